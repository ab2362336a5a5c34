"""Token buckets of rate limits (PROTOCOL 8)."""

from __future__ import annotations

from rebuno_sync.kernel.policy import RateLimit
from rebuno_sync.kernel.store import Transaction

#: What a wall clock in floating point may be off by, in seconds.
_TOLERANCE = 1e-6


def take(
    tx: Transaction, limit: RateLimit, rule_id: str, execution_id: str, agent_id: str
) -> float:
    """Take a token; return 0, or how many seconds it takes until there is one to take."""
    scope_id = {"execution": execution_id, "agent": agent_id, "global": ""}[limit.scope]
    key = (limit.scope, scope_id, rule_id)
    row = tx.one(
        "SELECT tokens, counted_at FROM buckets WHERE scope = ? AND scope_id = ? AND rule_id = ?",
        *key,
    )
    rate = limit.max_calls / limit.window
    tokens = float(limit.max_calls)
    if row is not None:
        passed = max(0.0, tx.now - row["counted_at"])
        tokens = min(tokens, row["tokens"] + passed * rate)
    wait = (1.0 - tokens) / rate
    if wait > _TOLERANCE:
        return wait
    tx.run("INSERT OR REPLACE INTO buckets VALUES (?, ?, ?, ?, ?)", *key, tokens - 1.0, tx.now)
    return 0.0


def forget(tx: Transaction, execution_id: str) -> None:
    """Drop the buckets of an execution that has ended."""
    tx.run("DELETE FROM buckets WHERE scope = 'execution' AND scope_id = ?", execution_id)
