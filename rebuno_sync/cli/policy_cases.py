"""Cases for a policy: steps, and what the bundle should say to each. Pure: text in, rows out.

A file of cases::

    agent_id: researcher            # of every case that names none of its own
    cases:
      - name: a search is free
        kind: tool_call             # the default; or llm_call, local
        target: web_search
        arguments: {query: tea}     # JSON; none by default
        expect: allow               # allow, deny or require_approval
      - name: nobody deletes
        agent_id: janitor
        target: delete_row
        expect: {decision: deny, rule: no-deletes, reason: never}

Values are read as JSON would be: ``no`` and ``2026-01-01`` are text, ``1.50`` is a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from rebuno_sync import wire
from rebuno_sync.kernel.policy import Bundle, Verdict
from rebuno_sync.wire import Event, Kind, Step

_ACTIONS: Final = ("allow", "deny", "require_approval")
_CASE_KEYS: Final = ("name", "agent_id", "kind", "target", "arguments", "expect")
_EXPECT_KEYS: Final = ("decision", "rule", "reason")
#: What the kernel decides by itself, whatever the bundle says.
_KERNELS_OWN: Final = "__"


class CasesError(ValueError):
    """A file of cases is malformed; the message names the case and the key."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A step and what is expected of it; an empty expectation holds for anything."""

    name: str
    agent_id: str
    kind: str
    target: str
    args: bytes
    decision: str
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
            ("decision", case.decision, verdict.action),
            ("rule", case.rule or verdict.rule_id, verdict.rule_id),
            ("reason", verdict.reason if case.reason is None else case.reason, verdict.reason),
        ):
            if expected != got:
                return f"expected the {name} {expected!r}, got {got!r}"
        return ""


def judge(bundle: Bundle, cases: Iterable[Case]) -> list[Outcome]:
    """Ask the bundle about each case."""
    return [Outcome(c, bundle.decide(c.agent_id, c.kind, c.target, c.args)) for c in cases]


def unreached(bundle: Bundle, outcomes: Iterable[Outcome]) -> list[str]:
    """Return the ids of the rules that decided no case, in their order."""
    reached = {outcome.verdict.rule_id for outcome in outcomes}
    return [r.verdict.rule_id for r in bundle.rules if r.verdict.rule_id not in reached]


def parse_cases(text: str) -> list[Case]:
    """Read a file of cases.

    Raises:
        CasesError: it is malformed.
    """
    try:
        content = yaml.load(text, Loader=_JsonLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise CasesError(f"not YAML: {exc}") from None
    _check_keys(content, "the file", ("agent_id", "cases"))
    agent_id = _text(content, "agent_id", "the file", default="")
    rows = content.get("cases")
    if not isinstance(rows, list) or not rows:
        raise CasesError("cases must be a list with at least one case")
    return [_case(row, number, agent_id) for number, row in enumerate(rows, start=1)]


def _case(row: Any, number: int, agent_id: str) -> Case:
    where = f"case {number}"
    _check_keys(row, where, _CASE_KEYS)
    name = _text(row, "name", where, default="")
    where = f"case {number} ({name})" if name else where
    kind = _text(row, "kind", where, default=Kind.TOOL_CALL.value)
    if kind not in [k.value for k in Kind]:
        raise CasesError(f"{where}: kind {kind!r} is not tool_call, llm_call or local")
    expect = row.get("expect")
    if isinstance(expect, str):
        expect = {"decision": expect}
    if expect is None:
        raise CasesError(f"{where} has no expect; give it allow, deny or require_approval")
    _check_keys(expect, f"{where}: expect", _EXPECT_KEYS)
    decision = _text(expect, "decision", f"{where}: expect")
    if decision not in _ACTIONS:
        raise CasesError(f"{where}: {decision!r} is not one of {', '.join(_ACTIONS)}")
    target = _text(row, "target", where)
    try:
        args = wire.encode(row.get("arguments"), "arguments")
    except TypeError as exc:
        raise CasesError(f"{where}: {exc}") from None
    return Case(
        name=name or f"{kind} {target}",
        agent_id=_text(row, "agent_id", where, default=agent_id),
        kind=kind,
        target=target,
        args=args,
        decision=decision,
        rule=_text(expect, "rule", f"{where}: expect", default=""),
        reason=_text(expect, "reason", f"{where}: expect") if "reason" in expect else None,
    )


def recorded_cases(agent_id: str, steps: Iterable[Step], events: Iterable[Event]) -> list[Case]:
    """Return the steps of an execution as cases that expect what was decided at the time.

    Left out is what no bundle decides: steps that the kernel refused by rules of its own, and
    those whose decision is not in the log.
    """
    decided: dict[str, tuple[str, str]] = {}
    actions = {"allowed": "allow", "denied": "deny", "awaiting_approval": "require_approval"}
    for event in events:
        group, _, what = event.type.partition(".")
        if group == "step" and what in actions:
            step_id = str(event.payload.get("step_id"))
            rule = str(event.payload.get("rule_id") or "")
            decided.setdefault(step_id, (actions[what], rule))
    cases = []
    for step in steps:
        decision, rule = decided.get(step.step_id, ("", _KERNELS_OWN))
        if not rule.startswith(_KERNELS_OWN):
            name = f"{step.kind} {step.target}"
            args = wire.encode(step.args, "args")
            cases.append(Case(name, agent_id, step.kind, step.target, args, decision))
    return cases


def _check_keys(content: Any, where: str, known: tuple[str, ...]) -> None:
    if not isinstance(content, Mapping):
        raise CasesError(f"{where} must have keys and values: {', '.join(known)}")
    for key in content:
        if key not in known:
            raise CasesError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def _text(content: Mapping[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = content.get(key, default)
    if value is None:
        raise CasesError(f"{where} has no {key}")
    if not isinstance(value, str) or (not value and default is None):
        raise CasesError(f"{where}: {key} must be text; quote it if it looks like a number")
    return value


class _JsonLoader(yaml.SafeLoader):
    """Reads an unquoted value as JSON would, or as text."""


_JsonLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in (
    ("null", r"null|~|", ["n", "~", ""]),
    ("bool", r"true|false", ["t", "f"]),
    ("int", r"-?(?:0|[1-9][0-9]*)", list("-0123456789")),
    ("float", r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?", list("-0123456789")),
):
    _JsonLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(rf"^(?:{_pattern})$"), _first
    )
