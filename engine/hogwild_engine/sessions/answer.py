"""The final answer: one writer, everything in view. Also the whole of a session with a single
worker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hogwild_engine.api import events
from hogwild_engine.api.errors import RequestError, complaint
from hogwild_engine.api.events import Event, FinishReason, TokenProbability
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.draft import Draft
from hogwild_engine.sessions.writer import Writer
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text import paragraphs
from hogwild_engine.text.call_grammar import call_grammar
from hogwild_engine.text.chat_template import THINK_CLOSE, ChatTemplate
from hogwild_engine.text.constraint import Constraint
from hogwild_engine.text.output_parser import OutputParser, Piece

MAX_REWINDS = 8

_QUESTION_BEFORE_TOOLS = (
    "Now call a tool for what my request asks, and rely on no guess written above; where no tool "
    "fits, write the complete final answer."
)
_QUESTION_AFTER_TOOLS = (
    "Now tell me the answer to my request in one or more plain sentences, using what the tools "
    "have given. Call a tool only for what is still missing."
)


def final_prompt_text(protocol: Protocol, chat: ChatTemplate, request: Request) -> str:
    """What is put before the final answer. A grammar binds all of an answer, so no protocol's own
    words can start it then.
    """
    if protocol.final_prompt != "close" and not request.constrains_answer:
        return protocol.final_prompt
    if chat.thinking:
        return f"{THINK_CLOSE}\n\n"
    if not request.may_call:
        return chat.closing(protocol.final_question)
    has_results = request.messages[-1]["role"] == "tool"
    return chat.closing(_QUESTION_AFTER_TOOLS if has_results else _QUESTION_BEFORE_TOOLS)


def answer_constraint(request: Request, chat: ChatTemplate) -> Constraint | None:
    """What the request's grammar or tools make of its answer."""
    budget, grammar = request.max_tokens, request.grammar
    if request.tools:
        try:
            grammar = call_grammar(
                request.tools,
                request.tool_choice,
                chat.tool_format,
                chat.spell,
                budget,
                parallel=request.parallel_tool_calls,
                answer=grammar,
            )
        except (TypeError, OverflowError, RecursionError) as error:
            wanted = "schemas that JSON can hold"
            told = [tool["function"]["name"] for tool in request.tools]
            raise RequestError(complaint("tools", wanted, told, str(error))) from error
    return chat.grammars.compile(grammar, budget) if grammar else None


