"""Tools: functions whose calls are recorded as steps of kind ``tool_call``."""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, overload

from .. import wire
from ..context import execution
from ..functions import require_plain_function
from ..wire import Kind
from .options import EffectOptions, IdempotencyName, OnDenied, Reconcile

P = ParamSpec("P")
T = TypeVar("T")


@overload
def tool(tool_id: Callable[P, T], /) -> Callable[P, T]: ...


@overload
def tool(
    tool_id: str | None = None,
    *,
    idempotency: IdempotencyName = "safe_to_retry",
    retries: int = 0,
    timeout: float | None = None,
    on_denied: OnDenied = "raise",
    reconcile: Reconcile | None = None,
    resources: Iterable[str] | None = None,
) -> Callable[[Callable[P, T]], Callable[P, T]]: ...


def tool(
    tool_id: Any = None,
    *,
    idempotency: IdempotencyName = "safe_to_retry",
    retries: int = 0,
    timeout: float | None = None,
    on_denied: OnDenied = "raise",
    reconcile: Reconcile | None = None,
    resources: Iterable[str] | None = None,
) -> Any:
    """Make each call of a function a step: submitted before it runs, recorded when it has.

    Used as ``@tool``, ``@tool()``, ``@tool("id")`` or ``@tool("id", idempotency=…)``. The
    function keeps its name, documentation, annotations and signature; ``__wrapped__`` is the
    plain function. The arguments are recorded by parameter name, defaults included, and a
    parameter called ``self`` or ``cls`` is left out. Calls return the result as it reads back
    from JSON, the first time as on every replay (PROTOCOL 5, 6).

    Args:
        tool_id: the name that policies, people and models see; the function's by default.
        idempotency: ``"at_most_once"`` for effects that must never be repeated. When an attempt
            dies inside one, the next finds the outcome unknown and raises ``ToolError`` with
            reason ``indeterminate``, or asks ``reconcile``.
        retries: how often a body that raises is run again, within the one step, with growing
            pauses; only the last outcome is recorded. Only for ``"safe_to_retry"``.
        timeout: seconds after which the step is recorded as failed, all tries together. The body
            is not stopped, since Python cannot stop a thread: the caller gets a ``ToolError``
            with reason ``timeout`` when the body ends, and when it never does, the lease runs
            out and the next attempt gets that error at once.
        on_denied: ``"return"`` turns a denial into the result ``<tool> not allowed. reason:
            <why>``, for loops in which a model reads the results.
        reconcile: called as ``reconcile(step_id, args)`` when the outcome of an at-most-once
            call is unknown; what it returns is recorded and becomes the result.
        resources: names of registered resources that the tool may change.

    Raises:
        TypeError: what is decorated is a coroutine function or a generator.
        ValueError: a keyword makes no sense.

    A call raises:
        RuntimeError: it is made outside an execution.
        TypeError: an argument has no JSON form; the message names the path, and nothing ran.
        PolicyError, RateLimited, ToolError, Blocked, Terminated, LeaseSuperseded.
    """

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        require_plain_function(fn, "@tool")
        options = EffectOptions.checked(
            Kind.TOOL_CALL,
            getattr(fn, "__name__", None) if tool_id is None or tool_id is fn else tool_id,
            idempotency=idempotency,
            retries=retries,
            timeout=timeout,
            on_denied=on_denied,
            reconcile=reconcile,
            resources=resources,
        )
        arguments = _Arguments(fn)

        @functools.wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            context = execution()
            encoded = wire.encode(arguments.named(args, kwargs), "args")
            body = functools.partial(fn, *args, **kwargs)
            result: T = context.perform(options.effect(encoded, body))
            return result

        return call

    return decorate(tool_id) if callable(tool_id) else decorate


