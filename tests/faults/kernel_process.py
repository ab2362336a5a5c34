"""An embedded kernel in a process of its own, to be killed and started again on the same file.

    python -m tests.faults.kernel_process FILE MACHINE

It prints its URL and ends with its standard input. MACHINE is the :class:`~.machine.Machine` that
it lives on. A webhook that is not answered within a second is a failed delivery.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from tests.faults.machine import live_on

WEBHOOK_SECONDS = 1.0


def main() -> None:
    """Serve until standard input ends."""
    file, machine = sys.argv[1:]
    live_on(Path(machine))

    # Later, so that what keeps time.time keeps the machine's.
    from rebuno_sync.kernel import EmbeddedKernel
    from rebuno_sync.kernel.dispatch import post_webhook

    post = functools.partial(post_webhook, timeout=WEBHOOK_SECONDS)
    with EmbeddedKernel(file, post=post) as kernel:
        print(kernel.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
