"""Token budgets as a rule states them: how many tokens its LLM calls may use."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias, cast

from rebuno_sync.kernel.policy_yaml import Field
from rebuno_sync.wire import Kind

Scope: TypeAlias = Literal["execution", "agent", "global"]

#: What SQLite holds in a sum of many of them.
_MOST_TOKENS = 10**15


@dataclasses.dataclass(frozen=True)
class TokenBudget:
    """How many tokens the LLM calls that one rule lets run may use.

    Attributes:
        max_tokens: tokens in and out together; a call that begins below it runs.
        scope: what has a budget of its own under the rule.
        window: how far back use counts, in seconds; ``None`` for all of it.
    """

    max_tokens: int
    scope: Scope = "execution"
    window: float | None = None

    @property
    def exceeded(self) -> str:
        """The stable reason of a refusal."""
        return f"{self.scope}_token_budget_exceeded"


def token_budgets(field: Field, action: str, step_kind: str | None) -> tuple[TokenBudget, ...]:
    """Read ``token_budget``: one budget, or a list with one for each scope.

    Args:
        field: the value.
        action: the decision of the rule.
        step_kind: the kind that the rule asks for, if any.

    Raises:
        BundleError: it is malformed, or the rule never lets an LLM call run.
    """
    if action == "deny":
        raise field.error("the rule denies, so nothing it decides uses tokens; remove it")
    if step_kind not in (None, Kind.LLM_CALL.value):
        raise field.error(f"{step_kind} steps use no tokens; put it on a rule for llm_call steps")
    items = field.items(empty="give it a budget, or leave it out") if field.is_list() else [field]
    budgets: list[TokenBudget] = []
    for item in items:
        budget = _token_budget(item)
        if budget.scope in [earlier.scope for earlier in budgets]:
            raise item.error(f"the rule has two budgets per {budget.scope}; keep one")
        budgets.append(budget)
    return tuple(budgets)


def _token_budget(field: Field) -> TokenBudget:
    fields = field.mapping(("max_tokens", "per_what", "window"))
    if "max_tokens" not in fields:
        raise field.error("it has no max_tokens; give it one, such as max_tokens: 100000")
    most = fields["max_tokens"].integer(least=1)
    if most > _MOST_TOKENS:
        raise fields["max_tokens"].error(f"{most} is too large; the most is {_MOST_TOKENS}")
    scope: Scope = "execution"
    if "per_what" in fields:
        scope = cast(Scope, fields["per_what"].choice(("execution", "agent", "global")))
    return TokenBudget(most, scope, fields["window"].duration() if "window" in fields else None)
