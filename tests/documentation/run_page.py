"""Runs one page in this process: ``python -m tests.documentation.run_page PAGE``.

The reader's surroundings: a kernel at ``REBUNO_URL``, the agents' secret in the environment, a
provider of language models that answers from a script, an empty working directory. Names stay
from block to block. An agent that a block defines is served and registered, as a reader with a
second terminal would do. Lines of ``console`` blocks that begin with ``$`` run in a shell, those of
one that serves in a terminal of its own, which knows nothing of these surroundings. The addresses
that such blocks serve at are others here, free ones, in every block that runs in a shell.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rebuno_sync import Agent, Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.documentation.pages import ROOT, Block, blocks
from tests.scripted.serving import served, wait_until

SECRET = "a-secret-for-the-pages"


def run(page: Path) -> None:
    with contextlib.ExitStack() as stack:
        kernel = stack.enter_context(EmbeddedKernel(lease_timeout=30))
        os.environ.update(REBUNO_URL=kernel.url, REBUNO_AGENT_SECRET=SECRET)
        provide_models(stack)
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        os.environ["PYTHONPATH"] = str(ROOT)
        os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["HOME"] = os.getcwd()
        client = stack.enter_context(Client(kernel.url))
        names: dict[str, Any] = {"__name__": "page"}
        known: set[int] = set()
        found = with_free_ports(blocks(page))
        for number, block in enumerate(found):
            if not block.run:
                continue
            following = found[number + 1] if number + 1 < len(found) else None
            if block.language == "python":
                run_python(page, block, following, names)
                serve_agents(names, known, client, stack)
            elif block.serves:
                stack.enter_context(serving(block))
            elif block.language == "console":
                run_console(block, following)
            elif block.language in ("yaml", "toml", "ini") and (name := file_name(block)):
                Path(name).write_text(block.text, encoding="utf-8")


def run_python(page: Path, block: Block, following: Block | None, names: dict[str, Any]) -> None:
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    if name := file_name(block):
        Path(name).write_text(block.text, encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    if following is not None and following.language == "text" and following.run:
        assert printed.getvalue() == following.text, (
            f"line {block.line} printed {printed.getvalue()!r}, the page says {following.text!r}"
        )


def serve_agents(
    names: dict[str, Any], known: set[int], client: Client, stack: contextlib.ExitStack
) -> None:
    for value in list(names.values()):
        if isinstance(value, Agent) and id(value) not in known and value._binder is not None:
            known.add(id(value))
            url = stack.enter_context(served(value.app))
            client.register_agent(value.agent_id, url + value.webhook_path, SECRET)
            stack.callback(value.close, 5)


def run_console(block: Block, following: Block | None) -> None:
    exports: list[str] = []
    printed = ""
    for command in commands(block):
        if re.fullmatch(r"export [^;&|]*", command):
            exports.append(command)
            continue
        script = "\n".join([*exports, command])
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        printed = done.stdout
    if following is not None and following.language == "text" and following.run:
        assert without_chance(printed) == without_chance(following.text), (
            f"line {block.line} printed {printed!r}, the page says {following.text!r}"
        )


def commands(block: Block) -> list[str]:
    """Return the commands of a console block."""
    found: list[str] = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.text, re.MULTILINE)
    assert found, f"the console block at line {block.line} has no command"
    return found


@contextlib.contextmanager
def serving(block: Block) -> Iterator[None]:
    """Run a block whose last command serves, until the page has ended."""
    host, _, port = block.serves.partition(":")
    *before, command = commands(block)
    script = "\n".join(["set -e", *before, f"exec {command}"])
    own = {k: v for k, v in os.environ.items() if k not in ("REBUNO_URL", "REBUNO_AGENT_SECRET")}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(
            ["bash", "-c", script], env=own, stdout=printed, stderr=subprocess.STDOUT
        )

        def listens() -> bool:
            assert process.poll() is None, f"{command} ended\n{said()}"
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((host, int(port))).close()
                return True
            return False

        def said() -> str:
            printed.seek(0)
            return printed.read()

        try:
            wait_until(listens, 60.0, f"{command} does not listen at {block.serves}")
            yield
            assert process.poll() is None, f"{command} ended\n{said()}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
        assert process.returncode == 0, f"{command} did not stop in order\n{said()}"


def with_free_ports(found: list[Block]) -> list[Block]:
    """Return the blocks, the addresses that they serve at being free ones."""
    with contextlib.ExitStack() as stack:
        free: dict[str, str] = {}
        for block in found:
            if block.serves and block.serves not in free:
                taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
                free[block.serves] = f"127.0.0.1:{taken.getsockname()[1]}"

    def changed(block: Block) -> Block:
        if block.language != "console":
            return block
        text = block.text
        for address, other in free.items():
            text = text.replace(address, other)
        return dataclasses.replace(block, text=text, serves=free.get(block.serves, ""))

    return [changed(block) for block in found]


def without_chance(printed: str) -> str:
    """Return what a command printed with its ids, times of day and durations made equal."""
    for pattern, equal in (
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
        (r"\d\d:\d\d:\d\d\.\d{3}", "TIME"),
        (r"\(\d+(\.\d+)? m?s\)", "(DURATION)"),
    ):
        printed = re.sub(pattern, equal, printed)
    return printed


def file_name(block: Block) -> str | None:
    """Return the name that a block's first line gives the file it stands for: ``# app.py``."""
    match = re.match(r"# ([\w./-]+\.\w+)\n", block.text)
    return match[1] if match else None


def provide_models(stack: contextlib.ExitStack) -> None:
    from examples.fake_provider import Asked, FakeProvider, Reply, calls, error, text

    def reply(asked: Asked) -> Reply:
        if asked.results:
            return text("It ships on Monday.")
        if "find_order" in asked.tools:
            return calls("find_order", order_id="A-17")
        return error(503) if asked.model == "overloaded-model" else text("It is snowing.")

    provider = stack.enter_context(FakeProvider(reply))
    os.environ.update(
        OPENAI_BASE_URL=provider.url + "/v1",
        OPENAI_API_KEY="none",
        ANTHROPIC_BASE_URL=provider.url,
        ANTHROPIC_API_KEY="none",
    )


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve())
