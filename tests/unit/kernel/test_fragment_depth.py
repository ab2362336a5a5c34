"""orjson never gets a deep tree with a fragment in it: it would write past its buffer."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from rebuno_sync.kernel import identity, jsontext, page_values

#: What orjson keeps free after a fragment, in bytes: one for each bracket that closes.
SLACK = 64


def deepest_fragment(value: Any, depth: int = 0) -> int:
    if isinstance(value, dict):
        return max((deepest_fragment(v, depth + 1) for v in value.values()), default=0)
    if isinstance(value, list):
        return max((deepest_fragment(v, depth + 1) for v in value), default=0)
    return depth if isinstance(value, orjson.Fragment) else 0


@pytest.fixture
def depths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How deep the deepest fragment of each value was that orjson was given."""
    seen: list[int] = []
    real = orjson.dumps

    def dumps(value: Any, *args: Any, **kwargs: Any) -> bytes:
        seen.append(deepest_fragment(value))
        # What is too deep is not given to the real one: it could end the whole run.
        return b"null" if seen[-1] > SLACK else real(value, *args, **kwargs)

    monkeypatch.setattr(orjson, "dumps", dumps)
    return seen


@pytest.mark.parametrize("levels", [1, 59, 60, 61, 66, 180, 250, 900])
def test_a_long_number_at_any_depth(depths: list[int], levels: int) -> None:
    number = "7" * 2150
    in_lists = "[" * levels + number + "]" * levels
    in_objects = '{"deeper":' * levels + number + "}" * levels
    for text in (in_lists, in_objects):
        assert identity.canonical_json(text.encode()) == text.encode()
        page_values.shown(text, len(text))
        page_values.hint(text)
    assert depths, "orjson was not used at all"
    assert max(depths) <= SLACK


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps({"a": "[" * 500, "b": ['\\"[{' * 100, 1]}, separators=(",", ":"))
    assert not jsontext.nested_deeper(text, 3)
    assert jsontext.nested_deeper("[" * 4 + "]" * 4, 3)
