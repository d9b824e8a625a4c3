"""From an engine's events to the AI message that answers a call, whole or in chunks.

A single worker's reply is plain text, with one reasoning block before it if the model thinks first.
A team's is a list of content blocks: a reasoning block for each paragraph, in history order, then
one text block, the answer, and its tool calls. Chunks extend these blocks token by token, in the
order in which they began; ``extras["index"]``, sent when a paragraph ends, is its place in the
history.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol
from uuid import uuid4

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.content import InvalidToolCall
from langchain_core.messages.tool import (
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)

from hogwild_agents.langchain.calls import Call
from hogwild_agents.langchain.echo import Echo
from hogwild_agents.langchain.errors import AnswerMismatchError
from hogwild_engine.api.events import (
    AnswerToken,
    CallToken,
    Event,
    Finished,
    Paragraph,
    ParagraphFinished,
    ThoughtToken,
    Token,
    ToolCall,
)

PROVIDER = "hogwild"

Block = dict[str, Any]


@dataclass
class Reply:
    """Builds the message that answers one call.

    Args:
        message_id: the prefix of its paragraphs' ids.
        model_name: for the response's metadata.
        is_team: more than one worker writes.
        answer: "write" or "join".
        echo: drops a speaker's name at the answer's start.
        shows_drafts: chunks show paragraphs while they are written. ``False``: one chunk before
            the answer holds them all, in the order of the history.
        must_fit: raise if the answer does not fit its JSON schema.
    """

    message_id: str
    model_name: str
    is_team: bool
    answer: str
    echo: Echo = field(default_factory=Echo)
    shows_drafts: bool = True
    _unshown: list[Block] = field(default_factory=list)
    must_fit: bool = False
    _begun: set[str] = field(default_factory=set)
    _thinks: bool = False

    @classmethod
    def to(cls, call: Call, *, shows_drafts: bool = True) -> Reply:
        """Return the reply to ``call``, with a new id."""
        request = call.request
        is_team = len(request.workers) > 1
        echo = Echo.of(request)
        must_fit = bool(request.grammar and request.grammar.kind == "json" and not call.include_raw)
        return cls(
            uuid4().hex,
            call.config.model,
            is_team,
            request.answer,
            echo=echo,
            shows_drafts=shows_drafts,
            must_fit=must_fit,
        )

    def chunk(self, event: Event) -> AIMessageChunk | None:
        """Return what the event adds to the message; ``None`` if nothing.

        Raises:
            AnswerMismatchError: the answer is finished and does not fit its JSON schema.
        """
        if isinstance(event, Token | ParagraphFinished) and not self.shows_drafts:
            if isinstance(event, ParagraphFinished):
                block = self._whole(event.paragraph, event.index)
                index = f"lc_{event.paragraph.worker.casefold()}_{event.paragraph.number}"
                self._unshown.append(block | {"index": index})
            return None
        chunk = self._answer_chunk(event)
        if chunk is not None and self._unshown:
            assert isinstance(chunk.content, list)  # a team's
            chunk.content = [*self._unshown, *chunk.content]
            self._unshown = []
        return chunk

    def _answer_chunk(self, event: Event) -> AIMessageChunk | None:
        if isinstance(event, Token):
            delta = self._delta(event.worker, event.paragraph, event.text)
            return self._chunk([delta], event.worker)
        if isinstance(event, ParagraphFinished):
            paragraph = event.paragraph
            block = self._delta(paragraph.worker, paragraph.number, "")
            cut = {} if paragraph.complete else {"complete": False}
            block["extras"] = block.get("extras", {}) | {"index": event.index} | cut
            return self._chunk([block], paragraph.worker)
        if isinstance(event, ThoughtToken):
            self._thinks = True
            return self._chunk([_thought(event.text) | {"index": "lc_thought"}])
        if isinstance(event, AnswerToken):
            text = self.echo.feed(event.text)
            return self._text_chunk(text) if text else None
        if isinstance(event, CallToken):
            if event.name == "":  # cut before its name: the last chunk reports it
                return None
            return self._with_held_text(self._call_chunk(event.call, event.name, event.text))
        if isinstance(event, Finished):
            return self._last_chunk(event)
        return None

    def _text_chunk(self, text: str) -> AIMessageChunk:
        block: Block = {"type": "text", "text": text, "index": "lc_answer"}
        return self._chunk([block] if self._has_blocks else text)

    def _with_held_text(self, chunk: AIMessageChunk) -> AIMessageChunk:
        """Put text before a chunk that was held in case it became an echo."""
        if held := self.echo.flush():
            text: Any = self._text_chunk(held).content
            chunk.content = text + chunk.content
        return chunk

    def _call_chunk(self, place: int, name: str | None, text: str) -> AIMessageChunk:
        call_id = None if name is None else self.call_id(place)
        chunk = tool_call_chunk(name=name, args=text, id=call_id, index=place)
        block = {**chunk, "type": "tool_call_chunk", "index": f"lc_call_{place}"}
        return AIMessageChunk(
            content=[block] if self._has_blocks else "",
            tool_call_chunks=[chunk],
            response_metadata=self._origin(),
        )

    def _last_chunk(self, finished: Finished) -> AIMessageChunk:
        """Return the chunk with the usage and metadata, which ends the message."""
        self._check(finished)
        chunk = self._chunk([] if self._has_blocks else "")
        for place, call in enumerate(finished.calls):
            if call.error:
                ending = unrepairable(call.arguments).removeprefix(call.arguments)
                chunk += self._call_chunk(place, None if call.name else "", ending)
        chunk = self._with_held_text(chunk)
        chunk.usage_metadata = self._usage(finished)
        chunk.response_metadata |= self._metadata(finished)
        chunk.chunk_position = "last"
        return chunk

    def message(self, finished: Finished) -> AIMessage:
        """Return the whole message.

        Raises:
            AnswerMismatchError: the answer does not fit its JSON schema.
        """
        self._check(finished)
        self._thinks = bool(finished.thought)
        calls = [(self.call_id(n), call) for n, call in enumerate(finished.calls)]
        text = self.echo.without_label(finished.text)
        content: str | list[str | Block] = text
        if self._has_blocks:
            content = [self._whole(p, place) for place, p in enumerate(finished.paragraphs)]
            content += [_thought(finished.thought)] if self._thinks else []
            if text or not calls:
                content.append({"type": "text", "text": text})
            content += [dict(_call(name, call)) for name, call in calls]
        return AIMessage(
            content,
            tool_calls=[_call(name, c) for name, c in calls if not c.error],
            invalid_tool_calls=[_invalid_call(name, c) for name, c in calls if c.error],
            usage_metadata=self._usage(finished),
            response_metadata=self._origin() | self._metadata(finished),
        )

    def _check(self, finished: Finished) -> None:
        if self.must_fit and finished.error:
            raise AnswerMismatchError(finished.error, finished.text)

    def paragraph_id(self, worker: str, number: int) -> str:
        """Return the id of a paragraph: of its reasoning block and of its own message."""
        return f"{self.message_id}-{worker.casefold()}-{number}"

    def call_id(self, place: int) -> str:
        """Return the id of the answer's tool call at ``place``."""
        return f"call_{self.message_id[:24]}_{place}"

    @property
    def _has_blocks(self) -> bool:
        return self.is_team or self._thinks

    def _chunk(self, content: str | list[str | Block], worker: str | None = None) -> AIMessageChunk:
        """Return a chunk; its name is the worker's who wrote it. Merged chunks have no name."""
        return AIMessageChunk(content=content, name=worker, response_metadata=self._origin())

    def _delta(self, worker: str, number: int, text: str) -> Block:
        """Return a delta. Merging concatenates equal keys, so ``extras`` is sent only once."""
        block = self._block(worker, number, text)
        block["index"] = f"lc_{worker.casefold()}_{number}"
        if block["id"] not in self._begun:
            self._begun.add(block["id"])
            block["extras"] = {"worker": worker, "paragraph": number}
        return block

    def _whole(self, paragraph: Paragraph, place: int) -> Block:
        worker, number = paragraph.worker, paragraph.number
        extras: dict[str, Any] = {"worker": worker, "paragraph": number, "index": place}
        extras |= {} if paragraph.complete else {"complete": False}
        return self._block(worker, number, paragraph.text) | {"extras": extras}

    def _block(self, worker: str, number: int, text: str) -> Block:
        block_id = self.paragraph_id(worker, number)
        return {"type": "reasoning", "reasoning": text, "id": block_id}

    def _origin(self) -> dict[str, Any]:
        """Return the metadata that every chunk may repeat."""
        version = {"output_version": "v1"} if self._has_blocks else {}
        return {"model_provider": PROVIDER} | version

    def _metadata(self, finished: Finished) -> dict[str, Any]:
        """Return the metadata that is sent once."""
        logprobs = [
            {"token": token.text, "bytes": [*token.utf8], "logprob": token.logprob}
            for token in finished.logprobs
        ]
        errors = [finished.error, *(call.error for call in finished.calls)]
        error = "; ".join(filter(None, errors))
        more: dict[str, Any] = {"logprobs": {"content": logprobs}} if logprobs else {}
        return (more | {"error": error} if error else more) | {
            "model_name": self.model_name,
            "finish_reason": finished.finish_reason,
            "steps": finished.usage.steps,
            "paragraphs": [asdict(paragraph) for paragraph in finished.paragraphs],
            "seed": finished.seed,
            "sampling": finished.sampling,
            "workers": {
                name: {
                    "tokens": count,
                    "end": finished.ends.get(name),
                    "step": finished.end_steps.get(name),
                }
                for name, count in finished.usage.worker_tokens.items()
            },
        }

    def _usage(self, finished: Finished) -> UsageMetadata:
        usage = finished.usage
        thought = usage.thought_tokens
        # A worker's tokens are reasoning unless they are the answer themselves.
        if self.is_team and self.answer == "write":
            thought += sum(usage.worker_tokens.values())
        return UsageMetadata(
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.output_tokens,
            total_tokens=usage.prompt_tokens + usage.output_tokens,
            input_token_details={"cache_read": usage.cached_tokens},
            output_token_details={"reasoning": thought},
        )


