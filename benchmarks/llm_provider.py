"""The fastest provider there is: it streams the same answer to every request.

    python -m benchmarks.llm_provider

The line it prints is its URL; it serves until standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading

_WORDS = ("The", " weather", " in", " Tromsø", " is", " cold", ".")


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "bench",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(chunk).encode("utf-8") + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_FIRST = _HEAD + _chunk(_event({"role": "assistant", "content": _WORDS[0]}))
_REST = (
    b"".join(_chunk(_event({"content": word})) for word in _WORDS[1:])
    + _chunk(_event({}, "stop"))
    + _chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


def _converse(client: socket.socket) -> None:
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = b""
    with client, contextlib.suppress(OSError):
        while received := client.recv(65536):
            buffer += received
            while (end := buffer.find(b"\r\n\r\n")) >= 0:
                head = buffer[:end].lower()
                at = head.find(b"\r\ncontent-length:")
                length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
                if len(buffer) < end + 4 + length:
                    break
                buffer = buffer[end + 4 + length :]
                client.sendall(_FIRST)
                client.sendall(_REST)


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
