"""A streamed answer: passed through as it comes, published live, recorded where it ends."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .. import wire
from ..context import ExecutionContext
from ..errors import Blocked, ControlFlow, LeaseSuperseded, RebunoError
from .llm import (
    CLOSED_EARLY,
    MAX_RECORD_BYTES,
    Call,
    Exchange,
    Failed,
    Failure,
    Incoming,
    kept,
    kept_failure,
    kept_headers,
    too_large,
)
from .llm_live import LiveChannel

log = logging.getLogger(__name__)

#: OpenAI's streams end with this, and its library closes them without reading on.
_LAST_WORDS = b"data: [DONE]"
_CLOSED_EARLY = Failure("", CLOSED_EARLY)
_GIVEN_UP = Failure("", "this attempt no longer owns the execution; its stream was given up")


class StreamedBody:
    """The body of an answer that is still coming.

    However it ends, it ends once. Read to its end, it is recorded whole; broken off, it is
    recorded as failed, with what came. The handler's next effect may follow from what has been
    read so far, so the rest is taken in and recorded before it, and is then read from memory.
    Closed early, it is recorded as what came and no more; this too waits for the next effect or
    for the handler's end, because a thread that is being killed closes what it leaves behind,
    and must record nothing. A caller that unwinds because the execution waits (``Blocked``) has
    not chosen to close it either, so the whole is taken in. A lost lease records nothing, and
    the next attempt asks again.
    """

    def __init__(
        self,
        context: ExecutionContext,
        step_id: str,
        call: Call,
        incoming: Incoming,
        exchange: Exchange,
    ) -> None:
        self._context = context
        self._step_id = step_id
        self._target = call.target
        self._incoming = incoming
        self._exchange = exchange
        self._headers = kept_headers(incoming.status, incoming.headers)
        self._content = bytearray()
        self._ahead: collections.deque[bytes] = collections.deque()
        self._live = LiveChannel(functools.partial(context.stream, step_id))
        self._reading = threading.Lock()
        self._ending = threading.Lock()
        self._reader = threading.get_ident()
        self._closed = False
        self._left_behind = False
        self._over = False
        self._failure: Failure | None = None
        self._held = contextlib.ExitStack()
        self._held.enter_context(context.running())
        context.leave_open(self)

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        if self._context.cancelled.is_set():
            self._give_up()
            self._context.check()
        self._reader = threading.get_ident()
        with self._reading:
            chunk = self._ahead.popleft() if self._ahead else self._read()
        if chunk:
            return chunk
        failure = _CLOSED_EARLY if self._closed else self._failure
        if failure is not None:
            raise Failed(failure)
        raise StopIteration

    def close(self) -> None:
        """Stop reading; safe to repeat, and never raises."""
        if self._over or self._closed:
            return
        if self._left_behind:
            self._give_up()
        elif isinstance(self._context.signal, Blocked):
            self._quietly(self._take_in)
        elif self._content.rstrip().endswith(_LAST_WORDS):
            self._quietly(lambda: self._end(None))
        else:
            self._closed = True
            self._let_go()

    def settle(self) -> bool:
        """Record all of it, unless another thread reads it; tell whether it is done with.

        Raises:
            ControlFlow: this attempt is over.
        """
        if self._closed:
            self._end(_CLOSED_EARLY)
        elif self._reader == threading.get_ident():
            self._take_in()
        return self._over

    def end(self) -> None:
        """Record what has come, as the handler has ended; never raises."""
        signal = self._context.signal
        if isinstance(signal, Blocked):
            self._quietly(self.settle)
        elif signal is not None or _is_being_ended():
            self._give_up()
        elif self._closed or self._reader == threading.get_ident():
            self._quietly(lambda: self._end(_CLOSED_EARLY))
        else:
            self._left_behind = True

    def _quietly(self, record: Callable[[], object]) -> None:
        try:
            record()
        except (ControlFlow, Exception) as exc:
            # Control flow is remembered by the context, and raised by the next effect.
            extra = {"step_id": self._step_id}
            log.info("an answer was not recorded: %s (step %s)", exc, self._step_id, extra=extra)

    def _take_in(self) -> None:
        with self._reading:
            while chunk := self._read():
                self._ahead.append(chunk)

    def _read(self) -> bytes:
        """Return the next chunk; at the end, which is recorded, nothing."""
        while not (self._over or self._closed):
            try:
                chunk = next(self._incoming.chunks, None)
            except Exception as exc:
                failure = self._exchange.failure(exc)
                extra = {"step_id": self._step_id}
                log.warning("%s broke off: %s", self._target, failure, exc_info=exc, extra=extra)
                self._end(failure)
                break
            except BaseException:
                self._give_up()
                raise
            if chunk is None or len(self._content) > MAX_RECORD_BYTES:
                self._end(None)
            elif chunk:
                self._content += chunk
                self._live.feed(chunk)
                return chunk
        return b""

    # The end, which comes once

    def _claim(self, failure: Failure | None) -> bool:
        """Tell whether the caller is the one to end the stream."""
        with self._ending:
            if self._over:
                return False
            self._over, self._failure = True, failure
        return True

    def _give_up(self) -> None:
        if self._claim(_GIVEN_UP):
            self._live.close(wait=False)
            self._let_go()

    def _end(self, failure: Failure | None) -> None:
        """Record the end; ``failure`` is what reading on raises.

        Raises:
            ControlFlow: this attempt is over.
        """
        if not self._claim(failure):
            return
        result: dict[str, Any] = kept(self._incoming.status, self._headers, bytes(self._content))
        try:
            self._live.close()
            with self._context.within(self._step_id):
                if failure is None:
                    self._record(result)
                elif failure is _CLOSED_EARLY:
                    self._record({**result, "closed_early": True})
                else:
                    self._record_failure(kept_failure(failure, result))
        except RebunoError as exc:
            self._failure = Failure("", f"this answer cannot be recorded: {exc}")
        finally:
            self._let_go()

    def _record(self, result: dict[str, Any]) -> None:
        encoded = wire.encode(result, "result")
        if len(encoded) > MAX_RECORD_BYTES:
            self._record_failure(too_large(len(encoded)))
            return
        stands = self._context.record(self._step_id, self._target, encoded)
        self._check(stands.error is None and stands.value == result)

    def _record_failure(self, error: dict[str, Any]) -> None:
        size = len(wire.encode(error, "error"))
        if size > MAX_RECORD_BYTES:
            error = too_large(size)
        self._failure = Failure(error["type"], error["message"])
        stands = self._context.record_failure(self._step_id, self._target, error)
        self._check(stands.error is not None and stands.error.error == error)

    def _check(self, stands: bool) -> None:
        """Go on only when what stands is what the caller has seen.

        Raises:
            LeaseSuperseded: another attempt recorded something else first.
        """
        if not stands:
            signal = LeaseSuperseded("another attempt has recorded another answer for this call")
            self._context.end_with(signal)
            raise signal

    def _let_go(self) -> None:
        self._held.close()
        try:
            self._incoming.close()
        except Exception as exc:
            log.debug("closing the connection failed: %s", exc)


def _is_being_ended() -> bool:
    """Tell whether the calling thread unwinds because it, or its process, is to end."""
    exc = sys.exc_info()[1]
    return exc is not None and not isinstance(exc, (Exception, GeneratorExit))
