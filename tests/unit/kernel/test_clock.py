"""The kernel's clock while the machine's is set."""

from __future__ import annotations

import types

import pytest

from rebuno_sync.kernel import clock as module
from rebuno_sync.kernel.clock import Clock

BEGIN = 1_790_000_000.0


class Machine:
    """A machine whose time passes, and whose clock is set, when a test says so."""

    def __init__(self) -> None:
        self.wall = BEGIN
        self.elapsed = 5.0

    def passes(self, seconds: float, set_by: float = 0.0) -> None:
        self.wall += seconds + set_by
        self.elapsed += seconds


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    fake = types.SimpleNamespace(monotonic=lambda: machine.elapsed)
    monkeypatch.setattr(module, "time", fake)
    return machine


@pytest.fixture
def clock(machine: Machine) -> Clock:
    clock = Clock(source=lambda: machine.wall)
    assert clock.now() == BEGIN
    return clock


def test_it_is_the_machines(machine: Machine, clock: Clock) -> None:
    machine.passes(7.5)
    assert clock.now() == machine.wall


def test_it_goes_on_when_the_machines_is_set_back(machine: Machine, clock: Clock) -> None:
    machine.passes(0.0, set_by=-600.0)
    assert clock.now() == BEGIN
    machine.passes(10.0)
    assert BEGIN + 8.9 <= clock.now() <= BEGIN + 10.0
    machine.passes(10_000.0)
    assert clock.now() == machine.wall, "they agree again in the end"


def test_it_never_stands_still_on_the_way(machine: Machine, clock: Clock) -> None:
    machine.passes(0.0, set_by=-600.0)
    before = clock.now()
    for _ in range(1000):
        machine.passes(0.5)
        now = clock.now()
        assert before + 0.44 < now
        before = now


def test_it_follows_when_the_machines_is_set_forward(machine: Machine, clock: Clock) -> None:
    machine.passes(1.0, set_by=600.0)
    assert clock.now() == BEGIN + 601.0


@pytest.mark.parametrize("first", [-600.0, 600.0])
def test_it_is_right_again_when_the_machines_is(
    machine: Machine, clock: Clock, first: float
) -> None:
    machine.passes(1.0, set_by=first)
    before = clock.now()
    machine.passes(1.0, set_by=-first)
    now = clock.now()
    assert before <= now
    if first < 0:
        assert now == BEGIN + 2.0


def test_it_begins_no_earlier_than_it_is_told(machine: Machine, clock: Clock) -> None:
    clock.not_before(BEGIN - 5.0)
    assert clock.now() == BEGIN
    clock.not_before(BEGIN + 50.0)
    assert clock.now() == BEGIN + 50.0
    machine.passes(1_000.0)
    assert clock.now() == machine.wall


def test_a_clock_that_stands_still_stands_still(machine: Machine) -> None:
    clock = Clock(source=lambda: BEGIN)
    assert clock.now() == BEGIN
    machine.elapsed += 100.0
    assert clock.now() == BEGIN
