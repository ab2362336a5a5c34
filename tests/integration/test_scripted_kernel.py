"""The scripted generation 1 kernel answers as a real one was recorded to.

``tests/vectors/wire_generation1.jsonl`` is sent to it line by line; equal names in the recording
(``<id1>``, ``<step3>``) must stand for equal values.
"""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from rebuno_sync import signing
from tests.scripted import GENERATION_1, Answer, Recorded, ScriptedKernel, Verdict
from tests.scripted.http import Server
from tests.scripted.state import Execution

LINES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "vectors" / "wire_generation1.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
SCENES = list(dict.fromkeys(line["scene"] for line in LINES))
NAME = re.compile(r"<(?:id|step)\d+>")
UNUSED = "01a227b5-0000-7000-8000-000000000000"
#: Routes that the scripted kernel leaves out: a test gives it its policy as a function.
NOT_PLAYED = re.compile(r"/v0/policies/|[?&](limit=x|cursor=x|limit=2)$")

#: What it does not keep: time-outs of approvals, policy bundles, and where its agent is.
_LEFT_OUT = ("timeout_at", "PolicyBundle", "WebhookURL")


def policy(kind: str, target: str, args: Any) -> Verdict:
    """The bundle that the recording posts in its scene ``policy``."""
    if target == "d1":
        return Verdict("deny", "no-reason")
    if target == "d2":
        return Verdict("deny", "with-reason", "never on fridays")
    if target.startswith("ask"):
        return Verdict("require_approval", "ask", approvers=("ann",), message="look twice")
    if target == "lim":
        limited = policy.calls > 0  # type: ignore[attr-defined]
        policy.calls += 1  # type: ignore[attr-defined]
        return Verdict("limit" if limited else "allow", "lim")
    if target.startswith("t") or kind == "local":
        return Verdict("allow", "ok" if target.startswith("t") else "local")
    return Verdict("deny", "default", "no explicit allow rule matched")


class Player:
    """Sends recorded requests to a scripted kernel and compares the answers."""

    def __init__(self, kernel: ScriptedKernel) -> None:
        self.kernel = kernel
        self.names: dict[str, str] = {}

    def real(self, text: str) -> str:
        """Put what the names stand for into a recorded text; a new name stands for nothing."""
        return NAME.sub(lambda match: self.names.get(match[0], UNUSED), text)

    def play(self, line: dict[str, Any]) -> None:
        request = line["request"]
        url = urlsplit(self.kernel.url)
        body = self.real(request["body"])
        if cut := re.fullmatch(r'(.*"data":")x+… \((\d+) characters of data\)', body):
            body = f'{cut[1]}{"x" * int(cut[2])}"}}'
        raw = body.encode("utf-8")
        headers = {}
        if request["auth"] == "agent":
            good = line["answer"]["status"] != 401
            headers["Rebuno-Agent-Id"] = "a1"
            headers["Rebuno-Signature"] = signing.sign_body(self.kernel.secret if good else "", raw)
        if request["dispatch_id"]:
            headers["Rebuno-Dispatch-Id"] = self.real(request["dispatch_id"])
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=30)
        try:
            connection.request(request["method"], self.real(request["path"]), raw, headers)
            response = connection.getresponse()
            kind, content = response.getheader("Content-Type", ""), response.read()
        finally:
            connection.close()
        expected = line["answer"]
        told = (response.status, kind)
        assert told == (expected["status"], expected["content_type"]), (request, content)
        got: Any = None
        if content:
            got = json.loads(content) if kind.startswith("application/json") else content.decode()
        self.match(expected["body"], got, request["path"])

    def match(self, expected: Any, got: Any, where: str) -> None:
        """Compare, learning what a name stands for where it is new."""
        if isinstance(expected, str):
            if expected == "<time>":
                assert got, where
            elif NAME.fullmatch(expected):
                assert self.names.setdefault(expected, got) == got, (where, expected)
            elif where.endswith(".message"):
                # The words are the real kernel's own; what they begin with is for everyone.
                assert isinstance(got, str), where
            else:
                assert got == expected, where
        elif isinstance(expected, dict):
            assert isinstance(got, dict), where
            known = {k: v for k, v in expected.items() if k not in _LEFT_OUT}
            have = {k: v for k, v in got.items() if k not in _LEFT_OUT}
            assert known.keys() == have.keys(), (where, expected, got)
            for key, value in known.items():
                self.match(value, got[key], f"{where}.{key}")
        elif isinstance(expected, list):
            assert isinstance(got, list), where
            assert len(got) == len(expected), (where, [g.get("type") for g in got])
            for i, (one, other) in enumerate(zip(_ordered(expected), _ordered(got), strict=True)):
                self.match(one, other, f"{where}[{i}]")
        else:
            assert got == expected, where


def _ordered(rows: list[Any]) -> list[Any]:
    # Steps come in the order of their ids, which are not the recorded ones.
    if rows and "occurrence" in rows[0]:
        return sorted(rows, key=lambda row: (row["kind"], row["target"], row["occurrence"]))
    return rows


def latest(kernel: ScriptedKernel) -> Execution:
    return list(kernel.executions.values())[-1]


@pytest.mark.parametrize("scene", SCENES)
def test_it_answers_as_recorded(scene: str) -> None:
    policy.calls = 0  # type: ignore[attr-defined]
    lines = [line for line in LINES if line["scene"] == scene]
    first_answers = [500] if scene == "rejected webhook" else []

    def webhook(request: Recorded) -> Answer:
        return Answer(first_answers.pop() if first_answers else 202)

    with ScriptedKernel(GENERATION_1) as kernel, Server(webhook) as agent:
        kernel.agent_url = f"{agent.url}/webhook"
        if scene == "bad requests":
            # In the scene before it, an agent without an id had been registered.
            kernel.agents[""] = {}
        if scene not in ("plain run", "bad requests"):
            kernel.policy = policy
        player = Player(kernel)
        for at, line in enumerate(lines):
            if "webhook" in line:
                deliver(kernel, player, line, lines[at - 1])
            elif "request" in line and not NOT_PLAYED.search(line["request"]["path"]):
                player.play(line)


def deliver(
    kernel: ScriptedKernel, player: Player, line: dict[str, Any], before: dict[str, Any]
) -> None:
    """The kernel delivers by itself: here at the place where the recording shows that it did."""
    body = json.loads(line["webhook"]["body"])
    known = kernel.executions.get(player.names.get(body["execution_id"], ""))
    run = known or latest(kernel)
    pending = [a for a in run.approvals.values() if a.status == "pending"]
    if pending:
        # The recording waited for the time-out of this approval.
        kernel.expire(pending[0])
    kernel.deliver(run)
    player.match(body, json.loads(kernel.webhook_body(run)), "webhook")
