"""Anthropic messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .asked import Asked
from .dialect import Answering, Event, argument_pieces, require

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


class Messages:
    """``POST /v1/messages``."""

    call_prefix = "toolu"

    def check(self, asked: Asked, known: Mapping[str, str]) -> None:
        require(asked.headers.get("anthropic-version"), "anthropic-version: header is required")
        require(asked.model, "model: Field required")
        require(isinstance(asked.json.get("max_tokens"), int), "max_tokens: Field required")
        require(asked.messages, "messages: at least one message is required")
        waiting: set[str] = set()
        for number, message in enumerate(asked.messages):
            require(
                message.get("role") in ("user", "assistant"),
                f"messages.{number}.role: expected 'user' or 'assistant'",
            )
            blocks = message.get("content")
            blocks = blocks if isinstance(blocks, list) else []
            answered = {b["tool_use_id"] for b in blocks if b.get("type") == "tool_result"}
            require(
                not waiting - answered,
                f"messages.{number}: `tool_use` ids were found without `tool_result` blocks "
                f"immediately after: {', '.join(sorted(waiting - answered))}",
            )
            require(
                not answered - waiting,
                f"messages.{number}: unexpected `tool_use_id` found in `tool_result` blocks: "
                f"{', '.join(sorted(answered - waiting))}",
            )
            waiting = {b["id"] for b in blocks if b.get("type") == "tool_use"}
        require(not waiting, f"`tool_use` ids without `tool_result`: {', '.join(sorted(waiting))}")

    def plain(self, answering: Answering) -> dict[str, Any]:
        return {
            **self._empty(answering),
            "content": self._blocks(answering),
            "stop_reason": self._stop_reason(answering),
            "usage": {
                "input_tokens": answering.tokens_in,
                "output_tokens": answering.tokens_out,
            },
        }

    def events(self, answering: Answering) -> Iterator[Event]:
        def event(name: str, /, **fields: Any) -> Event:
            return Event({"type": name, **fields}, name)

        yield event("message_start", message=self._empty(answering))
        yield event("ping")
        for index, block in enumerate(self._blocks(answering)):
            if block["type"] == "text":
                empty = {**block, "text": ""}
                deltas = [{"type": "text_delta", "text": p} for p in answering.reply.pieces]
            else:
                empty = {**block, "input": {}}
                at = index - (1 if answering.reply.pieces else 0)
                deltas = [
                    {"type": "input_json_delta", "partial_json": piece}
                    for piece in argument_pieces(answering.reply.tool_calls[at].json)
                ]
            yield event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield event("content_block_delta", index=index, delta=delta)
            yield event("content_block_stop", index=index)
        yield event(
            "message_delta",
            delta={"stop_reason": self._stop_reason(answering), "stop_sequence": None},
            usage={"output_tokens": answering.tokens_out},
        )
        yield event("message_stop")

    def error(self, status: int, message: str, request_id: str) -> dict[str, Any]:
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": message},
            "request_id": request_id,
        }

    def error_event(self, message: str) -> Event:
        return Event(
            {"type": "error", "error": {"type": "overloaded_error", "message": message}}, "error"
        )

    @staticmethod
    def _empty(answering: Answering) -> dict[str, Any]:
        return {
            "id": f"msg_{answering.tag}",
            "type": "message",
            "role": "assistant",
            "model": answering.asked.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answering.tokens_in, "output_tokens": 1},
        }

    def _blocks(self, answering: Answering) -> list[dict[str, Any]]:
        reply = answering.reply
        blocks: list[dict[str, Any]] = []
        if reply.pieces:
            blocks.append({"type": "text", "text": reply.text})
        for index, call in enumerate(reply.tool_calls):
            call_id = answering.call_id(self.call_prefix, index)
            blocks.append(
                {"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments}
            )
        return blocks

    @staticmethod
    def _stop_reason(answering: Answering) -> str:
        if answering.reply.stop == "length":
            return "max_tokens"
        return "tool_use" if answering.reply.tool_calls else "end_turn"
