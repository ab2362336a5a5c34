"""MCP tools as recorded tools, against real servers of ``mcp`` and ``fastmcp``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastmcp
import mcp
import pytest
from fastmcp.client.transports import StdioTransport
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import ListToolsResult, PaginatedRequestParams

from rebuno_sync import PolicyError, ToolError, step
from rebuno_sync.context import execution_or_none
from rebuno_sync.effects.background import background_loop
from rebuno_sync.effects.mcp import McpConnection, mcp_result, wrap_mcp_tool, wrap_mcp_tools
from tests.running import Running, given_up_once, running
from tests.scripted import wait_until

SERVER = str(Path(__file__).with_name("mcp_server.py"))
LIBRARIES = ("mcp", "fastmcp")

pytestmark = pytest.mark.filterwarnings(
    # Of the MCP libraries themselves, when a server is killed under them.
    "ignore::pytest.PytestUnraisableExceptionWarning"
)


def command(library: str, *, way: str = "stdio") -> list[str]:
    return [sys.executable, SERVER, library, way]


def parameters(library: str) -> StdioServerParameters:
    return StdioServerParameters(command=sys.executable, args=command(library)[1:])


@contextlib.asynccontextmanager
async def session_by_hand() -> AsyncIterator[ClientSession]:
    """What the documentation of the mcp package shows."""
    async with stdio_client(parameters("mcp")) as (read, write), ClientSession(read, write) as it:
        await it.initialize()
        yield it


SOURCES: dict[str, Callable[[], Any]] = {
    "parameters": lambda: parameters("mcp"),
    "mcp-legacy-client": lambda: mcp.Client(parameters("mcp"), mode="legacy"),
    "fastmcp-client": lambda: fastmcp.Client(
        StdioTransport(command=sys.executable, args=command("fastmcp")[1:])
    ),
    "function": lambda: session_by_hand,
}


@pytest.fixture(params=SOURCES)
def connection(request: pytest.FixtureRequest) -> Iterator[McpConnection]:
    with McpConnection(SOURCES[request.param]()) as connection:
        yield connection


class HttpServer:
    """A server behind a listening socket that outlives it."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/mcp"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        descriptor = self._socket.fileno()
        return subprocess.Popen(command(self._library, way=str(descriptor)), pass_fds=[descriptor])

    def restart(self) -> None:
        self.kill()
        self._process = self._start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self._socket.close()


@pytest.fixture(params=LIBRARIES)
def http_server(request: pytest.FixtureRequest) -> Iterator[HttpServer]:
    server = HttpServer(request.param)
    try:
        yield server
    finally:
        server.close()


def value(result: Any) -> Any:
    return mcp_result(result, {"properties": {"result": {}}})


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# The bridge


def test_lists_and_calls(connection: McpConnection) -> None:
    tools = {tool["name"]: tool for tool in connection.list_tools()}
    assert set(tools) == {"add", "greet", "die", "picture", "fail", "pid", "hang"}
    assert tools["add"]["inputSchema"]["required"] == ["a"]
    json.dumps(list(tools.values()))
    assert value(connection.call_tool("add", {"a": 2, "b": 40})) == 42


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_every_page_of_the_tools_is_read(mode: str) -> None:
    pages = {None: ("a", "1"), "1": ("b", "2"), "2": ("c", None)}

    async def list_tools(context: Any, params: PaginatedRequestParams | None) -> ListToolsResult:
        name, after = pages[None if params is None else params.cursor]
        tool = mcp.Tool(name=name, input_schema={"type": "object"})
        return ListToolsResult(tools=[tool], next_cursor=after)

    server = Server("pages", on_list_tools=list_tools)

    @contextlib.asynccontextmanager
    async def bare_session() -> AsyncIterator[ClientSession]:
        async with mcp.Client(server, mode=mode) as client:
            yield client.session

    for source in (mcp.Client(server, mode=mode), bare_session):
        with McpConnection(source) as connection:
            assert [tool["name"] for tool in connection.list_tools()] == ["a", "b", "c"]


