"""One run: an agent of thirty steps under gunicorn, its kernel, and what goes wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rebuno_sync import RebunoError
from rebuno_sync.wire import Event, Execution, Step
from tests.faults.parts import AgentSide, KernelSide
from tests.faults.plan import CALL, DELIVERY, LEASE, Incident, Kind, Plan, Trouble
from tests.faults.proxy import Fault, FaultProxy
from tests.faults.sides import SECRET
from tests.faults.verdict import faults_of

AGENT = "thirty"
#: An execution that has not ended after so many seconds is stuck.
LIMIT = 90.0
TEN_MINUTES = 600.0
#: No file of a kernel may grow beyond this many bytes while its disk refuses writes.
_NO_MORE = 4096


@dataclasses.dataclass(frozen=True)
class Report:
    """What came of a run.

    Attributes:
        plan: what was to happen.
        happened: how often each kind of fault did happen.
        attempts: how many attempts it took, over all executions.
        unknown: how many at-most-once effects ended with an unknown outcome.
        seconds: how long it took.
        faults: what was wrong in the end; nothing should be.
    """

    plan: Plan
    happened: Counter[str]
    attempts: int
    unknown: int
    seconds: float
    faults: list[str]


def run(plan: Plan, folder: Path) -> Report:
    """Do what the plan says and look at what came of it.

    Args:
        plan: what goes wrong.
        folder: an empty folder for the journal, the logs and the kernel's file.
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        stage = stack.enter_context(_Stage(plan, folder).built())
        ids = stage.create()
        stage.begin_troubles()
        found = stage.wait_for(ids)
        faults = stage.end()
    effects = _effects(folder)
    for execution, events, steps in found:
        faults += faults_of(execution, events, steps, effects)
    return Report(
        plan=plan,
        happened=stage.happened,
        attempts=sum(e.type == "dispatch.acked" for _, events, _ in found for e in events),
        unknown=sum(step.status == "failed" for _, _, steps in found for step in steps),
        seconds=time.monotonic() - begin,
        faults=faults,
    )


Found = tuple[Execution, list[Event], list[Step]]


