"""Every kernel call of a handler, spoiled in every way: nothing is lost, nothing runs twice."""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rebuno_sync import Agent, Client, ToolError, step, tool
from rebuno_sync.kernel import EmbeddedKernel
from tests.faults.proxy import Fault, FaultProxy, counting_refusals
from tests.faults.sides import AGENT, SECRET, EmbeddedSide, Outcome, ScriptedSide, Side
from tests.scripted import GENERATION_3, ScriptedKernel, served


class Connection(enum.Enum):
    """What becomes of the connections just before a call."""

    REFUSED = "connection refused"
    ENDED = "kept-alive connection ended"


Spoiling = Fault | Connection
SPOILINGS: list[Spoiling] = [
    *Connection,
    # A half-open connection looks as a late answer does; the others are of webhooks.
    *(f for f in Fault if f not in (Fault.HALF_OPEN, Fault.TWICE, Fault.OVERTAKEN)),
]
#: The kernel did it, whatever the agent was told.
PROCESSED = {Fault.LOST, Fault.LATE, Fault.ERROR_AFTER, Fault.HTML_AFTER, Fault.GATEWAY_AFTER}
#: The request certainly never arrived, so even a submission may be sent again.
NEVER_ARRIVED = set(Connection)

#: Every call of the handler below, in order.
CALLS = [
    ("read", 0),
    ("submit", 0),
    ("step_complete", 0),
    ("submit", 1),
    ("step_complete", 1),
    ("submit", 2),
    ("step_complete", 2),
    ("submit", 3),
    ("step_fail", 0),
    ("submit", 4),
    ("step_complete", 3),
    ("complete", 0),
]
TARGETS = ("add", "pay", "pick", "explode", "note")
EXPECTED = {"add": 3, "pay": "paid", "pick": "heads", "explode": "no fuse", "note": None}


class Trial:
    """One execution in which one call is spoiled once."""

    def __init__(self, side: Side, proxy: FaultProxy, spoiling: Spoiling) -> None:
        self.side = side
        self.proxy = proxy
        self.spoiling = spoiling
        self.effects: Counter[str] = Counter()
        self._when: tuple[str, int] | None = None

    def spoil(self, call: str, nth: int) -> None:
        if isinstance(self.spoiling, Fault):
            self.proxy.spoil(call, nth, self.spoiling)
        else:
            self._when = (call, nth)

    def before(self, call: str, nth: int) -> None:
        """Called on the agent's side right before a call is made."""
        if self._when != (call, nth):
            return
        self._when = None
        if self.spoiling is Connection.REFUSED:
            self.proxy.refuse(times=2)
        else:
            self.proxy.drop_idle()

    def run(self, handler: Callable[[], Any]) -> Outcome:
        # A late answer is one that comes after this many seconds; nothing else waits for it.
        patience = 1.0 if self.spoiling is Fault.LATE else 30.0
        agent = Agent(
            AGENT, secret=SECRET, base_url=self.proxy.url, signature="v1", kernel_timeout=patience
        )
        agent.bind(handler)
        with served(agent.app) as url:
            try:
                # The first call may come as soon as there is an execution.
                self.before("read", 0)
                execution_id = self.side.start(f"{url}/webhook", {})
                outcome = self.side.settle(execution_id, agent)
            finally:
                assert agent.close(timeout=60)
        self.check_arrivals()
        return outcome

    def check_arrivals(self) -> None:
        """The fault happened, and no submission of one attempt arrived twice."""
        if isinstance(self.spoiling, Fault):
            assert [p.fault for p in self.proxy.spoiled()] == [self.spoiling]
        else:
            assert self._when is None
            assert self.proxy.refused == (2 if self.spoiling is Connection.REFUSED else 0)
        arrived = Counter(
            (p.header("Rebuno-Dispatch-Attempt"), p.body) for p in self.proxy.calls("submit")
        )
        assert set(arrived.values()) <= {1}, "a submission was sent twice in one attempt"

    def check_steps(self, outcome: Outcome, targets: tuple[str, ...]) -> None:
        """Each logical step has one id and an outcome."""
        assert set(outcome.steps) == set(targets)
        assert all(len(rows) == 1 for rows in outcome.steps.values()), outcome.steps
        assert {rows[0]["status"] for rows in outcome.steps.values()} <= {"succeeded", "failed"}


