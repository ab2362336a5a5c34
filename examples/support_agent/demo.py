"""Watch the support agent be killed, wait for a person, and answer all the same.

``python -m examples.support_agent.demo`` starts a provider and a kernel in this process and the
agent under gunicorn, shows the execution with ``rebuno-sync exec watch``, kills the worker while
the model is being asked, and approves the refund. Exits 1 if the answer is not the expected one
or money was paid twice. The name of another loop, such as ``langgraph_agent``, may be given.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from rebuno_sync import Client
from rebuno_sync.kernel import EmbeddedKernel

from ..fake_provider import Asked, FakeProvider, Reply, load_script
from .desk import refunds

HERE = Path(__file__).parent
QUESTION = "My kettle is broken, order A-17. I want my money back."
ANSWER = "Your kettle was delivered 12 days ago, so you get 49.00 EUR back."
#: Short, so that the second attempt comes soon after the kill; in seconds.
LEASE = 3.0
LIMIT = 60.0


def main(loop: str = "openai_loop") -> int:
    with TemporaryDirectory(prefix="support-agent-") as folder, contextlib.ExitStack() as stack:
        ledger = Path(folder) / "refunds.jsonl"
        gunicorn: list[subprocess.Popen[bytes]] = []
        killing = _Killing(gunicorn)
        provider = stack.enter_context(FakeProvider(killing))
        kernel = stack.enter_context(EmbeddedKernel(lease_timeout=LEASE))
        client = stack.enter_context(Client(kernel.url))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        secret = secrets.token_hex(16)
        webhook = f"http://127.0.0.1:{listener.getsockname()[1]}/webhook"
        client.register_agent("support", webhook, secret)
        client.set_policy("support", (HERE / "policy.yaml").read_text(encoding="utf-8"))
        environment = {
            **os.environ,
            "REBUNO_URL": kernel.url,
            "REBUNO_AGENT_SECRET": secret,
            "SUPPORT_LEDGER": str(ledger),
            "OPENAI_BASE_URL": provider.openai_url,
            "OPENAI_API_KEY": "none",
            "ANTHROPIC_BASE_URL": provider.url,
            "ANTHROPIC_API_KEY": "none",
        }
        command = [
            *(sys.executable, "-m", "gunicorn", "--workers", "1", "--threads", "4", "--preload"),
            *("--bind", f"fd://{listener.fileno()}", "--log-level", "critical"),
            f"examples.support_agent.{loop}:create_app()",
        ]
        gunicorn.append(subprocess.Popen(command, env=environment, pass_fds=[listener.fileno()]))
        stack.callback(_end, gunicorn[0])
        _until_it_answers(*listener.getsockname())

        execution = client.create("support", {"question": QUESTION})
        threading.Thread(target=_approve, args=(kernel.url, execution.id), daemon=True).start()
        subprocess.run(
            [sys.executable, "-m", "rebuno_sync.cli", "exec", "watch", execution.id],
            env=environment,
            timeout=LIMIT,
            check=False,
        )
        output = client.get(execution.id).output
        times, paid = list(provider.times_asked.values()), refunds(ledger)
    print(f"\nthe answer: {output}")
    print(f"the provider was asked {len(times)} different things, {sum(times)} times in all")
    print(f"one of them twice, for the worker was killed before it had the answer: {times}")
    print(f"refunds paid: {paid}")
    return 0 if (output, sum(times), len(paid)) == (ANSWER, 5, 1) else 1


class _Killing:
    """The script, but at the second request the worker that asked is killed."""

    def __init__(self, gunicorn: list[subprocess.Popen[bytes]]) -> None:
        self._gunicorn = gunicorn
        self._script = load_script(HERE / "script.json")

    def __call__(self, asked: Asked) -> Reply:
        if asked.number == 2:
            master = self._gunicorn[0].pid
            children = Path(f"/proc/{master}/task/{master}/children").read_text(encoding="ascii")
            worker = int(children.split()[0])
            os.kill(worker, signal.SIGKILL)
            print(f"--- SIGKILL worker {worker}, while the model is being asked", flush=True)
        return self._script(asked)


def _approve(url: str, execution_id: str) -> None:
    with Client(url) as client:
        if client.wait(execution_id, LIMIT, until_blocked=True).status == "blocked":
            (approval,) = client.approvals()
            print(f"--- a person approves: {approval.message}", flush=True)
            client.grant(approval.id, decided_by="ann")


def _until_it_answers(host: str, port: int) -> None:
    """Return when the worker takes requests; until then they wait in the socket's queue."""
    connection = http.client.HTTPConnection(host, port, timeout=LIMIT)
    connection.request("GET", "/webhook")
    connection.getresponse().read()
    connection.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(30)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