class _Arguments:
    """Names the arguments of a call as the function's signature does."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._signature = inspect.signature(fn)
        parameters = list(self._signature.parameters.values())
        self._bound_to = {p.name for p in parameters[:1] if p.name in ("self", "cls")}
        self._extra = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        named = {k: v for k, v in bound.arguments.items() if k not in self._bound_to}
        if self._extra is not None:
            named.update(named.pop(self._extra))
        return named


def wrap_tool(
    name: str,
    invoke: Callable[[dict[str, Any]], Any],
    *,
    description: str = "",
    args_schema: Mapping[str, Any] | None = None,
    to_result: Callable[[Any], Any] | None = None,
    transform_args: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
    idempotency: IdempotencyName = "safe_to_retry",
    retries: int = 0,
    timeout: float | None = None,
    on_denied: OnDenied = "raise",
    reconcile: Reconcile | None = None,
    resources: Iterable[str] | None = None,
) -> Callable[..., Any]:
    """Make a recorded function of something that is not one: a framework's tool, a schema.

    The function takes keyword arguments. Its ``__name__``, ``__doc__``, ``__signature__`` and
    ``__input_schema__`` are what frameworks look at to offer it to a model.

    Args:
        name: the tool's id, with any prefix it should have.
        invoke: ``invoke(args)`` performs the call; ``args`` is the recorded dict.
        description: what the tool does, for people and models.
        args_schema: the JSON schema of the arguments, an object with ``properties``; ``None``
            for a tool without any.
        to_result: turns what ``invoke`` returns into a value that has a JSON form.
        transform_args: changes the arguments before they are recorded and passed on.
        idempotency, retries, timeout, on_denied, reconcile, resources: as for :func:`tool`.

    Raises:
        TypeError: ``invoke`` is a coroutine function, or ``args_schema`` is not an object schema.
        ValueError: a keyword makes no sense.
    """
    for given, what in (
        (invoke, "invoke"),
        (to_result, "to_result"),
        (transform_args, "transform_args"),
    ):
        if given is not None:
            require_plain_function(given, f"wrap_tool({what}=…)")
    options = EffectOptions.checked(
        Kind.TOOL_CALL,
        name,
        idempotency=idempotency,
        retries=retries,
        timeout=timeout,
        on_denied=on_denied,
        reconcile=reconcile,
        resources=resources,
    )
    signature = _signature_of(args_schema, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        context = execution()
        given = _keywords(signature, args, kwargs)
        recorded = transform_args(given) if transform_args is not None else given
        encoded = wire.encode(recorded, "args")

        def body() -> Any:
            value = invoke(recorded)
            return value if to_result is None else to_result(value)

        return context.perform(options.effect(encoded, body))

    call.__name__ = call.__qualname__ = name
    call.__doc__ = description or None
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {
        p.name: p.annotation for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    call.__input_schema__ = dict(args_schema or {"type": "object", "properties": {}})  # type: ignore[attr-defined]
    return call


_JSON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": None,
}


def _signature_of(schema: Mapping[str, Any] | None, name: str) -> inspect.Signature:
    properties = (schema or {}).get("properties", {})
    if not isinstance(properties, Mapping) or (schema or {}).get("type", "object") != "object":
        raise TypeError(
            f"{name}: args_schema is the JSON schema of an object with 'properties', not {schema!r}"
        )
    required = set((schema or {}).get("required", ()))
    parameters = [
        inspect.Parameter(
            key,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if key in required else _default(field),
            annotation=_annotation(field),
        )
        for key, field in properties.items()
        if key.isidentifier() and not keyword.iskeyword(key)
    ]
    if len(parameters) < len(properties) or (schema or {}).get("additionalProperties"):
        # Names that Python cannot spell still arrive as keywords.
        more = "more"
        while more in properties:
            more += "_"
        parameters.append(inspect.Parameter(more, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _default(field: Any) -> Any:
    return field.get("default") if isinstance(field, Mapping) else None


def _annotation(field: Any) -> Any:
    kind = field.get("type") if isinstance(field, Mapping) else None
    return _JSON_TYPES.get(kind, Any) if isinstance(kind, str) else Any


def _keywords(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments as given: absent ones stay absent, as a schema's defaults are hints."""
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        return _keywords(signature, (), dict(args[0]))
    signature.bind(*args, **kwargs)
    return kwargs
