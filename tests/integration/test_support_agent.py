"""The support agent under gunicorn, killed at each of its steps: one answer, nothing twice."""

from __future__ import annotations

import collections
import contextlib
import http.client
import importlib.util
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests

from examples.fake_provider import Asked, FakeProvider, Reply, load_script
from examples.support_agent.desk import refunds
from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.wire import Execution
from tests.integration.terminal import environment, on_a_terminal
from tests.scripted import Answer, Recorded, wait_until
from tests.scripted.http import Server

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "support_agent"
LEASE = 120.0
SECRET = "orchard-secret"
QUESTION = "My kettle is broken, order A-17. I want my money back."
ANSWER = "Your kettle was delivered 12 days ago, so you get 49.00 EUR back."
REFUSAL = "I am sorry, a colleague decided against the refund."
SCRIPT = load_script(EXAMPLE / "script.json")
REFUND = {"order_id": "A-17", "cents": 4900}
POLICY = (EXAMPLE / "policy.yaml").read_text("utf-8")
#: Every step is submitted once by an attempt that gets there: its number is that of the step.
NO_APPROVALS = "default_action: allow\nrules: []\n"
#: What the agent does, in order: four calls of the model and the three tools between them.
STEPS = ("llm", "find_order", "llm", "refund_rules", "llm", "issue_refund", "llm")
LOOPS = ("openai_loop", "anthropic_loop", "langgraph_agent")
OTHERS = ("openai_agents_sdk", "pydantic_ai_agent")
NEEDS = {
    "langgraph_agent": "langchain",
    "openai_agents_sdk": "agents",
    "pydantic_ai_agent": "pydantic_ai",
}
#: When to kill, seen from between the agent and the kernel, for the submission or the report of
#: a step: before the kernel hears of it, or when it has done it and before the agent knows.
BEFORE_SUBMIT, AFTER_SUBMIT, BEFORE_REPORT, AFTER_REPORT = (
    "before-submit",
    "after-submit",
    "before-report",
    "after-report",
)


class KillingProxy:
    """Stands between the agent and the kernel, and kills the agent at a chosen call."""

    def __init__(self, upstream: str) -> None:
        self._upstream = urlsplit(upstream).netloc
        self._server = Server(self._respond)
        self._plan: tuple[str, int] | None = None
        self._kill: Any = None
        self._seen: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self.killed = threading.Event()

    @property
    def url(self) -> str:
        return self._server.url

    def plan(self, when: str = "", number: int = 0, kill: Any = None) -> None:
        """Call ``kill`` at the ``number``-th submission or report from now, counted from 0."""
        with self._lock:
            self._plan, self._kill = (when, number), kill
            self._seen.clear()

    def _respond(self, request: Recorded) -> Answer:
        what = self._what(request)
        with self._lock:
            number = self._seen[what]
            self._seen[what] += 1
        if self._plan == (f"before-{what}", number):
            return self._dead()
        answer = self._forward(request)
        if self._plan == (f"after-{what}", number):
            return self._dead()
        return answer

    def _dead(self) -> Answer:
        self._kill()
        self.killed.set()
        return Answer(500)  # nobody is there to read it

    @staticmethod
    def _what(request: Recorded) -> str:
        if request.method == "POST" and request.path.endswith("/steps"):
            return "submit"
        steps = request.path.partition("/steps/")[2]
        return "report" if steps.endswith(("/complete", "/fail")) else "other"

    def _forward(self, request: Recorded) -> Answer:
        connection = http.client.HTTPConnection(self._upstream, timeout=60)
        try:
            connection.request(
                request.method, request.target, request.body, dict(request.headers.items())
            )
            response = connection.getresponse()
            body = response.read()
            return Answer(response.status, body, response.getheader("Content-Type", ""))
        finally:
            connection.close()

    def close(self) -> None:
        self._server.close()


