"""Tools: what is recorded of a call, and what the wrappers keep."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from typing import Any

import pytest

from rebuno_sync import PolicyError, ToolError, execution, tool, wrap_tool
from rebuno_sync.errors import Blocked
from rebuno_sync.wire import Decision
from tests.unit.support import MemoryKernel, in_execution


@pytest.fixture
def kernel() -> MemoryKernel:
    return MemoryKernel()


def submitted(kernel: MemoryKernel) -> list[tuple[str, str, bytes, str]]:
    return [call[1:] for call in kernel.calls if call[0] == "submit"]


# The four spellings


def test_the_ways_to_write_it(kernel: MemoryKernel) -> None:
    @tool
    def bare(a: int) -> int:
        return a

    @tool()
    def called(a: int) -> int:
        return a

    @tool("files.read")
    def named(a: int) -> int:
        return a

    @tool("pay", idempotency="at_most_once")
    def optioned(a: int) -> int:
        return a

    @tool(idempotency="at_most_once")
    def only_options(a: int) -> int:
        return a

    with in_execution(kernel):
        assert [f(5) for f in (bare, called, named, optioned, only_options)] == [5] * 5
    assert submitted(kernel) == [
        ("tool_call", "bare", b'{"a":5}', "safe_to_retry"),
        ("tool_call", "called", b'{"a":5}', "safe_to_retry"),
        ("tool_call", "files.read", b'{"a":5}', "safe_to_retry"),
        ("tool_call", "pay", b'{"a":5}', "at_most_once"),
        ("tool_call", "only_options", b'{"a":5}', "at_most_once"),
    ]


def test_the_function_keeps_what_it_is_known_by() -> None:
    def work(a: int, *, b: str = "x") -> list[str]:
        """Do the work."""
        return [b] * a

    wrapped = tool("other")(work)
    assert (wrapped.__name__, wrapped.__doc__) == ("work", "Do the work.")
    assert wrapped.__module__ == __name__
    assert wrapped.__annotations__ == work.__annotations__
    assert inspect.signature(wrapped) == inspect.signature(work)
    assert wrapped.__wrapped__ is work  # type: ignore[attr-defined]
    assert wrapped.__wrapped__(2, b="y") == ["y", "y"]  # type: ignore[attr-defined]


def test_outside_an_execution() -> None:
    @tool
    def work() -> None: ...

    wrapped = wrap_tool("w", lambda args: 1)
    for call in (work, wrapped):
        with pytest.raises(RuntimeError, match=r"(?s)no execution here.*__wrapped__"):
            call()


# What is recorded: part of the contract, so byte for byte

ARGUMENTS: list[tuple[Any, tuple[Any, ...], dict[str, Any], bytes]] = [
    (lambda: 1, (), {}, b"{}"),
    (lambda a, b=2: 1, (1,), {}, b'{"a":1,"b":2}'),
    (lambda a, b=2: 1, (), {"b": 3, "a": 1}, b'{"a":1,"b":3}'),
    (lambda a, *rest: 1, (1, 2, 3), {}, b'{"a":1,"rest":[2,3]}'),
    (lambda a, *rest: 1, (1,), {}, b'{"a":1,"rest":[]}'),
    (lambda *, a, b=None: 1, (), {"a": 1.0}, b'{"a":1.0,"b":null}'),
    (lambda a, **more: 1, (1,), {"z": 1, "y": 2}, b'{"a":1,"z":1,"y":2}'),
    (lambda a, /, b: 1, (1,), {"b": 2}, b'{"a":1,"b":2}'),
    (lambda self, a: 1, ("me",), {"a": 2}, b'{"a":2}'),
    (lambda cls, a: 1, ("me", 2), {}, b'{"a":2}'),
    (lambda a, self=1: 1, (1,), {}, b'{"a":1,"self":1}'),
    (lambda größe: 1, ("é",), {}, '{"größe":"é"}'.encode()),
]


@pytest.mark.parametrize(("fn", "args", "kwargs", "expected"), ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_arguments_as_they_are_recorded(
    kernel: MemoryKernel, fn: Any, args: Any, kwargs: Any, expected: bytes
) -> None:
    with in_execution(kernel):
        assert tool("t")(fn)(*args, **kwargs) == 1
    assert submitted(kernel) == [("tool_call", "t", expected, "safe_to_retry")]


def test_the_spelling_of_a_call_makes_no_difference(kernel: MemoryKernel) -> None:
    @tool
    def work(a: int, b: int = 2, *, c: int = 3) -> None: ...

    with in_execution(kernel):
        work(1)
        work(1, 2)
        work(a=1, c=3)
        work(b=2, a=1)
    assert {args for _, _, args, _ in submitted(kernel)} == {b'{"a":1,"b":2,"c":3}'}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(rows=[0, 1, 2, {"price": float("nan")}]), r"args\.rows\[3\]\.price is nan"),
        (lambda f: f({1, 2}), r"args\.rows is a set"),
        (lambda f: f("a\ud800"), r"args\.rows has a lone surrogate"),
        (lambda f: f({1: 2}), r"args\.rows has the key 1"),
        (lambda f: f(print), r"args\.rows is a builtin"),
        (lambda f: f(), "missing a required argument: 'rows'"),
        (lambda f: f(1, 2), "too many positional arguments"),
        (lambda f: f(1, no=2), "unexpected keyword argument 'no'"),
    ],
    ids=range(8),
)
def test_bad_arguments_are_found_before_anything_runs(
    kernel: MemoryKernel, call: Any, message: str
) -> None:
    @tool
    def work(rows: Any) -> None:
        raise AssertionError("it must not run")

    with in_execution(kernel), pytest.raises(TypeError, match=message):
        call(work)
    assert kernel.calls == []


# Bodies


def test_the_body_gets_what_was_passed_and_runs_here(kernel: MemoryKernel) -> None:
    seen: list[Any] = []

    @tool
    def work(items: tuple[int, ...]) -> None:
        seen.append((items, threading.current_thread(), execution()))

    with in_execution(kernel) as context:
        work((1, 2))
    assert seen == [((1, 2), threading.current_thread(), context)]


def test_methods(kernel: MemoryKernel) -> None:
    class Shop:
        def __init__(self, price: int) -> None:
            self.price = price

        @tool
        def total(self, count: int) -> int:
            return self.price * count

        @staticmethod
        @tool
        def tax(amount: int) -> int:
            return amount // 5

        @classmethod
        @tool
        def name(cls) -> str:
            return cls.__name__

    with in_execution(kernel):
        assert Shop(3).total(2) == 6
        assert Shop(1).tax(10) == 2
        assert Shop.name() == "Shop"
    assert [args for _, _, args, _ in submitted(kernel)] == [
        b'{"count":2}',
        b'{"amount":10}',
        b"{}",
    ]


def test_partials_and_instances(kernel: MemoryKernel) -> None:
    def add(a: int, b: int) -> int:
        return a + b

    class Adder:
        def __call__(self, a: int) -> int:
            return a + 1

    with in_execution(kernel):
        assert tool("plus")(functools.partial(add, 1))(2) == 3
        assert tool("adder")(Adder())(2) == 3
        with pytest.raises(TypeError, match="non-empty text"):
            tool(Adder())
    assert [args for _, _, args, _ in submitted(kernel)] == [b'{"b":2}', b'{"a":2}']


def test_nested_tools_are_steps_of_their_own(kernel: MemoryKernel) -> None:
    @tool
    def inner(n: int) -> int:
        return n + 1

    @tool
    def outer(n: int) -> int:
        return inner(n) * 10

    with in_execution(kernel):
        assert outer(1) == 20
    assert [name for _, name, _, _ in submitted(kernel)] == ["outer", "inner"]
    kernel.calls.clear()
    with in_execution(kernel):
        assert outer(1) == 20
    assert [name for _, name, _, _ in submitted(kernel)] == ["outer"], "replayed as a whole"


def test_tools_in_coroutines(kernel: MemoryKernel) -> None:
    @tool
    def work(n: int) -> int:
        if n == 3:
            raise ValueError("three")
        return n

    async def several() -> list[Any]:
        return await asyncio.gather(
            *(asyncio.to_thread(work, n) for n in range(4)), return_exceptions=True
        )

    with in_execution(kernel):
        *numbers, error = asyncio.run(several())
    assert numbers == [0, 1, 2]
    assert isinstance(error, ToolError)


def test_denied(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [Decision("denied", "s", reason="no"), Decision("denied", "s")]

    @tool
    def strict() -> None: ...

    @tool("lenient.tool", on_denied="return")
    def lenient() -> None: ...

    with in_execution(kernel):
        with pytest.raises(PolicyError) as caught:
            strict()
        assert caught.value.tool == "strict"
        assert lenient() == "lenient.tool not allowed. reason: policy_denied"


def test_what_cannot_be_a_tool() -> None:
    async def later() -> None: ...

    for wrong in (later, functools.partial(later)):
        with pytest.raises(TypeError, match="coroutine function"):
            tool("t")(wrong)
    with pytest.raises(TypeError, match="put @tool beneath @staticmethod"):
        tool("t")(staticmethod(lambda: 1))


# wrap_tool

SCHEMA = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "what to look for"},
        "limit": {"type": "integer", "default": 10},
        "deep": {"type": "boolean"},
    },
    "required": ["query"],
}


def test_a_wrapped_tool_is_offered_like_a_function() -> None:
    search = wrap_tool("web_search", lambda args: args, description="Search.", args_schema=SCHEMA)
    assert (search.__name__, search.__qualname__, search.__doc__) == (
        "web_search",
        "web_search",
        "Search.",
    )
    assert str(inspect.signature(search)) == "(*, query: str, limit: int = 10, deep: bool = None)"
    assert search.__annotations__ == {"query": str, "limit": int, "deep": bool}
    assert search.__input_schema__ == SCHEMA  # type: ignore[attr-defined]
    empty = wrap_tool("ping", lambda args: "pong")
    assert (empty.__doc__, str(inspect.signature(empty))) == (None, "()")
    assert empty.__input_schema__ == {"type": "object", "properties": {}}  # type: ignore[attr-defined]


def test_calls_of_a_wrapped_tool(kernel: MemoryKernel) -> None:
    seen: list[Any] = []
    search = wrap_tool("search", lambda args: seen.append(args) or len(seen), args_schema=SCHEMA)  # type: ignore[func-returns-value]
    with in_execution(kernel):
        assert search(query="x") == 1
        assert search({"query": "x", "deep": True}) == 2
        for wrong in (lambda: search("x"), lambda: search(), lambda: search(query="x", no=1)):
            with pytest.raises(TypeError):
                wrong()
    assert seen == [{"query": "x"}, {"query": "x", "deep": True}]
    assert submitted(kernel) == [
        ("tool_call", "search", b'{"query":"x"}', "safe_to_retry"),
        ("tool_call", "search", b'{"query":"x","deep":true}', "safe_to_retry"),
    ]


@pytest.mark.parametrize("name", ["from", "class", "not an identifier", "más-allá", "more", "self"])
def test_property_names_of_every_kind(kernel: MemoryKernel, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string"}, "from": {}, "plain": {"type": "number"}},
        "required": [name],
    }
    seen: list[Any] = []
    mail = wrap_tool("mail", seen.append, args_schema=schema)
    with in_execution(kernel):
        mail(**{name: "x", "plain": 1.5})
        mail({"plain": 1.5, name: "x"})
    assert seen == [{name: "x", "plain": 1.5}] * 2
    assert "inspect._empty" not in repr(mail.__annotations__)


def test_schemas_that_take_more(kernel: MemoryKernel) -> None:
    seen: list[Any] = []
    schema = {"properties": {"more": {}}, "additionalProperties": {"type": "string"}}
    loose = wrap_tool("loose", seen.append, args_schema=schema)
    with in_execution(kernel):
        loose(a="x", more="y", more_="z")
    assert seen == [{"a": "x", "more": "y", "more_": "z"}]


@pytest.mark.parametrize("schema", [{"type": "array"}, {"properties": []}, {"type": ["object"]}])
def test_schemas_of_something_else(schema: Any) -> None:
    with pytest.raises(TypeError, match="odd: args_schema is the JSON schema of an object"):
        wrap_tool("odd", lambda args: 1, args_schema=schema)


def test_arguments_and_results_are_turned(kernel: MemoryKernel) -> None:
    seen: list[Any] = []

    class Found:
        text = "found"

    def invoke(args: dict[str, Any]) -> Found:
        seen.append(args)
        return Found()

    search = wrap_tool(
        "search",
        invoke,
        args_schema=SCHEMA,
        transform_args=lambda args: {**args, "query": args["query"].strip()},
        to_result=lambda found: {"text": found.text},
    )
    for _ in range(2):
        with in_execution(kernel):
            assert search(query=" x ") == {"text": "found"}
    assert seen == [{"query": "x"}]
    assert submitted(kernel)[0][2] == b'{"query":"x"}'


def test_a_turn_that_fails(kernel: MemoryKernel) -> None:
    def fail(value: Any) -> Any:
        raise ValueError("cannot turn it")

    before = wrap_tool("before", lambda args: 1, transform_args=fail)
    after = wrap_tool("after", lambda args: 1, to_result=fail)
    with in_execution(kernel):
        with pytest.raises(ValueError, match="cannot turn it"):
            before()
        assert kernel.calls == []
        with pytest.raises(ToolError, match="cannot turn it"):
            after()


def test_coroutine_functions_are_refused_by_name() -> None:
    async def later(args: Any) -> None: ...

    for what in ("invoke", "to_result", "transform_args"):
        functions: dict[str, Any] = {"invoke": lambda args: 1, what: later}
        with pytest.raises(TypeError, match=rf"wrap_tool\({what}=…\) takes a plain function"):
            wrap_tool("t", functions.pop("invoke"), **functions)


def test_signals_pass_through_a_wrapped_tool(kernel: MemoryKernel) -> None:
    kernel.answers["submit"] = [Decision("blocked", "s", approval_id="a")]
    with in_execution(kernel), pytest.raises(Blocked):
        wrap_tool("t", lambda args: 1)()
