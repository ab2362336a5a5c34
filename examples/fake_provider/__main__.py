"""Serve a script from a JSON file until interrupted; prints one line per request."""

from __future__ import annotations

import argparse
import signal
import threading

from .asked import Asked
from .replies import Reply
from .script import Script, load_script
from .server import FakeProvider


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.fake_provider", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0: any free port")
    parser.add_argument("--script", required=True, help="a JSON file, as load_script describes")
    parser.add_argument("--api-key", help="refuse any other key")
    given = parser.parse_args()

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    script = _told(load_script(given.script))
    with FakeProvider(script, port=given.port, api_key=given.api_key) as provider:
        print(f"OPENAI_BASE_URL={provider.openai_url}")
        print(f"ANTHROPIC_BASE_URL={provider.url}", flush=True)
        ended.wait()


def _told(script: Script) -> Script:
    def told(asked: Asked) -> Reply:
        reply = script(asked)
        wanted = ", ".join(call.name for call in reply.tool_calls)
        said = f"calls {wanted}" if wanted else reply.message or reply.text[:60]
        print(f"{asked.number} {asked.path} {asked.model}: {said}", flush=True)
        return reply

    return told


if __name__ == "__main__":
    main()
