"""First run and replay cannot be told apart, whatever a body returns or raises (DESIGN, truth 1).

Each example runs twice through the real SDK and the embedded kernel: the first attempt runs the
body and stops at an approval, the second replays. What the handler saw must be the same, part by
part and type by type.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import itertools
import struct
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rebuno_sync import Agent, Client, RebunoError, ToolError, step, tool
from rebuno_sync.kernel import EmbeddedKernel
from rebuno_sync.wire import Execution
from tests.scripted import served, wait_until

SECRET = "orchard-secret"
POLICY = """
default_action: allow
rules:
  - {id: gate, when: {target: gate}, then: {decision: require_approval}}
"""


class Twice:
    """Runs one body twice, once for real and once as a replay, and keeps what each run saw."""

    def __init__(self, kernel: EmbeddedKernel, client: Client) -> None:
        self._client = client
        self._cases: dict[int, Callable[[], Any]] = {}
        self._numbers = itertools.count()
        self.ran = 0
        self._seen: list[Any] = []
        self.agent = Agent("a1", secret=SECRET, base_url=kernel.url)
        self.agent.bind(self._handler)

    def _handler(self, number: int) -> None:
        @tool
        def gate() -> None:
            pass

        try:
            self._seen.append(self._cases[number]())
        except RebunoError as exc:
            self._seen.append(exc)
        gate()

    def see(self, case: Callable[[], Any]) -> tuple[Any, Any]:
        """Run ``case`` in a handler twice; return what the first run and the replay gave."""
        number = next(self._numbers)
        self._cases[number] = case
        self._seen, self.ran = [], 0
        created = self._client.create("a1", {"number": number})
        self._until(created.id, "blocked")
        (approval,) = [a for a in self._client.approvals() if a.execution_id == created.id]
        self._client.grant(approval.id)
        self._until(created.id, "completed")
        del self._cases[number]
        first, replay = self._seen
        return first, replay

    def _until(self, execution_id: str, status: str) -> None:
        def settled() -> Execution | None:
            found = self._client.get(execution_id)
            return None if found.status == "running" else found

        found = wait_until(settled)
        assert found.status == status, found

    def body(self, produce: Callable[[], Any]) -> Any:
        """Run ``produce`` as a body that counts its runs."""

        def counted() -> Any:
            self.ran += 1
            return produce()

        return counted()


@pytest.fixture(scope="module")
def twice() -> Iterator[Twice]:
    with EmbeddedKernel() as kernel, Client(kernel.url) as client:
        runner = Twice(kernel, client)
        with served(runner.agent.app) as url:
            client.register_agent("a1", f"{url}/webhook", SECRET)
            client.set_policy("a1", POLICY)
            yield runner
            assert runner.agent.close(timeout=30)


def same(a: Any, b: Any) -> bool:
    """Equal part by part and type by type: ``1``, ``1.0`` and ``True`` differ, ``-0.0`` too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        # The order of the keys can be seen as well.
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, BaseException):
        return same_error(a, b)
    return bool(a == b)


def same_error(a: BaseException, b: BaseException) -> bool:
    return (
        type(a) is type(b)
        and str(a) == str(b)
        and repr(a) == repr(b)
        and same(a.args, b.args)
        and same(vars(a), vars(b))
        and type(a.__cause__) is type(b.__cause__)
        and type(a.__context__) is type(b.__context__)
        and a.__suppress_context__ == b.__suppress_context__
    )


def test_same_is_strict() -> None:
    pairs = [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"a": 1.0}), (None, False)]
    assert not any(same(a, b) for a, b in pairs)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(ToolError("m", "t", type="A"), ToolError("m", "t", type="B"))
    assert not same(ToolError("m", "t", error={"n": 1}), ToolError("m", "t", error={"n": 1.0}))
    assert same({"a": [1, 2.5, -0.0, "x", None]}, {"a": [1, 2.5, -0.0, "x", None]})


