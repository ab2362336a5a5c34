"""One LLM call: submitted, sent when it is due, recorded, answered. Knows no HTTP library."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Mapping

from .. import wire
from ..context import ExecutionContext
from ..decisions import Replayed
from ..errors import ControlFlow, RebunoError
from ..wire import Idempotency, Kind
from .llm import (
    CONTENT_TYPE,
    LONGEST_RETRY_AFTER,
    MAX_RECORD_BYTES,
    Answer,
    Call,
    Exchange,
    Failure,
    Incoming,
    answer_of,
    kept,
    kept_failure,
    kept_headers,
    may_be_retried,
    refusal,
    refusal_by_gateway,
    retry_after,
    too_large,
)
from .llm_stream import StreamedBody

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0


def check_retries(retries: int) -> int:
    """Return ``retries`` when it is a number of tries.

    Raises:
        ValueError: it is not.
    """
    if type(retries) is not int or retries < 0:
        raise ValueError(f"retries is a number of tries from 0 up, not {retries!r}")
    return retries


def perform(context: ExecutionContext, call: Call, exchange: Exchange, retries: int) -> Answer:
    """Return the answer to a call: the recorded one, or the provider's once it is recorded.

    A streamed answer is returned as it begins, and recorded where it ends. A refusal is an
    answer as well.

    Args:
        retries: how often a transient failure is tried again within the one step.

    Raises:
        Failed: the HTTP library raised, now or in an earlier attempt.
    """
    try:
        args = wire.encode(call.request, "args")
        found = context.submit(Kind.LLM_CALL, call.target, args, Idempotency.SAFE_TO_RETRY)
        if isinstance(found, Replayed):
            return answer_of(found, call, replayed=True)
    except (ControlFlow, RebunoError, TypeError, ValueError) as exc:
        return refusal(exc)
    return _Asking(context, found.step_id, call, exchange).answer(retries)


class _Asking:
    """Asks the provider for one step."""

    def __init__(
        self, context: ExecutionContext, step_id: str, call: Call, exchange: Exchange
    ) -> None:
        self._context = context
        self._step_id = step_id
        self._call = call
        self._exchange = exchange

    def answer(self, retries: int) -> Answer:
        with self._context.within(self._step_id), self._context.running():
            outcome = self._outcome(retries)
            if isinstance(outcome, Incoming):
                return self._streamed(outcome)
            try:
                return answer_of(self._recorded(outcome), self._call, replayed=False)
            except (ControlFlow, RebunoError) as exc:
                return refusal(exc)

    def _outcome(self, retries: int) -> Incoming | _Read | Failure:
        """Send the request, again if it may be, and return what came of it."""
        pause = _FIRST_PAUSE
        for left in range(retries, -1, -1):
            outcome, again, wait = self._try_once()
            if not (again and left):
                break
            wait = pause * random.uniform(0.75, 1.25) if wait is None else wait
            if wait > LONGEST_RETRY_AFTER:
                break
            log.info(
                "%s: tried again in %.1f s, %d more tries (step %s)",
                self._call.target,
                wait,
                left,
                self._step_id,
            )
            if self._context.cancelled.wait(wait):
                break
            pause = min(pause * 2, _LONGEST_PAUSE)
        return outcome

    def _try_once(self) -> tuple[Incoming | _Read | Failure, bool, float | None]:
        """Return what came, whether another try may do better, and when it is wanted."""
        try:
            incoming = self._exchange.send(self._step_id)
            if self._is_streamed(incoming):
                return incoming, False, None
            try:
                body = b"".join(incoming.chunks)
            finally:
                incoming.close()
        except Exception as exc:
            failure = self._exchange.failure(exc)
            log.warning("%s: %s (step %s)", self._call.target, failure, self._step_id, exc_info=exc)
            return failure, self._exchange.is_transient(exc), None
        refused = refusal_by_gateway(incoming.status, body)
        again = refused is None and may_be_retried(incoming.status, incoming.headers)
        read = _Read(incoming.status, incoming.headers, body, refused)
        return read, again, retry_after(incoming.headers)

    def _is_streamed(self, incoming: Incoming) -> bool:
        kind = incoming.headers.get(CONTENT_TYPE, "")
        return incoming.status < 400 and (
            self._call.streams or kind.strip().lower().startswith("text/event-stream")
        )

    def _streamed(self, incoming: Incoming) -> Answer:
        headers = kept_headers(incoming.status, incoming.headers)
        body = StreamedBody(self._context, self._step_id, self._call, incoming, self._exchange)
        return Answer(incoming.status, headers, body)

    def _recorded(self, outcome: _Read | Failure) -> Replayed:
        """Record what came; return the outcome that now stands.

        Raises:
            ControlFlow, RebunoError: nothing could be recorded.
        """
        context, step_id, target = self._context, self._step_id, self._call.target
        if isinstance(outcome, Failure):
            return context.record_failure(step_id, target, kept_failure(outcome))
        headers = kept_headers(outcome.status, outcome.headers)
        if isinstance(outcome.refused, ControlFlow):
            # No outcome: once the gateway lets it pass, this call is made again.
            context.end_with(outcome.refused)
            raise outcome.refused
        if outcome.refused is not None:
            headers["x-should-retry"] = "false"
        result = wire.encode(kept(outcome.status, headers, outcome.body), "result")
        if len(result) > MAX_RECORD_BYTES:
            return context.record_failure(step_id, target, too_large(len(result)))
        return context.record(step_id, target, result)


@dataclasses.dataclass(frozen=True)
class _Read:
    """An answer that was read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    refused: ControlFlow | RebunoError | None
