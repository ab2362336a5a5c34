"""What is recorded of an LLM call, and the answer that is made of a record."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rebuno_sync import wire
from rebuno_sync.decisions import Replayed, tool_error
from rebuno_sync.effects import llm
from rebuno_sync.effects.llm import Call, Failed, Failure

CALL = Call("m", {"model": "m"}, waits_long=False)
PATIENT = Call("m", {"model": "m"}, waits_long=True)


def through_the_kernel(record: Any) -> Any:
    return wire.decode(wire.encode(record, "record"))


def replayed(result: Any = None, error: Any = None, call: Call = CALL) -> llm.Answer:
    failed = None if error is None else tool_error(error, "m", "s1")
    found = Replayed("s1", result, failed)
    return llm.answer_of(found, call, replayed=True)


# Which requests


@pytest.mark.parametrize(
    ("body", "target"),
    [
        (b'{"model": "gpt-9"}', "gpt-9"),
        ('{"model": "gpt-9"}', "gpt-9"),
        (b'{"model": ""}', "v1/x"),
        (b'{"model": 7}', "v1/x"),
        (b"{}", "v1/x"),
        (b'{"model": "a", "model": "b"}', "b"),
    ],
)
def test_the_target_is_the_model(body: Any, target: str) -> None:
    call = llm.call_of(body, "/v1/x", {})
    assert call is not None
    assert call.target == target


@pytest.mark.parametrize(
    "body", [None, b"", "", b"null", b"[]", b'"{}"', b"{", b'{"a": Infinity}', b"\xff\xfe{}", b"["]
)
def test_what_is_no_json_object_is_not_recorded(body: Any) -> None:
    assert llm.call_of(body, "/v1/x", {}) is None


def test_a_target_is_never_empty() -> None:
    call = llm.call_of(b"{}", "/", {})
    assert call is not None
    assert call.target == "/"


@given(
    st.dictionaries(
        st.text(max_size=4), st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    )
)
def test_the_encoding_does_not_depend_on_the_spelling(value: dict[str, Any]) -> None:
    spellings = [
        json.dumps(value),
        json.dumps(value, ensure_ascii=False, indent=1),
        json.dumps(value, separators=(",", ":")),
    ]
    encoded = set()
    for spelling in spellings:
        call = llm.call_of(spelling, "/", {})
        assert call is not None
        encoded.add(wire.encode(call.request, "args"))
    assert len(encoded) == 1


# Records


@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda t: t.encode("utf-8")))
@example(b"\x00")
@example(b"\xed\xa0\x80")
@example("\ud7ff\U0010ffff\ufeff\u2028".encode())
def test_any_body_comes_back_byte_for_byte(body: bytes) -> None:
    record = through_the_kernel(llm.kept(200, {"content-type": "x/y"}, body))
    answer = replayed(record)
    assert b"".join(answer.body) == body
    assert (answer.status, answer.headers) == (200, {"content-type": "x/y"})
    # PostgreSQL stores no NUL.
    assert "\0" not in record["body"]


def test_text_is_kept_in_the_three_fields_of_the_protocol() -> None:
    assert llm.kept(200, {"content-type": "a/b"}, "é".encode()) == {
        "status": 200,
        "headers": {"content-type": "a/b"},
        "body": "é",
    }


ALL_HEADERS = {
    "content-type": "a/b",
    "content-encoding": "gzip",
    "set-cookie": "a=b",
    "x-request-id": "r1",
    "location": "/there",
    "www-authenticate": "Digest",
    "retry-after": "3",
    "retry-after-ms": "3000",
    "x-should-retry": "true",
}


@pytest.mark.parametrize("status", [200, 201, 299])
def test_of_a_success_only_the_content_type_is_kept(status: int) -> None:
    assert llm.kept_headers(status, ALL_HEADERS) == {"content-type": "a/b"}


@pytest.mark.parametrize("status", [307, 401, 429, 503])
def test_of_anything_else_what_libraries_go_by_is_kept(status: int) -> None:
    dropped = {"content-encoding", "set-cookie", "x-request-id"}
    assert llm.kept_headers(status, ALL_HEADERS) == {
        name: value for name, value in ALL_HEADERS.items() if name not in dropped
    }


def test_a_failure_comes_back() -> None:
    record = through_the_kernel(llm.kept_failure(Failure("ReadTimeout", "too late")))
    with pytest.raises(Failed) as caught:
        replayed(error=record)
    assert caught.value.failure == Failure("ReadTimeout", "too late")


@pytest.mark.parametrize("body", [b"data: 1\n\n", b"\xff\x00", b""])
def test_an_answer_that_broke_off_comes_back_with_its_failure(body: bytes) -> None:
    failure = Failure("ReadError", "cut")
    record = through_the_kernel(llm.kept_failure(failure, llm.kept(200, {}, body)))
    answer = replayed(error=record)
    came: list[bytes] = []
    with pytest.raises(Failed) as caught:
        came.extend(answer.body)
    assert b"".join(came) == body
    assert caught.value.failure == failure


# Retries on replay


@pytest.mark.parametrize(
    ("status", "headers", "may"),
    [
        (200, {}, False),
        (400, {}, False),
        (401, {}, False),
        (408, {}, True),
        (409, {}, True),
        (422, {}, False),
        (429, {}, True),
        (500, {}, True),
        (529, {}, True),
        (400, {"x-should-retry": "true"}, True),
        (500, {"x-should-retry": "false"}, False),
        (500, {"x-should-retry": "odd"}, True),
    ],
)
def test_what_libraries_retry_costs_no_wait_on_replay(
    status: int, headers: dict[str, str], may: bool
) -> None:
    answer = replayed(llm.kept(status, headers, b""))
    assert answer.headers == ({**headers, "retry-after-ms": "1"} if may else headers)


def test_the_first_run_waits_as_the_provider_asks() -> None:
    found = Replayed("s1", llm.kept(429, {"retry-after": "9"}, b""))
    answer = llm.answer_of(found, CALL, replayed=False)
    assert answer.headers == {"retry-after": "9"}


@pytest.mark.parametrize(("after", "kept"), [("120", False), ("121", True), ("9e9", True)])
def test_a_long_wait_stays_where_libraries_give_up_on_one(after: str, kept: bool) -> None:
    record = llm.kept(429, {"retry-after": after}, b"")
    assert ("retry-after-ms" in replayed(record).headers) is not kept
    assert "retry-after-ms" in replayed(record, call=PATIENT).headers


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "3"}, 3.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "odd", "retry-after": "9"}, 9.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:00 GMT"}, 0.0),
        ({"retry-after": "Thu, 99 Foo 1970 00:00:00 GMT"}, None),
    ],
)
def test_retry_after_in_all_its_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert llm.retry_after(headers) == seconds


def test_retry_after_as_a_date() -> None:
    then = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 3600))
    found = llm.retry_after({"retry-after": then})
    assert found is not None
    assert 0 < found <= 3600
