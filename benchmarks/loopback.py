"""The fastest kernel there is: it answers every call at once and keeps nothing.

    python -m benchmarks.loopback

The first line it prints is its URL; after that, one line of JSON for each execution that an
agent ends. What an execution is told is written in its id (:func:`execution_id`), so that the
server needs no state and costs each SDK under measurement the same.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading

STEP_ID = "a" * 64
_RESULT = {"hits": [{"id": i, "title": f"The result number {i}", "score": i / 8} for i in range(5)]}


def execution_id(steps: int, *, replay: bool) -> str:
    """An execution whose handler takes so many steps, each replayed or each run."""
    return f"0192f3a4-0000-7000-8000-{int(replay)}{steps:011d}"


def _answer(status: str, value: object = None) -> bytes:
    body = b"" if value is None else json.dumps(value).encode("utf-8")
    kind = "Content-Type: application/json; charset=utf-8\r\n" if body else ""
    length = "" if status.startswith("204") else f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status}\r\n{kind}{length}\r\n".encode("latin-1") + body


_NOTHING = _answer("204 No Content")
_PROCEED = _answer("200 OK", {"decision": "proceed", "step_id": STEP_ID})
_REPLAY = _answer("200 OK", {"decision": "replay", "step_id": STEP_ID, "result": _RESULT})
_RECORDED = _answer("200 OK", {"decision": "recorded"})
_UNKNOWN = _answer("404 Not Found", {"code": "not_found", "message": "not found"})


def _respond(method: bytes, path: bytes, body: bytes) -> bytes:
    parts = path.split(b"/")
    if method == b"POST" and len(parts) == 5 and parts[4] == b"steps":
        return _REPLAY if parts[3][24:25] == b"1" else _PROCEED
    if method == b"POST" and len(parts) == 7:
        return _RECORDED
    if method == b"GET" and len(parts) == 4:
        execution = {
            "id": parts[3].decode("ascii"),
            "agent_id": "bench",
            "input": {"steps": int(parts[3][25:])},
            "status": "running",
        }
        return _answer("200 OK", execution)
    if method == b"POST" and len(parts) == 5 and parts[4] in (b"complete", b"fail"):
        print(body.decode("utf-8"), flush=True)
        return _NOTHING
    if method == b"PUT" or parts[-1] == b"heartbeat":
        return _NOTHING
    return _UNKNOWN


def _converse(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = b""
    with client, contextlib.suppress(OSError):
        while chunk := client.recv(65536):
            buffer += chunk
            while (end := buffer.find(b"\r\n\r\n")) >= 0:
                head = buffer[:end].lower()
                at = head.find(b"\r\ncontent-length:")
                length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                if len(buffer) < end + 4 + length:
                    break
                method, path, _ = buffer[:end].split(b"\r\n", 1)[0].split(b" ")
                body = buffer[end + 4 : end + 4 + length]
                buffer = buffer[end + 4 + length :]
                client.sendall(_respond(method, path, body))


def main() -> None:
    """Serve until standard input ends."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_converse, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
