"""Reading a bundle's YAML field by field, with errors that name the rule, the key and the line.

The bundle is read from YAML's nodes, not from Python values: so duplicate keys are seen, every
scalar has the text it was written with (``on``, ``no``, ``010`` and ``12:30`` are no booleans
and no numbers), and each message can name its line.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import yaml

from rebuno_sync.kernel.policy_match import argument_text, valid_text

_TAG = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(
    _TAG + name for name in ("str", "int", "float", "bool", "timestamp", "value", "merge")
)
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
#: What YAML 1.2, or Go's reader of it, takes for a number or a boolean when it is not quoted.
_NUMBER = re.compile(
    r"[-+]?(0x[0-9a-fA-F_]+|0o[0-7_]+|(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?)"
)
_BOOLEANS = {"true": True, "false": False}

_DURATION = re.compile(r"(?:(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:ns|us|µs|μs|ms|s|m|h))+")
_DURATION_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)")
_NANOSECONDS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "μs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}


#: What a bundle may come to: each submission would wait for the reading of a larger one.
LONGEST, MOST_VALUES = 1 << 18, 50_000


class BundleError(ValueError):
    """A policy bundle is malformed. The message names the rule and the key, and how to mend it."""


def parse_duration(text: str) -> float:
    """Return the seconds of a Go duration, such as ``1h30m`` or ``250ms``.

    Raises:
        ValueError: ``text`` is no Go duration, or longer than the 292 years that Go can hold.
    """
    sign, unsigned = (text[:1], text[1:]) if text[:1] in ("-", "+") else ("", text)
    if unsigned == "0":
        return 0.0
    if not _DURATION.fullmatch(unsigned):
        raise ValueError(f"{text!r} is not a duration; write one like 30s, 5m, 1h30m or 250ms")
    total = 0
    for whole, fraction, unit in _DURATION_PART.findall(unsigned):
        # Digits beyond these cannot change the result; Python refuses to read very long integers.
        whole, fraction, size = whole.lstrip("0")[:20], fraction[:20], _NANOSECONDS[unit]
        total += int(whole or 0) * size + int(fraction or 0) * size // 10 ** len(fraction)
    if total >= 2**63:
        raise ValueError(f"{text!r} is longer than a duration can be; at most about 2562047h")
    return (-total if sign == "-" else total) / 1e9


class Field:
    """One value of a bundle, with the words to refuse it.

    Args:
        node: where it stands in the YAML.
        owner: what it belongs to, such as ``rule 'limit-search'``.
        path: the keys that lead to it from there, joined by dots.
    """

    def __init__(self, node: yaml.Node, owner: str, path: str = "") -> None:
        self._node = node
        self._owner = owner
        self._path = path

    @classmethod
    def document(cls, text: str) -> Field:
        """Return the whole of a bundle.

        Raises:
            BundleError: it is not one YAML document, or it is empty.
        """
        if len(text) > LONGEST:
            raise BundleError(f"the bundle is longer than {LONGEST} characters; merge some rules")
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except RecursionError:
            raise BundleError("the bundle is nested too deeply") from None
        except (yaml.YAMLError, ValueError, OverflowError) as exc:
            # PyYAML lets the latter two out for impossible escapes and version numbers.
            raise BundleError(f"the bundle is not valid YAML: {exc}") from None
        if node is None:
            raise BundleError(
                "the bundle is empty; a bundle that allows nothing is 'default_action: deny'"
            )
        if _written_out(node, {}) > MOST_VALUES:
            raise BundleError(
                f"the bundle holds more than {MOST_VALUES} values with its aliases written out"
            )
        return cls(node, "bundle")

    def named(self, owner: str) -> Field:
        """Return the same value as something that messages call ``owner``."""
        return Field(self._node, owner)

    def error(self, problem: str) -> BundleError:
        """Return the error that refuses this value because of ``problem``."""
        place = f"{self._owner}: {self._path}" if self._path else self._owner
        return BundleError(f"{place}: {problem} (line {self._node.start_mark.line + 1})")

    def mapping(self, known: Collection[str] | None = None) -> dict[str, Field]:
        """Return the fields of a mapping, of which each must be in ``known`` when that is given."""
        fields: dict[str, Field] = {}
        for key, value in self._pairs().items():
            if known is not None and key not in known:
                raise self.error(f"unknown key {key!r}; known are {', '.join(known)}")
            fields[key] = Field(value, self._owner, f"{self._path}.{key}" if self._path else key)
        return fields

    def _pairs(self, *, merged: bool = False) -> dict[str, yaml.Node]:
        node = self._node
        if not isinstance(node, yaml.MappingNode) or node.tag != _TAG + "map":
            raise self.error(f"expected keys and values, got {self._shown()}")
        own: dict[str, yaml.Node] = {}
        inherited: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            if key_node.tag == _TAG + "merge":
                # One level is what people write; more could grow without bound.
                if merged:
                    raise self.error("what is merged (<<) merges something itself; write it out")
                sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for source in sources:
                    pairs = Field(source, self._owner, self._path)._pairs(merged=True)
                    inherited = {**pairs, **inherited}
                continue
            key = Field(key_node, self._owner, f"a key of {self._path}".rstrip()).text()
            if key in own:
                raise Field(key_node, self._owner, self._path).error(
                    f"the key {key!r} stands there twice; remove one"
                )
            own[key] = value
        return {**inherited, **own}

    def is_list(self) -> bool:
        """Tell whether this is a list."""
        return isinstance(self._node, yaml.SequenceNode)

    def items(self, *, empty: str) -> list[Field]:
        """Return the elements of a list; ``empty`` says what to write instead of an empty one."""
        if not isinstance(self._node, yaml.SequenceNode) or self._node.tag != _TAG + "seq":
            raise self.error(f"expected a list, got {self._shown()}")
        if not self._node.value and empty:
            raise self.error(f"the list is empty; {empty}")
        return [
            Field(node, self._owner, f"{self._path}[{i}]")
            for i, node in enumerate(self._node.value)
        ]

    def peek(self, key: str) -> str:
        """Return the text of a key before anything is known to be in order, or ``""``."""
        if isinstance(self._node, yaml.MappingNode):
            for name, value in self._node.value:
                if name.value == key and isinstance(value, yaml.ScalarNode):
                    return valid_text(value.value)
        return ""

    def text(self) -> str:
        """Return a scalar's text as it was written."""
        return self._text()[0]

    def _text(self) -> tuple[str, bool]:
        """Return a scalar's text and whether it stands there without quotes."""
        node = self._node
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALAR_TAGS:
            raise self.error(f"expected text, got {self._shown()}")
        if valid_text(node.value) != node.value:
            raise self.error("the text has half of a surrogate pair; write the character itself")
        return node.value, node.style is None

    def compared_text(self) -> str:
        """Return the text that an argument is to be equal to.

        An unquoted number or boolean is refused where its own text is not what such an argument
        is compared as: the rule would never match, without a word.
        """
        text, plain = self._text()
        value = _plain_value(text) if plain else None
        if value is not None and argument_text(value) != text:
            raise self.error(
                f"an argument of that value is compared as {argument_text(value)!r}; write "
                f"{argument_text(value)!r} to match it, or {text!r} in quotes to match the text"
            )
        return text

    def choice(self, options: Collection[str]) -> str:
        """Return a text that must be one of ``options``."""
        text = self.text()
        if text not in options:
            raise self.error(f"{text!r} is not one of {', '.join(options)}")
        return text

    def integer(self, *, least: int | None = None) -> int:
        """Return an integer, written in decimal digits."""
        text, plain = self._text()
        if not plain or not _INTEGER.fullmatch(text):
            raise self.error(f"expected an integer, got {self._shown()}")
        if least is not None and int(text) < least:
            raise self.error(f"{text} is too small; the least is {least}")
        return int(text)

    def duration(self, *, zero: bool = False) -> float:
        """Return a duration in seconds: above 0, or 0 itself when ``zero`` is set."""
        text = self.text()
        try:
            seconds = parse_duration(text)
        except ValueError as exc:
            raise self.error(str(exc)) from None
        if seconds < 0 or (seconds == 0 and not zero):
            raise self.error(f"{text!r} must be {'0 or longer' if zero else 'longer than 0'}")
        return seconds

    def _shown(self) -> str:
        node = self._node
        if isinstance(node, yaml.MappingNode):
            shown = "keys and values"
        elif isinstance(node, yaml.SequenceNode):
            shown = "a list"
        elif node.tag == _TAG + "null":
            return "nothing; remove the key, or give it a value (quoted, if it is meant as text)"
        else:
            shown = repr(node.value[:80])
        return shown if node.tag.startswith(_TAG) else f"{shown} with the tag {node.tag}"


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node comes to with every alias written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        known[id(node)] = 1  # until it is known: it may hold itself
        inner = node.value
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in inner for part in pair]
        known[id(node)] = 1 + sum(_written_out(part, known) for part in inner)
    return known[id(node)]


def _plain_value(text: str) -> Any:
    """Return the number or boolean that an unquoted scalar may be read as, else ``None``."""
    if text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    if not _NUMBER.fullmatch(text):
        return None
    digits = text.replace("_", "")
    unsigned = digits.lstrip("+-")
    if unsigned[:2] in ("0x", "0o"):
        number = float(int(unsigned[2:] or "0", 16 if unsigned[1] == "x" else 8))
        return -number if digits.startswith("-") else number
    return float(digits)
