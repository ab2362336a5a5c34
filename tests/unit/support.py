"""What the tests of the core share: a kernel without a network, and agents on real ports."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rebuno_sync import Agent, wire
from rebuno_sync.context import ExecutionContext
from rebuno_sync.lease import Lease
from rebuno_sync.wire import Decision, Dispatch, Execution, Idempotency, Kind, Step
from tests.scripted import ScriptedKernel, served
from tests.scripted.state import Execution as ScriptedExecution


def dispatch(attempt: int | None = 1, lease: float | None = None, **fields: Any) -> Dispatch:
    """A dispatch like those of generation 2, or 3 with a ``lease``."""
    names = {"execution_id": "e1", "dispatch_id": "d1", **fields}
    return Dispatch(**names, dispatch_attempt=attempt, lease_timeout_seconds=lease)


class MemoryKernel:
    """Stands in for ``KernelClient``: steps in memory, answers that a test may replace.

    ``answers`` maps a call's name to what it does in place of its own work, once for each entry:
    an exception is raised, a :class:`Decision` returned, a function called first.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, list[Any]] = {}
        self.steps: dict[str, dict[str, Any]] = {}
        self.state: Any = None
        self._occurrences: Counter[tuple[str, str, bytes]] = Counter()
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The names of the calls so far."""
        return [call[0] for call in self.calls]

    def next_attempt(self) -> None:
        """Count occurrences from nought, as a kernel does when a dispatch is claimed."""
        self._occurrences.clear()

    def _scripted(self, call: str, *details: Any) -> Decision | None:
        with self._lock:
            self.calls.append((call, *details))
            waiting = self.answers.get(call)
            answer = waiting.pop(0) if waiting else None
        if isinstance(answer, BaseException):
            raise answer
        if callable(answer):
            answer = answer()
        assert answer is None or isinstance(answer, Decision)
        return answer

    def submit(
        self,
        execution_id: str,
        lease: Lease,
        kind: Kind,
        target: str,
        args: bytes,
        idempotency: Idempotency,
    ) -> Decision:
        told = self._scripted("submit", kind.value, target, args, idempotency.value)
        if told is not None:
            return told
        with self._lock:
            key = (kind.value, target, args)
            nth = self._occurrences[key]
            self._occurrences[key] += 1
            step_id = hashlib.sha256(repr((execution_id, key, nth)).encode()).hexdigest()
            step = self.steps.setdefault(step_id, {"status": "executing", "target": target})
            if step["status"] == "executing":
                return Decision("proceed", step_id)
            return Decision("replay", step_id, result=step.get("result"), error=step.get("error"))

    def complete_step(
        self, execution_id: str, lease: Lease, step_id: str, result: bytes
    ) -> Decision:
        return self._settle("complete_step", step_id, "succeeded", result=result)

    def fail_step(self, execution_id: str, lease: Lease, step_id: str, error: bytes) -> Decision:
        return self._settle("fail_step", step_id, "failed", error=error)

    def _settle(self, call: str, step_id: str, status: str, **outcome: bytes) -> Decision:
        told = self._scripted(call, step_id, *outcome.values())
        if told is not None:
            return told
        with self._lock:
            step = self.steps.setdefault(step_id, {"status": "executing"})
            if step["status"] != "executing":
                return Decision(
                    "replay", step_id, result=step.get("result"), error=step.get("error")
                )
            step["status"] = status
            step.update({name: wire.decode(raw) for name, raw in outcome.items()})
        return Decision("recorded")

    def terminal_steps(self, execution_id: str, lease: Lease) -> list[Step]:
        self._scripted("terminal_steps")
        return [
            Step(step_id, "tool_call", step["target"], step["status"])
            for step_id, step in self.steps.items()
            if step["status"] != "executing"
        ]

    def previous(self, execution_id: str, lease: Lease) -> Any:
        self._scripted("previous")
        return self.state

    def stream(self, execution_id: str, lease: Lease, step_id: str, seq: int, data: str) -> None:
        self._scripted("stream", step_id, seq, data)


@contextlib.contextmanager
def in_execution(
    kernel: MemoryKernel, *, attempt: int | None = 1, input: Any = None
) -> Iterator[ExecutionContext]:
    """Run the block as a handler would be run; every entry is another attempt."""
    kernel.next_attempt()
    lease = Lease(dispatch(attempt))
    context = ExecutionContext(Execution("e1", "a1", "running", input=input), lease, kernel)  # type: ignore[arg-type]
    with context.entered():
        yield context


@contextlib.contextmanager
def agent_of(
    kernel: ScriptedKernel, handler: Callable[..., Any] | None = None, **options: Any
) -> Iterator[Agent]:
    """An agent on a real port, with its webhook told to the kernel."""
    options = {"secret": kernel.secret, "base_url": kernel.url, **options}
    agent = Agent(kernel.agent_id, **options)
    if handler is not None:
        agent.bind(handler)
    with served(agent.app) as url:
        kernel.agent_url = f"{url}/webhook"
        try:
            yield agent
        finally:
            assert agent.close(timeout=30)


def run_once(
    kernel: ScriptedKernel, handler: Callable[..., Any], input: Any = None, **options: Any
) -> ScriptedExecution:
    """One execution of ``handler``, one delivery, waited for."""
    with agent_of(kernel, handler, **options) as agent:
        run = kernel.create(input)
        assert kernel.deliver(run).status == 202
        assert agent.join(timeout=30)
    return run
