"""Cases for a policy from a file, or from what an execution did. Pure: text in, cases out.

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

import re
from collections.abc import Iterable, Mapping
from typing import Final

import yaml

from rebuno_sync import wire
from rebuno_sync.kernel.policy_budget import TokenBudget
from rebuno_sync.kernel.policy_cases import Case, CasesError, cases_of, check_keys, text
from rebuno_sync.wire import Event, Step

#: What the kernel decides by itself, whatever the bundle says.
_KERNELS_OWN: Final = "__"
#: What a rule refuses by what was used, not by what the step is.
_BUDGET_REASONS: Final = frozenset(
    TokenBudget(1, scope).exceeded for scope in ("execution", "agent", "global")
)


def parse_cases(content: str) -> list[Case]:
    """Read a file of cases.

    Raises:
        CasesError: it is malformed.
    """
    try:
        decoded = yaml.load(content, Loader=_JsonLoader)  # a SafeLoader  # nosec B506
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise CasesError(f"not YAML: {exc}") from None
    check_keys(decoded, "the file", ("agent_id", "cases"))
    agent_id = text(decoded, "agent_id", "the file", default="")
    return cases_of(decoded.get("cases"), agent_id, args="arguments", expect=True)


def recorded_cases(agent_id: str, steps: Iterable[Step], events: Iterable[Event]) -> list[Case]:
    """Return the steps of an execution as cases that expect what was decided at the time.

    Left out is what no bundle decides: steps that the kernel refused by rules of its own or for
    a token budget, and those whose decision is not in the log.
    """
    decided: dict[str, tuple[str, str]] = {}
    actions = {"allowed": "allow", "denied": "deny", "awaiting_approval": "require_approval"}
    for event in events:
        group, _, what = event.type.partition(".")
        if group == "step" and what in actions:
            step_id = str(event.payload.get("step_id"))
            rule = str(event.payload.get("rule_id") or "")
            error = event.payload.get("error")
            if isinstance(error, Mapping) and error.get("reason") in _BUDGET_REASONS:
                rule = _KERNELS_OWN
            decided.setdefault(step_id, (actions[what], rule))
    cases = []
    for step in steps:
        decision, rule = decided.get(step.step_id, ("", _KERNELS_OWN))
        if not rule.startswith(_KERNELS_OWN):
            name = f"{step.kind} {step.target}"
            args = wire.encode(step.args, "args")
            cases.append(Case(name, agent_id, step.kind, step.target, args, decision))
    return cases


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
