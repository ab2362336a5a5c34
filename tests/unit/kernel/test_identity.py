"""Canonical JSON and step ids: the vectors, and an independent reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rebuno_sync.kernel import identity, jsontext

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "identity.json").read_text("utf-8"))
GOOD = [v for v in VECTORS if not v.get("invalid")]
BAD = [v for v in VECTORS if v.get("invalid")]


def _named(rows: list[dict[str, Any]]) -> Any:
    return pytest.mark.parametrize("row", rows, ids=[row["name"] for row in rows])


@_named(GOOD)
def test_vectors(row: dict[str, Any]) -> None:
    args = bytes.fromhex(row["args_hex"])
    assert identity.canonical_json(args).hex() == row["canonical_hex"]
    assert identity.args_hash(args) == row["args_hash"]
    step_id = identity.step_id(
        row["execution_id"], row["kind"], row["target"], row["args_hash"], row["occurrence"]
    )
    assert step_id == row["step_id"]


@_named(BAD)
def test_invalid_vectors(row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        identity.canonical_json(bytes.fromhex(row["args_hex"]))


# The reference: reads bytes one by one, as Go's decoder does, and knows nothing of the module.


class Invalid(Exception):
    pass


class Reference:
    def __init__(self, data: bytes) -> None:
        self.data, self.pos = data, 0

    def document(self) -> bytes:
        value = self.value()
        self.space()
        if self.pos != len(self.data):
            raise Invalid
        return value

    def peek(self) -> bytes:
        return self.data[self.pos : self.pos + 1]

    def take(self, expected: bytes) -> None:
        if self.peek() != expected:
            raise Invalid
        self.pos += 1

    def space(self) -> None:
        while self.peek() in (b" ", b"\t", b"\n", b"\r"):
            self.pos += 1

    def value(self) -> bytes:
        self.space()
        first = self.peek()
        if first == b"{":
            return self.object()
        if first == b"[":
            return self.array()
        if first == b'"':
            return self.quote(self.string())
        for word in (b"true", b"false", b"null"):
            if self.data.startswith(word, self.pos):
                self.pos += len(word)
                return word
        return self.number()

    def object(self) -> bytes:
        self.take(b"{")
        members: dict[bytes, tuple[bytes, bytes]] = {}
        self.space()
        if self.peek() == b"}":
            self.pos += 1
            return b"{}"
        while True:
            self.space()
            name = self.string()
            self.space()
            self.take(b":")
            members[name.encode()] = (self.quote(name), self.value())
            self.space()
            if self.peek() == b",":
                self.pos += 1
                continue
            self.take(b"}")
            rows = [b"%b:%b" % members[key] for key in sorted(members)]
            return b"{" + b",".join(rows) + b"}"

    def array(self) -> bytes:
        self.take(b"[")
        self.space()
        if self.peek() == b"]":
            self.pos += 1
            return b"[]"
        items = []
        while True:
            items.append(self.value())
            self.space()
            if self.peek() == b",":
                self.pos += 1
                continue
            self.take(b"]")
            return b"[" + b",".join(items) + b"]"

    def number(self) -> bytes:
        start = self.pos
        if self.peek() == b"-":
            self.pos += 1
        if self.peek() == b"0":
            self.pos += 1
        else:
            self.digits()
        if self.peek() == b".":
            self.pos += 1
            self.digits()
        if self.peek() in (b"e", b"E"):
            self.pos += 1
            if self.peek() in (b"+", b"-"):
                self.pos += 1
            self.digits()
        return self.data[start : self.pos]

    def digits(self) -> None:
        start = self.pos
        while self.peek() and self.peek() in b"0123456789":
            self.pos += 1
        if self.pos == start:
            raise Invalid

    def string(self) -> str:
        self.take(b'"')
        out = ""
        while True:
            byte = self.peek()
            if not byte or byte < b" ":
                raise Invalid
            if byte == b'"':
                self.pos += 1
                return out
            if byte == b"\\":
                self.pos += 1
                out += self.escape()
                continue
            for size in (1, 2, 3, 4):
                try:
                    out += self.data[self.pos : self.pos + size].decode()
                except UnicodeDecodeError:
                    continue
                self.pos += size
                break
            else:
                out += "\ufffd"
                self.pos += 1

    def escape(self) -> str:
        kind = self.peek()
        self.pos += 1
        plain = {b'"': '"', b"\\": "\\", b"/": "/", b"b": "\b", b"f": "\f"}
        plain |= {b"n": "\n", b"r": "\r", b"t": "\t"}
        if kind in plain:
            return plain[kind]
        if kind != b"u":
            raise Invalid
        code = self.hex()
        if 0xD800 <= code < 0xDC00 and self.data[self.pos : self.pos + 2] == b"\\u":
            before = self.pos
            self.pos += 2
            low = self.hex()
            if 0xDC00 <= low < 0xE000:
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
            self.pos = before
        return "\ufffd" if 0xD800 <= code < 0xE000 else chr(code)

    def hex(self) -> int:
        digits = self.data[self.pos : self.pos + 4]
        if len(digits) < 4 or any(d not in b"0123456789abcdefABCDEF" for d in digits):
            raise Invalid
        self.pos += 4
        return int(digits, 16)

    def quote(self, text: str) -> bytes:
        short = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\f": "\\f"}
        short |= {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
        out = ""
        for char in text:
            if char in short:
                out += short[char]
            elif char < " " or char in "<>&\u2028\u2029":
                out += f"\\u{ord(char):04x}"
            else:
                out += char
        return b'"' + out.encode() + b'"'


def reference(data: bytes) -> bytes | None:
    try:
        return Reference(data).document()
    except Invalid:
        return None


def canonical(data: bytes) -> bytes | None:
    try:
        return identity.canonical_json(data)
    except ValueError:
        return None


SPACE = st.sampled_from([b"", b"", b"", b" ", b"\n\t", b"\r "])
NUMBERS = st.one_of(
    st.integers().map(lambda n: b"%d" % n),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda f: repr(f).encode()),
    st.from_regex(rb"\A-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,4})?\Z"),
)
PIECES = st.one_of(
    st.text(max_size=8).map(lambda s: json.dumps(s)[1:-1].encode()),
    st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cs", "Cc"])).map(
        str.encode
    ),
    st.sampled_from([b"<", b">", b"&", b"\xe2\x80\xa8", b"\\u2029", b"\\/", b"\\u003C", b"\x7f"]),
    st.sampled_from([b"\\ud83d", b"\\ude42", b"\\uD83D\\uDE42", b"\\\\ud83d", b"\\uDFFF"]),
    st.sampled_from([b"\xff", b"\xc0\xaf", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x99", b"\x80"]),
)
STRINGS = st.lists(PIECES, max_size=5).map(lambda pieces: b'"' + b"".join(pieces) + b'"')
NAMES = st.one_of(STRINGS, st.sampled_from([b'"a"', b'"b"', b'"\\u0061"', b'""']))
SCALARS = st.one_of(NUMBERS, STRINGS, st.sampled_from([b"true", b"false", b"null"]))


def _array(items: list[bytes], space: bytes) -> bytes:
    return b"[" + space + (space + b"," + space).join(items) + space + b"]"


def _object(members: list[tuple[bytes, bytes]], space: bytes) -> bytes:
    rows = [name + space + b":" + space + value for name, value in members]
    return b"{" + space + (space + b"," + space).join(rows) + space + b"}"


DOCUMENTS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(_array, st.lists(inner, max_size=4), SPACE),
        st.builds(_object, st.lists(st.tuples(NAMES, inner), max_size=4), SPACE),
    ),
    max_leaves=12,
)


@given(DOCUMENTS)
@example(b'{"\\ud800":1,"\\ud801":2}')
@example(b'"\\\\ud800"')
@example(b"-0.0e-0")
def test_canonical_form_is_that_of_the_reference(document: bytes) -> None:
    expected = reference(document)
    assert expected is not None, "the strategy makes JSON alone"
    assert canonical(document) == expected
    assert canonical(expected) == expected


@given(DOCUMENTS, st.data())
def test_what_is_not_json_is_refused_as_the_reference_refuses_it(
    document: bytes, data: st.DataObject
) -> None:
    where = data.draw(st.integers(0, len(document)))
    cut = data.draw(st.integers(0, 2))
    more = data.draw(st.lists(st.sampled_from(list(b'{}[],:"\\0eE.-+ \x01\x0bnutNI\xff\xa0'))))
    broken = document[:where] + bytes(more) + document[where + cut :]
    if broken:
        assert canonical(broken) == reference(broken)


@given(DOCUMENTS)
def test_the_walk_for_deep_values_agrees(document: bytes) -> None:
    text = jsontext.decode_text(document)
    walked, end = jsontext._walk(text, 0, 0)
    assert jsontext._escape_for_html(walked.encode()) == reference(document)
    assert text[end:].strip() == ""


@given(st.lists(st.tuples(NAMES, DOCUMENTS), max_size=5), SPACE)
def test_an_object_is_split_into_the_text_of_its_fields(
    members: list[tuple[bytes, bytes]], space: bytes
) -> None:
    fields = jsontext.split_object(space + _object(members, space) + space)
    expected = {json.loads(canonical(name) or b""): value for name, value in members}
    assert fields.keys() == expected.keys()
    for name, value in expected.items():
        assert fields[name] == jsontext.decode_text(value)
        assert canonical(fields[name].encode()) == reference(value)


@pytest.mark.parametrize("depth", [1, 255, 1000, 5000, 10_000])
def test_deep_values_are_read(depth: int) -> None:
    array = b"[" * depth + b"]" * depth
    assert identity.canonical_json(b" " + array) == array
    nested = b'{"b":1,"a":' * depth + b"1.0" + b"}" * depth
    assert identity.canonical_json(nested) == b'{"a":' * depth + b"1.0" + b',"b":1}' * depth
    assert jsontext.split_object(nested)["b"] == "1"


@pytest.mark.parametrize("depth", [10_001, 50_000, 1_000_000])
def test_deeper_values_are_refused(depth: int) -> None:
    for value in (
        b"[" * depth + b"]" * depth,
        b"[" * depth,
        b'{"a":' * depth + b"1" + b"}" * depth,
    ):
        with pytest.raises(ValueError, match=r"deeper|expected|Expecting"):
            identity.canonical_json(value)
    with pytest.raises(ValueError, match="deeper"):
        jsontext.split_object(b'{"a":' * depth + b"1" + b"}" * depth)


def test_many_shallow_containers_are_no_depth() -> None:
    rows = b"[" + b",".join([b'{"[[":[]}'] * 20_000) + b"]"
    assert identity.canonical_json(rows) == rows


@pytest.mark.parametrize(
    "text", [b"", b"  ", b"[]", b"{", b'{"a"}', b'{"a":}', b'{"a":1,}', b"{}x"]
)
def test_what_is_no_object_is_not_split(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        jsontext.split_object(text)


def test_numbers_of_any_length_keep_their_text() -> None:
    digits = b"1" * 10_000
    assert identity.canonical_json(b'{"n":' + digits + b"}") == b'{"n":' + digits + b"}"
    assert jsontext.split_object(b'{"n":' + digits + b"}") == {"n": digits.decode()}
