"""Local steps: work of the handler itself that must come out the same on every replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from .. import wire
from ..context import execution
from ..functions import require_plain_function
from ..wire import Kind
from .options import EffectOptions, IdempotencyName, OnDenied, Reconcile

T = TypeVar("T")


def step(
    name: str,
    fn: Callable[..., T],
    args: Mapping[str, Any] | None = None,
    *,
    idempotency: IdempotencyName = "safe_to_retry",
    retries: int = 0,
    timeout: float | None = None,
    on_denied: OnDenied = "raise",
    reconcile: Reconcile | None = None,
    resources: Iterable[str] | None = None,
) -> T:
    """Run ``fn(**args)`` once and record its result as a step of kind ``local``.

    For what influences the rest of the handler and could come out differently the next time:
    the time, a random choice, a fresh id, a read of the database.

    Args:
        name: the step's name.
        fn: a plain function; its result must have a JSON form and is returned as it reads back.
        args: what ``fn`` is called with; part of the step's identity, so a call with other
            arguments is another step.
        idempotency, retries, timeout, on_denied, reconcile, resources: as for ``tool``.

    Raises:
        RuntimeError: called outside an execution.
        TypeError: ``fn`` is not a plain function, or an argument has no JSON form.
        PolicyError, RateLimited, ToolError, Blocked, Terminated, LeaseSuperseded.
    """
    require_plain_function(fn, "step()")
    options = EffectOptions.checked(
        Kind.LOCAL,
        name,
        idempotency=idempotency,
        retries=retries,
        timeout=timeout,
        on_denied=on_denied,
        reconcile=reconcile,
        resources=resources,
    )
    context = execution()
    given = dict(args or {})
    result: T = context.perform(options.effect(wire.encode(given, "args"), lambda: fn(**given)))
    return result
