"""From an engine's events to the message that answers a call, whole or in chunks.

A lone worker's reply is plain text. A team's is a list of content blocks: a reasoning block for
each paragraph, in history order, then one text block, the answer. Chunks grow these blocks as
tokens appear, so there they stand in the order in which they began; ``extras["index"]``, which
comes when a paragraph ends, is its place in the history.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata

from hogwild_agents.calls import Call
from hogwild_engine.events import (
    AnswerToken,
    Event,
    Finished,
    Paragraph,
    ParagraphFinished,
    Token,
)

PROVIDER = "hogwild"

Block = dict[str, Any]


@dataclass
class Reply:
    """The message that answers one call.

    Args:
        message_id: what the ids of its paragraphs begin with.
        model_name: stands in the response's metadata.
        is_team: more than one worker writes.
        answer: "write" or "join".
    """

    message_id: str
    model_name: str
    is_team: bool
    answer: str
    _begun: set[str] = field(default_factory=set)

    @classmethod
    def to(cls, call: Call) -> Reply:
        """The reply to ``call``, under a new id."""
        request = call.request
        is_team = len(request.workers) > 1
        return cls(uuid4().hex, call.config.model, is_team, request.answer)

    def chunk(self, event: Event) -> AIMessageChunk | None:
        """What the event adds to the message; nothing where it writes none of it."""
        if isinstance(event, Token):
            return self._chunk([self._grown(event.worker, event.paragraph, event.text)])
        if isinstance(event, ParagraphFinished):
            paragraph = event.paragraph
            block = self._grown(paragraph.worker, paragraph.number, "")
            block["extras"] = block.get("extras", {}) | {"index": event.index}
            return self._chunk([block])
        if isinstance(event, AnswerToken):
            return self.answer_chunk(event.text)
        if isinstance(event, Finished):
            return self.last_chunk(event)
        return None

    def answer_chunk(self, text: str) -> AIMessageChunk:
        """More of the answer."""
        if not self.is_team:
            return self._chunk(text)
        return self._chunk([{"type": "text", "text": text, "index": "lc_answer"}])

    def last_chunk(self, finished: Finished) -> AIMessageChunk:
        """The end of the message: all numbers, no text."""
        chunk = self._chunk([] if self.is_team else "")
        chunk.usage_metadata = self._usage(finished)
        chunk.response_metadata |= self._metadata(finished)
        chunk.chunk_position = "last"
        return chunk

    def message(self, finished: Finished) -> AIMessage:
        """The whole message."""
        content: str | list[str | Block] = finished.text
        if self.is_team:
            paragraphs = [self._whole(p, place) for place, p in enumerate(finished.paragraphs)]
            content = [*paragraphs, {"type": "text", "text": finished.text}]
        return AIMessage(
            content,
            usage_metadata=self._usage(finished),
            response_metadata=self._origin() | self._metadata(finished),
        )

    def paragraph_id(self, worker: str, number: int) -> str:
        """Shared by the block that holds a paragraph and the message named for its worker."""
        return f"{self.message_id}-{worker.casefold()}-{number}"

    def _chunk(self, content: str | list[str | Block]) -> AIMessageChunk:
        return AIMessageChunk(content=content, response_metadata=self._origin())

    def _grown(self, worker: str, number: int, text: str) -> Block:
        """A delta. Strings under equal keys are joined on merging: ``extras`` come but once."""
        block: Block = {
            "type": "reasoning",
            "reasoning": text,
            "id": self.paragraph_id(worker, number),
            "index": f"lc_{worker.casefold()}_{number}",
        }
        if block["id"] not in self._begun:
            self._begun.add(block["id"])
            block["extras"] = {"worker": worker, "paragraph": number}
        return block

    def _whole(self, paragraph: Paragraph, place: int) -> Block:
        return {
            "type": "reasoning",
            "reasoning": paragraph.text,
            "id": self.paragraph_id(paragraph.worker, paragraph.number),
            "extras": {"worker": paragraph.worker, "paragraph": paragraph.number, "index": place},
        }

    def _origin(self) -> dict[str, Any]:
        """Metadata that every chunk may repeat."""
        version = {"output_version": "v1"} if self.is_team else {}
        return {"model_provider": PROVIDER} | version

    def _metadata(self, finished: Finished) -> dict[str, Any]:
        """Metadata that must come once."""
        return {
            "model_name": self.model_name,
            "finish_reason": finished.finish_reason,
            "steps": finished.usage.steps,
            "paragraphs": [asdict(paragraph) for paragraph in finished.paragraphs],
            "seed": finished.seed,
            "workers": {
                name: {"tokens": count, "end": finished.ends.get(name)}
                for name, count in finished.usage.worker_tokens.items()
            },
        }

    def _usage(self, finished: Finished) -> UsageMetadata:
        usage = finished.usage
        # A worker's tokens are thought, unless they are the answer themselves.
        is_thought = self.is_team and self.answer == "write"
        return UsageMetadata(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            total_tokens=usage.prompt_tokens + usage.output_tokens,
            input_token_details={"cache_read": usage.cached_tokens},
            output_token_details={
                "reasoning": sum(usage.worker_tokens.values()) if is_thought else 0
            },
        )
