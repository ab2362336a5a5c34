"""The encoding of arguments, byte for byte.

A step's identity is a hash of these bytes (PROTOCOL 6): an execution that was begun under one
version of this package must find its steps again under every later one. When one of these tests
fails, the change is wrong, not the test.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import hashlib
import types
import uuid
from typing import Any, NamedTuple

import pydantic
import pytest

from rebuno_sync import wire
from rebuno_sync.kernel import identity

PLAIN = [
    (None, b"null"),
    (True, b"true"),
    (False, b"false"),
    (0, b"0"),
    (-1, b"-1"),
    (2**53 + 1, b"9007199254740993"),
    (-(2**64), b"-18446744073709551616"),
    (10**30, b"1000000000000000000000000000000"),
    (0.0, b"0.0"),
    (-0.0, b"-0.0"),
    (1.0, b"1.0"),
    (0.1, b"0.1"),
    (1 / 3, b"0.3333333333333333"),
    (1e15, b"1000000000000000.0"),
    (1e16, b"1e+16"),
    (1e22, b"1e+22"),
    (1.5e300, b"1.5e+300"),
    (1e-4, b"0.0001"),
    (1e-5, b"1e-05"),
    (5e-324, b"5e-324"),
    (1.7976931348623157e308, b"1.7976931348623157e+308"),
    ("", b'""'),
    ("a b", b'"a b"'),
    ('say "hi"', b'"say \\"hi\\""'),
    ("back\\slash/slash", b'"back\\\\slash/slash"'),
    ("\b\f\n\r\t", b'"\\b\\f\\n\\r\\t"'),
    ("\x00\x1f\x7f", b'"\\u0000\\u001f\x7f"'),
    ("<a href='x'>&</a>", b"\"<a href='x'>&</a>\""),
    ("\u00e9\u4e2d\U0001f600", '"\u00e9\u4e2d\U0001f600"'.encode()),
    ("e\u0301", '"e\u0301"'.encode()),
    ("\u2028\u2029\ufeff\uffff", '"\u2028\u2029\ufeff\uffff"'.encode()),
    ([], b"[]"),
    ({}, b"{}"),
    ([1, [2, [3]], {}], b"[1,[2,[3]],{}]"),
    ({"b": 1, "a": 2}, b'{"b":1,"a":2}'),
    ({"": None, "a\nb": [True]}, b'{"":null,"a\\nb":[true]}'),
    ({"\u00e9": "\u00e9"}, '{"\u00e9":"\u00e9"}'.encode()),
]


class Colour(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Text(str, enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Flags(enum.IntFlag):
    READ = 4
    WRITE = 2


class OddString(str):
    def __str__(self) -> str:
        return "something else"


class OddInt(int):
    def __repr__(self) -> str:
        return "something else"

    __str__ = __repr__


class OddFloat(float):
    __str__ = __repr__ = lambda self: "something else"


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Line:
    start: Point
    label: str = "edge"
    tags: list[str] = dataclasses.field(default_factory=list)
    hidden: int = dataclasses.field(default=7, repr=False)


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("a", "b")
    b: int
    a: int


class Order(pydantic.BaseModel):
    number: int
    total: decimal.Decimal
    when: datetime.datetime
    note: str | None = pydantic.Field(default=None, alias="remark")
    colour: Colour = Colour.RED


@pydantic.dataclasses.dataclass
class Checked:
    a: int


UTC = datetime.timezone.utc
RICH: list[tuple[Any, bytes]] = [
    ((1, "a"), b'[1,"a"]'),
    (Point(1, 2.0), b"[1,2.0]"),
    (Line(Point(1, 2.0)), b'{"start":[1,2.0],"label":"edge","tags":[],"hidden":7}'),
    (Slotted(1, 2), b'{"b":1,"a":2}'),
    (Colour.RED, b'"red"'),
    (Colour.PAIR, b"[1,2]"),
    (Text.RED, b'"red"'),
    (Number.ONE, b"1"),
    (Flags.READ | Flags.WRITE, b"6"),
    ({Text.RED: 1}, b'{"red":1}'),
    (OddString("kept"), b'"kept"'),
    ({OddString("kept"): 1}, b'{"kept":1}'),
    (OddInt(5), b"5"),
    (OddFloat(0.5), b"0.5"),
    (datetime.datetime(2024, 2, 29, 12, 30), b'"2024-02-29T12:30:00"'),
    (datetime.datetime(2024, 2, 29, 12, 30, 0, 1), b'"2024-02-29T12:30:00.000001"'),
    (datetime.datetime(2024, 2, 29, tzinfo=UTC), b'"2024-02-29T00:00:00+00:00"'),
    (
        datetime.datetime(
            2024, 2, 29, tzinfo=datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
        ),
        b'"2024-02-29T00:00:00-03:30"',
    ),
    (datetime.date(2024, 2, 29), b'"2024-02-29"'),
    (datetime.time(1, 2, 3), b'"01:02:03"'),
    (uuid.UUID("12345678-1234-5678-1234-567812345678"), b'"12345678-1234-5678-1234-567812345678"'),
    (decimal.Decimal("1.10"), b'"1.10"'),
    (decimal.Decimal("1E+3"), b'"1E+3"'),
    (decimal.Decimal("NaN"), b'"NaN"'),
    (collections.OrderedDict([("b", 1), ("a", 2)]), b'{"b":1,"a":2}'),
    (collections.defaultdict(list, {"a": [1]}), b'{"a":[1]}'),
    (types.MappingProxyType({"a": 1}), b'{"a":1}'),
    (
        Order(
            number=1, total=decimal.Decimal("9.90"), when=datetime.datetime(2024, 2, 29), remark="x"
        ),
        b'{"number":1,"total":"9.90","when":"2024-02-29T00:00:00","note":"x","colour":"red"}',
    ),
    (
        Order(number=1, total=decimal.Decimal(1), when=datetime.datetime(2024, 2, 29, tzinfo=UTC)),
        b'{"number":1,"total":"1","when":"2024-02-29T00:00:00Z","note":null,"colour":"red"}',
    ),
    (Checked(a=1), b'{"a":1}'),
    (pydantic.RootModel[list[int]]([1, 2]), b"[1,2]"),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN, ids=[repr(v)[:40] for v, _ in PLAIN])
def test_plain_values(value: object, expected: bytes) -> None:
    assert wire.encode(value, "args") == expected
    back = wire.decode(expected)
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize(
    ("value", "expected"), RICH, ids=[f"{type(v).__name__} {i}" for i, (v, _) in enumerate(RICH)]
)
def test_richer_values(value: object, expected: bytes) -> None:
    assert wire.encode(value, "args") == expected


@pytest.mark.parametrize(
    ("value", "expected"), RICH, ids=[f"{type(v).__name__} {i}" for i, (v, _) in enumerate(RICH)]
)
def test_richer_values_within_others(value: object, expected: bytes) -> None:
    assert wire.encode({"a": [value]}, "args") == b'{"a":[' + expected + b"]}"


def test_integers_have_any_size() -> None:
    for number in (7**20_000, -(7**20_000), 10**4_299, 10**4_300, 10**641, -(10**640)):
        digits = wire.encode([number, {"n": number, "x": 1.5, "é": "é"}], "args")
        text = identity_of_digits(number)
        assert digits == f'[{text},{{"n":{text},"x":1.5,"é":"é"}}]'.encode()
        assert wire.decode(digits) == [number, {"n": number, "x": 1.5, "é": "é"}]


def identity_of_digits(number: int) -> str:
    """The decimal text of an integer without ``str``, whose length is limited."""
    sign, rest, digits = ("-", -number, []) if number < 0 else ("", number, [])
    while rest:
        rest, part = divmod(rest, 10**500)
        digits.append(f"{part:0500d}" if rest else str(part))
    return sign + "".join(reversed(digits))


def test_what_is_hashed_is_what_was_encoded() -> None:
    args = wire.encode({"q": "é<", "n": 1.0, "ids": (1, 2)}, "args")
    assert args == '{"q":"é<","n":1.0,"ids":[1,2]}'.encode()
    hashed = identity.args_hash(args)
    canonical = '{"ids":[1,2],"n":1.0,"q":"é\\u003c"}'
    assert hashed == hashlib.sha256(canonical.encode()).hexdigest()
    assert hashed == identity.args_hash(wire.encode({"ids": [1, 2], "n": 1.0, "q": "é<"}, "args"))


def test_a_fraction_is_not_guessed_at() -> None:
    with pytest.raises(TypeError, match="args is a Fraction, which has no JSON form"):
        wire.encode(fractions.Fraction(1, 3), "args")
