"""Streams that are cut, broken or made to cost: live output, and what is read out of it."""

from __future__ import annotations

import http.server
import itertools
import json
import threading
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rebuno_sync import Client, NetworkError
from rebuno_sync.effects import llm
from rebuno_sync.event_stream import LONGEST_LINE, data_lines
from rebuno_sync.live_text import LiveText

FUZZ = settings(max_examples=200, derandomize=True, database=None)


def cut(whole: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(p, len(whole)) for p in places), len(whole)]
    return [whole[a:b] for a, b in itertools.pairwise(edges)]


LINES = st.lists(
    st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")).map(lambda b: b.rstrip(b"\r"))
    | st.sampled_from([b"data:", b"data: {}", b": keep-alive", b"", b"event: x", b"data:\xff"]),
    max_size=8,
)


@FUZZ
@given(LINES, st.lists(st.integers(0, 80), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
@example([b"data: a", b"data: b"], [], b"\n")
def test_what_comes_out_does_not_depend_on_the_cuts(
    lines: list[bytes], places: list[int], end: bytes
) -> None:
    whole = b"".join(line + end for line in lines)
    expected = [line[5:] for line in lines if line.startswith(b"data:")]
    assert list(data_lines(cut(whole, places))) == expected
    # A line that has not ended says nothing yet.
    assert list(data_lines(cut(whole + b"data: rest", places))) == expected


def test_a_line_is_told_as_soon_as_it_is_whole() -> None:
    def pieces() -> Any:
        yield b"data: 1"
        yield b"\ndata: 2"
        pytest.fail("the first line was there")

    assert next(data_lines(pieces())) == b" 1"


def test_a_line_without_end_is_given_up() -> None:
    with pytest.raises(ValueError, match="longer than"):
        list(data_lines(b"x" * 65536 for _ in range(LONGEST_LINE)))


class Streams(http.server.ThreadingHTTPServer):
    """Answers every request with one stream."""

    daemon_threads = True

    def __init__(self, body: bytes) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except OSError:
                    self.close_connection = True

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@pytest.mark.parametrize(
    "line",
    [
        b"data: " + b"[" * 500_000,
        b"data: {",
        b"data: \xff",
        b"data: NaN",
        b"data: 7",
        b'data: {"step_id": "s"}',
        b"x" * 2 * LONGEST_LINE,
    ],
    ids=lambda line: ascii(line[:12]),
)
def test_a_stream_that_makes_no_sense_is_an_error_of_ours(line: bytes) -> None:
    with (
        Streams(line + b"\n\n") as server,
        Client(server.url) as client,
        pytest.raises(NetworkError),
    ):
        list(client.stream("e"))


def test_a_long_line_takes_no_time_to_speak_of() -> None:
    """As it did when each byte was a piece, and every piece was put to all before it."""
    data = "x" * 900_000
    frame = json.dumps({"step_id": "s", "seq": 0, "data": data}).encode()
    with Streams(b"data: " + frame + b"\n\n") as server, Client(server.url) as client:
        (delta,) = client.stream("e")
        assert delta.data == data


# What models say


SAID = (
    st.text(max_size=20)
    | st.sampled_from(["data: ", "data: [DONE]\n", "\n", "event: x\n", ": x\n", "data: {"])
    | st.recursive(
        st.none() | st.text(max_size=4) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=2)
            | st.dictionaries(
                st.sampled_from(["choices", "delta", "content", "text", "type"]), inner, max_size=3
            )
        ),
        max_leaves=6,
    ).map(lambda value: f"data: {json.dumps(value)}\n")
)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 3), SAID), max_size=6))
@example([(0, "data: " + "[" * 7000), (1, "[" * 7000 + "\n")])
@example([(0, "data: " + "9" * 6000 + "\n")])
@example([(0, 'data: {"choices": [{"delta": {"content": 1}}, 2], "type": []}\n')])
def test_any_live_output_can_be_read(deltas: list[tuple[int, str]]) -> None:
    reader = LiveText()
    for seq, data in deltas:
        assert isinstance(reader.feed(seq, data), str)


BODIES = st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["model", "stream", "error", "type", "message", "x"]), inner, max_size=4
        )
    ),
    max_leaves=6,
).map(lambda value: json.dumps(value).encode())


@FUZZ
@given(BODIES, st.text(max_size=10), st.dictionaries(st.just("content-type"), st.text(max_size=9)))
@example(b"[" * 100_000, "/v1", {})
@example(b'{"model":"m","x":' + b"[" * 100_000, "/v1", {})
@example(b'{"model":"m","n":' + b"9" * 5000 + b"}", "/v1", {})
@example(b'{"model":"m","n":1e999999}', "/v1", {})
def test_any_request_to_a_model_is_a_call_or_none(
    body: bytes, path: str, headers: dict[str, str]
) -> None:
    call = llm.call_of(body, path, headers)
    if call is not None:
        assert isinstance(call.target, str)


@FUZZ
@given(BODIES, st.sampled_from([200, 403, 409, 429, 500]))
@example(b'{"error":' + b"[" * 100_000, 403)
@example(b'{"error":{"type":"rebuno_refusal","message":[]}}', 403)
@example(b'{"error":{"type":"rebuno_refusal","message":"rebuno_refusal: \\ud800"}}', 429)
def test_any_answer_of_a_gateway_is_a_refusal_or_none(body: bytes, status: int) -> None:
    refusal = llm.refusal_by_gateway(status, body)
    assert refusal is None or isinstance(refusal, BaseException)


@pytest.mark.parametrize("value", ["9" * 5000, "-1", "nan", "inf", "1e999", "\u0660", "x", ""])
def test_any_retry_after_is_a_time_or_none(value: str) -> None:
    seconds = llm.retry_after({"retry-after": value})
    assert seconds is None or seconds >= 0
