"""A handler's signature is the schema of its input: binding one to the other.

Three shapes are understood: keyword fields; one pydantic model; one parameter that is bare or
annotated as ``dict`` or ``Any``, for the raw input.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from .functions import plain_callable

_RAW = (inspect.Parameter.empty, Any, dict, Mapping)
_MISSING = inspect.Parameter.empty


class InputInvalid(Exception):
    """The input does not fit the handler's signature; the message says where."""


class InputBinder:
    """Calls a handler with an execution's input.

    Args:
        fn: the handler.

    Raises:
        TypeError: its signature has a shape that no JSON input can fill.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        hints = _hints(fn)
        parameters = list(inspect.signature(fn).parameters.values())
        for p in parameters:
            if p.kind is p.VAR_POSITIONAL:
                raise TypeError(f"the handler takes *{p.name}; an input has named fields only")
        self._fields = {
            p.name: (hints.get(p.name, p.annotation), p.default)
            for p in parameters
            if p.kind is not p.VAR_KEYWORD
        }
        self._takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters)
        sole = parameters[0] if len(parameters) == 1 and not self._takes_more else None
        self._whole = sole if sole is not None and _takes_all(self._fields[sole.name][0]) else None
        for p in parameters:
            if p.kind is p.POSITIONAL_ONLY and p is not self._whole:
                raise TypeError(f"the handler's {p.name} is positional-only; fields have names")

    def call(self, value: Any) -> Any:
        """Call the handler with ``value``.

        Raises:
            InputInvalid: ``value`` does not fit; the handler was not called.
        """
        if self._whole is None:
            return self._fn(**self._bind(value))
        checked = _checked(value, self._fields[self._whole.name][0], "input")
        if self._whole.kind is inspect.Parameter.KEYWORD_ONLY:
            return self._fn(**{self._whole.name: checked})
        return self._fn(checked)

    def _bind(self, value: Any) -> dict[str, Any]:
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise InputInvalid(
                f"the input is {_kind(value)}, and the handler takes an object with the fields "
                f"{', '.join(self._fields) or 'none'}"
            )
        missing = [n for n, (_, d) in self._fields.items() if d is _MISSING and n not in value]
        if missing:
            raise InputInvalid(f"the input has no field {', '.join(map(repr, missing))}")
        unknown = [n for n in value if n not in self._fields]
        if unknown and not self._takes_more:
            raise InputInvalid(
                f"the input has the field {', '.join(map(repr, unknown))}, which the handler does "
                f"not take; it takes {', '.join(self._fields) or 'none'}"
            )
        return {
            name: _checked(field, self._fields[name][0], f"input.{name}")
            if name in self._fields
            else field
            for name, field in value.items()
        }

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the input (PROTOCOL 4, agent metadata)."""
        shared: dict[str, Any] = {}
        if self._whole is not None:
            schema = _schema(self._fields[self._whole.name][0], shared)
        else:
            required = [n for n, (_, default) in self._fields.items() if default is _MISSING]
            schema = {
                "type": "object",
                "properties": {n: _schema(hint, shared) for n, (hint, _) in self._fields.items()},
                **({"required": required} if required else {}),
                "additionalProperties": self._takes_more,
            }
        return {**schema, "$defs": shared} if shared else schema


def schema_of(kind: Any) -> Any:
    """Return the JSON schema for a pydantic model, or ``kind`` itself when it is a schema."""
    return kind.model_json_schema() if _is_model(kind) else kind


def _hints(fn: Callable[..., Any]) -> dict[str, Any]:
    """Return the type of each parameter whose annotation can be read here.

    One by one: a name that only a type checker sees, in the return type say, must not cost the
    other parameters their types.
    """
    target = plain_callable(inspect.unwrap(fn))
    target = getattr(target, "__func__", target)
    names = getattr(target, "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in getattr(target, "__annotations__", {}).items():
        alone = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints.update(typing.get_type_hints(alone, names))
        except (NameError, TypeError, AttributeError, SyntaxError):
            hints[name] = _Unknown
    return hints


class _Unknown:
    """Stands for a type that cannot be read; fits any value, and is no raw input."""


def _takes_all(hint: Any) -> bool:
    """Tell whether a handler's only parameter takes the input as a whole."""
    return _is_model(hint) or hint in _RAW or typing.get_origin(hint) in (dict, Mapping)


def _is_model(hint: Any) -> bool:
    # Recognised by what it has, so that pydantic is imported only by those who use it.
    return (
        isinstance(hint, type)
        and hasattr(hint, "__pydantic_validator__")
        and hasattr(hint, "model_validate")
    )


def _validated(model: Any, value: Any, path: str) -> Any:
    try:
        return model.model_validate(value)
    except ValueError as exc:
        errors = getattr(exc, "errors", None)
        if errors is None:
            raise InputInvalid(f"{path}: {exc}") from None
        rows = [
            f"{'.'.join([path, *map(str, e['loc'])])}: {e['msg']}"
            for e in errors(include_url=False, include_context=False)
        ]
        raise InputInvalid("; ".join(rows)) from None


_NAMES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
    type(None): "null",
}


def _kind(value: Any) -> str:
    return f"a JSON {_NAMES.get(type(value), type(value).__name__)}"


def _checked(value: Any, hint: Any, path: str) -> Any:
    """Return ``value`` when it fits ``hint``; hints that say nothing about JSON fit anything."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_model(hint):
        return _validated(hint, value, path)
    if origin is typing.Annotated:
        return _checked(value, args[0], path)
    if origin in (Union, types.UnionType):
        return _one_of(value, args, path)
    if origin is Literal:
        if not any(value == a and type(value) is type(a) for a in args):
            raise InputInvalid(f"{path} must be one of {', '.join(map(repr, args))}")
        return value
    expected = origin or hint
    if expected is None:
        expected = type(None)
    if expected is Mapping:
        expected = dict
    if expected not in _NAMES:
        return value
    if not _is(value, expected):
        raise InputInvalid(f"{path} must be a JSON {_NAMES[expected]}, and is {_kind(value)}")
    if expected is list and args:
        return [_checked(v, args[0], f"{path}[{i}]") for i, v in enumerate(value)]
    if expected is dict and len(args) == 2:
        return {k: _checked(v, args[1], f"{path}.{k}") for k, v in value.items()}
    return value


def _is(value: Any, expected: Any) -> bool:
    if expected is float:
        return type(value) in (int, float)
    return type(value) is expected


def _one_of(value: Any, hints: tuple[Any, ...], path: str) -> Any:
    problems = []
    for hint in hints:
        try:
            return _checked(value, hint, path)
        except InputInvalid as exc:
            problems.append(str(exc))
    raise InputInvalid("; or ".join(problems))


def _schema(hint: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one type; what models define for all goes into ``shared``."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if _is_model(hint):
        schema: dict[str, Any] = hint.model_json_schema()
        shared.update(schema.pop("$defs", {}))
        return schema
    if origin is typing.Annotated:
        return _schema(args[0], shared)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(a, shared) for a in args]}
    if origin is Literal:
        return {"enum": list(args)}
    expected = origin or hint
    if expected is None:
        expected = type(None)
    if expected is Mapping:
        expected = dict
    if expected not in _NAMES:
        return {}
    schema = {"type": _NAMES[expected]}
    if expected is list and args:
        schema["items"] = _schema(args[0], shared)
    if expected is dict and len(args) == 2:
        schema["additionalProperties"] = _schema(args[1], shared)
    return schema
