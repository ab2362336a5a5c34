"""Cases for a policy: steps, what a bundle says to each, and whether that was expected.

Pure: decoded JSON or YAML in, outcomes out. The command line reads cases from a file, the kernel
from a request, and both judge them here. Nothing is recorded and nothing counted: rate limits and
token budgets are taken as not used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final

from rebuno_sync import wire
from rebuno_sync.kernel.policy import Bundle, Verdict
from rebuno_sync.wire import Kind

_ACTIONS: Final = ("allow", "deny", "require_approval")
_EXPECT_KEYS: Final = ("decision", "rule", "reason")


class CasesError(ValueError):
    """Cases are malformed; the message names the case and the key."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step and what is expected of it; an empty expectation holds for anything."""

    name: str
    agent_id: str
    kind: str
    target: str
    args: bytes
    decision: str = ""
    rule: str = ""
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a bundle said to a case."""

    case: Case
    verdict: Verdict

    @property
    def mismatch(self) -> str:
        """What differs from the expectation, or ``""``."""
        case, verdict = self.case, self.verdict
        for name, expected, got in (
            ("decision", case.decision or verdict.action, verdict.action),
            ("rule", case.rule or verdict.rule_id, verdict.rule_id),
            ("reason", verdict.reason if case.reason is None else case.reason, verdict.reason),
        ):
            if expected != got:
                return f"expected the {name} {expected!r}, got {got!r}"
        return ""

    def record(self) -> dict[str, Any]:
        """Return the outcome as JSON."""
        return {
            "name": self.case.name,
            "agent_id": self.case.agent_id,
            "kind": self.case.kind,
            "target": self.case.target,
            "expected": self.case.decision or None,
            "decision": self.verdict.action,
            "rule": self.verdict.rule_id,
            "reason": self.verdict.reason,
            "mismatch": self.mismatch or None,
        }


def judge(bundle: Bundle, cases: Iterable[Case]) -> list[Outcome]:
    """Ask the bundle about each case."""
    return [Outcome(c, bundle.decide(c.agent_id, c.kind, c.target, c.args)) for c in cases]


def unreached(bundle: Bundle, outcomes: Iterable[Outcome]) -> list[str]:
    """Return the ids of the rules that decided no case, in their order."""
    reached = {outcome.verdict.rule_id for outcome in outcomes}
    return [r.verdict.rule_id for r in bundle.rules if r.verdict.rule_id not in reached]


def cases_of(rows: Any, agent_id: str, *, args: str, expect: bool) -> list[Case]:
    """Read cases.

    Args:
        rows: the decoded list of them.
        agent_id: of every case that names none of its own.
        args: the key that holds the arguments of the step.
        expect: whether every case must have an expectation.

    Raises:
        CasesError: they are malformed.
    """
    if not isinstance(rows, list) or not rows:
        raise CasesError("cases must be a list with at least one case")
    return [_case(row, number, agent_id, args, expect) for number, row in enumerate(rows, start=1)]


def _case(row: Any, number: int, agent_id: str, args_key: str, must_expect: bool) -> Case:
    where = f"case {number}"
    check_keys(row, where, ("name", "agent_id", "kind", "target", args_key, "expect"))
    name = text(row, "name", where, default="")
    where = f"case {number} ({name})" if name else where
    kind = text(row, "kind", where, default=Kind.TOOL_CALL.value)
    if kind not in [k.value for k in Kind]:
        raise CasesError(f"{where}: kind {kind!r} is not tool_call, llm_call or local")
    target = text(row, "target", where)
    try:
        args = wire.encode(row.get(args_key), args_key)
    except TypeError as exc:
        raise CasesError(f"{where}: {exc}") from None
    case = Case(
        name=name or f"{kind} {target}",
        agent_id=text(row, "agent_id", where, default=agent_id),
        kind=kind,
        target=target,
        args=args,
    )
    expected = row.get("expect")
    if expected is None and must_expect:
        raise CasesError(f"{where} has no expect; give it allow, deny or require_approval")
    return case if expected is None else _expecting(case, expected, where)


def _expecting(case: Case, expected: Any, where: str) -> Case:
    if isinstance(expected, str):
        expected = {"decision": expected}
    where_of_it = f"{where}: expect"
    check_keys(expected, where_of_it, _EXPECT_KEYS)
    decision = text(expected, "decision", where_of_it)
    if decision not in _ACTIONS:
        raise CasesError(f"{where}: {decision!r} is not one of {', '.join(_ACTIONS)}")
    return dataclasses.replace(
        case,
        decision=decision,
        rule=text(expected, "rule", where_of_it, default=""),
        reason=text(expected, "reason", where_of_it) if "reason" in expected else None,
    )


def check_keys(content: Any, where: str, known: tuple[str, ...]) -> None:
    """Refuse what is no mapping, or has a key that is not ``known``.

    Raises:
        CasesError: it is so.
    """
    if not isinstance(content, Mapping):
        raise CasesError(f"{where} must have keys and values: {', '.join(known)}")
    for key in content:
        if key not in known:
            raise CasesError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def text(content: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    """Return a value that must be text; without a ``default`` it must be there.

    Raises:
        CasesError: it is not.
    """
    value = content.get(key, default)
    if value is None:
        raise CasesError(f"{where} has no {key}")
    if not isinstance(value, str) or (not value and default is None):
        raise CasesError(f"{where}: {key} must be text; quote it if it looks like a number")
    return value