class Desk:
    """Everything that runs for the tests of one loop: provider, kernel, proxy, gunicorn.

    Each test asks a question of its own, so that what the provider was asked can be told apart.
    """

    def __init__(self, loop: str, folder: Path) -> None:
        self._ledger = folder / "refunds.jsonl"
        self._stack = contextlib.ExitStack()
        self._asked_before = 0
        enter = self._stack.enter_context
        self.listening = threading.Event()
        self.listening.set()
        #: The answer to the customer stops in the middle until this is set.
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._provider = enter(FakeProvider(self._reply))
        self.kernel = enter(EmbeddedKernel(lease_timeout=LEASE))
        self.proxy = enter(contextlib.closing(KillingProxy(self.kernel.url)))
        self.client = enter(Client(self.kernel.url))
        listener = enter(socket.create_server(("127.0.0.1", 0)))
        webhook = f"http://127.0.0.1:{listener.getsockname()[1]}/webhook"
        self.client.register_agent("support", webhook, SECRET)
        self._gunicorn = subprocess.Popen(
            [
                *(sys.executable, "-m", "gunicorn", "--workers", "1", "--threads", "4"),
                *("--bind", f"fd://{listener.fileno()}", "--log-level", "critical", "--preload"),
                f"examples.support_agent.{loop}:create_app()",
            ],
            cwd=ROOT,
            pass_fds=[listener.fileno()],
            env={
                **os.environ,
                "REBUNO_URL": self.proxy.url,
                "REBUNO_AGENT_SECRET": SECRET,
                "SUPPORT_LEDGER": str(self._ledger),
                "OPENAI_BASE_URL": self._provider.openai_url,
                "OPENAI_API_KEY": "k",
                "ANTHROPIC_BASE_URL": self._provider.url,
                "ANTHROPIC_API_KEY": "k",
            },
        )
        self._stack.callback(self._stop)

    def _reply(self, asked: Asked) -> Reply:
        reply = SCRIPT(asked)
        if reply.text == ANSWER and not self.goes_on.is_set():
            return reply.held(self.goes_on, after=8)
        return reply.held(self.listening)

    def _stop(self) -> None:
        self._gunicorn.terminate()
        self._gunicorn.wait(60)

    def close(self) -> None:
        self._stack.close()

    def kill_worker(self) -> None:
        """SIGKILL the process that runs the agent; gunicorn starts another."""
        (worker,) = children(self._gunicorn.pid)
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: worker not in children(self._gunicorn.pid))

    def start(self, policy: str) -> str:
        """Begin anew: a ledger without entries, a policy, an execution."""
        self.client.set_policy("support", policy)
        self._ledger.unlink(missing_ok=True)
        self._asked_before = len(self._provider.asked)
        question = f"{QUESTION} (letter {self._asked_before})"
        return self.client.create("support", {"question": question}).id

    def finish(self, execution_id: str, *, grant: bool = True) -> Execution:
        """Deliver again what was killed, decide the approval, and return the end of it."""

        def moved() -> Execution | None:
            if self.proxy.killed.is_set():
                self.proxy.killed.clear()
                self.kernel.advance(LEASE + 1)
            found = self.client.get(execution_id)
            return found if found.done or found.status == "blocked" else None

        found: Execution = wait_until(moved, 120.0)
        if found.status == "blocked":
            (approval,) = self.client.approvals()
            assert approval.message == "A customer asks for money back"
            decide = self.client.grant if grant else self.client.deny
            decide(approval.id, decided_by="ann")
            wait_until(lambda: self.client.get(execution_id).status != "blocked")
            found = wait_until(moved, 120.0)
        return found

    @property
    def asked(self) -> list[Asked]:
        """What the provider was asked in this test."""
        return self._provider.asked[self._asked_before :]

    @property
    def times_asked(self) -> list[int]:
        """How often each distinct request came, in the order in which they first came."""
        return list(collections.Counter(asked.digest for asked in self.asked).values())

    @property
    def refunds(self) -> list[Any]:
        """The entries of the ledger."""
        return refunds(self._ledger)

    def steps(self, execution_id: str) -> list[str]:
        """The targets of the steps, in the order of their submission."""
        order = [
            event.payload["step_id"]
            for event in self.client.events(execution_id)
            if event.type == "step.proposed"
        ]
        steps = sorted(self.client.steps(execution_id), key=lambda s: order.index(s.step_id))
        return ["llm" if s.kind == "llm_call" else s.target for s in steps]

    def attempts(self, execution_id: str) -> int:
        """The highest attempt that the agent took."""
        events = self.client.events(execution_id)
        return max(e.payload["attempt"] for e in events if e.type == "dispatch.acked")


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    return [int(child) for child in found.split()]


def skip_unless_installed(loop: str) -> None:
    needed = NEEDS.get(loop)
    if needed is not None and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")


@pytest.fixture(scope="module")
def desk(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Desk]:
    skip_unless_installed(request.param)
    with contextlib.closing(Desk(request.param, tmp_path_factory.mktemp("desk"))) as desk:
        yield desk


def loops(*names: str) -> Any:
    return pytest.mark.parametrize("desk", names, indirect=True, scope="module")


@loops(*LOOPS, *OTHERS)
def test_undisturbed(desk: Desk) -> None:
    execution_id = desk.start(POLICY)
    found = desk.finish(execution_id)
    assert (found.status, found.output) == ("completed", ANSWER)
    assert desk.steps(execution_id) == list(STEPS)
    assert desk.times_asked == [1] * 4
    assert desk.refunds == [REFUND]


