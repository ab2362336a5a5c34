"""The same delivery, and two attempts of one dispatch, in two workers of a real gunicorn."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import requests

from rebuno_sync.wire import SIGNATURE_HEADER
from tests.faults.fleet import OUTPUT, fleet_of
from tests.faults.sides import AGENT, SECRET
from tests.scripted import wait_until
from tests.scripted.http import Answer, Recorded, Server

EFFECTS = ("reserve", "pay", "ship")
COPIES = 40


class Repeater:
    """A proxy before the webhook that sends each delivery many times at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers: list[str] = []
        self.seen: Recorded | None = None

    def respond(self, request: Recorded) -> Answer:
        self.seen = request
        begin = threading.Barrier(4)
        threads = [
            threading.Thread(target=self._send, args=(request, begin, COPIES // 4))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return Answer(202)

    def _send(self, request: Recorded, begin: threading.Barrier, count: int) -> None:
        begin.wait()
        for _ in range(count):
            # Each on a connection of its own, so that any worker may take it.
            self.answers.append(self.send(request))

    def send(self, request: Recorded) -> str:
        """Send a delivery once more, and return the answer."""
        headers = {SIGNATURE_HEADER: request.headers[SIGNATURE_HEADER]}
        answer = requests.post(self._url, request.body, headers=headers, timeout=30)
        assert answer.status_code == 202, answer.text
        return answer.text


def test_a_delivery_that_reaches_both_workers_runs_in_one(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        webhook = f"http://127.0.0.1:{fleet.listener.getsockname()[1]}/webhook"
        repeater = Repeater(webhook)
        with Server(repeater.respond) as proxy:
            fleet.client.register_agent(AGENT, proxy.url, SECRET)
            created, worker = fleet.start("between")
            wait_until(lambda: len(repeater.answers) == COPIES)
            # All of them may have come to one; this one comes to the other.
            assert repeater.seen is not None
            os.kill(worker, signal.SIGSTOP)
            try:
                assert repeater.send(repeater.seen) == "held by another process"
            finally:
                os.kill(worker, signal.SIGCONT)
            (tmp_path / "go").touch()
            found = fleet.client.wait(created.id, timeout=60)
        assert (found.status, found.output) == ("completed", OUTPUT)
        assert repeater.answers.count("taken") == 1
        assert [fleet.count(w) for w in EFFECTS] == [1, 1, 1]
        steps = fleet.client.steps(created.id)
        assert [step.occurrence for step in steps] == [0, 0, 0]


def test_a_newer_attempt_in_another_worker_leaves_one_runner(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        created, worker = fleet.start("between")
        os.kill(worker, signal.SIGSTOP)
        try:
            found = fleet.finish(created)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert (found.status, found.output) == ("completed", OUTPUT)
        # The first one goes on where it stood, and finds that it is not its work any more.
        (tmp_path / "go").touch()
        stopped = ("LeaseSuperseded", "Terminated")
        rows = wait_until(lambda: [row for row in fleet.noted() if row[0] in stopped])
        assert [(attempt, pid) for _, attempt, pid in rows] == [(1, worker)]
        assert [fleet.count(w) for w in EFFECTS] == [1, 1, 1]
        assert fleet.client.get(created.id).output == OUTPUT
