"""The ends of a stream that no server can be made to bring about."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rebuno_sync import APIError, Blocked, LeaseSuperseded, Terminated, ToolError, wire
from rebuno_sync.decisions import Replayed
from rebuno_sync.effects.llm import CLOSED_EARLY, Call, Failed, Failure, Incoming
from rebuno_sync.effects.llm_stream import StreamedBody

CALL = Call("m", {"model": "m", "stream": True}, waits_long=False)


class Context:
    """What a stream sees of its execution."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.signal: BaseException | None = None
        self.results: list[Any] = []
        self.errors: list[Any] = []
        self.answers: BaseException | None = None
        self.bodies = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self.bodies += 1
        yield
        self.bodies -= 1

    def within(self, step_id: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def leave_open(self, answer: Any) -> None:
        pass

    def end_with(self, signal: BaseException) -> None:
        self.signal = self.signal or signal

    def check(self) -> None:
        if self.signal is not None:
            raise self.signal

    def stream(self, step_id: str, seq: int, data: str) -> None:
        pass

    def record(self, step_id: str, name: str, result: bytes) -> Replayed:
        if self.answers is not None:
            raise self.answers
        self.results.append(wire.decode(result))
        return Replayed(step_id, self.results[-1])

    def record_failure(self, step_id: str, name: str, error: Any) -> Replayed:
        self.errors.append(error)
        return Replayed(step_id, None, ToolError("x", "m", error=error))


class Exchange:
    def send(self, step_id: str) -> Incoming:
        raise NotImplementedError

    def failure(self, exc: Exception) -> Failure:
        return Failure(type(exc).__name__, str(exc))

    def is_transient(self, exc: Exception) -> bool:
        return False


@pytest.fixture
def context() -> Context:
    return Context()


def body_of(context: Context, chunks: Iterator[bytes], close: Any = lambda: None) -> StreamedBody:
    incoming = Incoming(200, {"content-type": "text/event-stream"}, chunks, close)
    return StreamedBody(context, "s1", CALL, incoming, Exchange())  # type: ignore[arg-type]


def interrupted(exc: BaseException) -> Iterator[bytes]:
    yield b"one"
    raise exc


def test_a_stream_that_another_thread_closes(context: Context) -> None:
    """The reader learns that it was closed, and the connection's own error is no failure."""
    arriving: queue.Queue[bytes | None] = queue.Queue()

    def chunks() -> Iterator[bytes]:
        while (chunk := arriving.get()) is not None:
            yield chunk
        raise OSError("bad file descriptor")

    body = body_of(context, chunks(), lambda: arriving.put(None))
    arriving.put(b"one")
    assert next(body) == b"one"
    thread = threading.Thread(target=body.close)
    thread.start()
    with pytest.raises(Failed) as caught:
        next(body)
    thread.join()
    assert caught.value.failure.message == CLOSED_EARLY
    body.end()
    assert context.errors == []
    (result,) = context.results
    assert (result["body"], result["closed_early"]) == ("one", True)


@pytest.mark.parametrize("exc", [KeyboardInterrupt(), SystemExit(), Terminated()])
def test_a_read_that_is_interrupted_records_nothing(context: Context, exc: BaseException) -> None:
    body = body_of(context, interrupted(exc))
    next(body)
    with pytest.raises(type(exc)):
        next(body)
    body.close()
    body.end()
    assert context.results == context.errors == []
    with pytest.raises(Failed):
        next(body)


def test_a_connection_that_cannot_be_closed(context: Context) -> None:
    def close() -> None:
        raise OSError("already gone")

    body = body_of(context, iter([b"one", b"", b"two"]), close)
    assert list(body) == [b"one", b"two"]
    assert context.results[0]["body"] == "onetwo"


def test_the_body_counts_as_running_until_it_has_ended(context: Context) -> None:
    body = body_of(context, iter([b"one"]))
    assert context.bodies == 1
    list(body)
    assert context.bodies == 0


def test_what_is_taken_in_ahead_is_still_read(context: Context) -> None:
    body = body_of(context, iter([b"one", b"two", b"three"]))
    assert next(body) == b"one"
    assert body.settle()
    assert context.results[0]["body"] == "onetwothree"
    assert list(body) == [b"two", b"three"]
    assert len(context.results) == 1


def test_a_blocked_execution_still_gets_the_whole(context: Context) -> None:
    body = body_of(context, iter([b"one", b"two"]))
    next(body)
    context.signal = Blocked()
    body.end()
    assert context.results[0]["body"] == "onetwo"


def test_a_lost_lease_raises_each_time(context: Context) -> None:
    body = body_of(context, iter([b"one", b"two"]))
    next(body)
    context.signal = LeaseSuperseded()
    context.cancelled.set()
    for _ in range(2):
        with pytest.raises(LeaseSuperseded):
            next(body)
    body.close()
    body.end()
    assert context.results == context.errors == []


def test_what_is_closed_while_the_execution_blocks_is_taken_in(context: Context) -> None:
    """Nobody chose to close it: the handler unwinds, and will want all of it when it is back."""
    body = body_of(context, iter([b"one", b"two"]))
    next(body)
    context.signal = Blocked()
    body.close()
    assert context.results == [
        {"status": 200, "headers": {"content-type": "text/event-stream"}, "body": "onetwo"}
    ]


def test_what_another_thread_closes_after_the_handler_has_ended(context: Context) -> None:
    """It is too late to record anything; but nothing may be held for it either."""
    body = body_of(context, iter([b"one", b"two"]))
    thread = threading.Thread(target=lambda: next(body))
    thread.start()
    thread.join()
    body.end()
    assert context.bodies == 1
    body.close()
    assert context.bodies == 0
    assert context.results == context.errors == []
    assert body._live._stopped


@pytest.mark.parametrize("ending", ["close", "end"])
def test_closing_never_raises(context: Context, ending: str) -> None:
    context.answers = LeaseSuperseded()
    body = body_of(context, iter([b"data: [DONE]\n\n"]))
    next(body)
    getattr(body, ending)()


def test_a_record_that_the_kernel_refuses_is_an_error_at_the_end(context: Context) -> None:
    context.answers = APIError("no such step", "not_found", 404)
    body = body_of(context, iter([b"one"]))
    assert next(body) == b"one"
    with pytest.raises(Failed, match="this answer cannot be recorded: no such step"):
        next(body)
    with pytest.raises(Failed):
        next(body)


def test_an_end_comes_once(context: Context) -> None:
    body = body_of(context, iter([b"one"]))
    list(body)
    for _ in range(2):
        assert list(body) == []
        body.close()
        body.end()
        assert body.settle()
    assert len(context.results) == 1


def test_a_stream_without_end_is_given_up_in_time(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rebuno_sync.effects.llm_stream.MAX_RECORD_BYTES", 5000)

    def endless() -> Iterator[bytes]:
        while True:
            yield b"x" * 100

    body = body_of(context, endless())
    with pytest.raises(Failed, match="ask for less at once"):
        for _ in body:
            pass
    (error,) = context.errors
    assert error["reason"] == "too_large"