@pytest.fixture(params=["scripted", "embedded"])
def side(request: pytest.FixtureRequest) -> Iterator[Side]:
    if request.param == "scripted":
        with ScriptedKernel(GENERATION_3, agent_id=AGENT, secret=SECRET) as scripted:
            yield ScriptedSide(scripted)
    else:
        with EmbeddedKernel() as embedded, Client(embedded.url) as client:
            yield EmbeddedSide(embedded, client)


@pytest.fixture(params=SPOILINGS, ids=lambda s: s.value)
def trial(request: pytest.FixtureRequest, side: Side) -> Iterator[Trial]:
    with FaultProxy(side.url) as proxy, counting_refusals(proxy):
        yield Trial(side, proxy, request.param)


def five_steps(trial: Trial) -> Callable[[], Any]:
    """A handler of five steps: plain, at most once, local, failing, without a result."""

    def done(target: str, nth: int, call: str = "step_complete") -> None:
        trial.effects[target] += 1
        trial.before(call, nth)

    @tool
    def add(a: int, b: int) -> int:
        done("add", 0)
        return a + b

    @tool(idempotency="at_most_once")
    def pay(amount: int) -> str:
        done("pay", 1)
        return "paid"

    def pick() -> str:
        done("pick", 2)
        return "heads"

    @tool
    def explode() -> None:
        done("explode", 0, "step_fail")
        raise ValueError("no fuse")

    @tool
    def note(text: str) -> None:
        done("note", 3)

    def told(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ToolError as exc:
            return exc.reason or exc.message

    def handler() -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for nth, (target, call) in enumerate(
            (
                ("add", lambda: add(1, 2)),
                ("pay", lambda: pay(5)),
                ("pick", lambda: step("pick", pick)),
                ("explode", explode),
                ("note", lambda: note("the end")),
            )
        ):
            trial.before("submit", nth)
            seen[target] = told(call)
        trial.before("complete", 0)
        return seen

    return handler


@pytest.mark.parametrize(("call", "nth"), CALLS, ids=[f"{c} {n}" for c, n in CALLS])
def test_five_steps(trial: Trial, call: str, nth: int) -> None:
    trial.spoil(call, nth)
    outcome = trial.run(five_steps(trial))

    submission = call == "submit"
    unknown = submission and nth == 1 and trial.spoiling in PROCESSED
    # The kernel thinks that the payment is under way, and no attempt ever ran it.
    expected = {**EXPECTED, "pay": "indeterminate"} if unknown else EXPECTED
    assert (outcome.status, outcome.output) == ("completed", expected)
    assert trial.proxy.calls("fail") == []
    trial.check_steps(outcome, TARGETS)

    assert trial.effects == {t: 1 for t in TARGETS if not (unknown and t == "pay")}
    given_up = submission and trial.spoiling not in NEVER_ARRIVED
    assert outcome.attempts == (2 if given_up else 1)


def test_the_last_word_of_a_failed_handler(trial: Trial) -> None:
    @tool
    def add(a: int, b: int) -> int:
        trial.effects["add"] += 1
        return a + b

    def handler() -> None:
        add(1, 2)
        trial.before("fail", 0)
        raise ValueError("that is all")

    trial.spoil("fail", 0)
    outcome = trial.run(handler)
    assert outcome.status == "failed"
    assert outcome.failure_reason == "agent_error: ValueError: that is all"
    trial.check_steps(outcome, ("add",))
    assert trial.effects == {"add": 1}


@pytest.fixture
def beating() -> Iterator[Side]:
    with ScriptedKernel(GENERATION_3, agent_id=AGENT, secret=SECRET, lease_timeout=0.6) as kernel:
        yield ScriptedSide(kernel)


@pytest.mark.parametrize("spoiling", SPOILINGS, ids=lambda s: s.value)
def test_a_heartbeat(beating: Side, spoiling: Spoiling) -> None:
    with FaultProxy(beating.url) as proxy, contextlib.ExitStack() as stack:
        stack.enter_context(counting_refusals(proxy))
        trial = Trial(beating, proxy, spoiling)

        @tool
        def long() -> str:
            trial.effects["long"] += 1
            trial.before("heartbeat", 0)
            proxy.wait_for(
                lambda: sum(p.status == 204 and not p.fault for p in proxy.calls("heartbeat")) >= 2
            )
            return "still here"

        trial.spoil("heartbeat", 0)
        outcome = trial.run(lambda: long())
    assert (outcome.status, outcome.output) == ("completed", "still here")
    assert trial.effects == {"long": 1}
    assert outcome.attempts == 1
    trial.check_steps(outcome, ("long",))
