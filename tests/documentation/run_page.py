"""Runs one page in this process: ``python -m tests.documentation.run_page PAGE``.

The reader's surroundings: a kernel at ``REBUNO_URL``, the agents' secret in the environment, a
provider of language models that answers from a script, an empty working directory. Names stay
from block to block. An agent that a block defines is served and registered, as a reader with a
second terminal would do. Lines of ``console`` blocks that begin with ``$`` run in a shell.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rebuno_sync import Agent, Client
from rebuno_sync.kernel import EmbeddedKernel
from tests.documentation.pages import ROOT, Block, blocks
from tests.scripted.serving import served

SECRET = "a-secret-for-the-pages"


def run(page: Path) -> None:
    with contextlib.ExitStack() as stack:
        kernel = stack.enter_context(EmbeddedKernel(lease_timeout=30))
        os.environ.update(REBUNO_URL=kernel.url, REBUNO_AGENT_SECRET=SECRET)
        provide_models(stack)
        os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        os.environ["PYTHONPATH"] = str(ROOT)
        os.chdir(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(Client(kernel.url))
        names: dict[str, Any] = {"__name__": "page"}
        known: set[int] = set()
        found = blocks(page)
        for number, block in enumerate(found):
            if not block.run:
                continue
            if block.language == "python":
                following = found[number + 1] if number + 1 < len(found) else None
                run_python(page, block, following, names)
                serve_agents(names, known, client, stack)
            elif block.language == "console":
                run_console(block)
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


def run_console(block: Block) -> None:
    commands = re.findall(r"^\$ ((?:.*\\\n)*.*)$", block.text, re.MULTILINE)
    assert commands, f"the console block at line {block.line} has no command"
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


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
