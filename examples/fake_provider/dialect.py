"""What the three APIs have in common: how a reply is put into one of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from .asked import Asked
from .replies import Reply

#: When everything happened, in Unix seconds.
THEN = 1_700_000_000


class BadRequest(Exception):
    """A request that the API refuses with 400."""


@dataclasses.dataclass(frozen=True)
class Event:
    """One Server-Sent Event."""

    data: Mapping[str, Any] | str
    name: str = ""

    def encode(self) -> bytes:
        said = (
            self.data if isinstance(self.data, str) else json.dumps(self.data, ensure_ascii=False)
        )
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {said}\n\n".encode()


@dataclasses.dataclass(frozen=True)
class Answering:
    """A reply on its way out: what was asked, what is said, and the id that names this answer.

    Ids come from the request, and from how often the very same was asked before, so that they
    do not depend on the order in which requests arrive.
    """

    asked: Asked
    reply: Reply
    tag: str

    def call_id(self, prefix: str, index: int) -> str:
        return f"{prefix}_{self.tag}_{index}"

    @property
    def tokens_in(self) -> int:
        return len(self.asked.body) // 4 + 1

    @property
    def tokens_out(self) -> int:
        return len(self.reply.pieces) + 8 * len(self.reply.tool_calls)


class Dialect(Protocol):
    """One API: checks a request, and encodes a reply plain or as events."""

    #: Comes before the ids of tool calls.
    call_prefix: str

    def check(self, asked: Asked, known: Mapping[str, str]) -> None:
        """Raise :class:`BadRequest` for what the real API refuses as well."""

    def plain(self, answering: Answering) -> dict[str, Any]: ...

    def events(self, answering: Answering) -> Iterator[Event]: ...

    def error(self, status: int, message: str, request_id: str) -> dict[str, Any]: ...

    def error_event(self, message: str) -> Event: ...


def require(condition: Any, message: str) -> None:
    """Refuse a request unless ``condition`` holds."""
    if not condition:
        raise BadRequest(message)


def argument_pieces(encoded: str) -> list[str]:
    """The arguments of a tool call in the pieces that a stream sends them in."""
    return [encoded[at : at + 12] for at in range(0, len(encoded), 12)]


_OPENAI_TYPES = {
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    429: ("requests", "rate_limit_exceeded"),
}


def openai_error(status: int, message: str) -> dict[str, Any]:
    """An error of both OpenAI APIs."""
    fallback = ("server_error", None) if status >= 500 else ("invalid_request_error", None)
    kind, code = _OPENAI_TYPES.get(status, fallback)
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
