"""Agents and their policies as the page shows them."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from rebuno_sync.kernel import queries
from rebuno_sync.kernel.page_data import by_status
from rebuno_sync.kernel.policy import Bundle, BundleError, Verdict
from rebuno_sync.kernel.store import Transaction


@dataclasses.dataclass(frozen=True)
class RuleLine:
    """A rule as people read it: its conditions as names and texts, and its verdict."""

    conditions: Sequence[tuple[str, str]]
    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy: its rules in the order in which they are tried, and its own text."""

    text: str
    rules: Sequence[RuleLine]
    unmatched: str
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class AgentCard:
    """An agent, its policy, and how many executions it has in which status."""

    row: sqlite3.Row
    policy: Policy | None
    counts: dict[str, int]


def agent_cards(tx: Transaction) -> list[AgentCard]:
    """Return all agents."""
    return [agent_card(tx, row) for row in queries.agents(tx)]


def agent_card(tx: Transaction, row: sqlite3.Row) -> AgentCard:
    """Return what there is to say about an agent, given its row."""
    text = row["policy"]
    policy = None if text is None else read_policy(text)
    return AgentCard(row, policy, by_status(tx, {"agent_id": row["id"]}))


def read_policy(text: str) -> Policy:
    """Return a bundle as people read it."""
    try:
        bundle = Bundle.parse(text)
    except BundleError as exc:  # stored by a version that read it otherwise
        return Policy(text, (), "", problem=str(exc))
    # Every scalar as the text it was written with, which is how the bundle itself was read.
    written = yaml.load(text, Loader=yaml.BaseLoader)  # text alone  # nosec B506
    when = {rule["id"]: rule.get("when") or {} for rule in written.get("rules") or ()}
    return Policy(
        text,
        [
            RuleLine(list(_conditions(when.get(r.verdict.rule_id) or {})), r.verdict)
            for r in bundle.rules
        ],
        bundle.unmatched.action,
    )


def _conditions(when: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in when.items():
        if name == "arguments" and isinstance(value, dict):
            for argument, predicate in value.items():
                told = predicate.items() if isinstance(predicate, dict) else ()
                yield argument, " and ".join(f"{how} {_text(what)}" for how, what in told)
        else:
            yield name.replace("_", " "), _text(value)


def _text(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)
