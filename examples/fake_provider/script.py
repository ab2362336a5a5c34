"""Where replies come from: a list, a function, or a JSON file."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from . import replies
from .asked import Asked
from .replies import Reply, ToolCall

Script = Callable[[Asked], Reply]


class ScriptError(Exception):
    """The script has no reply for a request, or one that the request does not allow."""


def as_script(script: Script | Iterable[Reply]) -> Script:
    """Return a function of the request: the given one, or one that goes through a list."""
    return script if callable(script) else InOrder(script)


class InOrder:
    """Gives each reply once, in order."""

    def __init__(self, script: Iterable[Reply]) -> None:
        self._left = list(script)
        self._lock = threading.Lock()
        self._all = len(self._left)

    def __call__(self, asked: Asked) -> Reply:
        with self._lock:
            if not self._left:
                raise ScriptError(
                    f"request {asked.number} ({asked.method} {asked.path}) has no reply: the "
                    f"script had {self._all}"
                )
            return self._left.pop(0)


class ByRules:
    """Gives the reply of the first rule that fits, or else the next reply that has no condition."""

    def __init__(self, entries: Iterable[tuple[Mapping[str, Any] | None, Reply]]) -> None:
        entries = list(entries)
        self._rules = [(when, reply) for when, reply in entries if when is not None]
        self._rest = InOrder(reply for when, reply in entries if when is None)

    def __call__(self, asked: Asked) -> Reply:
        for when, reply in self._rules:
            if all(_holds(key, wanted, asked) for key, wanted in when.items()):
                return reply
        return self._rest(asked)


def _holds(key: str, wanted: Any, asked: Asked) -> bool:
    if key == "contains":
        return str(wanted).lower() in asked.user_text.lower()
    if key == "after":
        return bool(asked.after == (wanted or ""))
    if key == "result_contains":
        return any(str(wanted) in result.content for result in asked.results)
    return bool(asked.model == wanted)


_CONDITIONS = ("contains", "after", "result_contains", "model")
_FIELDS = ("when", "text", "calls", "data", "error", "message", "retry_after", "gap", "delay")


def load_script(path: str | Path) -> Script:
    """Read a script from a JSON file.

    It is a list of objects. Each holds one of ``text``, ``data`` (any JSON), ``calls`` (a list of
    ``{"name", "arguments"}``) or ``error`` (a status, with ``message`` and ``retry_after``), may
    hold ``gap`` and ``delay`` in seconds, and may hold ``when`` with ``contains`` (in what the
    user said last), ``after`` (the tool whose result came last; ``null`` when the user spoke
    last), ``result_contains`` or ``model``. Objects without ``when`` are used once each, in order.

    Raises:
        ValueError: the file does not hold that; the message says what is wrong where.
    """
    entries = json.loads(Path(path).read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise ValueError(f"{path}: a script is a list of replies")
    return ByRules(_entry(entry, f"{path}, reply {n}") for n, entry in enumerate(entries, 1))


def _entry(entry: Any, where: str) -> tuple[Mapping[str, Any] | None, Reply]:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: an object is expected, not {entry!r}")
    when = entry.get("when")
    for unknown in (*(set(entry) - set(_FIELDS)), *(set(when or ()) - set(_CONDITIONS))):
        raise ValueError(f"{where}: there is no field {unknown!r}")
    if "text" in entry:
        reply = replies.text(entry["text"])
    elif "data" in entry:
        reply = replies.data(entry["data"])
    elif "error" in entry:
        reply = replies.error(
            entry["error"], entry.get("message", ""), retry_after=entry.get("retry_after")
        )
    elif "calls" in entry:
        reply = Reply(
            tool_calls=tuple(ToolCall(c["name"], c.get("arguments", {})) for c in entry["calls"])
        )
    else:
        raise ValueError(f"{where}: one of 'text', 'data', 'calls' and 'error' is needed")
    return when, reply.slow(gap=entry.get("gap", 0.0), delay=entry.get("delay", 0.0))
