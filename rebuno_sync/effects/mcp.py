"""Tools of MCP servers as recorded tools.

The MCP libraries speak asyncio. :class:`McpConnection` is the bridge for plain threads: it opens
a client on the process's background loop (:mod:`.background`), keeps it, and waits for answers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import ToolError
from .mcp_connection import McpConnection, field
from .options import IdempotencyName, OnDenied, Reconcile
from .tool import wrap_tool

__all__ = ["McpConnection", "mcp_result", "wrap_mcp_tool", "wrap_mcp_tools"]

#: What calls a tool that is only described: ``call(name, arguments)``.
Call = Callable[[str, dict[str, Any]], Any]

#: A call of the library is given up so long after its step was recorded as timed out, in seconds.
_GRACE = 1.0


def wrap_mcp_tools(
    server: Any,
    tools: Iterable[Any] | None = None,
    *,
    prefix: str = "",
    only: Iterable[str] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> list[Callable[..., Any]]:
    """Make recorded functions of an MCP server's tools.

    Args:
        server: as for :func:`wrap_mcp_tool`; all the functions share one connection.
        tools: the tools as the server described them; by default the server is asked now. In a
            handler record the answer, so that every attempt offers the model the same tools:
            ``step("tools", server.list_tools)``.
        prefix: put before the names.
        only: the names, without prefix, of the tools that are wanted.
        overrides: further keywords of :func:`wrap_mcp_tool` for single tools, by name.
        options: keywords of :func:`wrap_mcp_tool` for all of them.

    Raises:
        ValueError: ``only`` or ``overrides`` names a tool that the server does not have.
        ConnectionError: the server cannot be reached.
        TypeError, ValueError: as :func:`wrap_mcp_tool`.
    """
    if not _is_call(server):
        server = McpConnection.of(server)
    if tools is None:
        if _is_call(server):
            raise TypeError("a function cannot list the tools that it calls; pass tools=…")
        tools = server.list_tools()
    described = {str(field(tool, "name")): tool for tool in tools}
    wanted = list(described) if only is None else list(only)
    for name in (*wanted, *(overrides or ())):
        if name not in described:
            raise ValueError(f"the server has no tool {name!r}; it has {sorted(described)}")
    return [
        wrap_mcp_tool(
            server,
            described[name],
            **{"prefix": prefix, **options, **dict((overrides or {}).get(name, {}))},
        )
        for name in wanted
    ]


def wrap_mcp_tool(
    server: Any,
    tool: Any,
    *,
    prefix: str = "",
    name: str | None = None,
    description: str | None = None,
    idempotency: IdempotencyName | None = None,
    retries: int = 0,
    timeout: float | None = None,
    on_denied: OnDenied = "raise",
    reconcile: Reconcile | None = None,
    resources: Iterable[str] | None = None,
    transform_args: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    to_result: Callable[[Any], Any] | None = None,
) -> Callable[..., Any]:
    """Make a recorded function of one tool of an MCP server (see :func:`rebuno_sync.wrap_tool`).

    Args:
        server: an :class:`McpConnection`, or what one is made of; or a plain function
            ``call(name, arguments)`` that performs the call in its own way.
        tool: the tool as the server described it: the MCP library's object, or a mapping with
            ``name``, ``description``, ``inputSchema``, ``outputSchema`` and ``annotations``.
        prefix: put before the name; the server is called by the name that it gave.
        name: instead of the server's name.
        description: instead of the server's.
        idempotency: by default what the server's annotations say. Read-only and idempotent tools
            are ``safe_to_retry``; a tool that says it is neither is ``at_most_once``; a tool
            that says nothing is ``safe_to_retry``, as any other.
        retries, on_denied, reconcile, resources, transform_args: as for ``wrap_tool``.
        timeout: as for ``wrap_tool``; the call is also taken back from the server then.
        to_result: turns the library's result into the value that is recorded, by default
            :func:`mcp_result`.

    Raises:
        TypeError: ``server`` is none of these, or ``tool`` describes no tool.
        ValueError: a keyword makes no sense.

    A call raises what calls of other tools raise; a result that says it is an error is a
    ``ToolError`` with its text.
    """
    their_name, schema = field(tool, "name"), field(tool, "input_schema", "inputSchema")
    if not isinstance(their_name, str) or not isinstance(schema, (Mapping, type(None))):
        raise TypeError(f"an MCP tool has a name and an inputSchema; this has not: {tool!r}")
    if idempotency is None:
        idempotency = _hinted(field(tool, "annotations"))
    call = server if _is_call(server) else None
    connection = None if call else McpConnection.of(server)
    convert = to_result or functools.partial(
        mcp_result, output_schema=field(tool, "output_schema", "outputSchema")
    )

    def invoke(arguments: dict[str, Any]) -> Any:
        if connection is None:
            assert call is not None
            return call(their_name, arguments)
        return connection.call_tool(
            their_name,
            arguments,
            timeout=None if timeout is None else timeout + _GRACE,
            repeatable=idempotency == "safe_to_retry",
        )

    return wrap_tool(
        prefix + (name or their_name),
        invoke,
        description=description or field(tool, "description") or "",
        args_schema=schema,
        to_result=convert,
        transform_args=transform_args,
        idempotency=idempotency,
        retries=retries,
        timeout=timeout,
        on_denied=on_denied,
        reconcile=reconcile,
        resources=resources,
    )


def mcp_result(result: Any, output_schema: Mapping[str, Any] | None = None) -> Any:
    """Return the value that stands for a result of an MCP tool.

    That is its structured content if it has one; else its text, if there is nothing but text;
    else its content blocks as JSON. ``{"result": x}``, in which servers wrap what is no object,
    becomes ``x`` when the output schema has no other property. What is no MCP result is returned
    as it is.

    Args:
        result: the library's result, or the same as a mapping.
        output_schema: the output schema of the tool, if it has one.

    Raises:
        ToolError: the result says that it is an error.
    """
    content = field(result, "content")
    if not isinstance(content, (list, tuple)):
        return result
    blocks = [_json(block) for block in content]
    texts = [block["text"] for block in blocks if block.get("type") == "text"]
    if field(result, "is_error", "isError"):
        raise ToolError("\n".join(texts) or json.dumps(blocks) if blocks else "the tool failed")
    structured = field(result, "structured_content", "structuredContent")
    if structured is not None:
        wrapped = set((output_schema or {}).get("properties", ())) == {"result"}
        if wrapped and isinstance(structured, Mapping) and set(structured) == {"result"}:
            return structured["result"]
        return structured
    return "\n".join(texts) if len(texts) == len(blocks) else blocks


def _json(block: Any) -> dict[str, Any]:
    if isinstance(block, Mapping):
        return dict(block)
    dumped: dict[str, Any] = block.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped


def _hinted(annotations: Any) -> IdempotencyName:
    read_only = field(annotations, "read_only_hint", "readOnlyHint")
    idempotent = field(annotations, "idempotent_hint", "idempotentHint")
    destructive = field(annotations, "destructive_hint", "destructiveHint")
    said = (read_only, idempotent, destructive)
    if read_only or idempotent or said == (None, None, None):
        return "safe_to_retry"
    return "at_most_once"


def _is_call(server: Any) -> bool:
    return callable(server) and not hasattr(server, "call_tool")
