"""One request as the provider got it, decoded."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ToolResult:
    """What a tool returned to the model."""

    call_id: str
    name: str
    content: str


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        number: 1 for the first request of this provider.
        method, path, query: of the request line.
        headers: with lower-case names.
        body: the raw bytes.
        tool_names: the names of the tool calls that the provider has made so far, by id.
    """

    number: int
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    tool_names: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def json(self) -> Any:
        """The body, decoded; ``None`` when it is no JSON."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    @property
    def model(self) -> str:
        return str(self._field("model") or "")

    @property
    def stream(self) -> bool:
        return self._field("stream") is True

    @functools.cached_property
    def digest(self) -> str:
        """A short name for what was asked: equal for equal requests."""
        return hashlib.sha256(f"{self.method} {self.path}\n".encode() + self.body).hexdigest()[:12]

    @functools.cached_property
    def tools(self) -> tuple[str, ...]:
        """The names of the tools on offer."""
        found = []
        for tool in self._field("tools") or ():
            tool = tool.get("function", tool)
            found.append(tool.get("name", ""))
        return tuple(found)

    @functools.cached_property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation as the API had it: messages, or the items of a response's input."""
        found = self._field("messages")
        if found is None:
            found = self._field("input")
        if isinstance(found, str):
            return ({"role": "user", "content": found},)
        return tuple(m for m in found or () if isinstance(m, Mapping))

    @functools.cached_property
    def user_text(self) -> str:
        """The text of the last message of the user that is not the result of a tool."""
        for message in reversed(self.messages):
            if message.get("role") == "user" and (said := text_of(message.get("content"))):
                return said
        return ""

    @functools.cached_property
    def results(self) -> tuple[ToolResult, ...]:
        """The results of tools at the end of the conversation, after which the model goes on."""
        found: list[ToolResult] = []
        for message in reversed(self.messages):
            here = list(self._results_in(message))
            if not here:
                break
            found[:0] = here
        return tuple(found)

    @property
    def after(self) -> str:
        """The tool whose result came last, or ``""`` when the user spoke last."""
        return self.results[-1].name if self.results else ""

    def _results_in(self, message: Mapping[str, Any]) -> list[ToolResult]:
        if message.get("role") == "tool":
            return [self._result(message.get("tool_call_id"), message.get("content"))]
        if message.get("type") == "function_call_output":
            return [self._result(message.get("call_id"), message.get("output"))]
        content = message.get("content")
        if message.get("role") != "user" or not isinstance(content, list):
            return []
        return [
            self._result(block.get("tool_use_id"), block.get("content"))
            for block in content
            if isinstance(block, Mapping) and block.get("type") == "tool_result"
        ]

    def _result(self, call_id: Any, content: Any) -> ToolResult:
        name = self._called.get(str(call_id)) or self.tool_names.get(str(call_id), "")
        return ToolResult(str(call_id), name, text_of(content))

    @functools.cached_property
    def _called(self) -> dict[str, str]:
        """The names of the tool calls in the conversation, by id."""
        found: dict[str, str] = {}
        for message in self.messages:
            for call in message.get("tool_calls") or ():
                found[call.get("id")] = call.get("function", {}).get("name")
            if message.get("type") == "function_call":
                found[message["call_id"]] = message["name"]
            content = message.get("content")
            for block in content if isinstance(content, list) else ():
                if isinstance(block, Mapping) and block.get("type") == "tool_use":
                    found[block["id"]] = block["name"]
        return found

    def _field(self, name: str) -> Any:
        return self.json.get(name) if isinstance(self.json, dict) else None


def text_of(content: Any) -> str:
    """Return the text in a message's content: text itself, or blocks of which some hold text."""
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else []
    found = [block.get("text") for block in blocks if isinstance(block, Mapping)]
    return "".join(piece for piece in found if isinstance(piece, str))
