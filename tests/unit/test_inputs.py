"""Binding an input to a handler's signature."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Union

import pydantic
import pytest

from rebuno_sync.inputs import InputBinder, InputInvalid, schema_of

if TYPE_CHECKING:
    from nowhere import OnlyForTypeCheckers


class Address(pydantic.BaseModel):
    city: str
    zip: str | None = None


class Order(pydantic.BaseModel):
    number: int
    to: Address


def call(fn: Callable[..., Any], value: Any) -> Any:
    return InputBinder(fn).call(value)


def refused(fn: Callable[..., Any], value: Any) -> str:
    with pytest.raises(InputInvalid) as caught:
        InputBinder(fn).call(value)
    return str(caught.value)


# The whole input in one parameter


def bare(payload):  # type: ignore[no-untyped-def]
    return payload


def anything(payload: Any) -> Any:
    return payload


def mapping(payload: dict[str, Any]) -> Any:
    return payload


def bare_dict(payload: dict) -> Any:  # type: ignore[type-arg]
    return payload


def old_dict(payload: typing.Dict[str, int]) -> Any:  # noqa: UP006
    return payload


def abstract(payload: Mapping[str, Any]) -> Any:
    return payload


def positional_only(payload: dict[str, Any], /) -> Any:
    return payload


def keyword_only(*, payload: dict[str, Any]) -> Any:
    return payload


def with_default(payload: Any = 5) -> Any:
    return payload


@pytest.mark.parametrize("value", [None, 1, 1.5, "x", True, [1], {"payload": 1}], ids=repr)
@pytest.mark.parametrize("fn", [bare, anything, with_default])
def test_raw_input(fn: Callable[..., Any], value: Any) -> None:
    assert call(fn, value) == value


@pytest.mark.parametrize("fn", [mapping, bare_dict, abstract, positional_only, keyword_only])
def test_raw_object(fn: Callable[..., Any]) -> None:
    assert call(fn, {"payload": 1, "a": [2]}) == {"payload": 1, "a": [2]}
    assert refused(fn, [1]) == "input must be a JSON object, and is a JSON array"
    assert refused(fn, None) == "input must be a JSON object, and is a JSON null"


def test_raw_object_with_typed_values() -> None:
    assert call(old_dict, {"a": 1}) == {"a": 1}
    assert refused(old_dict, {"a": "x"}) == "input.a must be a JSON integer, and is a JSON string"


def test_one_model() -> None:
    def handler(order: Order) -> Order:
        return order

    assert call(handler, {"number": 1, "to": {"city": "Bonn"}}) == Order(
        number=1, to=Address(city="Bonn")
    )
    message = refused(handler, {"number": "x", "to": {}})
    assert "input.number: Input should be a valid integer" in message
    assert "input.to.city: Field required" in message
    assert refused(handler, None).startswith("input: ")


# Fields


def fields(topic: str, depth: int = 2, *, loud: bool = False) -> tuple[Any, ...]:
    return topic, depth, loud


def test_fields_by_name() -> None:
    assert call(fields, {"topic": "x"}) == ("x", 2, False)
    assert call(fields, {"loud": True, "topic": "x", "depth": 3}) == ("x", 3, True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "the input has no field 'topic'"),
        (None, "the input has no field 'topic'"),
        ({"depth": 1}, "the input has no field 'topic'"),
        (
            {"topic": "x", "tpoic": 1},
            "the input has the field 'tpoic', which the handler does not take; it takes topic, "
            "depth, loud",
        ),
        ({"topic": 1}, "input.topic must be a JSON string, and is a JSON integer"),
        ({"topic": None}, "input.topic must be a JSON string, and is a JSON null"),
        ({"topic": "x", "depth": "2"}, "input.depth must be a JSON integer, and is a JSON string"),
        ({"topic": "x", "depth": 2.0}, "input.depth must be a JSON integer, and is a JSON number"),
        (
            {"topic": "x", "depth": True},
            "input.depth must be a JSON integer, and is a JSON boolean",
        ),
        ({"topic": "x", "loud": 1}, "input.loud must be a JSON boolean, and is a JSON integer"),
        (
            ["x"],
            "the input is a JSON array, and the handler takes an object with the fields topic, "
            "depth, loud",
        ),
        ("x", "the input is a JSON string, and the handler takes an object with the fields"),
    ],
    ids=repr,
)
def test_fields_that_do_not_bind(value: Any, message: str) -> None:
    assert refused(fields, value).startswith(message)


def test_a_handler_without_parameters() -> None:
    assert call(lambda: "ran", None) == "ran"
    assert call(lambda: "ran", {}) == "ran"
    assert "which the handler does not take; it takes none" in refused(lambda: "ran", {"a": 1})
    assert "an object with the fields none" in refused(lambda: "ran", [])


def test_a_handler_that_takes_more() -> None:
    def handler(topic: str, **more: Any) -> Any:
        return topic, more

    assert call(handler, {"topic": "x", "a": 1, "more": 2}) == ("x", {"a": 1, "more": 2})
    assert call(lambda **all: all, {"a": 1}) == {"a": 1}
    assert call(lambda **all: all, None) == {}


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (float, [1, 1.5], ["1", True, None]),
        (int | None, [1, None], ["x", 1.5]),
        (Optional[str], ["x", None], [1]),  # noqa: UP045
        (Union[int, str], [1, "x"], [1.5, None]),  # noqa: UP007
        (list[int], [[], [1]], [["x"], {}, "x"]),
        (list, [[], ["x", 1]], [{}]),
        (dict[str, list[int]], [{"a": [1]}], [{"a": [1.5]}, []]),
        (Literal["a", 1, None], ["a", 1, None], ["b", True, 1.0]),
        (Annotated[int, "at least 1"], [1], ["x"]),
        (None, [None], [1]),
        (bool, [True], [1]),
        (Address, [{"city": "Bonn"}], [{}, 1]),
        (list[Address], [[{"city": "Bonn"}]], [[{}], {}]),
        (Address | None, [None, {"city": "Bonn"}], [{}]),
        (bytes, [1, "x", None], []),
        (Any, [1, "x", None], []),
    ],
    ids=str,
)
def test_hints(hint: Any, good: list[Any], bad: list[Any]) -> None:
    def handler(a, b=0):  # type: ignore[no-untyped-def]
        return a

    handler.__annotations__["a"] = hint
    for value in good:
        call(handler, {"a": value})
    for value in bad:
        assert refused(handler, {"a": value}).startswith("input.a")


def test_models_among_fields_are_built() -> None:
    def handler(to: Address, also: list[Address]) -> Any:
        return to, also

    value = {"to": {"city": "Bonn"}, "also": [{"city": "Köln"}]}
    assert call(handler, value) == (Address(city="Bonn"), [Address(city="Köln")])
    assert "input.also[1].city: Field required" in refused(
        handler, {**value, "also": [{"city": "x"}, {}]}
    )


# Annotations that cannot all be read


def test_a_return_type_for_type_checkers_only_costs_nothing() -> None:
    def handler(topic: str) -> OnlyForTypeCheckers:
        return topic

    assert call(handler, {"topic": "x"}) == "x"
    assert refused(handler, {"topic": 1}).startswith("input.topic must be a JSON string")


def test_a_parameter_for_type_checkers_only_takes_anything() -> None:
    def handler(thing: OnlyForTypeCheckers, n: int = 0) -> Any:
        return thing, n

    def alone(thing: OnlyForTypeCheckers) -> Any:
        return thing

    assert call(handler, {"thing": [1], "n": 1}) == ([1], 1)
    assert refused(handler, {"thing": 1, "n": "x"}).startswith("input.n")
    assert call(alone, {"thing": 5}) == 5
    assert InputBinder(alone).schema()["properties"] == {"thing": {}}


class Handler:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def handle(self, n: int) -> int:
        return n

    def __call__(self, payload: dict[str, Any]) -> Any:
        return payload


def test_methods_instances_and_partials() -> None:
    assert call(Handler().handle, {"n": 1}) == 1
    assert refused(Handler().handle, {"n": "x"}).startswith("input.n")
    assert call(Handler(), {"payload": 1}) == {"payload": 1}

    def two(a: int, b: str) -> Any:
        return a, b

    assert call(functools.partial(two, 1), {"b": "x"}) == (1, "x")
    assert refused(functools.partial(two, 1), {"b": 1}).startswith("input.b")


def test_a_wrapped_handler_keeps_its_types() -> None:
    def inner(n: int) -> int:
        return n

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> int:
        return inner(*args, **kwargs)

    assert call(outer, {"n": 1}) == 1
    assert refused(outer, {"n": "x"}).startswith("input.n")


# Shapes that no input can fill


def test_shapes_that_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the handler takes \*rest; an input has named fields"):
        InputBinder(lambda *rest: rest)

    def several(a: int, /, b: int) -> None: ...

    def one(a: int, /) -> None: ...

    for fn in (several, one):
        with pytest.raises(
            TypeError, match="the handler's a is positional-only; fields have names"
        ):
            InputBinder(fn)


# Schemas


def schema(fn: Callable[..., Any]) -> dict[str, Any]:
    found = InputBinder(fn).schema()
    assert set(references(found)) <= {f"#/$defs/{name}" for name in found.get("$defs", {})}
    return found


def references(schema: Any) -> Iterator[str]:
    """Every ``$ref`` in a schema; they are read from the root of the document."""
    if isinstance(schema, dict):
        yield from [v for k, v in schema.items() if k == "$ref"]
        for value in schema.values():
            yield from references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from references(value)


def test_the_schema_of_fields() -> None:
    def handler(
        topic: str,
        depth: int = 2,
        tags: list[str] | None = None,
        mode: Literal["a", "b"] = "a",
        more: dict[str, float] | None = None,
        odd: bytes = b"",
    ) -> None: ...

    assert schema(handler) == {
        "type": "object",
        "properties": {
            "topic": {"type": "string"},
            "depth": {"type": "integer"},
            "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
            "mode": {"enum": ["a", "b"]},
            "more": {
                "anyOf": [
                    {"type": "object", "additionalProperties": {"type": "number"}},
                    {"type": "null"},
                ]
            },
            "odd": {},
        },
        "required": ["topic"],
        "additionalProperties": False,
    }


def test_the_schema_of_raw_inputs() -> None:
    assert schema(anything) == {}
    assert schema(bare) == {}
    assert schema(mapping) == {"type": "object", "additionalProperties": {}}
    assert schema(lambda: 1) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert schema(lambda **more: 1)["additionalProperties"] is True


def test_the_schema_of_a_model() -> None:
    def handler(order: Order) -> None: ...

    assert schema(handler) == Order.model_json_schema()
    assert schema_of(Order) == Order.model_json_schema()
    assert schema_of({"type": "string"}) == {"type": "string"}
    assert schema_of(None) is None


def test_the_schema_of_models_among_fields() -> None:
    def handler(order: Order, spare: list[Order] | None = None) -> None: ...

    found = schema(handler)
    order = {k: v for k, v in Order.model_json_schema().items() if k != "$defs"}
    assert found["$defs"] == Order.model_json_schema()["$defs"]
    assert found["properties"]["order"] == order
    assert found["properties"]["spare"] == {
        "anyOf": [{"type": "array", "items": order}, {"type": "null"}]
    }
    assert list(references(found)) == ["#/$defs/Address"] * 2
