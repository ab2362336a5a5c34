"""What LLM calls used, and whether there is some of a budget left.

A step counts for the rule that let it run, so that each rule has a budget of its own in each
scope. It is entered when it begins and gets its figure with its outcome, in the transactions of
these: what is counted is what is on record. Calls that run at the same time do not know of each
other, and each may begin below the limit.
"""

from __future__ import annotations

import logging
import sqlite3

from rebuno_sync.kernel import usage
from rebuno_sync.kernel.policy import Verdict
from rebuno_sync.kernel.policy_budget import TokenBudget
from rebuno_sync.kernel.store import Transaction
from rebuno_sync.wire import Kind

_log = logging.getLogger(__name__)

_HOUR = 3600.0


def check(
    tx: Transaction, verdict: Verdict, kind: str, execution_id: str, agent_id: str
) -> Verdict:
    """Return ``verdict``, or a denial where a budget of its rule is used up."""
    if kind != Kind.LLM_CALL.value:
        return verdict
    for budget in verdict.token_budgets:
        if used(tx, verdict.rule_id, budget, execution_id, agent_id) >= budget.max_tokens:
            return Verdict("deny", verdict.rule_id, reason=budget.exceeded)
    return verdict


def used(
    tx: Transaction, rule_id: str, budget: TokenBudget, execution_id: str, agent_id: str
) -> int:
    """Return how many tokens of a budget are used."""
    column, scope_id = {
        "execution": ("execution_id", execution_id),
        "agent": ("agent_id", agent_id),
        "global": ("rule_id", rule_id),
    }[budget.scope]
    since = 0.0 if budget.window is None else tx.now - budget.window
    row = tx.one(
        "SELECT coalesce(sum(tokens), 0) AS tokens FROM token_usage"
        f" WHERE rule_id = ? AND {column} = ? AND used_at > ?",
        rule_id,
        scope_id,
        since,
    )
    assert row is not None
    return int(row["tokens"])


def begin(
    tx: Transaction, step_id: str, kind: str, execution_id: str, agent_id: str, verdict: Verdict
) -> None:
    """Enter an LLM call that may run, or may once a person has let it."""
    if kind != Kind.LLM_CALL.value or verdict.action == "deny":
        return
    tx.insert(
        "token_usage",
        {
            "step_id": step_id,
            "execution_id": execution_id,
            "agent_id": agent_id,
            "rule_id": verdict.rule_id,
            "limited": len(verdict.token_budgets) > 0,
            "tokens": 0,
            "used_at": tx.now,
        },
    )


def record(tx: Transaction, step: sqlite3.Row, outcome: str, succeeded: bool) -> None:
    """Count what an LLM call used; ``outcome`` is the raw JSON of its result or error."""
    if step["kind"] != Kind.LLM_CALL.value:
        return
    tokens = usage.tokens_used(outcome)
    tx.run(
        "UPDATE token_usage SET tokens = ?, used_at = ? WHERE step_id = ?",
        tokens or 0,
        tx.now,
        step["step_id"],
    )
    if tokens is None and succeeded:
        entry = tx.one("SELECT limited FROM token_usage WHERE step_id = ?", step["step_id"])
        if entry is not None and entry["limited"]:
            _log.warning(
                "step %s of %s tells no token usage and does not count for its budget; when"
                " streaming from OpenAI, ask for it: stream_options={'include_usage': True}",
                step["step_id"],
                step["target"],
            )


def fold(tx: Transaction, execution_id: str) -> None:
    """Forget which calls an execution made that is deleted, but not what they used.

    Sums by hour stay, as of their latest call, so that deleting gives no budget back.
    """
    tx.run(
        "INSERT INTO token_usage"
        " (step_id, execution_id, agent_id, rule_id, limited, tokens, used_at)"
        " SELECT 'hour ' || CAST(used_at / ? AS INTEGER) || ' ' || length(agent_id) || ' '"
        " || agent_id || ' ' || rule_id, '', agent_id, rule_id, 0, sum(tokens), max(used_at)"
        " FROM token_usage WHERE execution_id = ? AND tokens > 0 GROUP BY 1"
        " ON CONFLICT (step_id) DO UPDATE SET tokens = tokens + excluded.tokens,"
        " used_at = max(used_at, excluded.used_at)",
        _HOUR,
        execution_id,
    )
    tx.run("DELETE FROM token_usage WHERE execution_id = ?", execution_id)