def test_one_session_serves_many_threads(connection: McpConnection) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: value(connection.call_tool("add", {"a": n})), range(40)))
        pids = set(pool.map(lambda _: value(connection.call_tool("pid", {})), range(8)))
    assert found == [n + 1 for n in range(40)]
    assert len(pids) == 1


def test_one_loop_thread_serves_all(connection: McpConnection) -> None:
    def loop_threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "rebuno-asyncio"]

    connection.list_tools()
    with McpConnection(parameters("mcp")) as other:
        other.list_tools()
        assert len(loop_threads()) == 1
    assert all(t.daemon for t in threading.enumerate() if t.name == "rebuno-asyncio")


def test_over_http(http_server: HttpServer) -> None:
    with McpConnection(http_server.url) as connection:
        assert value(connection.call_tool("add", {"a": 2})) == 3


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_over_http_a_restarted_server_is_found_again(http_server: HttpServer, mode: str) -> None:
    with McpConnection(mcp.Client(http_server.url, mode=mode)) as connection:
        first = value(connection.call_tool("pid", {}))
        http_server.restart()
        second = value(connection.call_tool("pid", {}))
        http_server.restart()
        third = value(connection.call_tool("pid", {}, repeatable=True))
    assert len({first, second, third}) == 3


def test_a_server_that_died_idle_is_started_again(connection: McpConnection) -> None:
    """Before a call that must not be repeated the session is tried; others are repeated."""
    pids = set()
    for repeatable in (True, False, True):
        pid = value(connection.call_tool("pid", {}, repeatable=repeatable))
        pids.add(pid)
        connection.list_tools()  # which a client might remember
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: not alive(pid))
    assert len(pids) == 3


def test_a_call_in_which_the_server_dies_is_not_repeated(connection: McpConnection) -> None:
    pid = value(connection.call_tool("pid", {}))
    with pytest.raises(ConnectionError, match="went away during the call"):
        connection.call_tool("die", {})
    assert value(connection.call_tool("pid", {})) != pid


def test_a_call_is_given_up_in_time_and_the_session_lives_on(connection: McpConnection) -> None:
    pid = value(connection.call_tool("pid", {}))
    with pytest.raises(TimeoutError, match=r"no result after 0\.2 s"):
        connection.call_tool("hang", {}, timeout=0.2)
    assert value(connection.call_tool("pid", {})) == pid


def test_closed_and_used_again(connection: McpConnection) -> None:
    first = value(connection.call_tool("pid", {}))
    connection.close()
    assert not alive(first)
    assert value(connection.call_tool("pid", {})) != first
    connection.close()
    connection.close()


def test_a_forgotten_connection_closes() -> None:
    connection = McpConnection(parameters("mcp"))
    pid = value(connection.call_tool("pid", {}))
    del connection
    wait_until(lambda: not alive(pid))


def test_a_server_that_cannot_be_reached() -> None:
    with pytest.raises(ConnectionError, match="cannot be reached: FileNotFoundError"):
        McpConnection(StdioServerParameters(command="/nonexistent")).list_tools()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ConnectionError, match="cannot be reached: ConnectError"):
        McpConnection(f"http://127.0.0.1:{port}/mcp").list_tools()


def test_a_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/mcp"
        with pytest.raises(ConnectionError, match=r"did not answer within 0\.2 s"):
            McpConnection(url, open_timeout=0.2).list_tools()


def test_an_open_session_of_a_loop_of_the_users() -> None:
    """For programs that run an event loop beside their threads already."""
    with ThreadPoolExecutor(1) as pool:

        async def main() -> int:
            async with session_by_hand() as session:
                connection = McpConnection(session, loop=asyncio.get_running_loop())
                waiting = asyncio.get_running_loop().run_in_executor(
                    pool, connection.call_tool, "add", {"a": 2}
                )
                with pytest.raises(RuntimeError, match="wait for its own event loop"):
                    connection.call_tool("add", {"a": 2})
                return value(await waiting)

        assert asyncio.run(main()) == 3


