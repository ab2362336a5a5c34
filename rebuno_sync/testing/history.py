"""Recorded histories: does today's handler still replay what an earlier version recorded?"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import wire
from ..agent import AgentCore
from ..client import Client
from ..kernel import identity
from ..signing import sign_body
from ..transport import Answer, Transport
from .in_process import BASE_URL
from .runs import LIMIT

_FORMAT = 1
_DISPATCH = "01900000-0000-7000-8000-000000000000"


class ReplayMismatch(AssertionError):
    """The handler does something else than what was recorded."""


@dataclasses.dataclass(frozen=True)
class History:
    """What was recorded of one execution: enough to replay it without a kernel.

    Attributes:
        execution: the execution, its input and what became of it.
        steps: its steps that have an outcome.
    """

    execution: Mapping[str, Any]
    steps: list[Mapping[str, Any]]

    @classmethod
    def of(cls, client: Client, execution_id: str) -> History:
        """Read the history of an execution from a kernel.

        Raises:
            NotFoundError: there is no such execution.
        """
        execution = client.get(execution_id)
        steps = client.steps(execution_id, status="terminal")
        return cls(_plain(execution), [_plain(step) for step in steps])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the history to a file, as JSON that can be kept with the tests."""
        data = {"format": _FORMAT, "execution": self.execution, "steps": self.steps}
        Path(path).write_text(
            json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> History:
        """Read a history from a file.

        Raises:
            ValueError: the file is no history, or of a version that this one does not know.
        """
        data = wire.decode(Path(path).read_bytes())
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a history of format {_FORMAT}")
        return cls(data["execution"], data["steps"])


def check_replay(agent: AgentCore, history: History, *, limit: float = LIMIT) -> None:
    """Run the handler against a history, and compare what it does with what was recorded.

    Nothing runs but the handler itself: every step is answered from the history. A history of an
    execution that has not ended is followed as far as it goes.

    Args:
        agent: the agent, with its handler bound.
        history: what was recorded.
        limit: how long the handler may take, in seconds.

    Raises:
        ReplayMismatch: the handler submits a step that was not recorded, leaves one out, or ends
            in another way.
        TimeoutError: it does not come to its end.
    """
    replay = _ReplayTransport(history)
    agent.connect(replay)
    body = json.dumps(
        {
            "execution_id": history.execution["id"],
            "dispatch_id": _DISPATCH,
            "dispatch_attempt": replay.next_attempt(),
        }
    ).encode()
    status, why = agent.deliver(body, sign_body(agent._secrets.all()[0], body))
    if status != 202:
        raise RuntimeError(f"the agent did not take the dispatch: {status} {why}")
    if not agent.join(limit):
        raise TimeoutError(f"the handler is still running after {limit:g} s")
    replay.check()


class _ReplayTransport(Transport):
    """Answers as a kernel would whose log is the history."""

    _attempts = 0

    def __init__(self, history: History) -> None:
        super().__init__(BASE_URL, timeout=LIMIT)
        self._history = history
        self._recorded = {
            (s["kind"], s["target"], s["args_hash"], s["occurrence"]): s for s in history.steps
        }
        self._left = dict(self._recorded)
        self._counts: collections.Counter[tuple[str, str, str]] = collections.Counter()
        self._lock = threading.Lock()
        self._problems: list[str] = []
        self._end: dict[str, Any] | None = None

    @classmethod
    def next_attempt(cls) -> int:
        """Return an attempt that no check of this process has used before."""
        cls._attempts += 1
        return cls._attempts

    def check(self) -> None:
        """Raise what was found."""
        recorded = self._history.execution
        ended = recorded["status"] in ("completed", "failed")
        if self._left and (ended or self._end is not None):
            names = ", ".join(f"{kind} {target}" for kind, target, _, _ in self._left)
            self._problems.append(f"these recorded steps were not submitted: {names}")
        if ended and not self._problems:
            expected = {
                "output": recorded.get("output"),
                "error": recorded.get("failure_reason"),
            }
            for key, value in (self._end or {}).items():
                if value != expected[key]:
                    self._problems.append(
                        f"the handler ends with {key} {value!r}; recorded is {expected[key]!r}"
                    )
        if self._problems:
            raise ReplayMismatch(f"execution {recorded['id']}: " + "; ".join(self._problems))

    def send_once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Callable[[str], Mapping[str, str]],
        timeout: float,
    ) -> Answer:
        name = path.partition("?")[0].rpartition("/")[2]
        if method == "GET":
            if name == "previous":
                return _answer({"state": None})
            found = self._history.steps if name == "steps" else self._running()
            return _answer(found)
        if name == "steps":
            with self._lock:
                return _answer(self._submit(wire.decode(body)))
        if name in ("complete", "fail") and "/steps/" not in path:
            self._end = wire.decode(body)
        return Answer(204, {}, b"")

    def _running(self) -> dict[str, Any]:
        return {**self._history.execution, "status": "running"}

    def _submit(self, step: dict[str, Any]) -> dict[str, Any]:
        hashed = identity.args_hash(wire.encode(step["args"], "args"))
        key = (step["kind"], step["target"], hashed)
        occurrence = self._counts[key]
        self._counts[key] += 1
        recorded = self._recorded.get((*key, occurrence))
        if recorded is not None:
            self._left.pop((*key, occurrence), None)
            return _outcome(recorded)
        if self._left or self._history.execution["status"] in wire.TERMINAL_EXECUTION:
            self._problems.append(
                f"{step['kind']} {step['target']} with {step['args']!r} was not recorded"
                + self._near(step)
            )
        # Beyond the end of the history nothing may run.
        return {"decision": "execution_terminal"}

    def _near(self, step: dict[str, Any]) -> str:
        for kind, target, _, _ in self._left:
            if (kind, target) == (step["kind"], step["target"]):
                args = next(s["args"] for key, s in self._left.items() if key[:2] == (kind, target))
                return f"; recorded is that call with {args!r}"
        return ""


def _outcome(step: Mapping[str, Any]) -> dict[str, Any]:
    if step["status"] == "succeeded":
        return {"decision": "replay", "step_id": step["step_id"], "result": step.get("result")}
    error = step.get("error")
    if step["status"] == "failed":
        return {"decision": "replay", "step_id": step["step_id"], "error": error}
    if step["status"] == "denied":
        reason = error.get("reason", "") if isinstance(error, dict) else ""
        return {"decision": "denied", "step_id": step["step_id"], "reason": reason}
    return {"decision": "execution_terminal"}


def _plain(model: wire.Model) -> dict[str, Any]:
    found = dataclasses.asdict(model)
    return {**found.pop("extra"), **found}


def _answer(data: Any) -> Answer:
    return Answer(200, {"content-type": "application/json"}, wire.encode(data, "answer"))