# Values

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
#: Beyond the number of digits that int() and str() convert by default, too.
integers = st.one_of(
    st.integers(),
    st.sampled_from([2**53, 2**53 + 1, 2**63, 2**64, -(2**63), 10**400]),
    st.integers(4200, 6000).map(lambda bits: 7 << (bits * 4)),
)
floats = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 1e16, 1e22, 1e-7, 5e-324, 1.7976931348623157e308]),
)
scalars = st.one_of(st.none(), st.booleans(), integers, floats, texts)
json_values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(texts, inner, max_size=5)),
    max_leaves=25,
)


def nested(value: Any, depth: int) -> Any:
    for level in range(depth):
        value = [value] if level % 2 else {"deeper": value}
    return value


deep_values = st.builds(nested, scalars, st.integers(150, 195))


class Colour(enum.Enum):
    RED = "red"
    NUMBER = 7


@dataclasses.dataclass
class Point:
    x: Any
    y: Any


#: What has a JSON form without being JSON; the caller sees the JSON both times.
rich_scalars = st.one_of(
    scalars,
    st.sampled_from(Colour),
    st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc)),
    st.dates(),
    st.times(),
    st.uuids(),
    st.decimals(allow_nan=False, allow_infinity=False),
)
rich_values = st.recursive(
    rich_scalars,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.lists(inner, max_size=3),
        st.dictionaries(texts, inner, max_size=3),
    ),
    max_leaves=10,
)
#: What went wrong somewhere before, or nearly did.
HARD: list[Any] = [
    [1.0, -0.0, 0.0, 1e16, 1e22, 1e-7, 5e-324, 0.1, 2.0**60],
    1.0,
    -0.0,
    [True, 1, False, 0, None, "", "1", "true"],
    [2**53 + 1, -(2**63), 2**64, 10**400, -(10**6000)],
    {"b": 1, "a": 2, "": 3, "ü": 4, "\U0001f600": 5, "\uffff": 6},
    "\x00\x1f\x7f \u2028\u2029 <>&'\"\\/ \ud7ff\ue000 \U0010ffff",
    [[], {}, [[]], [{}], {"a": {}}],
]


def hard(test: Any) -> Any:
    """Try what is known to be hard first."""
    for value in HARD:
        test = example(value=value)(test)
    return test


examples = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@hard
@examples
@given(value=st.one_of(json_values, deep_values))
def test_a_tool_gives_the_same_value_for_the_same_arguments(twice: Twice, value: Any) -> None:
    @tool
    def echo(given: Any) -> Any:
        return twice.body(lambda: given)

    first, replay = twice.see(lambda: echo(value))
    assert same(first, replay)
    assert same(first, value)
    assert twice.ran == 1, "the arguments named another step in the replay"


@hard
@examples
@given(value=rich_values)
def test_a_step_gives_the_json_of_its_result_both_times(twice: Twice, value: Any) -> None:
    first, replay = twice.see(lambda: step("pick", lambda: twice.body(lambda: value)))
    assert same(first, replay)
    assert type(first) in (type(None), bool, int, float, str, list, dict)
    assert twice.ran == 1


@examples
@given(value=json_values)
def test_what_a_caller_does_to_a_value_does_not_reach_the_replay(twice: Twice, value: Any) -> None:
    kept = {"value": value}

    def case() -> Any:
        given = step("pick", lambda: twice.body(lambda: kept))
        shown = step("show", lambda: given)
        given["value"] = "spoiled"
        kept["value"] = "spoiled"
        return shown

    first, replay = twice.see(case)
    assert same(first, replay)


class Opaque:
    """Has no JSON form."""


def holds_itself() -> list[Any]:
    row: list[Any] = []
    row.append(row)
    return row


@pytest.mark.parametrize(
    "produce",
    [
        Opaque,
        holds_itself,
        lambda: float("nan"),
        lambda: float("inf"),
        lambda: {1: "a"},
        lambda: {"a": {1, 2}},
        lambda: b"bytes",
        lambda: "lone \ud800 surrogate",
        lambda: {"\udfff": 1},
        lambda: nested(1, 250),
        lambda: len,
    ],
)
def test_a_result_without_a_json_form_fails_the_same_way(
    twice: Twice, produce: Callable[[], Any]
) -> None:
    first, replay = twice.see(lambda: step("pick", lambda: twice.body(produce)))
    assert isinstance(first, ToolError)
    assert same(first, replay)
    assert first.type == "TypeError"
    assert twice.ran == 1


