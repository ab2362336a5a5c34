"""Policy bundles: which steps run, which are refused, which a person decides (PROTOCOL 8).

Pure: text in, verdicts out. Token buckets and approvals are kept by whoever asks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, Literal, TypeAlias, cast

from rebuno_sync.kernel.policy_budget import Scope, TokenBudget, token_budgets
from rebuno_sync.kernel.policy_match import (
    Matcher,
    argument_text,
    compile_glob,
    compile_regex,
    decode_arguments,
)
from rebuno_sync.kernel.policy_yaml import BundleError, Field
from rebuno_sync.wire import Kind

__all__ = ["PERMISSIVE", "Action", "Bundle", "BundleError", "RateLimit", "Rule", "Verdict"]

Action: TypeAlias = Literal["allow", "deny", "require_approval"]

_NO_RULE_MATCHED: Final = "no explicit allow rule matched"


@dataclasses.dataclass(frozen=True)
class RateLimit:
    """A token bucket.

    Attributes:
        max_calls: how many calls it holds.
        window: how long it takes to refill from empty, in seconds.
        scope: what has a bucket of its own under the rule.
        max_wait: how long a step over the limit may park for a refill, in seconds; 0 for never.
        on_limiter_error: what happens to a step when the bucket cannot be asked.
    """

    max_calls: int
    window: float
    scope: Scope = "execution"
    max_wait: float = 0.0
    on_limiter_error: Literal["allow", "deny"] = "deny"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a bundle says to one step.

    Attributes:
        action: what is to happen.
        rule_id: the rule that said so, or ``default``, ``local``, ``permissive``.
        reason: why, in the rule's words.
        approvers: who may decide the approval; empty for anyone.
        approval_timeout: how long the approval waits, in seconds; ``None`` for as long as needed.
        approval_message: what the approver is shown.
        rate_limit: the limit that the step has to pass first.
        token_budgets: what must be left for an LLM call to run.
    """

    action: Action
    rule_id: str
    reason: str = ""
    approvers: tuple[str, ...] = ()
    approval_timeout: float | None = None
    approval_message: str = ""
    rate_limit: RateLimit | None = None
    token_budgets: tuple[TokenBudget, ...] = ()


