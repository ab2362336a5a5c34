"""The keywords that tools and steps share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Literal

from ..context import Effect
from ..wire import Idempotency, Kind

OnDenied = Literal["raise", "return"]
IdempotencyName = Literal["safe_to_retry", "at_most_once"]
Reconcile = Callable[[str, Any], Any]


@dataclasses.dataclass(frozen=True)
class EffectOptions:
    """How an effect is run; checked once, where the effect is defined.

    Raises:
        ValueError: a keyword has a value that makes no sense; the message says which.
        TypeError: one has the wrong type.
    """

    kind: Kind
    name: str
    idempotency: Idempotency
    retries: int
    timeout: float | None
    on_denied: OnDenied
    reconcile: Reconcile | None

    @classmethod
    def checked(
        cls,
        kind: Kind,
        name: Any,
        *,
        idempotency: str,
        retries: int,
        timeout: float | None,
        on_denied: str,
        reconcile: Reconcile | None,
        resources: Iterable[str] | None,
    ) -> EffectOptions:
        """Return the options, or say what is wrong with them."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"the name of a tool or step is non-empty text, not {name!r}")
        where = f"{name}: "
        try:
            mode = Idempotency(idempotency)
        except ValueError:
            raise ValueError(
                f"{where}idempotency is 'safe_to_retry' or 'at_most_once', not {idempotency!r}"
            ) from None
        if type(retries) is not int or retries < 0:
            raise ValueError(f"{where}retries is a number of tries from 0 up, not {retries!r}")
        if retries and mode is Idempotency.AT_MOST_ONCE:
            raise ValueError(
                f"{where}an at-most-once effect is never tried twice; set retries=0, or "
                "idempotency='safe_to_retry'"
            )
        if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout < 1e9):
            raise ValueError(f"{where}timeout is a number of seconds above 0, not {timeout!r}")
        if on_denied not in ("raise", "return"):
            raise ValueError(f"{where}on_denied is 'raise' or 'return', not {on_denied!r}")
        if reconcile is not None and not callable(reconcile):
            raise TypeError(f"{where}reconcile is a function of (step_id, args), not {reconcile!r}")
        if reconcile is not None and mode is not Idempotency.AT_MOST_ONCE:
            raise ValueError(
                f"{where}reconcile is asked about at-most-once effects; set "
                "idempotency='at_most_once', or leave it out"
            )
        if resources:
            raise ValueError(
                f"{where}resources={list(resources)!r} names resources that are not registered; "
                "this version registers none"
            )
        return cls(
            kind,
            name,
            mode,
            retries,
            timeout,
            "return" if on_denied == "return" else "raise",
            reconcile,
        )

    def effect(self, args: bytes, body: Callable[[], Any]) -> Effect:
        """Return the effect for one call."""
        return Effect(
            name=self.name,
            kind=self.kind,
            args=args,
            body=body,
            idempotency=self.idempotency,
            retries=self.retries,
            timeout=self.timeout,
            on_denied=self.on_denied,
            reconcile=self.reconcile,
        )