class _Stage:
    """The processes of a run, the proxies between them, and the threads that make trouble."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.happened: Counter[str] = Counter()
        self._plan = plan
        self._folder = folder
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        # Trouble of one side goes one after the other; that of both sides may overlap.
        self._kernel_lock, self._agents_lock = threading.Lock(), threading.Lock()

    @contextlib.contextmanager
    def built(self) -> Iterator[_Stage]:
        """Start everything; on the way out, everything has ended."""
        with contextlib.ExitStack() as stack:
            self._kernel = KernelSide(self._folder)
            stack.callback(self._kernel.kill)
            self._calls = stack.enter_context(FaultProxy(self._kernel.url))
            self._agents = AgentSide(self._plan, self._calls.url, self._folder)
            stack.callback(self._agents.stop)
            self._webhooks = stack.enter_context(FaultProxy(self._agents.url))
            stack.callback(self._end_troubles)
            self._agents.wait()
            yield self

    def create(self) -> list[str]:
        """Register the agent and begin the executions; spoiled calls are spoiled from here on."""
        self._kernel.client.register_agent(
            AGENT, f"{self._webhooks.url}/webhook", SECRET, lease_timeout_seconds=LEASE
        )
        for incident in self._plan.incidents:
            fault = incident.kind.what
            if isinstance(fault, Fault):
                proxy = self._calls if incident.kind.where == CALL else self._webhooks
                proxy.spoil(incident.call, incident.at, fault)
            elif fault is Trouble.AGENT_REFUSES:
                self._webhooks.close_port()  # before the first delivery
        create = self._kernel.client.create
        return [create(AGENT, {"threads": n}).id for n in self._plan.threads]

    def wait_for(self, ids: list[str]) -> list[Found]:
        """Wait until every execution has ended, and read what there is of each."""
        deadline = time.monotonic() + LIMIT
        pending = set(ids)
        while pending and time.monotonic() < deadline:
            for execution_id in list(pending):
                with contextlib.suppress(RebunoError):
                    if self._kernel.client.get(execution_id).done:
                        pending.discard(execution_id)
            self._over.wait(0.05)
        self._end_troubles()
        # What a woken worker still does, it does before it ends.
        self._in_order = self._agents.stop()
        client = self._kernel.client
        return [(client.get(i), list(client.events(i)), list(client.steps(i))) for i in ids]

    def end(self) -> list[str]:
        """End everything; return what was wrong with that."""
        self._count_spoiled()
        faults = [] if self._in_order else ["gunicorn did not end when it was told to"]
        if not self._kernel.stop():
            faults.append("the kernel did not end when it was told to")
        return faults

    def _count_spoiled(self) -> None:
        for where, proxy in ((CALL, self._calls), (DELIVERY, self._webhooks)):
            for passed in proxy.spoiled():
                assert passed.fault is not None
                self.happened[str(Kind(where, passed.fault))] += 1

    # Trouble

    def begin_troubles(self) -> None:
        """Start a thread for each trouble, which waits for its time."""
        for number, incident in enumerate(self._plan.incidents):
            if isinstance(incident.kind.what, Trouble):
                rng = random.Random(self._plan.seed * 100 + number)
                thread = threading.Thread(target=self._make, args=(incident, rng))
                thread.start()
                self._threads.append(thread)

    def _end_troubles(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _make(self, incident: Incident, rng: random.Random) -> None:
        while len(self._calls.passed) < incident.at:
            if self._over.wait(0.005):
                return
        what = incident.kind.what
        assert isinstance(what, Trouble)
        if self._TROUBLES[what](self, incident, rng):
            self.happened[str(incident.kind)] += 1

    def _kill_worker(self, incident: Incident, rng: random.Random) -> bool:
        with self._agents_lock, contextlib.suppress(ProcessLookupError):
            workers = self._agents.workers()
            if workers:
                os.kill(rng.choice(workers), signal.SIGKILL)
                return True
        return False

    def _stop_worker(self, incident: Incident, rng: random.Random) -> bool:
        workers = self._agents.workers()
        if not workers:
            return False
        worker = rng.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGSTOP)
            self._over.wait(incident.seconds)
            os.kill(worker, signal.SIGCONT)
            return not self._over.is_set()
        return False

    def _kill_master(self, incident: Incident, rng: random.Random) -> bool:
        with self._agents_lock:
            self._agents.kill_master()
        return True

    def _kill_kernel(self, incident: Incident, rng: random.Random) -> bool:
        with self._kernel_lock:
            self._kernel.kill()
            # Its port is closed, or else somebody takes connections who gets no further.
            refuses = rng.random() < 0.7
            if refuses:
                self._calls.close_port()
            self._over.wait(incident.seconds)
            self._kernel.start()
            self._calls.pass_to(self._kernel.url)
            if refuses:
                self._calls.open_port()
        return True

    def _close_kernel_port(self, incident: Incident, rng: random.Random) -> bool:
        with self._kernel_lock:
            self._calls.close_port()
            self._over.wait(incident.seconds)
            self._calls.open_port()
        return True

    def _open_agent_port(self, incident: Incident, rng: random.Random) -> bool:
        self._over.wait(incident.seconds)
        self._webhooks.open_port()
        return self._kernel.times_said("refused") > 0

    def _hang_up(self, incident: Incident, rng: random.Random) -> bool:
        self._calls.drop_idle()
        return True

    def _fill_disk(self, incident: Incident, rng: random.Random) -> bool:
        machine = self._kernel.machine
        before = machine.times_full
        machine.fill(True)
        self._over.wait(incident.seconds)
        machine.fill(False)
        return machine.times_full > before

    def _refuse_writes(self, incident: Incident, rng: random.Random) -> bool:
        with self._kernel_lock:
            before = len(self._calls.passed)
            self._kernel.limit_files(_NO_MORE)
            self._over.wait(incident.seconds)
            self._kernel.limit_files(-1)
            return any((p.status or 0) >= 500 for p in self._calls.passed[before:])

    def _set_clock(self, incident: Incident, rng: random.Random) -> bool:
        of_kernel = incident.kind.what in (Trouble.KERNEL_CLOCK_AHEAD, Trouble.KERNEL_CLOCK_BACK)
        ahead = incident.kind.what in (Trouble.KERNEL_CLOCK_AHEAD, Trouble.AGENT_CLOCK_AHEAD)
        machine = (self._kernel if of_kernel else self._agents).machine
        machine.set_clock(TEN_MINUTES if ahead else -TEN_MINUTES)
        if not incident.stays and not self._over.wait(incident.seconds):
            machine.set_clock(0.0)
        return True

    _TROUBLES: dict[Trouble, Callable[[_Stage, Incident, random.Random], bool]] = {  # noqa: RUF012
        Trouble.WORKER_KILLED: _kill_worker,
        Trouble.MASTER_KILLED: _kill_master,
        Trouble.KERNEL_KILLED: _kill_kernel,
        Trouble.WORKER_STOPPED: _stop_worker,
        Trouble.DISK_FULL: _fill_disk,
        Trouble.DISK_REFUSES: _refuse_writes,
        Trouble.KERNEL_CLOCK_AHEAD: _set_clock,
        Trouble.KERNEL_CLOCK_BACK: _set_clock,
        Trouble.AGENT_CLOCK_AHEAD: _set_clock,
        Trouble.AGENT_CLOCK_BACK: _set_clock,
        Trouble.KERNEL_REFUSES: _close_kernel_port,
        Trouble.AGENT_REFUSES: _open_agent_port,
        Trouble.KERNEL_HANGS_UP: _hang_up,
    }


def _effects(folder: Path) -> dict[tuple[str, str], list[str]]:
    """Read the journal: the values of what happened, by execution and effect."""
    found: dict[tuple[str, str], list[str]] = {}
    file = folder / "effects"
    for line in file.read_text().splitlines() if file.exists() else ():
        execution_id, effect, value = line.split()
        found.setdefault((execution_id, effect), []).append(value)
    return found
