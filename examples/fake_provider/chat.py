"""OpenAI chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .asked import Asked
from .dialect import THEN, Answering, Event, argument_pieces, openai_error, require


class Chat:
    """``POST /v1/chat/completions``."""

    call_prefix = "call"

    def check(self, asked: Asked, known: Mapping[str, str]) -> None:
        require(asked.model, "you must provide a model parameter")
        require(asked.messages, "[] is too short - 'messages'")
        waiting: set[str] = set()
        for message in asked.messages:
            if message.get("role") == "tool":
                call_id = message.get("tool_call_id")
                require(
                    call_id in waiting,
                    "messages with role 'tool' must be a response to a preceding message with "
                    f"'tool_calls': {call_id!r}",
                )
                waiting.discard(str(call_id))
                continue
            require(not waiting, f"tool_call_ids did not have response messages: {sorted(waiting)}")
            waiting = {call["id"] for call in message.get("tool_calls") or ()}
        require(not waiting, f"tool_call_ids did not have response messages: {sorted(waiting)}")

    def plain(self, answering: Answering) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answering.reply.text or None,
            "refusal": None,
        }
        if answering.reply.tool_calls:
            message["tool_calls"] = self._tool_calls(answering)
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": self._finish(answering),
        }
        return {
            "id": f"chatcmpl-{answering.tag}",
            "object": "chat.completion",
            "created": THEN,
            "model": answering.asked.model,
            "choices": [choice],
            "usage": self._usage(answering),
        }

    def events(self, answering: Answering) -> Iterator[Event]:
        yield self._chunk(answering, {"role": "assistant", "content": "", "refusal": None})
        for piece in answering.reply.pieces:
            yield self._chunk(answering, {"content": piece})
        for index, call in enumerate(self._tool_calls(answering)):
            arguments = call["function"]["arguments"]
            call["function"]["arguments"] = ""
            yield self._chunk(answering, {"tool_calls": [{"index": index, **call}]})
            for piece in argument_pieces(arguments):
                delta = {"index": index, "function": {"arguments": piece}}
                yield self._chunk(answering, {"tool_calls": [delta]})
        yield self._chunk(answering, {}, self._finish(answering))
        options = answering.asked.json.get("stream_options") or {}
        if options.get("include_usage"):
            last = self._chunk(answering, {})
            yield Event({**last.data, "choices": [], "usage": self._usage(answering)})  # type: ignore[dict-item]
        yield Event("[DONE]")

    def error(self, status: int, message: str, request_id: str) -> dict[str, Any]:
        return openai_error(status, message)

    def error_event(self, message: str) -> Event:
        return Event(openai_error(500, message))

    def _tool_calls(self, answering: Answering) -> list[dict[str, Any]]:
        return [
            {
                "id": answering.call_id(self.call_prefix, index),
                "type": "function",
                "function": {"name": call.name, "arguments": call.json},
            }
            for index, call in enumerate(answering.reply.tool_calls)
        ]

    @staticmethod
    def _chunk(answering: Answering, delta: dict[str, Any], finish: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return Event(
            {
                "id": f"chatcmpl-{answering.tag}",
                "object": "chat.completion.chunk",
                "created": THEN,
                "model": answering.asked.model,
                "choices": [choice],
            }
        )

    @staticmethod
    def _finish(answering: Answering) -> str:
        if answering.reply.stop == "length":
            return "length"
        return "tool_calls" if answering.reply.tool_calls else "stop"

    @staticmethod
    def _usage(answering: Answering) -> dict[str, Any]:
        read, written = answering.tokens_in, answering.tokens_out
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
        }