def test_the_background_loop_does_not_wait_for_itself() -> None:
    async def inside() -> None:
        background_loop().run(inside)

    with pytest.raises(RuntimeError, match="wait for its own event loop"):
        background_loop().run(inside)


def test_a_session_without_its_loop_is_refused() -> None:
    async def main() -> None:
        async with session_by_hand() as session:
            with pytest.raises(TypeError, match=r"pass that as\s+loop=…, or pass a function"):
                McpConnection(session)

    asyncio.run(main())
    with pytest.raises(TypeError, match="not by the class"):
        McpConnection(mcp.Client)


PREFORK = """
import os, sys
from mcp import StdioServerParameters
from rebuno_sync.effects.mcp import McpConnection
connection = McpConnection(StdioServerParameters(command=sys.executable, args=sys.argv[1:]))
pid = lambda: connection.call_tool("pid", {}).structured_content["result"]
before = pid()
child = os.fork()
if child == 0:
    mine = pid()
    connection.close()
    os._exit(0 if mine not in (before, os.getpid()) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pid() == before
print("server", before)
"""


def test_a_fork_opens_a_session_of_its_own_and_leaves_the_parents() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "error::ResourceWarning"),
            # Python warns of any fork beside threads; this is a test of what comes of one.
            *("-W", "ignore::DeprecationWarning", "-c", PREFORK, *command("mcp")[1:]),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    pid = int(done.stdout.split()[1])
    assert not alive(pid)  # though nobody called close()