class Observer(Protocol):
    """Sees the events of a call before they become parts of its message."""

    def see(self, event: Event, reply: Reply) -> None:
        """Take an event in."""
        ...

    async def asee(self, event: Event, reply: Reply) -> None:
        """Do as `see` in a coroutine."""
        ...


def _thought(text: str) -> Block:
    return {"type": "reasoning", "reasoning": text}


def _call(call_id: str, call: ToolCall) -> Any:
    if call.error:
        return _invalid_call(call_id, call)
    return tool_call(name=call.name, args=json.loads(call.arguments), id=call_id)


def _invalid_call(call_id: str, call: ToolCall) -> InvalidToolCall:
    return invalid_tool_call(
        name=call.name, args=unrepairable(call.arguments), id=call_id, error=call.error
    )


def unrepairable(arguments: str) -> str:
    """Return invalid arguments with a bracket appended that does not match.

    LangChain completes cut JSON to a call that looks valid; JSON that is wrong it leaves alone.
    """
    quoted = escaped = False
    open_brackets: list[str] = []
    for char in arguments:
        if quoted:
            quoted = char != '"' or escaped
            escaped = char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "{[":
            open_brackets.append(char)
        elif char in "}]" and open_brackets:
            open_brackets.pop()
    closing = ("\\" if escaped else "") + ('"' if quoted else "")
    return arguments + closing + ("]" if open_brackets[-1:] == ["{"] else "}")
