"""Policy bundles (PROTOCOL 8)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rebuno_sync.kernel.policy import PERMISSIVE, Bundle, BundleError, RateLimit, Verdict
from rebuno_sync.kernel.policy_match import (
    argument_text,
    compile_glob,
    compile_regex,
    decode_arguments,
)
from rebuno_sync.kernel.policy_yaml import parse_duration

VECTORS = Path(__file__).parents[2] / "vectors"


def vectors(name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((VECTORS / f"{name}.json").read_text("utf-8"))
    assert rows
    return rows


def bundle(*rules: dict[str, Any], **top: Any) -> Bundle:
    return Bundle.parse(yaml.safe_dump({**top, "rules": list(rules)}, sort_keys=False))


def rule(
    id: str = "r", decision: str = "allow", *, when: Any = None, **then: Any
) -> dict[str, Any]:
    row: dict[str, Any] = {"id": id, "then": {"decision": decision, **then}}
    if when is not None:
        row["when"] = when
    return row


def decide(
    policy: Bundle,
    target: str = "t",
    args: bytes = b"{}",
    *,
    agent_id: str = "a",
    kind: str = "tool_call",
) -> Verdict:
    return policy.decide(agent_id, kind, target, args)


def matched(condition: dict[str, Any], args: bytes) -> bool:
    """Whether a rule with this condition on the argument ``x`` matches."""
    policy = bundle(rule(when={"arguments": {"x": condition}}))
    return decide(policy, args=args).rule_id == "r"


# Vectors


@pytest.mark.parametrize(
    "row", vectors("policy_glob"), ids=lambda r: f"{r['pattern']}~{r['target']}"
)
def test_glob_vectors(row: dict[str, Any]) -> None:
    if row.get("bad_pattern"):
        with pytest.raises(BundleError, match=r"rule 'r'.*when\.target.*malformed"):
            bundle(rule(when={"target": row["pattern"]}))
        return
    verdict = decide(bundle(rule(when={"target": row["pattern"]})), row["target"])
    assert verdict.action == ("allow" if row["match"] else "deny")


@pytest.mark.parametrize("row", vectors("policy_regex"), ids=lambda r: f"{r['regex']}~{r['text']}")
def test_regex_vectors(row: dict[str, Any]) -> None:
    if row.get("invalid_regex"):
        with pytest.raises(BundleError, match=r"rule 'r'.*when\.arguments\.x\.regex.*RE2"):
            matched({"regex": row["regex"]}, b"{}")
        return
    args = json.dumps({"x": row["text"]}).encode()
    assert matched({"regex": row["regex"]}, args) is row["match"]


@pytest.mark.parametrize("row", vectors("durations"), ids=lambda r: r["text"])
def test_duration_vectors(row: dict[str, Any]) -> None:
    if row.get("invalid"):
        with pytest.raises(ValueError, match="duration"):
            parse_duration(row["text"])
    else:
        assert parse_duration(row["text"]) == pytest.approx(row["seconds"], rel=1e-15, abs=0)


@pytest.mark.parametrize("row", vectors("argument_text"), ids=lambda r: r["value_json"])
def test_argument_text_vectors(row: dict[str, Any]) -> None:
    args = b'{"x":' + row["value_json"].encode() + b"}"
    assert argument_text(decode_arguments(args)["x"]) == row["compared_as"]
    assert matched({"equals": str(row["compared_as"])}, args)
    assert not matched({"equals": row["compared_as"] + "!"}, args)


# Globs


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("fs/*", "fs/a/b", True),
        ("a?b", "a/b", True),
        ("*", "", True),
        ("?", "", False),
        ("?", "日", True),
        ("a*", "a\nb", True),
        ("[^a]", "/", True),
        ("[^a]", "\n", True),
        ("[a-cx]z", "xz", True),
        ("[a-cx]z", "dz", False),
        ("[z-a]", "m", False),
        ("[^z-a]", "m", True),
        ("[z-ab]", "b", True),
        (r"[\]]", "]", True),
        (r"[\-a]", "-", True),
        ("[[]", "[", True),
        ("[a^]", "^", True),
        ("[*]", "*", True),
        ("[*]", "a", False),
        ("]", "]", True),
        ("a.c", "abc", False),
        ("(a|b)+$", "(a|b)+$", True),
        (r"\a", "a", True),
        (r"\\", "\\", True),
        ("*a*b*", "xxaxxbxx", True),
        ("*ab", "aab", True),
        ("\0", "\0", True),
    ],
)
def test_glob(pattern: str, text: str, expected: bool) -> None:
    assert compile_glob(pattern)(text) is expected


@pytest.mark.parametrize(
    "pattern", ["[", "[]", "[]a]", "[^]", "[a", "[a-", "[a-]", "[-a]", "[a--]", "\\", "x[a\\", "*["]
)
def test_a_malformed_glob_is_refused_at_load_even_behind_what_never_matches(pattern: str) -> None:
    for glob in (pattern, "never" + pattern, "*never?" + pattern):
        with pytest.raises(ValueError, match=r"."):
            compile_glob(glob)


def reference_glob(tokens: list[Any], text: str) -> bool:
    """The definition of a match, tried in every way."""
    if not tokens:
        return not text
    first, rest = tokens[0], tokens[1:]
    if first == "*":
        return any(reference_glob(rest, text[i:]) for i in range(len(text) + 1))
    if not text:
        return False
    if first != "?":
        negated, held = first
        if (text[0] in held) is negated:
            return False
    return reference_glob(rest, text[1:])


LETTERS = "ab/-]["
GLOB_TOKENS = st.lists(
    st.one_of(
        st.just(("*", "*")),
        st.just(("?", "?")),
        st.sampled_from(LETTERS).map(lambda c: (f"\\{c}", (False, {c}))),
        st.tuples(st.booleans(), st.lists(st.sampled_from(LETTERS), min_size=1, max_size=3)).map(
            lambda t: (
                f"[{'^' if t[0] else ''}{''.join(chr(92) + c for c in t[1])}]",
                (t[0], set(t[1])),
            )
        ),
    ),
    max_size=6,
)


@given(GLOB_TOKENS, st.text(alphabet=LETTERS, max_size=8))
def test_glob_agrees_with_the_definition(tokens: list[Any], text: str) -> None:
    pattern = "".join(written for written, _ in tokens)
    assert compile_glob(pattern)(text) is reference_glob([meant for _, meant in tokens], text)


# Conditions


def test_first_match_wins_from_top_to_bottom() -> None:
    policy = bundle(rule("one", "deny", when={"target": "a*"}), rule("two", when={"target": "*"}))
    assert decide(policy, "ab").rule_id == "one"
    assert decide(policy, "b").rule_id == "two"


def test_priority_orders_when_every_rule_has_one() -> None:
    low, high = {**rule("low"), "priority": -1}, {**rule("high"), "priority": 5}
    assert decide(bundle(high, low)).rule_id == "low"


def test_priority_does_not_order_when_a_rule_has_none() -> None:
    assert decide(bundle({**rule("first"), "priority": 5}, rule("second"))).rule_id == "first"
    rows = ({**rule("first"), "priority": 5}, {**rule("second"), "priority": 1}, rule("third"))
    assert decide(bundle(*rows)).rule_id == "first"


def test_every_condition_must_hold() -> None:
    when = {
        "target": "web_*",
        "agent_id": "researcher",
        "step_kind": "tool_call",
        "arguments": {"q": {"equals": "x"}},
    }
    policy = bundle(rule(when=when))
    good: dict[str, Any] = {
        "agent_id": "researcher",
        "kind": "tool_call",
        "target": "web_get",
        "args": b'{"q":"x"}',
    }
    assert policy.decide(**good).rule_id == "r"
    for change in (
        {"agent_id": "other"},
        {"kind": "llm_call"},
        {"target": "get"},
        {"args": b'{"q":"y"}'},
        {"args": b"{}"},
    ):
        assert policy.decide(**{**good, **change}).rule_id == "default", change


def test_plural_fields_match_any_of_their_elements() -> None:
    policy = bundle(rule(when={"targets": ["a*", "b"], "agent_ids": ["x", "y"]}))
    assert decide(policy, "abc", agent_id="y").rule_id == "r"
    assert decide(policy, "b", agent_id="x").rule_id == "r"
    assert decide(policy, "c", agent_id="x").rule_id == "default"
    assert decide(policy, "b", agent_id="z").rule_id == "default"


def test_singular_and_plural_must_both_match() -> None:
    policy = bundle(rule(when={"target": "a*", "targets": ["*b", "*c"]}))
    assert decide(policy, "axb").rule_id == "r"
    assert decide(policy, "ax").rule_id == "default"
    assert decide(policy, "xb").rule_id == "default"


def test_agent_ids_are_compared_whole_not_as_globs() -> None:
    assert decide(bundle(rule(when={"agent_id": "a*"})), agent_id="ab").rule_id == "default"


def test_every_constraint_of_a_predicate_must_hold() -> None:
    condition = {"contains": "b", "one_of": ["abc", "cba", "xyz"], "regex": "^a"}
    assert matched(condition, b'{"x":"abc"}')
    assert not matched(condition, b'{"x":"cba"}')
    assert not matched(condition, b'{"x":"xyz"}')
    assert not matched(condition, b'{"x":"ab"}')
    assert not matched({**condition, "equals": "cba"}, b'{"x":"abc"}')


@pytest.mark.parametrize("args", [b"", b"null", b"[1]", b'"x"', b"3", b"{}", b'{"X":"a"}'])
def test_an_argument_must_be_present(args: bytes) -> None:
    assert not matched({"regex": ""}, args)


def test_a_null_argument_is_present() -> None:
    assert matched({"equals": "<nil>"}, b'{"x":null}')


def test_the_last_of_duplicate_argument_keys_counts() -> None:
    assert matched({"equals": "b"}, b'{"x":"a","x":"b"}')


def test_undecodable_arguments_read_as_replacement_characters() -> None:
    assert matched({"equals": "a\ufffd\ufffdb"}, b'{"x":"a\xff\\ud800b"}')
    assert matched({"equals": "\U0001f333"}, b'{"x":"\\ud83c\\udf33"}')
    assert matched({"regex": "^\ufffd$"}, b'{"x":"\\udc00"}')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"1234567.5", "1.2345675e+06"),
        (b"999999.5", "999999.5"),
        (b"-20000000", "-2e+07"),
        (b"1e15", "1e+15"),
        (b"1e400", "+Inf"),
        (b"-1e400", "-Inf"),
        (b"5e-324", "5e-324"),
        (b"9" * 5000, "+Inf"),
        (b'{"\xe6\x97\xa5":1,"z":null}', "map[z:<nil> 日:1]"),
    ],
    ids=lambda v: str(v[:20]),
)
def test_argument_text(value: bytes, text: str) -> None:
    assert argument_text(decode_arguments(b'{"x":' + value + b"}")["x"]) == text


def test_the_text_of_nested_values_takes_no_stack() -> None:
    deep: Any = 1.0
    for _ in range(20_000):
        deep = [deep, {"a": True}]
    text = argument_text(deep)
    assert text.startswith("[" * 20_000 + "1 map[a:true]] map[a:true]]")
    assert argument_text({"b": [], "a": {"d": "x", "c": None}}) == "map[a:map[c:<nil> d:x] b:[]]"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_number_reads_back_the_same(value: float) -> None:
    text = argument_text(value)
    assert float(text) == value
    mantissa, _, exponent = text.partition("e")
    assert ("e" in text) is (value != 0 and not 1e-4 <= abs(value) < 1e6)
    if exponent:
        assert len(mantissa.lstrip("-").partition(".")[0]) == 1
        assert exponent[0] in "+-"
        assert len(exponent) >= 3


@pytest.mark.parametrize("args", [b"{", b'{"x":NaN}', b'{"x":"\n"}', b"[" * 100_000])
def test_a_step_whose_arguments_cannot_be_read_is_denied_where_a_rule_asks(args: bytes) -> None:
    policy = bundle(
        rule("no", "deny", when={"target": "danger", "arguments": {"x": {"equals": "y"}}}),
        rule("rest"),
    )
    assert decide(policy, "danger", args) == Verdict("deny", "no", "arguments_unreadable")
    assert decide(policy, "harmless", args).rule_id == "rest"


# Verdicts


def test_no_bundle_allows_everything() -> None:
    for kind in ("tool_call", "llm_call", "local"):
        assert PERMISSIVE.decide("a", kind, "t", b"{}") == Verdict("allow", "permissive")


@pytest.mark.parametrize("action", ["deny", "block", "Allow", "off"])
def test_any_default_but_allow_denies(action: str) -> None:
    expected = Verdict("deny", "default", "no explicit allow rule matched")
    assert decide(Bundle.parse(f"default_action: {action}")) == expected
    assert decide(Bundle.parse("rules: []")) == expected


def test_default_allow() -> None:
    assert decide(Bundle.parse("default_action: allow")) == Verdict("allow", "default")


def test_an_unmatched_local_step_is_allowed_and_a_matched_one_is_not_special() -> None:
    policy = bundle(rule("no", "deny", when={"target": "now"}))
    assert decide(policy, "uuid", kind="local") == Verdict("allow", "local")
    assert decide(policy, "now", kind="local").rule_id == "no"


def test_a_denial_without_a_reason_has_the_default_one() -> None:
    assert decide(bundle(rule("no", "deny"))) == Verdict("deny", "no", "policy_denied")
    assert decide(bundle(rule("no", "deny", reason="never"))).reason == "never"


def test_everything_that_a_verdict_can_say() -> None:
    config = {"approvers": ["alice", "bob"], "timeout": "5m", "message": "look"}
    limit = {
        "max_calls": 5,
        "window": "1m",
        "per_what": "global",
        "max_wait": "30s",
        "on_limiter_error": "allow",
    }
    policy = bundle(
        rule("ask", "require_approval", reason="why", approval_config=config, rate_limit=limit)
    )
    assert decide(policy) == Verdict(
        "require_approval",
        "ask",
        "why",
        ("alice", "bob"),
        300.0,
        "look",
        RateLimit(5, 60.0, "global", 30.0, "allow"),
    )


def test_what_a_rate_limit_leaves_out() -> None:
    policy = bundle(rule(rate_limit={"max_calls": 1, "window": "1h"}))
    assert decide(policy).rate_limit == RateLimit(1, 3600.0, "execution", 0.0, "deny")


def test_the_example_of_the_protocol() -> None:
    policy = Bundle.parse("""
    default_action: deny            # or allow; anything but allow means deny
    rules:
      - id: limit-search            # required, unique
        when:                       # every field present must match; absent = any
          target: web_*             # glob; also targets: [..]
          agent_id: researcher      # also agent_ids: [..]
          step_kind: tool_call
          arguments:                # each key must be present in args
            command: { equals: lsx, contains: s, one_of: [lsx, ..], regex: '^ls' }
        then:
          decision: allow           # allow | deny | require_approval
          reason: text
          approval_config: { approvers: [alice], timeout: 5m, message: text }
          rate_limit: { max_calls: 5, window: 1m, per_what: execution, max_wait: 30s,
                        on_limiter_error: allow }
    """)
    verdict = policy.decide("researcher", "tool_call", "web_get", b'{"command":"lsx"}')
    assert verdict.action == "allow"
    assert verdict.rule_id == "limit-search"
    assert verdict.rate_limit == RateLimit(5, 60.0, "execution", 30.0, "allow")


# YAML


def test_scalars_have_the_text_they_were_written_with() -> None:
    policy = Bundle.parse("""
    rules:
      - id: on
        when: {target: off, arguments: {on: {one_of: [yes, 12:30, 2024-01-01, "010", true, 1.5]}}}
        then: {decision: deny, reason: no}
    """)
    for value in (b'"yes"', b'"12:30"', b'"2024-01-01"', b'"010"', b"true", b"1.5"):
        verdict = decide(policy, "off", b'{"on":' + value + b"}")
        assert (verdict.rule_id, verdict.reason) == ("on", "no"), value
    assert decide(policy, "off", b'{"on":8}').rule_id == "default"


@pytest.mark.parametrize(
    ("written", "compared_as"),
    [
        ("20000000", "2e+07"),
        ("1.0", "1"),
        ("1e3", "1000"),
        ("010", "10"),
        ("1_000", "1000"),
        ("0x10", "16"),
        ("-0o17", "-15"),
        ("True", "true"),
        ("+5", "5"),
    ],
)
def test_an_unquoted_number_that_would_never_match_is_refused(
    written: str, compared_as: str
) -> None:
    text = "rules: [{id: r, when: {arguments: {x: {%s}}}, then: {decision: deny}}]"
    for condition in ("equals: %s", "one_of: [%s]"):
        with pytest.raises(BundleError, match=r"compared as") as caught:
            Bundle.parse(text % (condition % written))
        assert repr(compared_as) in str(caught.value)
        Bundle.parse(text % (condition % f"'{written}'"))


def test_anchors_and_merge_keys() -> None:
    policy = Bundle.parse("""
    rules:
      - id: one
        when: &when {target: a, step_kind: tool_call}
        then: &then {decision: deny, reason: first}
      - id: two
        when: {<<: *when, target: b}
        then: {<<: [{reason: second}, *then]}
      - {id: three, when: {target: c}, then: *then}
    """)
    assert decide(policy, "b") == Verdict("deny", "two", "second")
    assert decide(policy, "b", kind="llm_call").rule_id == "default"
    assert decide(policy, "c") == Verdict("deny", "three", "first")


THEN = "then: {decision: allow}"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ["bundle", "empty"]),
        ("# nothing", ["bundle", "empty"]),
        ("rules: [{id: x}", ["YAML", "line 1"]),
        ("a: 1\n---\nb: 2", ["YAML"]),
        ("- id: x", ["bundle", "a list"]),
        ("allow", ["bundle", "'allow'"]),
        ("default_action: [allow]", ["default_action", "a list"]),
        ("rules:", ["rules", "nothing"]),
        ("rules: {id: x}", ["rules", "expected a list"]),
        ("rule: []", ["unknown key 'rule'", "default_action, rules"]),
        ("rules: []\nrules: []", ["'rules'", "twice", "line 2"]),
        ("rules: [x]", ["rule number 1", "'x'"]),
        (f"rules: [{{id: x, {THEN}}}, {{{THEN}}}]", ["rule number 2", "no id"]),
        (f"rules: [{{id: '', {THEN}}}]", ["rule number 1", "id", "empty"]),
        (f"rules: [{{id: [a], {THEN}}}]", ["rule number 1", "id", "a list"]),
        (f"rules: [{{id: x, {THEN}}}, {{id: x, {THEN}}}]", ["rule 'x'", "same id"]),
        (f"rules: [&r {{id: x, {THEN}}}, {{<<: *r}}]", ["same id"]),
        (f"rules: [{{id: x, {THEN}, {THEN}}}]", ["rule 'x'", "'then'", "twice"]),
        (f"rules: [{{id: x, wen: {{}}, {THEN}}}]", ["rule 'x'", "'wen'", "known are", "when"]),
        ("rules: [{id: x}]", ["rule 'x'", "no then"]),
        (f"rules: [{{id: x, priority: high, {THEN}}}]", ["rule 'x'", "priority", "integer"]),
        (f"rules: [{{id: x, priority: '1', {THEN}}}]", ["rule 'x'", "priority", "integer"]),
        (f"rules: [{{id: x, priority: 1.0, {THEN}}}]", ["rule 'x'", "priority", "integer"]),
        (f"rules: [{{id: x, priority: true, {THEN}}}]", ["rule 'x'", "priority", "integer"]),
        (
            f"rules: [{{id: x, priority: 1, {THEN}}}, {{id: y, priority: 1, {THEN}}}]",
            ["'x'", "'y'", "priority 1", "each its own"],
        ),
        ("rules: [{id: x, then: {}}]", ["rule 'x'", "then", "decision"]),
        ("rules: [{id: x, then: {decision: maybe}}]", ["rule 'x'", "then.decision", "'maybe'"]),
        ("rules: [{id: x, then: {decision: ~}}]", ["rule 'x'", "then.decision", "nothing"]),
        ("rules: [{id: x, then: {decision: !foo allow}}]", ["then.decision", "tag !foo"]),
        ("rules: [{id: x, then: {decision: !!binary YQ==}}]", ["then.decision"]),
        ("rules: [{id: x, then: !foo {decision: allow}}]", ["then", "tag !foo"]),
        ("rules: [{id: x, then: {decision: deny, reason: {a: b}}}]", ["then.reason"]),
        ("rules: [{id: x, then: {decision: deny, because: y}}]", ["then", "'because'"]),
        ('rules: [{id: x, then: {decision: deny, reason: "\\uD800"}}]', ["then.reason", "pair"]),
        (f"rules: [{{id: x, when: ~, {THEN}}}]", ["rule 'x'", "when", "nothing"]),
        (f"rules: [{{id: x, when: [], {THEN}}}]", ["rule 'x'", "when", "keys and values"]),
        (f"rules: [{{id: x, when: {{kind: local}}, {THEN}}}]", ["when", "'kind'"]),
        (f"rules: [{{id: x, when: {{step_kind: shell}}, {THEN}}}]", ["when.step_kind", "'shell'"]),
        (f"rules: [{{id: x, when: {{target: }}, {THEN}}}]", ["when.target", "nothing"]),
        (f"rules: [{{id: x, when: {{target: [a]}}, {THEN}}}]", ["when.target", "a list"]),
        (f"rules: [{{id: x, when: {{target: 'a['}}, {THEN}}}]", ["when.target", "'a['"]),
        (f"rules: [{{id: x, when: {{targets: a}}, {THEN}}}]", ["when.targets", "a list"]),
        (f"rules: [{{id: x, when: {{targets: []}}, {THEN}}}]", ["when.targets", "leave it out"]),
        (f"rules: [{{id: x, when: {{targets: [a, '[']}}, {THEN}}}]", ["when.targets[1]", "'['"]),
        (f"rules: [{{id: x, when: {{agent_ids: []}}, {THEN}}}]", ["when.agent_ids", "empty"]),
        (f"rules: [{{id: x, when: {{arguments: [a]}}, {THEN}}}]", ["when.arguments", "a list"]),
        (f"rules: [{{id: x, when: {{arguments: {{a: b}}}}, {THEN}}}]", ["when.arguments.a", "'b'"]),
        (
            f"rules: [{{id: x, when: {{arguments: {{a: {{}}}}}}, {THEN}}}]",
            ["rule 'x'", "when.arguments.a", "no constraint", "equals"],
        ),
        (
            f"rules: [{{id: x, when: {{arguments: {{a: {{equal: b}}}}}}, {THEN}}}]",
            ["when.arguments.a", "'equal'"],
        ),
        (
            f"rules: [{{id: x, when: {{arguments: {{a: {{equals: }}}}}}, {THEN}}}]",
            ["when.arguments.a.equals", "nothing"],
        ),
        (
            f"rules: [{{id: x, when: {{arguments: {{a: {{one_of: []}}}}}}, {THEN}}}]",
            ["when.arguments.a.one_of", "never match"],
        ),
        (
            f"rules: [{{id: x, when: {{arguments: {{a: {{regex: '['}}}}}}, {THEN}}}]",
            ["when.arguments.a.regex", "'['", "RE2"],
        ),
        (
            f"rules: [{{id: x, when: {{arguments: {{? [a] : {{equals: b}}}}}}, {THEN}}}]",
            ["when.arguments", "key"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, approval_config: {approvers: ann}}}]",
            ["then.approval_config.approvers", "list"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, approval_config: {approvers: []}}}]",
            ["then.approval_config.approvers", "anyone"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, approval_config: {timeout: 1d}}}]",
            ["then.approval_config.timeout", "'1d'", "1h30m"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, approval_config: {timeout: 0s}}}]",
            ["then.approval_config.timeout", "longer than 0"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, approval_config: {timeout: -1s}}}]",
            ["then.approval_config.timeout", "longer than 0"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: {window: 1m}}}]",
            ["then.rate_limit", "max_calls: 5"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: {max_calls: 5}}}]",
            ["then.rate_limit", "window: 1m"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: {max_calls: 0, window: 1m}}}]",
            ["then.rate_limit.max_calls", "least is 1"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: {max_calls: 010, window: 1m}}}]",
            ["then.rate_limit.max_calls", "'010'"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: {max_calls: 1, window: 60}}}]",
            ["then.rate_limit.window", "'60'", "30s"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: "
            "{max_calls: 1, window: 1s, max_wait: -1s}}}]",
            ["then.rate_limit.max_wait", "0 or longer"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: "
            "{max_calls: 1, window: 1s, per_what: tool}}}]",
            ["then.rate_limit.per_what", "'tool'", "execution, agent, global"],
        ),
        (
            "rules: [{id: x, then: {decision: deny, rate_limit: "
            "{max_calls: 1, window: 1s, on_limiter_error: on}}}]",
            ["then.rate_limit.on_limiter_error", "'on'"],
        ),
        (f"rules: [{{id: x, when: &w {{<<: *w}}, {THEN}}}]", ["when", "merge"]),
        (f"rules: [{{id: x, when: {{<<: a}}, {THEN}}}]", ["when", "'a'"]),
        ('rules: "\\UFFFFFFFF"', ["YAML"]),
        ("%YAML " + "1" * 5000 + ".1\n--- {}", ["YAML"]),
        ("[" * 5000, ["nested too deeply"]),
        ("a: \x07", ["YAML"]),
        ("\ud800", ["YAML"]),
    ],
)
def test_a_malformed_bundle_is_refused_with_its_place(text: str, names: list[str]) -> None:
    with pytest.raises(BundleError) as caught:
        Bundle.parse(text)
    for name in names:
        assert name in str(caught.value)


def test_a_message_names_the_line() -> None:
    with pytest.raises(BundleError, match=r"rule 'b': then\.decision: .*\(line 6\)"):
        Bundle.parse(
            "rules:\n- id: a\n  then: {decision: deny}\n- id: b\n  then:\n    decision: x\n"
        )


def test_a_refused_regular_expression_prints_nothing() -> None:
    code = (
        "from rebuno_sync.kernel.policy_match import compile_regex\n"
        "for pattern in ('(?=x)', 'a{1001}', '(', 'a' * 3000000):\n"
        "    try: compile_regex(pattern)\n"
        "    except ValueError: pass\n"
        "    else: raise SystemExit(pattern)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout + done.stderr == b""


def test_a_regular_expression_takes_linear_time() -> None:
    # A backtracking engine would not come back from this one.
    assert not compile_regex("^(a+)+$")("a" * 50_000 + "b")
    assert not compile_glob("*a" * 40 + "b")("a" * 5_000)


# Whatever is sent

KEYS = st.sampled_from(
    """default_action rules id priority when then target targets agent_id agent_ids step_kind
    arguments equals contains one_of regex decision reason approval_config approvers timeout message
    rate_limit max_calls window per_what max_wait on_limiter_error <<""".split()  # noqa: SIM905
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["allow", "deny", "1m", "[a", "(", "local", "x*"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=20,
)
WHEN = st.dictionaries(KEYS, VALUES, max_size=3)
RULES = st.fixed_dictionaries(
    {"id": st.text(max_size=3)},
    optional={"when": WHEN | VALUES, "then": WHEN | VALUES, "priority": VALUES},
)
PIECES = st.lists(
    st.sampled_from(
        r"""rules id when then : - { } [ ] &a *a << !!str ! | > ' " \ % # ? , ~ --- ...""".split()  # noqa: SIM905
    )
    | st.sampled_from([" ", "\n", "\t", "- "])
    | st.text(max_size=3),
    max_size=30,
).map("".join)