@loops(*LOOPS, *OTHERS)
def test_a_denied_refund_is_the_tools_answer(desk: Desk) -> None:
    found = desk.finish(desk.start(POLICY), grant=False)
    assert (found.status, found.output) == ("completed", REFUSAL)
    told = desk.asked[-1].results[-1]
    assert told.content == "issue_refund not allowed. reason: approval_denied"
    assert desk.times_asked == [1] * 4
    assert desk.refunds == []


@loops(*LOOPS)
@pytest.mark.parametrize(
    ("when", "number"),
    # Before a submission is after the report before it, but for the first.
    [(BEFORE_SUBMIT, 0), *itertools.product([AFTER_SUBMIT, AFTER_REPORT], range(len(STEPS)))],
)
def test_killed_at_a_boundary_of_a_step(desk: Desk, when: str, number: int) -> None:
    """The provider has answered and been recorded, or has not been asked: never twice."""
    desk.proxy.plan(when, number, desk.kill_worker)
    execution_id = desk.start(NO_APPROVALS)
    found = desk.finish(execution_id)
    assert (found.status, found.output) == ("completed", ANSWER)
    assert desk.attempts(execution_id) == 2
    assert desk.times_asked == [1] * 4
    assert desk.refunds == [REFUND]
    expected = list(STEPS)
    if STEPS[number] == "issue_refund" and when == AFTER_SUBMIT:
        # The kernel could not know whether it was paid, so the ledger was asked.
        expected.insert(number + 1, "issue_refund.reconcile")
    assert desk.steps(execution_id) == expected


@loops(*LOOPS)
@pytest.mark.parametrize("number", range(len(STEPS)))
def test_killed_between_an_effect_and_its_record(desk: Desk, number: int) -> None:
    """What was lost may be asked again, once, and nothing else; money is paid once all the same."""
    desk.proxy.plan(BEFORE_REPORT, number, desk.kill_worker)
    execution_id = desk.start(NO_APPROVALS)
    found = desk.finish(execution_id)
    assert (found.status, found.output) == ("completed", ANSWER)
    assert desk.attempts(execution_id) == 2
    expected = [1, 1, 1, 1]
    if STEPS[number] == "llm":
        expected[STEPS[:number].count("llm")] = 2
    assert desk.times_asked == expected
    assert desk.refunds == [REFUND]


@loops(*LOOPS)
def test_killed_while_a_person_decides(desk: Desk) -> None:
    execution_id = desk.start(POLICY)
    wait_until(lambda: desk.client.get(execution_id).status == "blocked", 60.0)
    desk.kill_worker()
    found = desk.finish(execution_id)
    assert (found.status, found.output) == ("completed", ANSWER)
    assert desk.times_asked == [1] * 4
    assert desk.refunds == [REFUND]


@loops(*LOOPS)
def test_the_answer_is_seen_while_it_comes(desk: Desk) -> None:
    """What the command line shows by ``exec watch``; nothing is sent before it listens."""
    desk.listening.clear()
    execution_id = desk.start(POLICY)
    stream = f"{desk.kernel.url}/v0/executions/{execution_id}/stream"
    with requests.get(stream, stream=True, timeout=60) as live:
        desk.listening.set()
        assert desk.finish(execution_id).output == ANSWER
        said: list[int] = []
        for number, line in enumerate(live.iter_lines()):
            if b"Your " in line or b"back." in line:
                said.append(number)
            if b"back." in line:
                break
    assert len(said) > 1  # the beginning came before the end


@loops(*LOOPS)
def test_a_terminal_shows_words_before_the_model_has_said_the_rest(desk: Desk) -> None:
    """The provider stands still in the middle of its answer until the beginning was seen."""
    desk.listening.clear()
    desk.goes_on.clear()
    try:
        execution_id = desk.start(NO_APPROVALS)
        env = environment(REBUNO_URL=desk.kernel.url)
        with on_a_terminal("exec", "watch", execution_id, env=env) as watch:
            watchers = desk.kernel._running().hub._subscriptions
            wait_until(lambda: execution_id in watchers, 60.0)
            desk.listening.set()
            watch.read_until("Your kettle")
            assert desk.client.get(execution_id).status == "running"
            assert "back." not in watch.text
            desk.goes_on.set()
            assert watch.wait() == 0
        assert ANSWER in watch.text
    finally:
        desk.listening.set()
        desk.goes_on.set()


def test_the_demo() -> None:
    """``exec watch`` shows the streamed answer; one model call is asked twice, for the kill."""
    done = subprocess.run(
        [sys.executable, "-m", "examples.support_agent.demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    assert re.search(r"SIGKILL worker \d+, while the model is being asked", shown)
    assert re.search(r"attempt 2 +2 steps on record", shown)
    assert "a person approves: A customer asks for money back" in shown
    live = shown.index(f"test-model │ {ANSWER}")
    assert live < shown.index("■ completed")
    assert "4 different things, 5 times in all" in shown