@dataclasses.dataclass(frozen=True)
class Predicate:
    """What one argument must be. Every constraint that is there must hold."""

    equals: str | None = None
    contains: str | None = None
    one_of: frozenset[str] | None = None
    regex: Matcher | None = None

    def holds(self, text: str) -> bool:
        """Tell whether an argument that is compared as ``text`` satisfies every constraint."""
        return (
            (self.equals is None or text == self.equals)
            and (self.contains is None or self.contains in text)
            and (self.one_of is None or text in self.one_of)
            and (self.regex is None or self.regex(text))
        )


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule: what it looks for, and its verdict. An empty condition holds for any step."""

    verdict: Verdict
    targets: tuple[tuple[Matcher, ...], ...] = ()
    agent_ids: tuple[frozenset[str], ...] = ()
    step_kind: str | None = None
    arguments: tuple[tuple[str, Predicate], ...] = ()
    priority: int | None = None

    def covers(self, agent_id: str, kind: str, target: str) -> bool:
        """Tell whether every condition but those on arguments holds."""
        return (
            (self.step_kind is None or kind == self.step_kind)
            and all(agent_id in ids for ids in self.agent_ids)
            and all(any(matches(target) for matches in globs) for globs in self.targets)
        )

    def accepts(self, arguments: dict[str, Any]) -> bool:
        """Tell whether every condition on arguments holds."""
        return all(
            name in arguments and predicate.holds(argument_text(arguments[name]))
            for name, predicate in self.arguments
        )


@dataclasses.dataclass(frozen=True)
class Bundle:
    """A policy: rules in the order in which they are tried, and what happens when none matches.

    Attributes:
        warnings: what may not mean what its author thinks, each a sentence.
    """

    rules: tuple[Rule, ...]
    unmatched: Verdict
    unmatched_local: Verdict
    warnings: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Bundle:
        """Read a bundle from YAML.

        Raises:
            BundleError: anything in it is malformed or unknown.
        """
        fields = Field.document(text).mapping(("default_action", "rules"))
        unmatched = Verdict("deny", "default", reason=_NO_RULE_MATCHED)
        warnings: tuple[str, ...] = ()
        if "default_action" in fields:
            action = fields["default_action"].text()
            if action == "allow":
                unmatched = Verdict("allow", "default")
            elif action != "deny":
                warnings = (
                    f"default_action {action!r:.100} means deny, as all but allow does;"
                    " write allow or deny",
                )
        return cls(
            rules=_rules(fields["rules"]) if "rules" in fields else (),
            unmatched=unmatched,
            unmatched_local=Verdict("allow", "local"),
            warnings=warnings,
        )

    def decide(self, agent_id: str, kind: str, target: str, args: bytes) -> Verdict:
        """Return the verdict on a step.

        Args:
            agent_id: whose step it is.
            kind: the kind of the step.
            target: the name of the tool, model or local step.
            args: its arguments as JSON, decoded only when a rule asks for them. Where they cannot
                be read, that rule might have denied: the step is denied.
        """
        arguments: dict[str, Any] | None = None
        for rule in self.rules:
            if not rule.covers(agent_id, kind, target):
                continue
            if not rule.arguments:
                return rule.verdict
            try:
                if arguments is None:
                    arguments = decode_arguments(args)
                if rule.accepts(arguments):
                    return rule.verdict
            except (ValueError, RecursionError):
                return Verdict("deny", rule.verdict.rule_id, reason="arguments_unreadable")
        return self.unmatched_local if kind == Kind.LOCAL.value else self.unmatched


#: The policy of an agent that has none.
PERMISSIVE: Final = Bundle(
    rules=(),
    unmatched=Verdict("allow", "permissive"),
    unmatched_local=Verdict("allow", "permissive"),
)


def _rules(field: Field) -> tuple[Rule, ...]:
    rules: list[Rule] = []
    seen: set[str] = set()
    for number, item in enumerate(field.items(empty=""), start=1):
        rule_id = item.peek("id")
        item = item.named(f"rule {rule_id!r}" if rule_id else f"rule number {number}")
        rule = _rule(item)
        if rule.verdict.rule_id in seen:
            raise item.error("an earlier rule has the same id; give each its own")
        seen.add(rule.verdict.rule_id)
        rules.append(rule)
    return _ordered(rules, field)


def _ordered(rules: list[Rule], field: Field) -> tuple[Rule, ...]:
    """Order by priority, where every rule has one."""
    by_priority: dict[int, Rule] = {}
    for rule in rules:
        if rule.priority is None:
            return tuple(rules)
        if rule.priority in by_priority:
            first, second = by_priority[rule.priority].verdict.rule_id, rule.verdict.rule_id
            raise field.error(
                f"{first!r} and {second!r} both have the priority {rule.priority}; "
                "give each its own"
            )
        by_priority[rule.priority] = rule
    return tuple(by_priority[priority] for priority in sorted(by_priority))


def _rule(field: Field) -> Rule:
    fields = field.mapping(("id", "priority", "when", "then"))
    if "id" not in fields:
        raise field.error("it has no id; give it one that no other rule has")
    rule_id = fields["id"].text()
    if not rule_id:
        raise fields["id"].error("it is empty; give the rule one that no other rule has")
    if "then" not in fields:
        raise field.error("it has no then; give it one, with a decision")
    when: dict[str, Field] = {}
    if "when" in fields:
        when = fields["when"].mapping(
            ("target", "targets", "agent_id", "agent_ids", "step_kind", "arguments")
        )
    targets: list[tuple[Matcher, ...]] = []
    if "target" in when:
        targets.append((_glob(when["target"]),))
    if "targets" in when:
        items = when["targets"].items(empty="leave it out to match every target")
        targets.append(tuple(_glob(item) for item in items))
    agent_ids: list[frozenset[str]] = []
    if "agent_id" in when:
        agent_ids.append(frozenset((when["agent_id"].text(),)))
    if "agent_ids" in when:
        items = when["agent_ids"].items(empty="leave it out to match every agent")
        agent_ids.append(frozenset(item.text() for item in items))
    arguments: dict[str, Field] = {}
    if "arguments" in when:
        arguments = when["arguments"].mapping()
    step_kind = None
    if "step_kind" in when:
        step_kind = when["step_kind"].choice([k.value for k in Kind])
    return Rule(
        verdict=_verdict(rule_id, fields["then"], step_kind),
        targets=tuple(targets),
        agent_ids=tuple(agent_ids),
        step_kind=step_kind,
        arguments=tuple((name, _predicate(value)) for name, value in arguments.items()),
        priority=fields["priority"].integer() if "priority" in fields else None,
    )


def _glob(field: Field) -> Matcher:
    pattern = field.text()
    try:
        return compile_glob(pattern)
    except ValueError as exc:
        raise field.error(f"the glob {pattern!r} is malformed: {exc}") from None


def _predicate(field: Field) -> Predicate:
    fields = field.mapping(("equals", "contains", "one_of", "regex"))
    if not fields:
        raise field.error(
            "it has no constraint; give it equals, contains, one_of or regex "
            "(regex: '' matches any value)"
        )
    equals = contains = one_of = regex = None
    if "equals" in fields:
        equals = fields["equals"].compared_text()
    if "contains" in fields:
        contains = fields["contains"].text()
    if "one_of" in fields:
        items = fields["one_of"].items(empty="it would never match")
        one_of = frozenset(item.compared_text() for item in items)
    if "regex" in fields:
        pattern = fields["regex"].text()
        try:
            regex = compile_regex(pattern)
        except ValueError as exc:
            raise fields["regex"].error(f"{pattern!r} is not an RE2 expression: {exc}") from None
    return Predicate(equals, contains, one_of, regex)


def _verdict(rule_id: str, field: Field, step_kind: str | None) -> Verdict:
    fields = field.mapping(("decision", "reason", "approval_config", "rate_limit", "token_budget"))
    if "decision" not in fields:
        raise field.error("it has no decision; give it allow, deny or require_approval")
    action = cast(Action, fields["decision"].choice(("allow", "deny", "require_approval")))
    reason = fields["reason"].text() if "reason" in fields else ""
    if action == "deny":
        reason = reason or "policy_denied"
    approval: dict[str, Field] = {}
    if "approval_config" in fields:
        approval = fields["approval_config"].mapping(("approvers", "timeout", "message"))
    approvers: tuple[str, ...] = ()
    if "approvers" in approval:
        items = approval["approvers"].items(empty="leave it out to let anyone decide")
        approvers = tuple(item.text() for item in items)
    return Verdict(
        action=action,
        rule_id=rule_id,
        reason=reason,
        approvers=approvers,
        approval_timeout=approval["timeout"].duration() if "timeout" in approval else None,
        approval_message=approval["message"].text() if "message" in approval else "",
        rate_limit=_rate_limit(fields["rate_limit"]) if "rate_limit" in fields else None,
        token_budgets=token_budgets(fields["token_budget"], action, step_kind)
        if "token_budget" in fields
        else (),
    )


def _rate_limit(field: Field) -> RateLimit:
    fields = field.mapping(("max_calls", "window", "per_what", "max_wait", "on_limiter_error"))
    for name, example in (("max_calls", "5"), ("window", "1m")):
        if name not in fields:
            raise field.error(f"it has no {name}; give it one, such as {name}: {example}")
    limit = RateLimit(fields["max_calls"].integer(least=1), fields["window"].duration())
    if "per_what" in fields:
        scope = cast(Scope, fields["per_what"].choice(("execution", "agent", "global")))
        limit = dataclasses.replace(limit, scope=scope)
    if "max_wait" in fields:
        limit = dataclasses.replace(limit, max_wait=fields["max_wait"].duration(zero=True))
    if "on_limiter_error" in fields:
        answer = cast(
            Literal["allow", "deny"], fields["on_limiter_error"].choice(("allow", "deny"))
        )
        limit = dataclasses.replace(limit, on_limiter_error=answer)
    return limit
