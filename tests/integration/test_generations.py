"""Our agent under kernels of all three generations, over real sockets (PROTOCOL 2, 3, 5)."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rebuno_sync import (
    Agent,
    Blocked,
    ContextThreadPoolExecutor,
    LeaseSuperseded,
    PolicyError,
    RateLimited,
    Terminated,
    ToolError,
    execution,
    step,
    tool,
)
from rebuno_sync.lease import Lease
from rebuno_sync.wire import Dispatch
from tests.scripted import (
    GENERATION_1,
    GENERATION_2,
    GENERATION_3,
    Answer,
    Generation,
    Recorded,
    ScriptedKernel,
    Verdict,
    served,
)
from tests.scripted.http import Server
from tests.scripted.state import Execution

MUTATIONS = ("submit", "step_complete", "step_fail", "heartbeat", "complete", "fail")
ENDS = ("complete", "fail")
WITH_LEASES = (GENERATION_2, GENERATION_3)


@pytest.fixture(params=(GENERATION_1, GENERATION_2, GENERATION_3), ids=str)
def kernel(request: pytest.FixtureRequest) -> Iterator[ScriptedKernel]:
    with ScriptedKernel(request.param) as kernel:
        yield kernel


@contextlib.contextmanager
def agent_of(
    kernel: ScriptedKernel, handler: Callable[..., Any], **options: Any
) -> Iterator[Agent]:
    """Our agent, served on a real port, with its webhook told to the kernel."""
    agent = Agent(kernel.agent_id, secret=kernel.secret, base_url=kernel.url, **options)
    agent.bind(handler)
    with served(agent.app) as url:
        kernel.agent_url = f"{url}/webhook"
        try:
            yield agent
        finally:
            assert agent.close(timeout=30)


def dispatch(kernel: ScriptedKernel, agent: Agent, run: Execution) -> None:
    """Deliver a dispatch and wait until the agent is done with it."""
    answer = kernel.deliver(run)
    assert 200 <= answer.status < 300, answer
    assert agent.join(timeout=30)


def run_once(
    kernel: ScriptedKernel, handler: Callable[..., Any], input: Any = None, **options: Any
) -> Execution:
    """One execution of ``handler``, one delivery."""
    run = kernel.create({} if input is None else input)
    with agent_of(kernel, handler, **options) as agent:
        dispatch(kernel, agent, run)
    return run


def replying(kernel: ScriptedKernel, target: str, told: dict[str, Any]) -> None:
    """Let the kernel answer submissions of one target with ``told``."""
    kernel.decide_steps(lambda submission: told if submission["target"] == target else None)


@tool
def charge(amount: int) -> dict[str, Any]:
    return {"charged": amount}


@tool("explode")
def explode() -> None:
    raise ValueError("no fuse")


def bodies_never_run(name: str) -> Callable[..., Any]:
    @tool(name)
    def body() -> None:
        pytest.fail("the body ran")

    return body


gated = bodies_never_run("gated")


def charge_input(amount: int) -> dict[str, Any]:
    return charge(amount)


# What is sent


def test_every_call_carries_what_its_generation_demands(kernel: ScriptedKernel) -> None:
    generation = kernel.generation

    def handler() -> Any:
        charge(5)
        with pytest.raises(ToolError):
            explode()
        return step("total", lambda amount: amount * 2, {"amount": 5})

    run = run_once(kernel, handler)
    assert (run.status, run.output and json.loads(run.output.text)) == ("completed", 10)
    assert kernel.calls(*MUTATIONS) == [
        "submit",
        "step_complete",
        "submit",
        "step_fail",
        "submit",
        "step_complete",
        "complete",
    ]
    accepted = [r for r in kernel.requests if r.call in MUTATIONS and r.answer.status != 401]
    for request in accepted:
        assert request.headers["Rebuno-Agent-Id"] == "a1"
        assert request.headers["Rebuno-Signature"].startswith(generation.signature_prefix)
        assert request.headers["Rebuno-Dispatch-Id"] == run.dispatch_id
        attempt = request.headers["Rebuno-Dispatch-Attempt"]
        assert attempt == ("1" if generation.sends_attempt else None)
    submissions = [r.json for r in kernel.sent("submit") if r.answer.status == 200]
    assert [(s["kind"], s["target"], s["args"]) for s in submissions] == [
        ("tool_call", "charge", {"amount": 5}),
        ("tool_call", "explode", {}),
        ("local", "total", {"amount": 5}),
    ]


def test_the_webhook_must_be_signed(kernel: ScriptedKernel) -> None:
    ran = threading.Event()
    with agent_of(kernel, lambda: ran.set()) as agent:
        run = kernel.create({})
        kernel.take(run)
        body = kernel.webhook_body(run)
        for signature in ("", "sha256=" + "0" * 64, "v1=" + "0" * 64, "sha256=é"):
            answer = kernel.post_webhook(body, run.id, signature=signature)
            assert (answer.status, answer.body) == (401, b"")
        assert agent.join(timeout=30)
    assert not ran.is_set()
    assert kernel.requests == []


def test_unknown_fields_are_ignored(kernel: ScriptedKernel) -> None:
    kernel.intercept(
        lambda request: (
            Answer.json({"decision": "proceed", "step_id": "b" * 64, "surprise": [1]})
            if request.call == "submit"
            else Answer.json({"decision": "recorded", "surprise": {}})
            if request.call == "step_complete"
            else None
        )
    )
    run = kernel.create({"amount": 3})
    with agent_of(kernel, charge_input) as agent:
        kernel.take(run)
        body = json.dumps({**json.loads(kernel.webhook_body(run)), "surprise": 1}).encode()
        assert kernel.post_webhook(body, run.id).status < 300
        assert agent.join(timeout=30)
    assert run.output is not None
    assert json.loads(run.output.text) == {"charged": 3}


def test_lists_may_come_as_null(kernel: ScriptedKernel) -> None:
    run = run_once(kernel, lambda: execution().is_replaying)
    assert run.output is not None
    assert run.output.text == "false"
    assert kernel.sent("steps")[-1].answer.body == b"null"


# Decisions


def test_a_recorded_step_is_replayed(kernel: ScriptedKernel) -> None:
    ran: list[int] = []

    @tool
    def effect(n: int) -> dict[str, Any]:
        ran.append(n)
        return {"n": n, "half": n / 2}

    seen: list[Any] = []

    def handler() -> Any:
        seen.append([effect(1), effect(2), effect(1)])
        with pytest.raises(ToolError) as caught:
            explode()
        seen[-1].append(caught.value)
        gate()
        return "done"

    @tool
    def gate() -> None:
        pass

    kernel.policy = lambda kind, target, args: (
        Verdict("require_approval", "ask") if target == "gate" else Verdict()
    )
    run = kernel.create({})
    with agent_of(kernel, handler) as agent:
        dispatch(kernel, agent, run)
        assert run.status == "blocked"
        (approval,) = run.approvals.values()
        kernel.decide(approval, grant=True)
        dispatch(kernel, agent, run)
    assert run.status == "completed"
    assert ran == [1, 2, 1]
    assert seen[0] == seen[1]
    assert seen[0][3].type == "ValueError"
    assert len(run.steps) == 5


def test_denied_raises_the_reason(kernel: ScriptedKernel) -> None:
    told = {"decision": "denied", "step_id": "c" * 64, "reason": "never on fridays"}
    if kernel.generation.number == 3:
        told["rule_id"] = "fridays"
    replying(kernel, "gated", told)
    caught: list[PolicyError] = []

    def handler() -> str:
        try:
            gated()
        except PolicyError as exc:
            caught.append(exc)
            return "went on"
        return "ran"

    assert run_once(kernel, handler).status == "completed"
    (error,) = caught
    assert (error.reason, error.tool, error.step_id) == ("never on fridays", "gated", "c" * 64)
    assert error.rule_id == ("fridays" if kernel.generation.number == 3 else "")


def test_denied_without_a_reason(kernel: ScriptedKernel) -> None:
    kernel.policy = lambda kind, target, args: Verdict("deny", "silent")
    run = run_once(kernel, lambda: gated())
    assert (run.status, run.failure_reason) == ("failed", "policy_denied")


@pytest.mark.parametrize("reason", ["rate_limit_exceeded", "rate_limiter_unavailable"])
def test_rate_limited_raises(kernel: ScriptedKernel, reason: str) -> None:
    replying(kernel, "gated", {"decision": "rate_limited", "reason": reason})
    caught: list[RateLimited] = []

    def handler() -> None:
        try:
            gated()
        except RateLimited as exc:
            caught.append(exc)
            raise

    run = run_once(kernel, handler)
    assert caught[0].reason == reason
    assert (run.status, run.failure_reason) == ("failed", reason)


BLOCKING = [
    ({"decision": "blocked", "step_id": "d" * 64, "approval_id": "e"}, Blocked),
    ({"decision": "blocked", "step_id": "d" * 64}, Blocked),
    ({"decision": "execution_blocked"}, Blocked),
    ({"decision": "execution_terminal"}, Terminated),
]


@pytest.mark.parametrize(("told", "signal"), BLOCKING, ids=lambda v: str(v)[:60])
def test_signals_end_the_dispatch_silently(
    kernel: ScriptedKernel, told: dict[str, Any], signal: type[BaseException]
) -> None:
    replying(kernel, "gated", told)
    caught: list[BaseException] = []

    def handler() -> None:
        try:
            gated()
        except Exception:
            pytest.fail("a signal was caught as an Exception")
        except BaseException as exc:
            caught.append(exc)
            raise

    run = run_once(kernel, handler)
    assert isinstance(caught[0], signal)
    if isinstance(caught[0], Blocked):
        assert caught[0].approval_id == told.get("approval_id", "")
    assert run.status == "running"
    assert kernel.calls(*ENDS) == []


@pytest.mark.parametrize("then", ["returns", "raises", "calls another tool"])
@pytest.mark.parametrize(("told", "signal"), BLOCKING, ids=lambda v: str(v)[:60])
def test_a_swallowed_signal_still_ends_the_dispatch(
    kernel: ScriptedKernel, told: dict[str, Any], signal: type[BaseException], then: str
) -> None:
    replying(kernel, "gated", told)

    def handler() -> str:
        try:
            gated()
        except signal:
            if then == "raises":
                raise ValueError("something else") from None
            if then == "calls another tool":
                bodies_never_run("later")()
        return "as if nothing had happened"

    run = run_once(kernel, handler)
    assert run.status == "running"
    assert kernel.calls(*ENDS) == []
    assert [r.json["target"] for r in kernel.sent("submit") if r.answer.status == 200] == ["gated"]


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize(
    "told", [{"decision": "dance", "step_id": "f" * 64}, {"decision": "proceed"}], ids=str
)
def test_an_unknown_decision_fails_by_name(
    kernel: ScriptedKernel, told: dict[str, Any], swallowed: bool
) -> None:
    replying(kernel, "gated", told)

    def handler() -> str:
        with contextlib.suppress(*([Exception] if swallowed else [])):
            gated()
        return "as if nothing had happened"

    run = run_once(kernel, handler)
    assert run.status == "failed"
    assert run.failure_reason.startswith("agent_error: APIError: ")
    assert repr(told["decision"]) in run.failure_reason


def test_approval_granted_runs_the_step(kernel: ScriptedKernel) -> None:
    kernel.policy = lambda kind, target, args: Verdict("require_approval", "ask")
    run = kernel.create({})
    with agent_of(kernel, lambda: charge(7)) as agent:
        dispatch(kernel, agent, run)
        first = run.dispatch_id
        (approval,) = run.approvals.values()
        kernel.decide(approval, grant=True)
        dispatch(kernel, agent, run)
    assert run.dispatch_id != first
    assert run.output is not None
    assert json.loads(run.output.text) == {"charged": 7}
    assert [s.status for s in run.steps.values()] == ["succeeded"]


def test_approval_denied_raises_the_rationale(kernel: ScriptedKernel) -> None:
    kernel.policy = lambda kind, target, args: Verdict("require_approval", "ask")
    run = kernel.create({})
    with agent_of(kernel, lambda: gated()) as agent:
        dispatch(kernel, agent, run)
        (approval,) = run.approvals.values()
        kernel.decide(approval, grant=False, why="Not today.")
        dispatch(kernel, agent, run)
    assert (run.status, run.failure_reason) == ("failed", "policy_denied: Not today.")


def test_a_body_in_flight_when_the_execution_blocks_records_its_outcome(
    kernel: ScriptedKernel,
) -> None:
    kernel.policy = lambda kind, target, args: (
        Verdict("require_approval", "ask") if target == "gated" else Verdict()
    )
    started, blocked = threading.Event(), threading.Event()

    @tool
    def slow() -> str:
        started.set()
        assert blocked.wait(30)
        return "recorded late"

    def handler() -> None:
        with ContextThreadPoolExecutor(max_workers=1) as pool:
            pool.submit(slow)
            assert started.wait(30)
            try:
                gated()
            finally:
                blocked.set()

    run = run_once(kernel, handler)
    assert run.status == "blocked"
    by_target = {s.target: s for s in run.steps.values()}
    assert by_target["slow"].status == "succeeded"
    assert by_target["slow"].result is not None
    assert json.loads(by_target["slow"].result.text) == "recorded late"


def test_cancelled_while_a_body_runs(kernel: ScriptedKernel) -> None:
    run = kernel.create({})

    @tool
    def slow() -> str:
        kernel.cancel(run)
        return "too late"

    with agent_of(kernel, lambda: slow()) as agent:
        dispatch(kernel, agent, run)
    assert run.status == "cancelled"
    assert kernel.calls(*ENDS) == []


def test_an_outcome_that_stands_already_is_what_the_handler_sees(kernel: ScriptedKernel) -> None:
    run = kernel.create({})

    @tool
    def slow() -> str:
        (row,) = run.steps.values()
        row.end("succeeded", result=replace_text(row.args, '{"by":"another"}'))
        return "mine"

    with agent_of(kernel, lambda: slow()) as agent:
        dispatch(kernel, agent, run)
    assert run.output is not None
    assert json.loads(run.output.text) == {"by": "another"}


def test_a_failure_that_stands_already_is_what_the_handler_sees(kernel: ScriptedKernel) -> None:
    # The kernel answers only "replay" here, as recorded from generation 1.
    run = kernel.create({})

    @tool
    def slow() -> str:
        (row,) = run.steps.values()
        error = '{"message":"outcome unknown","reason":"indeterminate"}'
        row.end("failed", error=replace_text(row.args, error))
        return "mine"

    with agent_of(kernel, lambda: slow()) as agent:
        dispatch(kernel, agent, run)
    assert run.failure_reason == "tool_error: slow: outcome unknown"


def replace_text(raw: Any, text: str) -> Any:
    return replace(raw, text=text)


# How the agent reports a handler's end


def raising(exc: BaseException) -> Callable[[], None]:
    def handler() -> None:
        raise exc

    return handler


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("exc", "reason"),
    [
        (PolicyError("policy_denied"), "policy_denied"),
        (PolicyError("approval_timeout"), "approval_timeout"),
        (PolicyError("Never on fridays"), "policy_denied: Never on fridays"),
        (RateLimited("rate_limiter_unavailable"), "rate_limiter_unavailable"),
        (ToolError("no fuse", "explode"), "tool_error: explode: no fuse"),
        (ValueError("no"), "agent_error: ValueError: no"),
        (KeyError("k"), "agent_error: KeyError: 'k'"),
        (ValueError("ünïcode ☃ \ud800"), "agent_error: ValueError: ünïcode ☃ ?"),
        (
            Unprintable(),
            "agent_error: Unprintable: <Unprintable that cannot be shown as text>",
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_the_handler_raises_is_the_failure_reason(
    kernel: ScriptedKernel, exc: Exception, reason: str
) -> None:
    run = run_once(kernel, raising(exc))
    assert (run.status, run.failure_reason) == ("failed", reason)


def test_an_unexpected_error_is_logged_with_its_traceback(
    kernel: ScriptedKernel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        run_once(kernel, raising(ValueError("look here")))
    shown = [r for r in caplog.records if r.exc_info and isinstance(r.exc_info[1], ValueError)]
    assert len(shown) == 1


@pytest.mark.parametrize("signal", [Blocked(), Terminated(), LeaseSuperseded()], ids=repr)
def test_a_raised_signal_reports_nothing(kernel: ScriptedKernel, signal: BaseException) -> None:
    run = run_once(kernel, raising(signal))
    assert run.status == "running"
    assert kernel.calls(*ENDS) == []


@pytest.mark.parametrize(
    ("value", "output"),
    [
        (None, None),
        ({"a": [1, 2.5, "ü☃", None, True]}, {"a": [1, 2.5, "ü☃", None, True]}),
        (10**30, 10**30),
        ((1, 2), [1, 2]),
    ],
    ids=str,
)
def test_what_the_handler_returns_is_the_output(
    kernel: ScriptedKernel, value: Any, output: Any
) -> None:
    run = run_once(kernel, lambda: value)
    assert run.status == "completed"
    assert run.output is not None
    assert json.loads(run.output.text) == output


@pytest.mark.parametrize(
    "value",
    [object(), {1: 2}, float("nan"), {"a": {"b": b"x"}}],
    ids=["object", "number as key", "nan", "bytes"],
)
def test_an_output_that_is_not_json_fails(kernel: ScriptedKernel, value: Any) -> None:
    run = run_once(kernel, lambda: value)
    assert run.status == "failed"
    assert run.failure_reason.startswith("agent_error: TypeError: output")


@pytest.mark.parametrize("input", [{"m": 1}, {"n": "1"}, [], "text", {"n": 1, "m": 2}], ids=str)
def test_an_input_that_does_not_bind_never_reaches_the_handler(
    kernel: ScriptedKernel, input: Any
) -> None:
    called: list[int] = []

    def handler(n: int) -> None:
        called.append(n)

    run = run_once(kernel, handler, input)
    assert run.status == "failed"
    assert run.failure_reason.startswith("input_invalid: ")
    assert called == []


# Leases


@pytest.fixture(params=WITH_LEASES, ids=str)
def leasing(request: pytest.FixtureRequest) -> Iterator[ScriptedKernel]:
    with ScriptedKernel(request.param) as kernel:
        yield kernel


def written(kernel: ScriptedKernel) -> list[Recorded]:
    """What the agent wrote into executions."""
    return [r for r in kernel.requests if r.call in MUTATIONS]


@pytest.mark.parametrize("swallowed", [False, True])
@pytest.mark.parametrize("at", ["submit", "step_complete", "step_fail", "complete", "fail"])
def test_a_lost_lease_ends_the_attempt_at_once(
    leasing: ScriptedKernel, at: str, swallowed: bool
) -> None:
    kernel, run = leasing, leasing.create({})
    caught: list[BaseException] = []

    @tool
    def body(fails: bool) -> str:
        if at in ("step_complete", "step_fail"):
            kernel.take(run)
        if fails:
            raise ValueError("no")
        return "done"

    def handler() -> str:
        if at != "submit":
            try:
                body(at == "step_fail")
            except ToolError:
                pytest.fail("the outcome was not recorded")
            except BaseException as exc:
                caught.append(exc)
                if not swallowed:
                    raise
        if at in ("complete", "fail", "submit"):
            kernel.take(run)
        if at == "fail":
            raise ValueError("no")
        if at in ("submit", "step_complete", "step_fail"):
            try:
                body(False)
            except BaseException as exc:
                caught.append(exc)
                if not swallowed:
                    raise
        return "done"

    with agent_of(kernel, handler) as agent:
        dispatch(kernel, agent, run)
    refused = [r for r in kernel.requests if r.answer.status == 409]
    assert [r.call for r in refused] == [at]
    assert written(kernel)[-1] is refused[0], "it wrote on after the refusal"
    assert run.status == "running"
    if at not in ENDS:
        assert all(isinstance(exc, LeaseSuperseded) for exc in caught)
        assert caught


def test_a_refused_heartbeat_sets_cancelled_and_stops_the_handler() -> None:
    with ScriptedKernel(GENERATION_3, lease_timeout=0.3) as kernel:
        run = kernel.create({})
        later: list[str] = []

        @tool
        def long() -> None:
            kernel.take(run)
            assert execution().cancelled.wait(30)

        def handler() -> None:
            try:
                long()
            finally:
                with pytest.raises(LeaseSuperseded):
                    execution().check()
                with pytest.raises(LeaseSuperseded):
                    charge(1)
                later.append("got here")

        with agent_of(kernel, handler) as agent:
            dispatch(kernel, agent, run)
        assert later == ["got here"]
        refused = [r for r in kernel.requests if r.answer.status == 409]
        assert [r.call for r in refused] == ["heartbeat"]
        assert written(kernel)[-1] is refused[0]


def test_heartbeats_follow_the_lease_that_the_kernel_tells() -> None:
    with ScriptedKernel(GENERATION_3, lease_timeout=0.6) as kernel:

        @tool
        def long() -> None:
            kernel.wait_for(lambda: len(kernel.sent("heartbeat")) >= 4)

        run = run_once(kernel, lambda: long())
        assert run.status == "completed"
        for beat in kernel.sent("heartbeat"):
            assert beat.body == b""
            assert beat.answer.status in (204, 401)
            assert beat.headers["Rebuno-Dispatch-Attempt"] == "1"


@pytest.mark.parametrize(
    ("generation", "lease", "interval"),
    [
        (GENERATION_1, 0.6, 30),
        (GENERATION_2, 0.6, 30),
        (GENERATION_3, 0.6, 0.2),
        (GENERATION_3, 30, 10),
        (GENERATION_3, 90, 30),
        (GENERATION_3, 600, 30),
    ],
    ids=str,
)
def test_the_interval_of_heartbeats(generation: Generation, lease: float, interval: float) -> None:
    with ScriptedKernel(generation, lease_timeout=lease) as kernel:
        run = kernel.create({})
        kernel.take(run)
        told = Lease(Dispatch.from_json(json.loads(kernel.webhook_body(run))))
    assert told.interval == pytest.approx(interval)


def test_a_newer_attempt_supersedes_the_one_that_runs_here(leasing: ScriptedKernel) -> None:
    kernel, run = leasing, leasing.create({})
    first = threading.Event()
    second = threading.Event()
    ended: list[str] = []

    def handler() -> str:
        if execution().dispatch_attempt == 1:
            first.set()
            assert execution().cancelled.wait(30)
            try:
                charge(1)
            except LeaseSuperseded:
                ended.append("superseded")
                raise
        second.set()
        return str(charge(1))

    with agent_of(kernel, handler) as agent:
        assert kernel.deliver(run).status < 300
        assert first.wait(30)
        assert kernel.deliver(run).status < 300
        assert second.wait(30)
        assert agent.join(timeout=30)
    assert ended == ["superseded"]
    assert run.status == "completed"
    assert len(kernel.sent("complete")) == 1
    attempts = {r.headers["Rebuno-Dispatch-Attempt"] for r in kernel.sent("submit")}
    assert attempts == {"2"}


def test_a_repeated_webhook_runs_once(kernel: ScriptedKernel) -> None:
    started, go = threading.Event(), threading.Event()
    ran: list[int] = []

    def handler() -> None:
        ran.append(1)
        started.set()
        assert go.wait(30)

    run = kernel.create({})
    with agent_of(kernel, handler) as agent:
        assert kernel.deliver(run).status < 300
        assert started.wait(30)
        assert kernel.post_webhook(kernel.webhook_body(run), run.id).status < 300
        go.set()
        assert agent.join(timeout=30)
    assert ran == [1]
    assert run.status == "completed"


def test_generation_1_delivers_the_same_dispatch_again(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedKernel(GENERATION_1) as kernel:
        run = kernel.create({})
        ran: list[str] = []

        @tool
        def effect() -> str:
            ran.append("effect")
            return "kept"

        def handler() -> str:
            kept = effect()
            ran.append("handler")
            if ran.count("handler") == 1:
                raise SystemExit
            return kept

        with agent_of(kernel, handler) as agent:
            dispatch(kernel, agent, run)
            assert run.status == "running"
            dispatch(kernel, agent, run)
        assert ran == ["effect", "handler", "handler"]
        assert run.output is not None
        assert json.loads(run.output.text) == "kept"


# Signatures


def schemes(kernel: ScriptedKernel) -> list[tuple[str, int]]:
    return [
        (r.headers["Rebuno-Signature"].partition("=")[0], r.answer.status) for r in kernel.requests
    ]


def test_the_request_signature_is_tried_once_and_kept() -> None:
    with ScriptedKernel(GENERATION_3) as kernel:
        first, second = kernel.create({"amount": 1}), kernel.create({"amount": 2})
        with agent_of(kernel, charge_input) as agent:
            dispatch(kernel, agent, first)
            dispatch(kernel, agent, second)
        assert first.status == second.status == "completed"
        told = schemes(kernel)
        assert told[0] == ("sha256", 401)
        assert {scheme for scheme, _ in told[1:]} == {"v1"}
        assert all(status < 300 for _, status in told[1:])


@pytest.mark.parametrize("generation", [GENERATION_1, GENERATION_2], ids=str)
def test_the_body_signature_is_kept_where_it_works(generation: Generation) -> None:
    with ScriptedKernel(generation) as kernel:
        assert run_once(kernel, lambda: charge(1)).status == "completed"
        assert {scheme for scheme, _ in schemes(kernel)} == {"sha256"}


def test_it_never_steps_down() -> None:
    with ScriptedKernel(GENERATION_3) as kernel:
        first, second = kernel.create({"amount": 1}), kernel.create({"amount": 2})
        with agent_of(kernel, charge_input) as agent:
            dispatch(kernel, agent, first)
            before = len(kernel.requests)
            refused = Answer.error(401, "unauthorized")
            kernel.intercept(lambda request: refused if second.id in request.target else None)
            dispatch(kernel, agent, second)
        later = schemes(kernel)[before:]
        assert later
        assert {scheme for scheme, _ in later} == {"v1"}
        assert second.status == "running"


def test_a_wrong_secret_does_not_change_the_signature() -> None:
    with ScriptedKernel(GENERATION_2) as kernel:
        refused = Answer.error(401, "unauthorized")
        first, second = kernel.create({"amount": 1}), kernel.create({"amount": 2})
        kernel.intercept(lambda request: refused if first.id in request.target else None)
        with agent_of(kernel, charge_input) as agent:
            dispatch(kernel, agent, first)
            assert schemes(kernel) == [("sha256", 401), ("v1", 401)]
            dispatch(kernel, agent, second)
        assert second.status == "completed"
        assert {scheme for scheme, _ in schemes(kernel)[2:]} == {"sha256"}


@pytest.mark.parametrize(
    ("pinned", "scheme"), [("body", "sha256"), ("v1", "v1")], ids=["body", "v1"]
)
def test_a_pinned_signature_is_the_only_one_tried(
    kernel: ScriptedKernel, pinned: str, scheme: str
) -> None:
    run = run_once(kernel, lambda: charge(1), signature=pinned)
    assert {used for used, _ in schemes(kernel)} == {scheme}
    works = kernel.generation.signature_prefix == f"{scheme}="
    assert run.status == ("completed" if works else "running")


# Redirects


@pytest.mark.parametrize("status", [301, 302, 307, 308])
@pytest.mark.parametrize("call", ["read", "submit", "step_complete", "complete"])
def test_redirects_are_never_followed(kernel: ScriptedKernel, call: str, status: int) -> None:
    elsewhere: list[Recorded] = []

    def record(request: Recorded) -> Answer:
        elsewhere.append(request)
        return Answer.json({"decision": "proceed", "step_id": "a" * 64})

    with Server(record) as other:
        kernel.intercept(
            lambda request: (
                Answer(status, headers=(("Location", other.url + request.target),))
                if request.call == call
                else None
            )
        )
        run_once(kernel, lambda: charge(1))
    assert elsewhere == []
    assert len(kernel.sent(call)) == 1
