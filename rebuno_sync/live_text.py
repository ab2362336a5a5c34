"""From the live output of a step to the words that a model says. Pure.

LLM calls publish the provider's stream as it comes, which is Server-Sent Events with JSON; a
person wants the text in it. Whatever is not such a stream passes through unchanged. The command
line and the kernel's page both read it so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_FIELDS = ("data:", "event:", "id:", "retry:", ":")


class LiveText:
    """Reads the deltas of one step in order."""

    def __init__(self) -> None:
        self._rest = ""
        self._is_stream: bool | None = None

    def feed(self, seq: int, data: str) -> str:
        """Return what the next delta says.

        Args:
            seq: its number; a first one above 0 may begin in the middle of a line.
            data: its text.
        """
        if self._is_stream is None:
            whole = self._rest + data
            if seq > 0 and not self._rest:
                _, newline, tail = whole.partition("\n")
                if newline and tail.lstrip("\r\n").startswith(_FIELDS):
                    whole = tail.lstrip("\r\n")
            self._rest = whole
            if any(f.startswith(whole) and f != whole for f in _FIELDS):
                return ""
            self._is_stream = whole.startswith(_FIELDS)
        else:
            self._rest += data
        if not self._is_stream:
            text, self._rest = self._rest, ""
            return text
        *lines, self._rest = self._rest.split("\n")
        return "".join(_said(line.rstrip("\r")) for line in lines)


def _said(line: str) -> str:
    if not line.startswith("data:"):
        return ""
    try:
        message = json.loads(line[5:])
    except (ValueError, RecursionError):  # such as the [DONE] that ends OpenAI's streams
        return ""
    return "".join(_words(message)) if isinstance(message, Mapping) else ""


def _words(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text in a message of OpenAI's two interfaces or of Anthropic's."""
    choices = message.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, Mapping):
            delta = choice.get("delta")
            said = delta.get("content") if isinstance(delta, Mapping) else choice.get("text")
            if isinstance(said, str):
                yield said
    delta = message.get("delta")
    if message.get("type") == "response.output_text.delta" and isinstance(delta, str):
        yield delta
    if message.get("type") == "content_block_delta" and isinstance(delta, Mapping):
        said = delta.get("text")
        if isinstance(said, str):
            yield said