@given(
    PIECES
    | st.text()
    | VALUES.map(lambda v: yaml.safe_dump(v, allow_unicode=True))
    | st.lists(RULES, max_size=3).map(lambda rows: json.dumps({"rules": rows}))
)
def test_parsing_raises_nothing_but_bundle_error(text: str) -> None:
    try:
        parsed = Bundle.parse(text)
    except BundleError:
        return
    assert decide(parsed).action in ("allow", "deny", "require_approval")


DEMANDING = bundle(
    rule("a", when={"arguments": {"x": {"equals": "1"}}}),
    rule("b", when={"targets": ["[^a]*", "?"], "arguments": {"": {"contains": "a"}}}),
    rule("c", when={"step_kind": "local", "arguments": {"x": {"regex": r"\pL+"}}}),
    rule("d", "require_approval", when={"agent_ids": ["", "a"]}),
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["x", "", "y"]) | st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(
    st.text(),
    st.sampled_from(["tool_call", "llm_call", "local"]) | st.text(max_size=5),
    st.text() | st.text(alphabet="\ud800\udfffab/*[", max_size=5),
    st.binary() | JSON_VALUES.map(lambda v: json.dumps(v).encode()),
)
def test_deciding_never_raises(agent_id: str, kind: str, target: str, args: bytes) -> None:
    for policy in (DEMANDING, PERMISSIVE):
        verdict = policy.decide(agent_id, kind, target, args)
        assert verdict.action in ("allow", "deny", "require_approval")