def test_nothing_is_imported_until_used() -> None:
    code = (
        "import sys, rebuno_sync.effects.mcp as m; m.McpConnection('http://127.0.0.1:1/mcp');"
        "sys.exit(str({'mcp', 'fastmcp', 'anyio', 'httpx', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"


# Recorded


@pytest.fixture(params=LIBRARIES, scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[McpConnection]:
    """A connection that the tests below share."""
    source = SOURCES["fastmcp-client" if request.param == "fastmcp" else "parameters"]
    with McpConnection(source()) as connection:
        yield connection


def steps_of(found: Running, execution: Any) -> list[tuple[str, str, str, Any]]:
    return [(s.kind, s.target, s.idempotency, s.args) for s in found.steps(execution)]


def test_calls_are_recorded_and_replayed(server: McpConnection) -> None:
    tools = {fn.__name__: fn for fn in wrap_mcp_tools(server, prefix="t_")}
    seen: list[Any] = []

    def handler() -> Any:
        seen.append(
            [
                tools["t_add"](a=2, b=40),
                tools["t_greet"](name="Åse"),
                tools["t_pid"](),
                tools["t_picture"](),
            ]
        )
        given_up_once()
        return seen[-1]

    with running(handler) as found:
        execution = found.run_twice()
        assert execution.status == "completed"
        assert steps_of(found, execution) == [
            ("tool_call", "t_add", "safe_to_retry", {"a": 2, "b": 40}),
            ("tool_call", "t_greet", "safe_to_retry", {"name": "Åse"}),
            ("tool_call", "t_pid", "safe_to_retry", {}),
            ("tool_call", "t_picture", "safe_to_retry", {}),
        ]
    assert seen[0] == seen[1] == execution.output
    total, greeting, _pid, picture = seen[0]
    assert (total, greeting) == (42, {"greeting": "Hei, Åse!", "result": 3})
    assert picture == [
        {"type": "text", "text": "Here it is:"},
        {"type": "image", "data": "iVBORw==", "mimeType": "image/png"},
    ]


def test_what_frameworks_look_at(server: McpConnection) -> None:
    (add,) = wrap_mcp_tools(server, only=["add"], prefix="calc_")
    assert (add.__name__, add.__doc__) == ("calc_add", "Add two numbers.")
    assert add.__input_schema__["properties"]["a"]["type"] == "integer"  # type: ignore[attr-defined]
    assert add.__annotations__ == {"a": int, "b": int}


def test_an_error_is_the_same_tool_error_both_times(server: McpConnection) -> None:
    (fail,) = wrap_mcp_tools(server, only=["fail"])
    seen: list[ToolError] = []

    def handler() -> str:
        try:
            fail(why="no luck")
        except ToolError as exc:
            seen.append(exc)
        given_up_once()
        return "handled"

    with running(handler) as found:
        assert found.run_twice().output == "handled"
    assert seen[0] == seen[1]
    assert (seen[0].tool, seen[0].type) == ("fail", "ToolError")
    assert "no luck" in seen[0].message


def test_a_server_that_dies_is_a_tool_error(server: McpConnection) -> None:
    (die,) = wrap_mcp_tools(server, only=["die"])
    with running(lambda: die()) as found:
        execution = found.run()
        (at_most_once,) = steps_of(found, execution)
    assert execution.failure_reason.startswith("tool_error: die: the MCP server went away")
    assert at_most_once[2] == "at_most_once"


def test_retries_open_a_new_session() -> None:
    with McpConnection(parameters("mcp")) as connection:
        die = wrap_mcp_tool(
            connection,
            {"name": "die", "inputSchema": {"type": "object"}},
            idempotency="safe_to_retry",
            retries=1,
        )
        with running(lambda: die()) as found:
            assert found.run().failure_reason.startswith("tool_error: die: the MCP server went")
        assert value(connection.call_tool("add", {"a": 1})) == 2


def test_a_time_out_frees_the_thread_and_replays(server: McpConnection) -> None:
    (hang,) = wrap_mcp_tools(server, only=["hang"], timeout=0.2)

    def handler() -> list[str]:
        try:
            hang()
        except ToolError as exc:
            reason = exc.reason
        given_up_once()
        return [reason, str(value(server.call_tool("add", {"a": 1})))]

    with running(handler) as found:
        assert found.run_twice().output == ["timeout", "2"]


DENY = """
default_action: allow
rules:
  - id: no-adding
    when: {target: add, arguments: {a: {equals: 13}}}
    then: {decision: deny, reason: unlucky}
"""


def test_a_denial_raises_or_becomes_the_answer(server: McpConnection) -> None:
    (raising,) = wrap_mcp_tools(server, only=["add"])
    (returning,) = wrap_mcp_tools(server, only=["add"], on_denied="return")

    def handler() -> list[Any]:
        with pytest.raises(PolicyError, match="unlucky"):
            raising(a=13)
        return [returning(a=13), returning(a=12)]

    with running(handler, policy=DENY) as found:
        assert found.output() == ["add not allowed. reason: unlucky", 13]


def test_an_approval_is_waited_for(server: McpConnection) -> None:
    (add,) = wrap_mcp_tools(server, only=["add"])
    policy = DENY.replace("decision: deny, reason: unlucky", "decision: require_approval")
    with running(lambda: add(a=13), policy=policy) as found:
        assert found.decide(found.run(), grant=True).output == 14
        assert found.decide(found.run(), grant=False, why="unlucky").failure_reason == "unlucky"


def test_the_list_of_tools_can_be_recorded(server: McpConnection) -> None:
    """So that the model is offered the same tools by every attempt."""
    lists: list[Any] = []

    def handler() -> int:
        lists.append(step("tools", server.list_tools))
        (add,) = wrap_mcp_tools(server, lists[-1], only=["add"])
        given_up_once()
        return add(a=1)

    with running(handler) as found:
        assert found.run_twice().output == 2
    assert lists[0] == lists[1]


def test_overrides_and_names_that_are_not_there(server: McpConnection) -> None:
    tools = wrap_mcp_tools(
        server,
        only=["add", "pid"],
        overrides={"add": {"name": "sum", "prefix": ""}},
        prefix="x_",
    )
    assert [fn.__name__ for fn in tools] == ["sum", "x_pid"]
    with pytest.raises(ValueError, match=r"no tool 'sub'; it has \['add', 'die'"):
        wrap_mcp_tools(server, only=["sub"])
    with pytest.raises(ValueError, match="no tool 'sub'"):
        wrap_mcp_tools(server, overrides={"sub": {}})


def test_an_in_process_server() -> None:
    local = MCPServer("local")
    seen: list[Any] = []

    @local.tool()
    def whisper(word: str) -> str:
        seen.append(execution_or_none())
        return word.lower()

    with McpConnection(local) as connection:
        (tool,) = wrap_mcp_tools(connection)
        with running(lambda: tool(word="HUSH")) as found:
            assert found.output() == "hush"
    # The session outlives the execution that came first, and must not hold on to it.
    assert seen == [None]


def test_an_in_process_fastmcp_server() -> None:
    local = fastmcp.FastMCP("local")

    @local.tool
    def whisper(word: str) -> str:
        return word.lower()

    with McpConnection(local) as connection:
        (tool,) = wrap_mcp_tools(connection)
        with running(lambda: tool(word="HUSH")) as found:
            assert found.output() == "hush"


# Plain descriptors


def test_a_plain_descriptor_and_a_function() -> None:
    calls: list[Any] = []

    def call(name: str, arguments: dict[str, Any]) -> Any:
        calls.append((name, arguments))
        return {"content": [{"type": "text", "text": "sunny"}, {"type": "text", "text": "warm"}]}

    descriptor = {
        "name": "weather",
        "description": "Tell the weather.",
        "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
    }
    (weather,) = wrap_mcp_tools(call, [descriptor], prefix="w_")
    assert weather.__doc__ == "Tell the weather."
    with running(lambda: weather(city="Bergen")) as found:
        assert found.output() == "sunny\nwarm"
    assert calls == [("weather", {"city": "Bergen"})]
    with pytest.raises(TypeError, match="pass tools=…"):
        wrap_mcp_tools(call)
    with pytest.raises(TypeError, match="has a name and an inputSchema"):
        wrap_mcp_tool(call, {"description": "x"})


@pytest.mark.parametrize(
    ("annotations", "idempotency"),
    [
        (None, "safe_to_retry"),
        ({}, "safe_to_retry"),
        ({"title": "x", "openWorldHint": True}, "safe_to_retry"),
        ({"readOnlyHint": True}, "safe_to_retry"),
        ({"readOnlyHint": False, "idempotentHint": True}, "safe_to_retry"),
        ({"readOnlyHint": False}, "at_most_once"),
        ({"destructiveHint": False}, "at_most_once"),
        ({"destructiveHint": True, "idempotentHint": False}, "at_most_once"),
    ],
)
def test_hints(annotations: Any, idempotency: str) -> None:
    tool = {"name": "t", "inputSchema": {"type": "object"}, "annotations": annotations}

    def call(name: str, arguments: Any) -> str:
        return "done"

    with running(lambda: wrap_mcp_tool(call, tool)()) as found:
        execution = found.run()
        assert steps_of(found, execution)[0][2] == idempotency
    with running(lambda: wrap_mcp_tool(call, tool, idempotency="at_most_once")()) as found:
        execution = found.run()
        assert steps_of(found, execution)[0][2] == "at_most_once"


@pytest.mark.parametrize(
    ("result", "schema", "expected"),
    [
        ({"content": []}, None, ""),
        ({"content": [{"type": "text", "text": "x"}], "isError": False}, None, "x"),
        ({"content": [], "structuredContent": {"result": 1}}, None, {"result": 1}),
        ({"content": [], "structuredContent": {"result": 1}}, {"properties": {"result": {}}}, 1),
        ({"content": [], "structuredContent": [1]}, {"properties": {"result": {}}}, [1]),
        ({"content": [{"type": "image"}]}, None, [{"type": "image"}]),
        ("plain", None, "plain"),
        (None, None, None),
    ],
)
def test_results(result: Any, schema: Any, expected: Any) -> None:
    assert mcp_result(result, schema) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "text", "text": "no"}, {"type": "text", "text": "luck"}], "no\nluck"),
        ([{"type": "image", "data": "AA=="}], '[{"type": "image", "data": "AA=="}]'),
        ([], "the tool failed"),
    ],
)
def test_error_results(content: Any, message: str) -> None:
    with pytest.raises(ToolError) as raised:
        mcp_result({"content": content, "isError": True})
    assert raised.value.message == message
