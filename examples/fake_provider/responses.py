"""The OpenAI Responses API."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from .asked import Asked
from .dialect import THEN, Answering, Event, argument_pieces, openai_error, require


class Responses:
    """``POST /v1/responses``."""

    call_prefix = "call"

    def check(self, asked: Asked, known: Mapping[str, str]) -> None:
        require(asked.model, "you must provide a model parameter")
        require(
            asked.messages or asked.json.get("previous_response_id"),
            "one of 'input' or 'previous_response_id' must be provided",
        )
        called = {m["call_id"] for m in asked.messages if m.get("type") == "function_call"}
        answered = {m["call_id"] for m in asked.messages if m.get("type") == "function_call_output"}
        if asked.json.get("previous_response_id"):
            called |= known.keys() & answered
        for missing in sorted(answered - called):
            require(False, f"no tool call found for function call output with call_id {missing}")
        for missing in sorted(called - answered):
            require(False, f"no tool output found for function call {missing}")

    def plain(self, answering: Answering) -> dict[str, Any]:
        return self._response(answering, self._items(answering), done=True)

    def events(self, answering: Answering) -> Iterator[Event]:
        order = itertools.count()

        def event(name: str, /, **fields: Any) -> Event:
            return Event({"type": name, "sequence_number": next(order), **fields}, name)

        begun = self._response(answering, [], done=False)
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        items = self._items(answering)
        for index, item in enumerate(items):
            at = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                empty = {**item, "status": "in_progress", "content": []}
                part = item["content"][0]
                inside = {**at, "content_index": 0}
                yield event("response.output_item.added", output_index=index, item=empty)
                yield event("response.content_part.added", **inside, part={**part, "text": ""})
                for piece in answering.reply.pieces:
                    yield event("response.output_text.delta", **inside, delta=piece, logprobs=[])
                text = part["text"]
                yield event("response.output_text.done", **inside, text=text, logprobs=[])
                yield event("response.content_part.done", **inside, part=part)
            else:
                empty = {**item, "status": "in_progress", "arguments": ""}
                yield event("response.output_item.added", output_index=index, item=empty)
                for piece in argument_pieces(item["arguments"]):
                    yield event("response.function_call_arguments.delta", **at, delta=piece)
                yield event(
                    "response.function_call_arguments.done",
                    **at,
                    name=item["name"],
                    arguments=item["arguments"],
                )
            yield event("response.output_item.done", output_index=index, item=item)
        ended = self._response(answering, items, done=True)
        yield event(f"response.{ended['status']}", response=ended)

    def error(self, status: int, message: str, request_id: str) -> dict[str, Any]:
        return openai_error(status, message)

    def error_event(self, message: str) -> Event:
        said = {"code": "server_error", "message": message, "param": None, "sequence_number": 0}
        return Event({"type": "error", **said}, "error")

    def _items(self, answering: Answering) -> list[dict[str, Any]]:
        reply = answering.reply
        status = "incomplete" if reply.stop == "length" else "completed"
        items: list[dict[str, Any]] = []
        if reply.pieces or not reply.tool_calls:
            content = {
                "type": "output_text",
                "text": reply.text,
                "annotations": [],
                "logprobs": [],
            }
            items.append(
                {
                    "id": f"msg_{answering.tag}",
                    "type": "message",
                    "role": "assistant",
                    "status": status,
                    "content": [content],
                }
            )
        for index, call in enumerate(reply.tool_calls):
            items.append(
                {
                    "id": answering.call_id("fc", index),
                    "type": "function_call",
                    "call_id": answering.call_id(self.call_prefix, index),
                    "name": call.name,
                    "arguments": call.json,
                    "status": status,
                }
            )
        return items

    @staticmethod
    def _response(
        answering: Answering, items: list[dict[str, Any]], *, done: bool
    ) -> dict[str, Any]:
        asked = answering.asked.json
        cut = answering.reply.stop == "length"
        read, written = answering.tokens_in, answering.tokens_out
        usage = {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        }
        return {
            "id": f"resp_{answering.tag}",
            "object": "response",
            "created_at": THEN,
            "status": "in_progress" if not done else "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if done and cut else None,
            "instructions": asked.get("instructions"),
            "metadata": asked.get("metadata") or {},
            "model": answering.asked.model,
            "output": items,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": asked.get("previous_response_id"),
            "temperature": asked.get("temperature", 1.0),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "truncation": asked.get("truncation", "disabled"),
            "usage": usage if done else None,
        }
