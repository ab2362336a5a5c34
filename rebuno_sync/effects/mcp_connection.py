"""A connection to an MCP server that plain threads can use."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any

from ..errors import safe_text
from .background import BackgroundLoop, background_loop

log = logging.getLogger(__name__)

#: Opens a client: a function without arguments that returns an async context manager.
Opener = Callable[[], AbstractAsyncContextManager[Any]]

#: The codes for a connection that ended, and for a session that the server does not know (any
#: more): an HTTP server that was started anew answers so.
_SESSION_IS_GONE = frozenset({-32000, -32600})


class McpConnection:
    """A connection to one MCP server, for plain synchronous code.

    It opens with its first use, on one background event loop per process, and stays open; any
    number of threads may use it at once. A session that turns out broken is replaced with the
    next use, and a forked process opens one of its own.

    Args:
        source: what the server is reached by:

            - the URL of a streamable HTTP server, or a ``StdioServerParameters``;
            - an unopened ``mcp.Client`` or ``fastmcp.Client``: each session is a copy of it;
            - a function without arguments that returns an async context manager, which gives
              something with ``list_tools`` and ``call_tool``, such as an initialized
              ``ClientSession``;
            - an open session or client, with ``loop``.
        loop: the running event loop that an open ``source`` belongs to.
        open_timeout: how long opening a session may take, in seconds.

    Raises:
        TypeError: ``source`` is none of these.
    """

    def __init__(
        self,
        source: Any,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        open_timeout: float = 30.0,
    ) -> None:
        self._opener = _opener(source) if loop is None else None
        self._given = source, loop
        self._open_timeout = open_timeout
        self._session: _Session | None = None
        self._home: BackgroundLoop | None = None

    @classmethod
    def of(cls, server: Any) -> McpConnection:
        """Return ``server`` if it is a connection, else a connection made of it."""
        return server if isinstance(server, cls) else cls(server)

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools, all pages, as plain JSON: ``name``, ``inputSchema``, ….

        Raises:
            ConnectionError: the server cannot be reached.
        """
        found = self._request(_list_tools, repeatable=True)
        return [_as_json(tool) for tool in found]

    def call_tool(
        self,
        name: str,
        arguments: Mapping[str, Any],
        *,
        timeout: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """Call a tool and return the library's result; nothing is recorded.

        Args:
            name: the tool, by the server's name.
            arguments: its arguments.
            timeout: how long to wait for the result, in seconds; the call is taken back then.
            repeatable: whether a call that found its session broken may be made again on a new
                one. Otherwise a session that has been idle is tried first.

        Raises:
            ConnectionError: the server cannot be reached, or went away.
            TimeoutError: there was no result in time.
            Exception: whatever else the library raises.
        """

        async def call(client: Any) -> Any:
            # fastmcp's own call_tool raises for results that say they are errors.
            method = getattr(client, "call_tool_mcp", None) or client.call_tool
            return await method(name, dict(arguments))

        return self._request(call, repeatable=repeatable, timeout=timeout)

    def close(self) -> None:
        """Close the session, once the calls in it have ended; a later call opens another."""
        if self._home is not None and self._home is background_loop():
            self._home.run(self._close)

    def __enter__(self) -> McpConnection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # What follows the waiting thread's side runs on the loop.

    def _request(
        self, ask: Callable[[Any], Any], *, repeatable: bool, timeout: float | None = None
    ) -> Any:
        source, loop = self._given
        if loop is not None:
            return BackgroundLoop.wait_for(loop, lambda: _timed(ask(source), timeout))
        home = background_loop()
        return home.run(lambda: _timed(self._ask(home, ask, repeatable), timeout))

    async def _ask(self, home: BackgroundLoop, ask: Callable[[Any], Any], repeatable: bool) -> Any:
        session, fresh = self._current(home)
        try:
            if not fresh and not repeatable:
                await session.request(_list_tools, self._open_timeout)
            else:
                return await session.request(ask, self._open_timeout)
        except _Broken as exc:
            if fresh:
                raise exc.error from exc.__cause__
            log.info("the MCP session was broken, opening another: %s", exc.error)
            session, fresh = self._current(home)
        try:
            return await session.request(ask, self._open_timeout)
        except _Broken as exc:
            raise exc.error from exc.__cause__

    def _current(self, home: BackgroundLoop) -> tuple[_Session, bool]:
        """Return the session of this process, and whether it has just been made."""
        if self._home is not home:
            # What another process opened is not ours to close.
            self._session, self._home = None, home
        if self._session is None or self._session.ended:
            assert self._opener is not None
            self._session = _Session(self._opener, home, self._session)
            forgotten = weakref.finalize(self, _leave_soon, home.loop, self._session)
            forgotten.atexit = False
            return self._session, True
        return self._session, False

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.leave()
            await asyncio.wait([session.task])


def _leave_soon(loop: asyncio.AbstractEventLoop, session: _Session) -> None:
    if loop.is_running():
        loop.call_soon_threadsafe(session.leave)


class _Broken(Exception):
    """A session cannot be used any more; ``error`` is what the caller shall see."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class _Session:
    """An open client, held by one task: anyio wants it left by the task that entered it."""

    def __init__(self, opener: Opener, home: BackgroundLoop, last: _Session | None) -> None:
        self._calls = 0
        self._leave = asyncio.Event()
        self._opened: asyncio.Future[Any] = home.loop.create_future()
        # Whoever waited may have given up before it failed.
        self._opened.add_done_callback(asyncio.Future.exception)
        self._ending = False
        self.task = home.keep(self._keep(opener, last))

    @property
    def ended(self) -> bool:
        return self._ending or self.task.done()

    def leave(self) -> None:
        """Take no more calls, and close when the last has ended."""
        self._ending = True
        if not self._calls:
            self._leave.set()

    async def _keep(self, opener: Opener, last: _Session | None) -> None:
        if last is not None:
            # Copies of a client may share what they open.
            await asyncio.wait([last.task])
        try:
            async with opener() as client:
                self._opened.set_result(client)
                await self._leave.wait()
        except BaseException as exc:
            if not self._opened.done():
                self._opened.set_exception(_lost("cannot be reached", exc))
            elif not isinstance(exc, asyncio.CancelledError):
                # Nobody waits for this: the calls that it broke have errors of their own.
                log.info("%s", _lost("went away", exc))
        finally:
            self._ending = True

    async def request(self, ask: Callable[[Any], Any], open_timeout: float) -> Any:
        """Await ``ask(client)``.

        Raises:
            _Broken: the client could not be opened, or its connection is gone.
        """
        self._calls += 1
        work: asyncio.Future[Any] | None = None
        try:
            client = await self._client(open_timeout)
            work = asyncio.ensure_future(ask(client))
            await asyncio.wait([work, self.task], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() or work.cancelled():
                raise _Broken(ConnectionError("the MCP server went away during the call"))
            return work.result()
        except Exception as exc:
            if isinstance(exc, _Broken) or _is_broken(exc):
                self._ending = True
                self._leave.set()  # without waiting for other calls, which can end no better
                if not isinstance(exc, _Broken):
                    exc = _Broken(_lost("went away during the call", exc))
                raise exc from None
            raise
        finally:
            if work is not None and not work.done():
                work.cancel()
            self._calls -= 1
            if self._ending:
                self.leave()

    async def _client(self, open_timeout: float) -> Any:
        await asyncio.wait([self._opened], timeout=open_timeout)
        if not self._opened.done():
            self.task.cancel()
            raise _Broken(
                ConnectionError(f"the MCP server did not answer within {open_timeout:g} s")
            )
        try:
            return self._opened.result()
        except ConnectionError as exc:
            raise _Broken(exc) from None


async def _timed(work: Any, timeout: float | None) -> Any:
    try:
        return await asyncio.wait_for(work, timeout)
    except asyncio.TimeoutError:
        if timeout is None:
            raise
        raise TimeoutError(f"the MCP server had no result after {timeout:g} s") from None


async def _list_tools(client: Any) -> list[Any]:
    """Ask the server for its tools, every page, in the ways in which the libraries do it."""
    known = inspect.signature(client.list_tools).parameters
    # Clients may answer out of a cache, and then it is not known whether the server is there.
    anew = {"cache_mode": "refresh"} if "cache_mode" in known else {}
    listed = await client.list_tools(**anew)
    if isinstance(listed, list):
        return listed
    found = list(listed.tools)
    while cursor := field(listed, "next_cursor", "nextCursor"):
        if "cursor" in known:
            listed = await client.list_tools(cursor=cursor, **anew)
        else:
            from mcp.types import PaginatedRequestParams

            listed = await client.list_tools(params=PaginatedRequestParams(cursor=cursor))
        found += listed.tools
    return found


def _opener(source: Any) -> Opener:
    if isinstance(source, type):
        raise TypeError(f"an MCP server is reached by a client, not by the class {source!r}")
    library, kind = _library_class(source)
    if kind == "Client":
        return _copier(source, library)
    if kind == "ClientSession":
        raise TypeError(
            "a ClientSession belongs to the event loop that it was opened on: pass that as "
            "loop=…, or pass a function that opens one, such as an @asynccontextmanager"
        )
    if callable(source) and library != "fastmcp":
        opener: Opener = source
        return opener

    def open_client() -> AbstractAsyncContextManager[Any]:
        if library == "fastmcp":
            from fastmcp import Client as FastMcpClient

            return FastMcpClient(source)
        from mcp import Client

        return Client(source)

    return open_client


def _library_class(source: Any) -> tuple[str, str]:
    """Return the MCP library and the class in it that ``source`` is an object of, if any."""
    for kind in type(source).__mro__:
        library = kind.__module__.partition(".")[0]
        if library in ("mcp", "fastmcp"):
            return library, kind.__name__
    return "", ""


def _copier(client: Any, library: str) -> Opener:
    """Return what opens a copy of a client, since some can be opened but once."""
    if library == "mcp":
        return lambda: dataclasses.replace(client)

    @contextlib.asynccontextmanager
    async def open_copy() -> AsyncIterator[Any]:
        copy = client.new()
        try:
            async with copy:
                yield copy
        finally:
            # Leaving it would keep a server that is a subprocess alive for the next to enter.
            await copy.close()

    return open_copy


def _is_broken(exc: Exception) -> bool:
    """Whether an error says that the session is of no more use, rather than the request."""
    code = getattr(getattr(exc, "error", None), "code", None)
    if code is not None:
        return code in _SESSION_IS_GONE
    library = type(exc).__module__.partition(".")[0]
    transports = ("anyio", "httpx", "httpx2", "httpcore", "httpcore2")
    return library in transports or isinstance(exc, ConnectionError)


def _lost(what: str, exc: BaseException) -> ConnectionError:
    members: Any = getattr(exc, "exceptions", ())
    while len(members) == 1:  # task groups wrap what is one error
        exc = members[0]
        members = getattr(exc, "exceptions", ())
    return ConnectionError(f"the MCP server {what}: {type(exc).__name__}: {safe_text(exc)}")


def field(thing: Any, *names: str) -> Any:
    """Return a field of an object or mapping under the first of its names, or ``None``.

    Releases of the MCP libraries spell fields in two ways, and JSON in one.
    """
    for name in names:
        if isinstance(thing, Mapping):
            if name in thing:
                return thing[name]
        elif hasattr(thing, name):
            return getattr(thing, name)
    return None


def _as_json(tool: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
    return dumped
