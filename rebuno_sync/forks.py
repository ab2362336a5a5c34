"""What a process holds for itself and its children must not share."""

from __future__ import annotations

import os
from collections.abc import Callable


def after_fork(renew: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that each forked child calls first, before anything else runs in it.

    It replaces locks, which another thread may have held at the fork, and whatever has threads
    or sockets. Where there is no fork, as on Windows, it is never called.
    """
    register = getattr(os, "register_at_fork", None)
    if register is not None:
        register(after_in_child=renew)
    return renew
