"""The processes of a run: the loop-back kernel and the agents, and how to drive them."""

from __future__ import annotations

import collections
import contextlib
import http.client
import json
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import IO, Any

from benchmarks.loopback import STEP_ID, execution_id
from rebuno_sync import signing

SECRET = "loop-back"
_HERE = Path(__file__).resolve().parent
_START = 60.0


class Kernel:
    """The loop-back kernel in a process of its own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.loopback"],
            cwd=_HERE.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self._ended: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True).start()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            self._ended.put(line)

    def next_output(self) -> dict[str, Any]:
        """Wait for the next execution to end and return its output.

        Raises:
            RuntimeError: it failed, or none ended within a minute.
        """
        try:
            told = json.loads(self._ended.get(timeout=60))
        except queue.Empty:
            raise RuntimeError("the agent did not end the execution within 60 s") from None
        if "output" not in told:
            raise RuntimeError(f"the agent failed the execution: {told}")
        output: dict[str, Any] = told["output"]
        return output

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


class AgentProcess:
    """An agent in a process of its own, on a port of its own choice.

    Args:
        python: the interpreter that has the SDK.
        module: the file in this directory that runs the agent.
        kernel: the kernel it speaks to.
    """

    def __init__(self, python: str, module: str, kernel: Kernel) -> None:
        self.kernel = kernel
        # Ours is imported from the tree, the official one from its own environment.
        command = (
            [python, "-m", f"benchmarks.{module}", kernel.url]
            if python == sys.executable
            else [python, str(_HERE / f"{module}.py"), kernel.url]
        )
        self._process = subprocess.Popen(
            command,
            cwd=_HERE.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._lines: collections.deque[str] = collections.deque(maxlen=50)
        self._address = re.compile(r"http://127\.0\.0\.1:(\d+)")
        self._found: queue.Queue[int] = queue.Queue()
        assert self._process.stdout is not None
        reader = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        reader.start()
        self._port = self._listening()

    def _listen(self, lines: IO[str]) -> None:
        for line in lines:
            self._lines.append(line)
            if found := self._address.search(line):
                self._found.put(int(found[1]))

    def _listening(self) -> int:
        """Wait until the agent has printed where it listens, and does."""
        deadline = time.monotonic() + _START
        port = 0
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(queue.Empty):
                port = port or self._found.get(timeout=0.1)
            if port:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    return port
        raise RuntimeError(f"the agent did not start: {self._told()}")

    def _told(self) -> str:
        return "".join(self._lines)

    def dispatch(self, steps: int, *, replay: bool = False) -> tuple[float, dict[str, Any]]:
        """Deliver one webhook; return the seconds to its answer, and the execution's output."""
        body = json.dumps(
            {
                "execution_id": execution_id(steps, replay=replay),
                "dispatch_id": str(uuid.uuid4()),
                "dispatch_attempt": 1,
                "lease_timeout_seconds": 120,
            }
        ).encode("utf-8")
        headers = {
            "Content-Type": "application/json",
            "Rebuno-Signature": signing.sign_body(SECRET, body),
        }
        # A connection of its own each time: servers differ in how long they keep one.
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        begin = time.perf_counter()
        connection.request("POST", "/webhook", body, headers)
        response = connection.getresponse()
        response.read()
        seconds = time.perf_counter() - begin
        connection.close()
        if not 200 <= response.status < 300:
            raise RuntimeError(f"the webhook was answered {response.status}: {self._told()}")
        return seconds, self.kernel.next_output()

    def close(self) -> None:
        """End the process, kindly first."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RawSocket:
    """Two round trips, no more than bytes on one kept-alive socket."""

    def __init__(self, kernel: Kernel) -> None:
        host, port = kernel.url.removeprefix("http://").split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        steps = f"/v0/executions/{execution_id(0, replay=False)}/steps"
        args = {"query": "durable execution in plain Python", "limit": 1}
        submission = {
            "kind": "tool_call",
            "target": "search",
            "args": args,
            "idempotency": "safe_to_retry",
        }
        hits = [{"id": i, "title": f"The result number {i}", "score": i / 8} for i in range(5)]
        self._requests = (
            _raw_request(steps, submission),
            _raw_request(f"{steps}/{STEP_ID}/complete", {"result": {"hits": hits}}),
        )

    def seconds_per_pair(self, pairs: int) -> float:
        """Send so many pairs of requests and return the seconds that one pair took."""
        begin = time.perf_counter()
        for _ in range(pairs):
            for request in self._requests:
                self._socket.sendall(request)
                self._socket.recv(65536)
        return (time.perf_counter() - begin) / pairs

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def _raw_request(path: str, value: Any) -> bytes:
    body = json.dumps(value).encode("utf-8")
    head = f"POST {path} HTTP/1.1\r\nHost: kernel\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body


def start(python: str, code: str) -> tuple[float, int]:
    """Run ``python -c code``; return its wall seconds and its peak memory in KiB."""
    peak = "\nfrom benchmarks.memory import peak_kib\nprint(peak_kib())"
    begin = time.perf_counter()
    done = subprocess.run(
        [python, "-c", code + peak], cwd=_HERE.parent, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - begin, int(done.stdout)
