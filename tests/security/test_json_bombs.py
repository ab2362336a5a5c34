"""JSON that is made to cost: depth, length, numbers without end, doubled keys."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rebuno_sync import NetworkError, signing, wire
from rebuno_sync.kernel import identity, jsontext
from rebuno_sync.transport import Answer
from rebuno_sync.wire import MAX_BODY_BYTES
from tests.unit.kernel.agent_double import Caller, Webhooks

DEEP = 9_000


def seconds(work: Any) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def nested(size: int) -> bytes:
    return b"[" * DEEP + b'"' + b"a" * size + b'"' + b"]" * DEEP


@pytest.mark.parametrize("read", [identity.canonical_json, lambda v: jsontext.split_object(v)])
def test_what_lies_deep_is_not_copied_by_every_level(read: Any) -> None:
    """Against itself: 9000 copies of 4 MB would take a thousand times as long as none."""
    wrap = (lambda v: v) if read is identity.canonical_json else (lambda v: b'{"x":%b}' % v)
    shallow = wrap(b'["' + b"a" * 4_000_000 + b'"]')
    few = min(seconds(lambda: read(wrap(nested(1)))) for _ in range(3))
    alone = min(seconds(lambda: read(shallow)) for _ in range(3))
    assert seconds(lambda: read(wrap(nested(4_000_000)))) < 20 * (few + alone) + 0.2


def test_long_integers_do_not_take_the_square_of_their_length() -> None:
    body = b"[" + b",".join([b"9" * 50_000] * 20) + b"]"
    plain = b"[" + b",".join([b"9" * 500] * 2000) + b"]"
    assert seconds(lambda: wire.decode(body)) < 60 * seconds(lambda: wire.decode(plain)) + 0.5


@pytest.mark.parametrize("sign", ["", "-"])
def test_integers_beyond_what_is_read_are_infinite(sign: str) -> None:
    longest = f"{sign}{'9' * 100_000}".encode()
    assert abs(wire.decode(longest)) == 10**100_000 - 1
    assert wire.decode(longest + b"9") == float(f"{sign}inf")
    assert wire.decode(b"[%s1e999999]" % sign.encode()) == [float(f"{sign}inf")]


def test_a_number_that_cannot_be_sent_is_refused_by_its_place() -> None:
    assert len(wire.encode(10**99_999, "args")) == 100_000
    with pytest.raises(TypeError, match="args holds an integer of more than 100000 digits"):
        wire.encode({"n": [-(10**100_000)]}, "args")
    with pytest.raises(TypeError, match=r"args\.n is inf"):
        wire.encode({"n": math.inf}, "args")


@pytest.mark.parametrize(
    "body", [b"[" * 200_000, b'{"a":' * 200_000, b"[" * 200_000 + b"]" * 200_000]
)
def test_an_answer_of_depth_is_no_answer(body: bytes) -> None:
    with pytest.raises(NetworkError, match="nested too deeply"):
        Answer(200, {}, body).json()


BOMBS: dict[str, bytes] = {
    "open brackets": b"[" * 100_000,
    "open braces": b'{"a":' * 100_000,
    "balanced": b"[" * 100_000 + b"]" * 100_000,
    "an infinite number": b"1e999999",
    "a long integer": b"9" * 100_000,
    "a long fraction": b"0." + b"9" * 100_000,
    "a long exponent": b"1e" + b"9" * 100_000,
    "minus": b"-" * 100_000,
    "a lone surrogate": b'"\\ud800"',
    "an open escape": b'"' + b"\\" * 100_001,
    "NaN": b"NaN",
    "not UTF-8": b'"\xff\xfe"',
    "NUL": b"\0",
    "doubled keys": b"{" + b",".join([b'"a":1'] * 20_000) + b"}",
}
#: Every body that a route takes, with the field that may be anything, or must be something.
BODIES: list[tuple[str, str, str, str]] = [
    ("client", "POST", "/v0/executions", '{"agent_id":"a1","input":%}'),
    ("client", "POST", "/v0/executions", '{"agent_id":%}'),
    ("client", "POST", "/v0/executions", '{"agent_id":"a1","spawned_by":%}'),
    ("client", "POST", "/v0/executions", '{"agent_id":"a1","session":%}'),
    ("client", "POST", "/v0/executions", "%"),
    ("client", "POST", "/v0/agents", '{"id":"a3","webhook_url":"http://h/","secret":%}'),
    (
        "client",
        "POST",
        "/v0/agents",
        '{"id":"a3","webhook_url":"http://h/","secret":"s","lease_timeout_seconds":%}',
    ),
    ("client", "POST", "/v0/policies/a1", '{"bundle":%}'),
    ("client", "POST", "/v0/policies/a1/test", '{"cases":[{"target":"t","args":%}]}'),
    ("client", "POST", "/v0/policies/a1/test", '{"cases":%}'),
    ("client", "POST", "/v0/api-keys", '{"name":"n","scopes":%}'),
    ("agent", "POST", "{execution}/steps", '{"kind":"local","target":"t","args":%}'),
    ("agent", "POST", "{execution}/steps", '{"kind":%,"target":"t"}'),
    ("agent", "POST", "{execution}/steps", '{"kind":"local","target":"t","resources":%}'),
    ("agent", "POST", "{execution}/steps/s/complete", '{"result":%}'),
    ("agent", "POST", "{execution}/steps/s/fail", '{"error":%}'),
    ("agent", "POST", "{execution}/steps/s/stream", '{"seq":%,"data":"x"}'),
    ("agent", "POST", "{execution}/steps/s/stream", '{"seq":0,"data":%}'),
    ("agent", "POST", "{execution}/heartbeat", "%"),
    ("agent", "POST", "{execution}/complete", '{"output":1,"surprise":%}'),
    ("agent", "POST", "{execution}/fail", '{"error":%,"error":[]}'),
    ("agent", "PUT", "/v0/agents/a1/metadata", '{"input_schema":%,"x":1}'),
]


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_no_bomb_brings_a_route_down(bomb: bytes, caller: Caller, webhooks: Webhooks) -> None:
    id = caller.client("POST", "/v0/executions", {"agent_id": "a1"}).json()["id"]
    lease = webhooks.next()
    for who, method, route, form in BODIES:
        path = route.replace("{execution}", f"/v0/executions/{id}")
        body = form.encode().replace(b"%", bomb)
        if who == "agent":
            answer = caller.agent(method, path, body, lease=lease)
        else:
            answer = caller.client(method, path, body)
        assert answer.status_code < 500, (path, form, answer.text[:200])
        if answer.status_code >= 400:
            told = answer.json()
            assert set(told) == {"code", "message"}
            assert len(told["message"]) < 600
    assert caller.client("GET", "/v0/executions").status_code == 200
    assert caller.client("GET", f"/v0/executions/{id}/steps").status_code == 200
    for page in ("/", f"/executions/{id}", f"/executions/{id}/events", "/agents"):
        assert caller.client("GET", page).status_code == 200


def test_a_bomb_is_kept_and_told_as_it_came(caller: Caller, webhooks: Webhooks) -> None:
    """What is JSON is data, whatever a reader makes of it."""
    for value in (b"1e999999", b"9" * 50_000, b"[" * 5000 + b"]" * 5000):
        created = caller.client(
            "POST", "/v0/executions", b'{"agent_id":"a1","input":' + value + b"}"
        )
        assert created.status_code == 201
        assert b'"input":' + value + b"," in created.content
        id = created.content.partition(b'"id":"')[2][:36].decode()
        page = caller.client("GET", f"/executions/{id}")
        assert page.status_code == 200
        assert caller.client("GET", f"/executions/{id}/input.json").content == value


def test_a_body_over_the_limit_is_refused_before_it_is_read(caller: Caller) -> None:
    answer = caller.client("POST", "/v0/executions", b" " * (MAX_BODY_BYTES + 1))
    assert (answer.status_code, answer.json()["code"]) == (413, "validation_error")


# Whatever is sent to whatever route

ID = "01a22858-90c6-7f9f-87bd-f638f4b4a5dd"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
FIELDS = """agent_id input session parent_execution_id idempotency_key spawned_by on_behalf_of id
    webhook_url secret lease_timeout_seconds bundle cases kind target args idempotency resources
    result error seq data output state description input_schema output_schema decided_by rationale
    name scopes""".split()  # noqa: SIM905
LIKELY = st.sampled_from(
    ["a1", "", ID, "local", "executions:read", ["executions:read"], "default_action: allow", 0, {}]
)
SENT = (
    st.binary(max_size=60)
    | st.dictionaries(st.sampled_from(FIELDS), LIKELY | JSON, max_size=4).map(
        lambda fields: json.dumps(fields).encode()
    )
    | JSON.map(lambda value: json.dumps(value).encode())
)
SEGMENTS = st.sampled_from(
    [ID, ID.upper(), "a1", "x", "%00", "%ff", "a%0d%0ab", "..", "%2e%2e", ""]
)
QUERY = st.dictionaries(
    st.sampled_from(["limit", "cursor", "after_seq", "status", "session", "page", "after", "next"]),
    st.sampled_from(
        ["", "0", "-1", "9" * 30, "9" * 5000, "1e9", ID, "\x00", "é", "terminal", "//x"]
    ),
    max_size=2,
)


@settings(
    max_examples=400,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_no_route_fails(data: st.DataObject, kernel: Any, caller: Caller) -> None:
    """Every route of the kernel and of its page, with whatever it is sent: never a 5xx."""
    rules = sorted(kernel.app.url_map.iter_rules(), key=lambda rule: (rule.rule, rule.endpoint))
    rule = data.draw(st.sampled_from(rules))
    if rule.rule.endswith(("/stream", "/live")) and "GET" in rule.methods:
        return  # these go on; test_routes holds them
    path = "/".join(
        data.draw(SEGMENTS) if part.startswith("<") else part for part in rule.rule.split("/")
    )
    path = path.replace("<any(input,output):part>", "input")
    method = data.draw(st.sampled_from([*sorted(rule.methods - {"OPTIONS"}), "POST", "PATCH"]))
    sent = data.draw(SENT)
    query = data.draw(QUERY)
    headers = {}
    if data.draw(st.booleans()):
        headers = {
            "Rebuno-Agent-Id": "a1",
            "Rebuno-Dispatch-Id": data.draw(st.sampled_from([ID, "x", ""])),
            "Rebuno-Dispatch-Attempt": data.draw(st.sampled_from(["1", "0", "9" * 20, "x", "-1"])),
            "Rebuno-Signature": signing.sign_body("orchard-secret", sent),
        }
    answer = kernel.app.test_client().open(
        path, method=method, data=sent, query_string=query, headers=headers, base_url=kernel.url
    )
    assert answer.status_code < 500, (method, path, sent, query, answer.text[:300])
    answer.close()


@settings(max_examples=200, derandomize=True, database=None)
@given(st.binary(max_size=80) | SENT)
@example(b'{"a":"\\ud83d\\ud83d\\ude42"}')
def test_any_body_is_split_or_refused(data: bytes) -> None:
    """And what is split is what the standard library reads, of each field."""
    try:
        fields = jsontext.split_object(data)
    except ValueError:
        return
    read = json.loads(jsontext.decode_text(data), parse_int=str, parse_float=str)
    assert {
        name: json.loads(raw, parse_int=str, parse_float=str) for name, raw in fields.items()
    } == read
