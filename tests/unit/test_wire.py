"""JSON both ways, routes and models."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic
import pytest

from rebuno_sync import wire
from rebuno_sync.wire import AgentInfo, Approval, Decision, Dispatch, Event, Execution, Step


class Broken:
    """A dataclass-like value whose reading fails."""


@dataclasses.dataclass
class Lazy:
    a: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "a":
            raise LookupError("the session is closed")
        return super().__getattribute__(name)


class LazyMapping(Mapping[str, int]):
    def __getitem__(self, key: str) -> int:
        raise ConnectionError("gone")

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


class Unserializable(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(arbitrary_types_allowed=True)
    thing: Broken


class Tagged(pydantic.BaseModel):
    tags: set[str] | None = None
    more: dict[str, list[frozenset[int]]] = {}


class Sorted(pydantic.BaseModel):
    tags: set[str]

    @pydantic.field_serializer("tags")
    def in_order(self, tags: set[str]) -> list[str]:
        return sorted(tags)


class Colour(enum.Enum):
    RED = frozenset({1, 2})


def holding_itself() -> list[Any]:
    rows: list[Any] = [1]
    rows.append(rows)
    return rows


NOT_JSON = [
    (math.nan, "args is nan; JSON has no such number"),
    (-math.inf, "args is -inf; JSON has no such number"),
    ({"rows": [0, {"price": math.inf}]}, r"args\.rows\[1\]\.price is inf"),
    ([(1, math.nan)], r"args\[0\]\[1\] is nan"),
    (b"x", "args is a bytes, which has no JSON form; decode it, or encode it as base64"),
    ({"a": bytearray(b"x")}, r"args\.a is a bytearray"),
    ({"a": {1, 2}}, r"args\.a is a set, which has no JSON form; a sorted list has one"),
    ([frozenset()], r"args\[0\] is a frozenset"),
    (Colour.RED, "args is a frozenset"),
    ({"f": print}, r"args\.f is a builtin_function_or_method, .*; pass the data it would need"),
    (lambda: 1, "args is a function"),
    (int, "args is a type"),
    (object(), "args is a object, .*; convert it to text"),
    (1j, "args is a complex"),
    (iter([1]), "args is a list_iterator"),
    ({1: "x"}, "args has the key 1, a int; JSON keys are text"),
    ({"a": {None: 1}}, r"args\.a has the key None, a NoneType"),
    ({"a": {True: 1}}, r"args\.a has the key True, a bool"),
    ({(1, 2): 1}, r"args has the key \(1, 2\), a tuple"),
    ({b"k": 1}, "args has the key b'k', a bytes"),
    ("a\ud800", "args has a lone surrogate at character 1"),
    ({"a": ["\udfff"]}, r"args\.a\[0\] has a lone surrogate at character 0"),
    ({"\ud800": 1}, "a key of args has a lone surrogate"),
    (holding_itself(), "nested deeper than 200 levels, or holds itself"),
    (Lazy(), "args is a Lazy, and reading it raised LookupError: the session is closed"),
    ([LazyMapping()], r"args\[0\] is a LazyMapping, and reading it raised ConnectionError: gone"),
    (Tagged(tags={"a"}), r"reading it raised TypeError: Tagged\.tags is a set; serialize it as a"),
    (
        {"a": Tagged(more={"b": [frozenset()]})},
        r"args\.a is a Tagged, .*Tagged\.more\.b\[0\] is a frozenset",
    ),
    (Unserializable(thing=Broken()), "args is a Unserializable, and reading it raised"),
]


@pytest.mark.parametrize(("value", "message"), NOT_JSON, ids=[m[:50] for _, m in NOT_JSON])
def test_what_is_not_json_is_refused_with_its_path(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wire.encode(value, "args")


def test_a_coroutine_is_refused_with_advice() -> None:
    async def later() -> int:
        return 1

    coroutine = later()
    with pytest.raises(TypeError, match=r"result is a coroutine.*; await it within asyncio\.run"):
        wire.encode(coroutine, "result")
    assert asyncio.run(coroutine) == 1


def test_the_order_of_a_model_is_its_own() -> None:
    """A set in a model is refused because its order differs between processes; a list is not."""
    assert wire.encode(Tagged(), "args") == b'{"tags":null,"more":{}}'
    assert wire.encode(Sorted(tags={"b", "a", "c"}), "args") == b'{"tags":["a","b","c"]}'


def test_the_path_of_an_endless_value_stays_short() -> None:
    with pytest.raises(TypeError) as caught:
        wire.encode(holding_itself(), "args")
    assert len(str(caught.value)) < 200


def test_the_deepest_value_that_is_taken() -> None:
    def nested(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return value

    deepest = wire.MAX_DEPTH + 1
    assert wire.decode(wire.encode(nested(deepest), "args")) == nested(deepest)
    with pytest.raises(TypeError, match="nested deeper"):
        wire.encode(nested(deepest + 1), "args")


def test_encoding_leaves_the_value_alone() -> None:
    value = {"a": (1, [2]), "b": {"c": 3}}
    wire.encode(value, "args")
    assert value == {"a": (1, [2]), "b": {"c": 3}}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[1,]",
        b"NaN",
        b'{"a":Infinity}',
        b"[-Infinity]",
        b"'a'",
        b"\xff",
        b'"\xed\xa0\x80"',
        b"\xef\xbb\xbf1",
        b"1 2",
        b"[" * 100_000,
    ],
    ids=repr,
)
def test_what_does_not_decode(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        wire.decode(data)


def test_long_integers_decode_beside_anything() -> None:
    digits = "9" * 10_000
    value = wire.decode(f'{{"n":[{digits},-{digits},1,1.5],"s":"\\u00e9"}}'.encode())
    assert value["n"][0] == 10**10_000 - 1
    assert value["n"][1] == -(10**10_000 - 1)
    assert value["n"][2:] == [1, 1.5]
    with pytest.raises(ValueError, match="NaN"):
        wire.decode(f"[{digits},NaN]".encode())


# Routes


def test_an_id_reaches_no_other_route() -> None:
    path = wire.execution_path("a/b?c#d", "steps", "é %2F", "complete")
    assert path == "/v0/executions/a%2Fb%3Fc%23d/steps/%C3%A9%20%252F/complete"


@pytest.mark.parametrize("bad", ["", ".", ".."])
def test_what_is_no_id(bad: str) -> None:
    with pytest.raises(ValueError, match="is not an id"):
        wire.execution_path(bad)


# Models


def test_unknown_fields_are_kept_out_of_the_way() -> None:
    run = Execution.from_json(
        {"id": "1", "agent_id": "a", "status": "running", "shard": 7, "extra": "x", "input": None}
    )
    assert (run.id, run.input, run.done) == ("1", None, False)
    assert run.extra == {"shard": 7, "extra": "x"}
    assert run == Execution.from_json(
        {"id": "1", "agent_id": "a", "status": "running", "shard": 7, "extra": "x"}
    )


def test_models_are_frozen() -> None:
    run = Execution("1", "a", "completed")
    assert run.done
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.status = "failed"  # type: ignore[misc]


def test_null_stands_for_absent() -> None:
    approval = Approval.from_json({"id": "1", "status": "pending", "approvers": None})
    assert approval.approvers == []
    assert Event.from_json({"event_seq": 1, "type": "x", "payload": None}).payload == {}
    step = Step.from_json(
        {"step_id": "s", "kind": "local", "target": "t", "status": "succeeded", "result": None}
    )
    assert (step.result, step.idempotency) == (None, "safe_to_retry")
    decision = Decision.from_json({"decision": "denied", "reason": None, "step_id": None})
    assert (decision.reason, decision.step_id) == ("", "")


@pytest.mark.parametrize("data", [None, [], "x", 1])
def test_a_model_is_an_object(data: object) -> None:
    with pytest.raises(ValueError, match="expected a JSON object for Decision"):
        Decision.from_json(data)


def test_a_model_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="Execution came without agent_id, status"):
        Execution.from_json({"id": "1", "agent_id": None})


def test_agents_of_generation_1_are_spelt_otherwise() -> None:
    info = AgentInfo.from_json(
        {"ID": "a", "WebhookURL": "http://x", "Secret": "s", "PolicyBundle": "p", "Odd": 1}
    )
    assert (info.id, info.webhook_url, info.policy_bundle) == ("a", "http://x", "p")
    assert info.extra == {"Odd": 1}
    assert "s" not in vars(info).values()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"execution_id": 1}, "execution_id must be an id in printable ASCII, got 1"),
        ({"dispatch_id": ""}, "dispatch_id must be an id in printable ASCII, got ''"),
        ({"dispatch_id": "d\r\nX: y"}, "dispatch_id must be an id in printable ASCII"),
        ({"dispatch_id": "d\n"}, "dispatch_id must be an id in printable ASCII"),
        ({"execution_id": "é"}, "execution_id must be an id in printable ASCII"),
        ({"execution_id": ".."}, "execution_id must be an id in printable ASCII"),
        ({"execution_id": "e" * 201}, "execution_id must be an id in printable ASCII"),
        ({"dispatch_attempt": 0}, "dispatch_attempt must be an integer of at least 1, got 0"),
        ({"dispatch_attempt": True}, "dispatch_attempt must be an integer"),
        ({"dispatch_attempt": 1.0}, "dispatch_attempt must be an integer"),
        ({"dispatch_attempt": "1"}, "dispatch_attempt must be an integer"),
        ({"lease_timeout_seconds": 0}, "lease_timeout_seconds must be a number above 0, got 0"),
        ({"lease_timeout_seconds": -1}, "lease_timeout_seconds must be a number above 0"),
        ({"lease_timeout_seconds": True}, "lease_timeout_seconds must be a number above 0"),
        ({"lease_timeout_seconds": 1e999}, "lease_timeout_seconds must be a number above 0"),
        ({"lease_timeout_seconds": "5"}, "lease_timeout_seconds must be a number above 0"),
    ],
    ids=str,
)
def test_a_dispatch_is_checked(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dispatch.from_json({"execution_id": "e", "dispatch_id": "d", **fields})


def test_dispatches_of_each_generation() -> None:
    first = Dispatch.from_json({"execution_id": "e", "dispatch_id": "d"})
    assert (first.dispatch_attempt, first.lease_timeout_seconds) == (None, None)
    second = Dispatch.from_json({"execution_id": "e", "dispatch_id": "d", "dispatch_attempt": 2})
    assert (second.dispatch_attempt, second.lease_timeout_seconds) == (2, None)
    third = Dispatch.from_json(
        {
            "execution_id": "e",
            "dispatch_id": "d",
            "dispatch_attempt": 2,
            "lease_timeout_seconds": 0.5,
            "later": "field",
        }
    )
    assert (third.lease_timeout_seconds, third.extra) == (0.5, {"later": "field"})


def test_no_warning_comes_of_encoding_a_model() -> None:
    class Model(pydantic.BaseModel):
        a: int

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert wire.encode(Model(a=1), "args") == b'{"a":1}'