@dataclass
class Bounds:
    """What an answer may be.

    Args:
        max_tokens: bound on the drawn tokens.
        stop: strings that end it.
        guards: a team's headers, as they start; ``None`` for one worker alone. Where one begins in
            text, the answer is rewound and another token drawn, `MAX_REWINDS` times at most:
            structure is not the answer's to write. A team's answer has no white space at its ends.
        constraint: the grammar it is bound to, its thoughts left out.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()
    guards: Sequence[str] | None = None
    constraint: Constraint | None = None


class AnswerPhase:
    """Writes the final answer.

    Args:
        writer: number and block of who writes.
        chat: turns ids into text.
        bounds: what it may write.
        parser: tells thoughts, text and calls apart.
        forced: the start of its text, which a protocol's own final_prompt put there.
        base: length of the writer's block before the first drawn token.
        emit: takes events.

    Attributes:
        finish_reason: why it ended; ``None`` while it goes on.
        num_thought: tokens drawn for thoughts.
    """

    def __init__(
        self,
        writer: Writer,
        chat: ChatTemplate,
        bounds: Bounds,
        parser: OutputParser,
        forced: str,
        base: int,
        emit: Callable[[Event], None],
    ) -> None:
        self.writer = writer
        self.parser = parser
        self.finish_reason: FinishReason | None = None
        self.num_thought = 0
        self._chat = chat
        self._bounds = bounds
        self._guards = bounds.guards or ()
        self._emit = emit
        self._draft = writer.draft = Draft(
            chat.decode,
            chat.hidden,
            forced,
            base=base,
            start=0,
            watched=[*bounds.stop, *self._guards],
            strips=bounds.guards is not None,
            constraint=None if parser.thinking else bounds.constraint,
        )
        self._show(self._draft.show())

    @property
    def block(self) -> Block:
        return self.writer.block

    @property
    def logprobs(self) -> tuple[TokenProbability, ...]:
        """The drawn tokens; a token that a grammar forced is certain."""
        return tuple(
            TokenProbability(self._chat.decode([token]), math.log(max(probability, 1e-45)))
            for token, probability in self._draft.drawn
        )

    def banned(self) -> Collection[int]:
        """Ids that must not come next."""
        return self._draft.banned()

    def advance(self, drawn: SampledToken) -> list[int]:
        """Take in a drawn token; returns the tokens to encode next, none at the end."""
        tokens = [self._take(drawn)]
        draft, constraint = self._draft, self._bounds.constraint
        if constraint is None or self.parser.thinking:
            return tokens if self.finish_reason is None else []
        if draft.constraint is None:  # the thoughts have just ended
            tokens += self._force(self._chat.encode("\n\n"))
            draft.constraint = constraint
        if self.finish_reason is None:
            tokens += self._force(constraint.forced())
        return tokens if self.finish_reason is None else []

    def _force(self, forced: Sequence[int]) -> list[int]:
        """Take tokens that the model is not asked about, as far as there is room for them."""
        taken = []
        for token in forced:
            if self.finish_reason is None:
                taken.append(self._take(SampledToken(token, 1.0)))
        return taken

    def _take(self, drawn: SampledToken) -> int:
        """Take in a token; returns the last one that stands then."""
        self.writer.num_sampled += 1
        self.num_thought += self.parser.thinking
        if drawn.token in self._chat.ends:
            self._end("stop", None)
            return drawn.token
        self.writer.seen.add(drawn.token)
        fresh = self._draft.add(drawn)
        constraint = self._draft.constraint
        stop = self._found(self._bounds.stop, fresh)
        guard = None if self.parser.calls else self._found(self._guards, fresh)
        if stop is not None:
            self._end("stop", stop)
        elif (constraint is not None and constraint.finished) or self.parser.repeats:
            self._end("stop", None)
        elif self.writer.num_sampled >= self._bounds.max_tokens:
            self._end("length", guard)
        elif guard is not None and self._draft.attempts < MAX_REWINDS:
            return self._rewind(guard)
        else:
            self._show(self._draft.show())
        return drawn.token

    def _rewind(self, length: int) -> int:
        """Go back to where the text had ``length`` characters; returns the last token there."""
        keep = self._draft.tokens_within(length)
        self._draft.rewind(keep)
        last = self._draft.base + keep - 1
        token = self.block.tokens[last]
        self.block.truncate(last)
        return token

    def _found(self, strings: Sequence[str], fresh: int) -> int | None:
        longest = max(map(len, strings), default=0)
        since = max(len(self._draft.forced), fresh - longest)
        return paragraphs.first_of(self._draft.text, strings, since)

    def _end(self, reason: FinishReason, length: int | None) -> None:
        cut = reason == "length"
        self._show(self._draft.finish(length), final=True, cut=cut)
        # Cut in the tags behind its last call, an answer is whole.
        called = bool(self.parser.calls) and self.parser.calls[-1].complete
        self.finish_reason = "tool_calls" if called else reason
        self.writer.done = True

    def _show(self, text: str, *, final: bool = False, cut: bool = False) -> None:
        for piece in self.parser.feed(text, final=final, cut=cut):
            self._emit(self._event(piece))

    def _event(self, piece: Piece) -> Event:
        index = self.writer.num_sampled
        if piece.kind == "text":
            return events.AnswerToken(piece.text, index)
        if piece.kind == "thought":
            return events.ThoughtToken(piece.text, index)
        call = len(self.parser.calls) - 1
        name = self.parser.calls[-1].name if piece.begins else None
        return events.CallToken(call, name, piece.text, index)
