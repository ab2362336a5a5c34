"""Reading from a socket until a deadline: what keeps a slow peer from holding a thread for ever.

A socket's own time-out begins anew with every byte that arrives.
"""

from __future__ import annotations

import http.client
import io
import math
import time
from typing import Any


class UntilDeadline(io.RawIOBase):
    """What a socket receives, until a deadline.

    Args:
        sock: the socket, whose time-out is set before each read.
        raw: its unbuffered reader.

    Attributes:
        silence: the longest that nothing may arrive, in seconds; ``None`` for ever.
        deadline: when the last byte must have arrived, by ``time.monotonic()``.
    """

    def __init__(self, sock: Any, raw: Any) -> None:
        self._sock = sock
        self._raw = raw
        self.silence: float | None = None
        self.deadline = math.inf

    def readable(self) -> bool:
        """Say that this can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there, or wait for it.

        Raises:
            TimeoutError: nothing arrived in time.
        """
        seconds = self.silence
        if self.deadline != math.inf:
            left = self.deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            seconds = left if seconds is None else min(left, seconds)
        self._sock.settimeout(seconds)
        count: int = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        """Close the reader, and the socket if it was closed already but for this."""
        if not self.closed:
            self._raw.close()
        super().close()


class PromptResponse(http.client.HTTPResponse):
    """An answer that must have come by a deadline.

    Args:
        sock: the socket, whose time-out is the longest silence to bear.

    Attributes:
        times: how many such silences the whole answer may take.
    """

    times = 1.0

    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        reader = UntilDeadline(sock, self.fp.detach())
        reader.silence = silence = sock.gettimeout()
        if silence is not None:
            reader.deadline = time.monotonic() + silence * self.times
        self.fp = io.BufferedReader(reader)
