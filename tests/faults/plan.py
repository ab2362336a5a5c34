"""What goes wrong in one run, and when: all of it follows from the seed."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import random

from tests.faults.proxy import ANY, Fault

#: How long a lease is in a run, in seconds.
LEASE = 2.0
#: How many steps each execution takes, and kernel calls if nothing goes wrong.
STEPS, CALLS = 30, 63


class Trouble(enum.Enum):
    """What happens to a process, its machine or its port."""

    WORKER_KILLED = "worker killed"
    MASTER_KILLED = "gunicorn's master killed"
    KERNEL_KILLED = "kernel killed"
    WORKER_STOPPED = "worker stopped longer than its lease"
    DISK_FULL = "kernel's disk full (SQLITE_FULL)"
    DISK_REFUSES = "kernel's disk refuses writes (EFBIG)"
    KERNEL_CLOCK_AHEAD = "kernel's clock set 10 min ahead"
    KERNEL_CLOCK_BACK = "kernel's clock set 10 min back"
    AGENT_CLOCK_AHEAD = "agents' clock set 10 min ahead"
    AGENT_CLOCK_BACK = "agents' clock set 10 min back"
    KERNEL_REFUSES = "kernel's port closed"
    AGENT_REFUSES = "agents' port closed"
    KERNEL_HANGS_UP = "kept-alive connections ended"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of fault: where it happens, and what it is."""

    where: str
    what: Fault | Trouble

    def __str__(self) -> str:
        return f"{self.where}: {self.what.value}"


PROCESS, CALL, DELIVERY = "process", "call", "delivery"
_OF_DELIVERIES = {
    Fault.DROPPED,
    Fault.CUT,
    Fault.LOST,
    Fault.LATE,
    Fault.ERROR_BEFORE,
    Fault.ERROR_AFTER,
    Fault.HTML_BEFORE,
    Fault.GATEWAY_BEFORE,
    Fault.HALF_OPEN,
    Fault.TWICE,
    Fault.OVERTAKEN,
}
KINDS = (
    *(Kind(PROCESS, trouble) for trouble in Trouble),
    *(Kind(CALL, f) for f in Fault if f not in (Fault.TWICE, Fault.OVERTAKEN)),
    *(Kind(DELIVERY, f) for f in Fault if f in _OF_DELIVERIES),
)
#: So few may go wrong that no execution can run out of deliveries: five in a row end it.
MOST_LOST_DELIVERIES = 2


@dataclasses.dataclass(frozen=True)
class Incident:
    """One fault.

    Attributes:
        kind: which.
        call: for a spoiled call or delivery, the name it goes by.
        at: how many of these calls come before it; for the trouble of a process, how many calls
            of any name.
        seconds: how long trouble lasts.
        stays: for clocks, whether they are not set right again.
    """

    kind: Kind
    call: str
    at: int
    seconds: float
    stays: bool

    def __str__(self) -> str:
        at = f"{self.kind} at {self.call} {self.at}"
        if not isinstance(self.kind.what, Trouble):
            return at
        return f"{at} for {self.seconds:.1f} s{' and on' if self.stays else ''}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """One run.

    Attributes:
        seed: what it was made from.
        worker_class: gunicorn's.
        preload: whether gunicorn loads the app before it forks.
        hooks: whether gunicorn has our hooks.
        signature: how the agent signs.
        threads: how many steps go side by side, for each execution.
        incidents: what goes wrong.
    """

    seed: int
    worker_class: str
    preload: bool
    hooks: bool
    signature: str
    threads: tuple[int, ...]
    incidents: tuple[Incident, ...]

    def __str__(self) -> str:
        with_what = [
            self.worker_class,
            *(["preload"] if self.preload else []),
            *(["hooks"] if self.hooks else []),
            f"{self.signature} signatures",
            f"threads {self.threads}",
        ]
        return "; ".join([", ".join(with_what), *map(str, self.incidents)])


def make_plan(seed: int) -> Plan:
    """Make the plan of a run. The first kind of fault goes by turns, so that each has its turn."""
    rng = random.Random(seed)
    worker_class = rng.choice(["sync", "gthread", "gthread", "gevent"])
    if worker_class == "gevent" and not importlib.util.find_spec("gevent"):
        worker_class = "gthread"  # and all the rest as the seed has it
    kinds = [KINDS[seed % len(KINDS)], *rng.choices(KINDS, k=rng.randint(2, 4))]
    incidents: list[Incident] = []
    for kind in kinds:
        if kind.where == DELIVERY and _lost(incidents) >= MOST_LOST_DELIVERIES:
            continue
        if kind.what is Trouble.AGENT_REFUSES and _lost(incidents):
            continue
        incident = _incident(rng, kind)
        if all(
            (i.kind.where, i.call, i.at) != (kind.where, incident.call, incident.at)
            for i in incidents
        ):
            incidents.append(incident)
    return Plan(
        seed=seed,
        worker_class=worker_class,
        # Without a patch of its own, an app that is loaded first has threads that are none.
        preload=rng.random() < 0.3 and worker_class != "gevent",
        hooks=rng.random() < 0.5,
        signature=rng.choice(["v1", "v1", "body"]),
        threads=(1, rng.choice([2, 3, 5])),
        incidents=tuple(incidents),
    )


def _lost(incidents: list[Incident]) -> int:
    """How many deliveries fail by the incidents so far."""
    return sum(i.kind.where == DELIVERY or i.kind.what is Trouble.AGENT_REFUSES for i in incidents)


def _incident(rng: random.Random, kind: Kind) -> Incident:
    call, at = ANY, rng.randrange(2, int(CALLS * 1.5))
    seconds = rng.uniform(0.1, 0.9)
    if kind.where == DELIVERY:
        # The first ones are sure to come.
        at = rng.randrange(2)
    elif kind.where == CALL and rng.random() < 0.3:
        call, at = rng.choice(
            [
                ("read", 0),
                ("read", 1),
                ("submit", rng.randrange(40)),
                ("step_complete", rng.randrange(40)),
                ("complete", 0),
                ("heartbeat", 0),
            ]
        )
    elif kind.what is Trouble.AGENT_REFUSES:
        at = 0
    elif kind.what is Trouble.WORKER_STOPPED:
        seconds = LEASE + rng.uniform(0.3, 1.0)
    elif kind.what in (Trouble.DISK_FULL, Trouble.DISK_REFUSES):
        seconds = rng.uniform(0.6, 1.5)
    return Incident(kind, call, at, seconds, rng.random() < 0.5)
