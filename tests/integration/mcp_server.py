"""A real MCP server for tests: ``python mcp_server.py mcp|fastmcp stdio|FD``.

``FD`` is a listening socket, which outlives the server, so that another can take its place.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from mcp.types import ToolAnnotations as Hints

_never = threading.Event()


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def greet(name: str) -> dict[str, Any]:
    """Greet somebody."""
    return {"greeting": f"Hei, {name}!", "result": len(name)}


def fail(why: str) -> str:
    """Fail."""
    raise ToolError(why)


def pid() -> int:
    """Tell which process this is."""
    return os.getpid()


def die() -> str:
    """End the server in the middle of the call."""
    os._exit(3)


def hang() -> str:
    """Never answer."""
    _never.wait()
    return "never"


if sys.argv[1] == "fastmcp":
    from fastmcp import FastMCP as Server
    from fastmcp.exceptions import ToolError
    from fastmcp.utilities.types import Image

    options: dict[str, Any] = {"show_banner": False}
else:
    from mcp.server.mcpserver import Image
    from mcp.server.mcpserver import MCPServer as Server
    from mcp.server.mcpserver.exceptions import ToolError

    options = {}

if options:
    server = Server("test-server")
else:
    from mcp.server.caching import CacheHint

    # Clients may answer for the list of tools themselves for a long time.
    server = Server("test-server", cache_hints={"tools/list": CacheHint(ttl_ms=3_600_000)})


def picture() -> list[Any]:
    """Draw something."""
    return ["Here it is:", Image(data=b"\x89PNG", format="png")]


server.tool(annotations=Hints(readOnlyHint=True))(add)
server.tool(annotations=Hints(idempotentHint=True))(greet)
server.tool(annotations=Hints(destructiveHint=True))(die)
server.tool(structured_output=False)(picture) if not options else server.tool(picture)
for plain in (fail, pid, hang):
    server.tool()(plain)

if sys.argv[2] == "stdio":
    server.run("stdio", **options)
else:
    import uvicorn

    app = server.http_app() if options else server.streamable_http_app()
    uvicorn.run(app, fd=int(sys.argv[2]), log_level="warning")
