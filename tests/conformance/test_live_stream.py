"""Live output: Server-Sent Events (PROTOCOL 4 and 9)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import requests

from tests.conformance.driver import WAIT, Attempt, Kernel, done, wait_until

#: How long to wait for a comment line that is due every 15 s, in seconds.
SILENCE = 40.0


class Watcher:
    """One reader of an execution's stream."""

    def __init__(self, response: requests.Response) -> None:
        self.response = response
        self._lines = response.iter_lines(chunk_size=1)

    def line(self) -> str:
        return next(self._lines).decode("utf-8")  # type: ignore[no-any-return]

    def frame(self) -> Any:
        """Return the data of the next frame, which is one line and a blank one."""
        while not (line := self.line()).startswith("data:"):
            assert line == "" or line.startswith((":", "retry:")), line
        assert self.line() == ""
        return json.loads(line.removeprefix("data:").strip())


@contextmanager
def watching(kernel: Kernel, execution_id: str, patience: float = WAIT) -> Iterator[Watcher]:
    headers = {} if kernel.token is None else {"Authorization": f"Bearer {kernel.token}"}
    with requests.Session() as session:
        session.trust_env = False
        with session.get(
            f"{kernel.url}/v0/executions/{execution_id}/stream",
            headers=headers,
            stream=True,
            timeout=patience,
        ) as response:
            assert response.status_code == 200, response.text
            yield Watcher(response)


def test_frames(attempt: Attempt) -> None:
    """9: data: {"step_id","seq","data"}."""
    step = attempt.proceed("t")
    with watching(attempt.kernel, attempt.execution_id) as watcher:
        assert watcher.response.headers["Content-Type"].startswith("text/event-stream")
        texts = ["a", "grün 🌳\u2028\n\r\n", "", "data: x\n\n", "x" * 7000]
        for seq, text in enumerate(texts):
            done(attempt.stream(step, seq, text))
            assert watcher.frame() == {"step_id": step, "seq": seq, "data": text}


def test_every_watcher_sees_every_step(attempt: Attempt) -> None:
    """9: the stream is the execution's."""
    first, second = attempt.proceed("a"), attempt.proceed("b")
    kernel, id = attempt.kernel, attempt.execution_id
    with watching(kernel, id) as one, watching(kernel, id) as two:
        done(attempt.stream(first, 0, "x"))
        done(attempt.stream(second, 0, "y"))
        for watcher in (one, two):
            frames = [watcher.frame(), watcher.frame()]
            assert [(f["step_id"], f["data"]) for f in frames] == [(first, "x"), (second, "y")]


def test_another_executions_output_is_not_seen(attempt: Attempt) -> None:
    """9: the stream is the execution's."""
    other = attempt.agent.start()
    step, others = attempt.proceed("t"), other.proceed("t")
    with watching(attempt.kernel, attempt.execution_id) as watcher:
        done(other.stream(others, 0, "theirs"))
        done(attempt.stream(step, 0, "ours"))
        assert watcher.frame()["data"] == "ours"


def test_live_only(attempt: Attempt) -> None:
    """9: live only, never stored."""
    step = attempt.proceed("t")
    done(attempt.stream(step, 0, "before anyone watched"))
    with watching(attempt.kernel, attempt.execution_id) as watcher:
        done(attempt.stream(step, 1, "now"))
        assert watcher.frame() == {"step_id": step, "seq": 1, "data": "now"}
    assert "before anyone" not in json.dumps(attempt.kernel.events(attempt.execution_id))
    assert "before anyone" not in json.dumps(attempt.steps())


def test_a_watcher_that_left_disturbs_nobody(attempt: Attempt) -> None:
    """9: best effort: publishing goes on, and others go on watching."""
    step = attempt.proceed("t")
    kernel, id = attempt.kernel, attempt.execution_id
    with watching(kernel, id) as stays:
        with watching(kernel, id) as leaves:
            done(attempt.stream(step, 0, "both"))
            assert leaves.frame()["data"] == "both"
        for seq in range(1, 20):
            done(attempt.stream(step, seq, "x" * 1000))
        assert [stays.frame()["seq"] for _ in range(20)] == list(range(20))


def test_a_comment_line_keeps_the_connection(attempt: Attempt) -> None:
    """9: a comment line every 15 s."""
    with watching(attempt.kernel, attempt.execution_id, SILENCE) as watcher:
        # One may come at once, as a greeting; only one after it shows that they go on coming.
        for which in ("first", "second"):
            wait_until(
                lambda: watcher.line().startswith(":"), SILENCE, f"no {which} comment line came"
            )
