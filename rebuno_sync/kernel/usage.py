"""How many tokens an LLM call used, as the provider's recorded answer tells (PROTOCOL 11).

Pure. It knows the shapes of OpenAI (chat completions, responses, embeddings) and Anthropic
(messages), whole or streamed. In a stream the figures stand in some of its events, each as a
total so far, and the last of each kind holds.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

#: Where the figures are: beside the answer, or inside the event of a stream that carries it.
_CARRIERS = ("response", "message")
#: Each total is the sum of these. OpenAI counts cached tokens among the input, Anthropic beside it.
_PARTS = (
    "prompt_tokens",
    "completion_tokens",
    "input_tokens",
    "output_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
)
_MOST = 10**12


def tokens_used(outcome: str) -> int | None:
    """Return the tokens in and out of an LLM call; ``None`` when its record does not tell.

    Args:
        outcome: the raw JSON of the step's result, or of its error where the answer broke off.
    """
    if '"usage' not in outcome and '\\"usage' not in outcome and "body_base64" not in outcome:
        return None
    record = _decoded(outcome)
    if isinstance(record, dict) and isinstance(record.get("response"), dict):
        record = record["response"]
    body = _body(record)
    if body is None:
        return None
    figures: dict[str, int] = {}
    for value in _values(body):
        figures.update(_figures(value))
    if "total_tokens" in figures:
        return figures["total_tokens"]
    parts = [figures[name] for name in _PARTS if name in figures]
    return sum(parts) if parts else None


def _body(record: Any) -> str | None:
    if not isinstance(record, dict):
        return None
    body, encoded = record.get("body"), record.get("body_base64")
    if isinstance(encoded, str):
        try:
            return base64.b64decode(encoded).decode("utf-8", "replace")
        except ValueError:
            return None
    return body if isinstance(body, str) else None


def _values(body: str) -> Iterator[Any]:
    """Yield the JSON values of an answer in which figures may stand: one, or those of its events.

    An event may be spread over several ``data:`` lines, which the format joins by line feeds.
    """
    whole = _decoded(body)
    if whole is not None:
        yield whole
        return
    data: list[str] = []
    for line in [*body.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""]:
        if line.startswith("data:"):
            data.append(line[5:])
        elif not line and data:
            event = "\n".join(data)
            data = []
            if '"usage"' in event:
                yield _decoded(event)


def _figures(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        return {}
    found: dict[str, int] = {}
    for holder in (value, *(value.get(name) for name in _CARRIERS)):
        usage = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(usage, dict):
            for name in ("total_tokens", *_PARTS):
                figure = usage.get(name)
                if type(figure) is int and 0 <= figure <= _MOST:
                    found[name] = figure
    return found


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
