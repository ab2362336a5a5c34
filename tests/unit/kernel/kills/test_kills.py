"""A kernel that is killed at any point, thousands of times, loses nothing and leaves nothing stuck.

``REBUNO_KILLS`` says how many kills there are, ``REBUNO_SEED`` which. They are dealt out to
*worlds* of forty: one file each, on which kernels live one after the other. A failure names the
seed of its world; ``REBUNO_SEED=<that> REBUNO_KILLS=1`` runs that world alone.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from rebuno_sync.kernel import schema
from tests.unit.kernel.kills import records
from tests.unit.kernel.kills.driver import Driver, Gone, Nursery
from tests.unit.kernel.kills.lives import RETAIN_SECONDS

KILLS = int(os.environ.get("REBUNO_KILLS", "2000"))
SEED = int(os.environ.get("REBUNO_SEED", "1"))
#: Kills of a world, while it works and while it deletes.
WORKING, DELETING = 34, 6
#: Points that a life may have at most. A start has about fifty, a call about twenty.
LONGEST_LIFE = 900
LONGEST_SECONDS = 0.04


@pytest.fixture
def nursery(tmp_path: Path) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path)
    yield nursery
    nursery.close()


class World:
    """One file, the kernels that live on it, and the driver that outlives them."""

    def __init__(self, nursery: Nursery, path: Path, seed: int) -> None:
        self.nursery = nursery
        self.path = path
        self.chance = random.Random(seed)
        self.driver = Driver(seed)
        self.kills = 0
        self.sabotaged = False

    def live(self, *, kinds: tuple[str, ...] = ("points", "seconds")) -> None:
        """Drive a kernel until it is killed."""
        if self.chance.choices(kinds, [4, 1][: len(kinds)])[0] == "points":
            # Many short lives: what happens around a start is worth the most.
            longest = self.chance.choice([70, 250, LONGEST_LIFE])
            end = {"points": self.chance.randrange(1, longest)}
        else:
            end = {"seconds": self.chance.uniform(0.0001, LONGEST_SECONDS), "threads": True}
        life = self.nursery.begin(
            path=str(self.path),
            now=self.driver.now,
            seed=self.chance.randrange(1 << 30),
            checkpoint_pages=self.chance.choice([1, 3, 1000]),
            sabotaged=self.sabotaged,
            **end,
        )
        self.driver.trace.append(f"a life of {end}")
        try:
            self.driver.connect(life)
            while True:
                self.driver.act()
        except Gone:
            assert self.nursery.ended() == -signal.SIGKILL
            self.kills += 1
        finally:
            life.close()

    def work(self, **kinds: tuple[str, ...]) -> None:
        """Drive kernels until as many were killed as are to be killed while they work."""
        while self.kills < WORKING:
            self.live(**kinds)

    def settle(self) -> None:
        """Let a last kernel bring everything to its end."""
        life = self.nursery.begin(path=str(self.path), now=self.driver.now, seed=0)
        self.driver.trace.append("the last life")
        try:
            self.driver.connect(life)
            self.driver.finish()
        finally:
            life.close()
        assert self.nursery.ended() == 0

    def delete(self, kills: int) -> None:
        """Let kernels be killed that delete what has become old, and a last one do it."""
        self.driver.now += RETAIN_SECONDS + 1
        for remaining in range(kills, -1, -1):
            points = self.chance.randrange(1, 500) if remaining else 0
            life = self.nursery.begin(
                path=str(self.path), now=self.driver.now, seed=0, points=points
            )
            try:
                self.driver.connect(life)
                self.driver.pass_time(0.0)
            except Gone:
                assert remaining
            finally:
                life.close()
            self.kills += self.nursery.ended() == -signal.SIGKILL


def migrated_up_to(path: Path, count: int) -> None:
    """Make a database as an older kernel left it."""
    with sqlite3.connect(path, isolation_level=None) as database:
        database.execute("PRAGMA journal_mode = WAL")
        known = schema.MIGRATIONS
        try:
            schema.MIGRATIONS = known[:count]  # type: ignore[misc]
            schema.migrate(database)
        finally:
            schema.MIGRATIONS = known  # type: ignore[misc]
    database.close()


def test_killed_at_any_point(nursery: Nursery, tmp_path: Path) -> None:
    kills = worlds = 0
    ended: list[str] = []
    while kills < KILLS:
        seed = SEED + worlds
        path = tmp_path / f"{seed}.sqlite3"
        world = World(nursery, path, seed)
        try:
            older = seed % (len(schema.MIGRATIONS) + 1)
            if older:
                migrated_up_to(path, older)
            world.work()
            world.settle()
            records.check(world.driver, path)
            world.delete(DELETING)
            records.check_nothing_is_left(path)
        except BaseException:
            print(*world.driver.trace[-60:], sep="\n")
            print(f"once more: REBUNO_SEED={seed} REBUNO_KILLS=1; the file: {path}")
            raise
        kills += world.kills
        worlds += 1
        ended += world.driver.ended.values()
        path.unlink()
    print(f"{kills} kills in {worlds} worlds; {len(ended)} executions came to an end")
    assert kills >= KILLS
    assert worlds < 10 or set(ended) == {"completed", "failed", "cancelled"}


def test_a_world_is_the_same_each_time(nursery: Nursery, tmp_path: Path) -> None:
    traces = []
    for name in ("one", "two"):
        world = World(nursery, tmp_path / name, SEED)
        world.work(kinds=("points",))
        traces.append(world.driver.trace)
    assert traces[0] == traces[1]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_kernel_that_answers_before_it_commits_is_found_out(
    nursery: Nursery, tmp_path: Path, seed: int
) -> None:
    world = World(nursery, tmp_path / "k.sqlite3", seed)
    world.sabotaged = True
    with pytest.raises(AssertionError, match=r"lost|ran twice|another|two keys"):
        world.work(kinds=("points",))
    assert world.kills