# Errors


class Custom(Exception):
    """Takes what it is given, and keeps more."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args)
        self.__dict__.update(more)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


class NotText(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Hidden(ToolError):
    """A tool error of the user's own, with attributes that are not JSON."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "elsewhere", type="Hidden", reason="mine", error={"a": 1})
        self.connection = Opaque()


def self_caused(exc: BaseException) -> BaseException:
    exc.__cause__ = exc
    return exc


def circular(exc: BaseException) -> BaseException:
    other = KeyError("other")
    exc.__context__, other.__context__ = other, exc
    return exc


any_text = st.text(max_size=40)
attributes = st.dictionaries(
    st.sampled_from(["message", "reason", "type", "error", "tool", "step_id", "args_", "detail"]),
    st.one_of(json_values, st.builds(Opaque)),
    max_size=4,
)
errors = st.one_of(
    st.builds(Custom, st.lists(st.one_of(json_values, any_text), max_size=3)),
    st.builds(lambda args: ValueError(*args), st.lists(json_values, max_size=3)),
    st.builds(lambda args: KeyError(*args), st.lists(any_text, max_size=2)),
    st.builds(lambda args, more: Custom(*args, **more), st.lists(any_text, max_size=2), attributes),
    st.builds(OSError, st.integers(0, 200), any_text, any_text),
    st.builds(lambda text: self_caused(ValueError(text)), any_text),
    st.builds(lambda text: circular(ValueError(text)), any_text),
    st.builds(lambda text: RuntimeError("x" * 70_000 + text), any_text),
    st.builds(Mute),
    st.builds(NotText),
    st.builds(Hidden, any_text),
    st.builds(
        UnicodeDecodeError,
        st.just("utf-8"),
        st.binary(min_size=1),
        st.just(0),
        st.just(1),
        any_text,
    ),
    st.builds(
        lambda name: type(name, (Exception,), {})("made up"), st.sampled_from(["Ünï", "A B", ""])
    ),
    st.sampled_from([TimeoutError(), StopIteration(3), AssertionError(), ZeroDivisionError("no")]),
)
if sys.version_info >= (3, 11):
    errors |= st.builds(
        lambda text, inner: ExceptionGroup(text, [inner, ValueError(text)]),  # noqa: F821
        any_text,
        errors,
    )


@settings(parent=examples, max_examples=120)
@given(error=errors)
def test_an_error_looks_the_same_both_times(twice: Twice, error: BaseException) -> None:
    def fail() -> Any:
        raise error

    @tool
    def broken() -> Any:
        return twice.body(fail)

    first, replay = twice.see(broken)
    assert type(first) is ToolError
    assert same(first, replay)
    assert first == replay
    assert first.tool == "broken"
    assert first.type == type(error).__name__
    assert twice.ran == 1


@examples
@given(value=json_values, error=errors, order=st.permutations(["value", "error", "local"]))
def test_a_whole_handler_takes_the_same_way_both_times(
    twice: Twice, value: Any, error: BaseException, order: list[str]
) -> None:
    def fail() -> Any:
        raise error

    @tool
    def give(given: Any) -> Any:
        return twice.body(lambda: given)

    @tool
    def broken() -> Any:
        return twice.body(fail)

    def case() -> list[Any]:
        told: list[Any] = []
        for name in order:
            try:
                if name == "value":
                    told.append(give(value))
                elif name == "error":
                    told.append(broken())
                else:
                    told.append(step("id", lambda: twice.body(lambda: str(uuid.uuid4()))))
            except ToolError as exc:
                told.append(exc)
        return told

    first, replay = twice.see(case)
    assert same(first, replay)
    assert twice.ran == 3
