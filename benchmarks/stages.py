"""Where the time of one step goes: the parts of the path that our SDK takes, each by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from benchmarks.loopback import STEP_ID, execution_id
from benchmarks.processes import SECRET
from rebuno_sync import signing, wire
from rebuno_sync.transport import Transport

_ARGS = {"query": "durable execution in plain Python", "limit": 7}
_RESULT = {"hits": [{"id": i, "title": f"The result number {i}", "score": i / 8} for i in range(5)]}


def stages(kernel_url: str, calls: int, rounds: int) -> dict[str, float]:
    """Return the seconds that each part of one step takes: a submission and a completion."""
    transport = Transport(kernel_url, timeout=30)
    steps = wire.execution_path(execution_id(0, replay=False), "steps")
    submission = b'{"kind":"tool_call","target":"search","args":%s}' % wire.encode(_ARGS, "args")
    result = wire.encode(_RESULT, "result")
    completion = b'{"result":%s}' % result
    headers: Mapping[str, str] = {"Content-Type": "application/json", "Rebuno-Agent-Id": "bench"}

    def encode() -> None:
        wire.encode(_ARGS, "args")
        wire.encode(_RESULT, "result")

    def sign() -> None:
        for body in (submission, completion):
            signing.sign_request(
                SECRET, "POST", steps, "1700000000", body, dispatch_id=STEP_ID, dispatch_attempt="1"
            )

    def send() -> None:
        transport.request("POST", steps, submission, lambda target: headers)
        transport.request("POST", f"{steps}/{STEP_ID}/complete", completion, lambda target: headers)

    answers = [
        transport.request("POST", path, body, lambda target: headers)
        for path, body in ((steps, submission), (f"{steps}/{STEP_ID}/complete", completion))
    ]

    def decode() -> None:
        for answer in answers:
            wire.Decision.from_json(answer.json())
        wire.decode(result)

    return {
        name: _seconds(part, calls, rounds)
        for name, part in (
            ("encode arguments and result", encode),
            ("sign both requests", sign),
            ("two round trips through the transport", send),
            ("decode both answers and the result", decode),
        )
    }


def _seconds(part: Callable[[], None], calls: int, rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(calls):
            part()
        taken.append((time.perf_counter() - begin) / calls)
    return statistics.median(taken)
