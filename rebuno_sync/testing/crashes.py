"""A harness that crashes a handler at every point at which it can crash."""

from __future__ import annotations

import collections
import dataclasses
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..agent import AgentCore
from ..transport import Answer
from ..wire import DISPATCH_ATTEMPT_HEADER, Step, decode
from .in_process import InProcessTransport, TestKernel
from .runs import LIMIT, AgentRun, Policy, begin

_LEASE = 60.0
_HANDLER_CALL = re.compile(r"/v0/executions/(?!.*/heartbeat$).*")
_SUBMISSION = re.compile(r"/v0/executions/[^/]+/steps")


class Crash(SystemExit):
    """Ends a handler as the death of its process would."""


class Diverged(AssertionError):
    """A replay did something else than the attempt that it replays."""


@dataclasses.dataclass(frozen=True)
class CrashRun:
    """One run with one crash.

    Attributes:
        point: the number of the kernel call that the crash came at, from 0.
        call: that call, as ``METHOD path``, without ids.
        arrived: whether the call reached the kernel before the crash.
        run: the execution, as the attempts after the crash left it.
        indeterminate: whether the crash left an at-most-once effect of unknown outcome; then the
            run may end in another way than it does without a crash.
    """

    point: int
    call: str
    arrived: bool
    run: AgentRun
    indeterminate: bool


def crash_everywhere(
    agent: AgentCore,
    input: Any = None,
    *,
    policy: Policy | None = None,
    reset: Callable[[], None] = lambda: None,
    limit: float = LIMIT,
) -> list[CrashRun]:
    """Run an agent once without a crash, and then with one at each kernel call that it makes.

    Each call is crashed at twice: before it reaches the kernel, and before its answer is back.
    The lease of the dead attempt then runs out at once, and another attempt finishes the work.

    Args:
        agent: the agent, with its handler bound.
        input: its input.
        policy: the policy to run under: YAML text, or what it would hold.
        reset: called before each run, to clear what the handler leaves behind.
        limit: how long each run may take, in seconds.

    Returns:
        A :class:`CrashRun` for each crash, for assertions of your own.

    Raises:
        Diverged: a run ended in another status than the one without a crash, though no effect
            was left of unknown outcome; or the attempt after the crash did not submit every step
            of the one before: the handler is not deterministic.
    """
    plan = _Plan(point=None, arrived=False)
    plain = _run(agent, input, policy, reset, limit, plan)
    runs = []
    for point, call in enumerate(plan.calls):
        for arrived in (False, True):
            crashed = _Plan(point, arrived)
            run = _run(agent, input, policy, reset, limit, crashed)
            where = f"after a crash {'behind' if arrived else 'before'} call {point}, {call}"
            unknown = any(is_indeterminate(step) for step in run.steps)
            if run.status != plain.status and not unknown:
                raise Diverged(f"{where} the execution is {_told(run)}; else it is {_told(plain)}")
            _check_steps(crashed, where)
            runs.append(CrashRun(point, call, arrived, run, unknown))
    return runs


class _Plan:
    """Where to crash, and what was seen."""

    def __init__(self, point: int | None, arrived: bool) -> None:
        self.point = point
        self.arrived = arrived
        self.crashed = threading.Event()
        self.dead = False
        self.calls: list[str] = []
        self.submitted: dict[str, list[str]] = collections.defaultdict(list)


class _CrashingTransport(InProcessTransport):
    def __init__(self, app: Callable[[], Any], plan: _Plan) -> None:
        super().__init__(app)
        self._plan = plan
        self._lock = threading.Lock()

    def send_once(
        self,
        method: str,
        path: str,
        body: bytes,
        headers: Callable[[str], Mapping[str, str]],
        timeout: float,
    ) -> Answer:
        plan = self._plan
        with self._lock:
            if plan.dead:
                raise Crash
            number = len(plan.calls)
            if _HANDLER_CALL.fullmatch(path):
                plan.calls.append(f"{method} {_without_ids(path)}")
            here = number == plan.point and len(plan.calls) > number
            if here:
                plan.dead = True
            if _SUBMISSION.fullmatch(path) and method == "POST":
                attempt = headers(path)[DISPATCH_ATTEMPT_HEADER]
                plan.submitted[attempt].append(_step_of(body))
        try:
            if here and not plan.arrived:
                raise Crash
            answer = super().send_once(method, path, body, headers, timeout)
            if here:
                raise Crash
        finally:
            if here:
                plan.crashed.set()
        return answer


def _run(
    agent: AgentCore,
    input: Any,
    policy: Policy | None,
    reset: Callable[[], None],
    limit: float,
    plan: _Plan,
) -> AgentRun:
    reset()
    with TestKernel(lease_timeout=_LEASE) as kernel:
        transport = _CrashingTransport(lambda: kernel.app, plan)
        run = begin(kernel, agent, input, policy, transport)
        if plan.point is not None:
            if not plan.crashed.wait(limit):
                raise Diverged(
                    f"call {plan.point} of the run without a crash was not made in this one: the "
                    "handler is not deterministic"
                )
            agent.join(limit)
            plan.dead = False
            kernel.advance(_LEASE + 1)
        try:
            return run.settled(limit)
        finally:
            agent.join(limit)


def is_indeterminate(step: Step) -> bool:
    """Tell whether a step was at most once, and died before its outcome was known."""
    return isinstance(step.error, dict) and step.error.get("reason") == "indeterminate"


def _told(run: AgentRun) -> str:
    return f"{run.status} ({run.failure_reason or repr(run.output)})"


def _check_steps(plan: _Plan, where: str) -> None:
    first, *later = (collections.Counter(steps) for steps in plan.submitted.values())
    lost = first - later[-1] if later else collections.Counter()
    if lost:
        raise Diverged(
            f"{where} the next attempt did not submit {', '.join(sorted(lost))}; what decides "
            "which effects run must come from the input, a tool or a step"
        )


def _step_of(body: bytes) -> str:
    step = decode(body)
    return f"{step['kind']} {step['target']} {step['args']!r:.200}"


def _without_ids(path: str) -> str:
    return re.sub(r"/(executions|steps)/[^/?]+", r"/\1/…", path)
