"""The answer phase: one writer, everything in view. For a single worker it is the whole session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hogwild_engine.api import events
from hogwild_engine.api.events import (
    Event,
    FinishReason,
    TokenProbability,
    ToolCall,
    Usage,
)
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.phase import FinishedPhase, Phase, Team
from hogwild_engine.sessions.writer import Draft, Writer
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text.output_parser import OutputParser, OutputPiece
from hogwild_engine.text.paragraphs import header_starts

_CUT_BY_LENGTH = "the answer was cut at max_tokens"
_CUT_BY_STRING = "a stop string cut the answer"

MAX_REWINDS = 8
"""How often an answer that starts a worker's header is rewound: structure is not its to write."""


class AnswerPhase(Phase):
    """Writes the final answer.

    Args:
        context: the session.
        team: the parallel phase, closed, or a lone worker's `Team`.
        block: where the answer is written; the common block for a single worker.
        prompt: all tokens of ``block`` before the answer; those that it lacks become pending.
        forced: the start of the answer's text, which the protocol's final prompt wrote.
        max_tokens: bound on the sampled tokens beside the request's and the cache's.
        forbidden: strings that must not begin in the answer's text.
    """

    def __init__(
        self,
        context: SessionContext,
        team: Team,
        block: Block,
        prompt: Sequence[int],
        *,
        forced: str = "",
        max_tokens: int | None = None,
        forbidden: Sequence[str] = (),
    ) -> None:
        super().__init__(context, team.blocks)
        request, chat = context.request, context.chat
        self.is_alone = block is context.common
        self._team = team
        self._before = team.answer_context()
        self._finish_reason: FinishReason | None = None
        self._num_thought = 0
        self._stopped_by_string = False
        self._forbidden = forbidden
        self._constraint = context.constraint
        self.parser = _parser(context, thinks=chat.thinking and self.is_alone)
        missing = prompt[len(block) :]
        view_len = sum(map(len, self._before)) if self._before else len(block)
        room = context.budget.answer_tokens(view_len, team.blocks) - len(missing)
        self._max_tokens = max(1, min(max_tokens or room, request.max_tokens, room))
        number = 0 if self.is_alone else len(request.workers)
        self.writer = Writer(number, "", block, context.prompt.tokens)
        self._draft = Draft(
            self.writer,
            chat,
            forced,
            start=0,
            base=len(prompt),
            watched=[*request.stop, *forbidden],
            strips=not self.is_alone,
            constraint=None if self.parser.thinking else self._constraint,
        )
        self._show(self._draft.show())
        context.pending.append(block, missing, self._draft, samples=True, splits=self.is_alone)

    @classmethod
    def alone(cls, context: SessionContext) -> AnswerPhase:
        """Return the phase of a single worker, which answers behind its prompt."""
        return cls(context, Team(context), context.common, context.prompt.tokens)

    @classmethod
    def of_team(cls, context: SessionContext, team: Team, protocol: Protocol) -> AnswerPhase:
        """Return the phase that follows a parallel phase."""
        request = context.request
        free = not request.constrains_answer
        return cls(
            context,
            team,
            Block(context.cache),
            context.final_prompt,
            forced=context.final_text if free and protocol.final_prompt != "close" else "",
            max_tokens=protocol.answer_tokens if free else None,
            forbidden=_forbidden(context, team, protocol),
        )

    # What the session asks

    @property
    def over(self) -> bool:
        return self._finish_reason is not None

    def following(self) -> Phase:
        """Finish the session."""
        context = self._context
        if self.is_alone:
            # The answer goes on where the prompt ends: a later prompt may start with both.
            context.prefix.extend(context.common.tokens)
            context.register_prefix()
        return FinishedPhase(
            context,
            self.blocks,
            self._team,
            self.parser.text,
            self._finish_reason or "stop",
            self.usage(),
            thought=self.parser.thought,
            calls=self._calls(),
            error=self._error(),
            logprobs=self._logprobs() if context.request.logprobs else (),
        )

    def _calls(self) -> tuple[ToolCall, ...]:
        return tuple(replace(call, error=self._call_error(call)) for call in self.parser.calls)

    def _call_error(self, call: ToolCall) -> str:
        if not call.complete:
            return _CUT_BY_STRING if self._stopped_by_string else _CUT_BY_LENGTH
        check = self._context.check.calls.get(call.name)
        return check.problem(call.arguments) if check else ""

    def _error(self) -> str:
        """Return why an answer without calls does not fit its grammar."""
        request, check = self._context.request, self._context.check.answer
        must_call = bool(request.tools) and request.tool_choice not in ("auto", "none")
        is_free = request.grammar is None and not must_call
        if is_free or self.parser.calls or self._finish_reason == "length":
            return ""
        if self._stopped_by_string:
            return _CUT_BY_STRING
        if self._constraint is not None and not self._constraint.may_end:
            return "the model ended its turn before the answer"
        return check.problem(self.parser.text) if check else ""

    @property
    def blocks(self) -> list[Block]:
        own = [] if self.is_alone else [self.writer.block]
        return [*self._team.blocks, *own]

    def view(self, block: Block, draft: Draft | None) -> Sequence[Block]:
        if block is self.writer.block:
            return [*self._before, block]
        return self._team.view(block, draft)

    def usage(self) -> Usage:
        usage, sampled = self._team.usage(), self.writer.num_sampled
        return replace(usage, answer_tokens=sampled, thought_tokens=self._num_thought)

    def _logprobs(self) -> tuple[TokenProbability, ...]:
        """The sampled tokens; a token that a grammar forced is certain."""
        chat = self._context.chat
        return tuple(
            TokenProbability(
                chat.decode([token]), (*chat.to_bytes(token),), math.log(max(probability, 1e-45))
            )
            for token, probability in self._draft.sampled
        )

    # One step

    def postprocess(self, sampled: Sequence[tuple[Draft, SampledToken]]) -> None:
        for draft, token in sampled:
            tokens = self._append(token)
            if not self.over:
                block = self.writer.block
                self._context.pending.append(block, tokens, draft, samples=True)

    def _append(self, token: SampledToken) -> list[int]:
        """Append a sampled token, and those that the grammar forces; return what to encode."""
        tokens = [self._append_one(token)]
        if self._constraint is None or self.parser.thinking:
            return tokens
        if self._draft.constraint is None:  # the thoughts have just ended
            tokens += self._force(self._context.chat.encode("\n\n"))
            self._draft.constraint = self._constraint
        if not self.over:
            tokens += self._force(self._constraint.forced_tokens())
        return tokens

    def _force(self, tokens: Sequence[int]) -> list[int]:
        """Append tokens that the model is not asked about, as far as the bounds allow."""
        taken = []
        for token in tokens:
            if not self.over:
                taken.append(self._append_one(SampledToken(token, 1.0)))
        return taken

    def _append_one(self, token: SampledToken) -> int:
        """Append a token; return the last one that stands then."""
        draft, parser = self._draft, self.parser
        self.writer.num_sampled += 1
        self._num_thought += parser.thinking
        if token.token in self._context.chat.eos_ids:
            if draft.constraint is not None:
                draft.constraint.check_alive()
            self._end("stop", None)
            return token.token
        self.writer.seen.add(token.token)
        before = draft.add(token)
        stop = draft.find(self._context.request.stop, before)
        header = None if parser.calls else draft.find(self._forbidden, before)
        if stop is not None:
            self._stopped_by_string = True
            self._end("stop", stop)
        elif (draft.constraint is not None and draft.constraint.finished) or parser.repeated_call:
            self._end("stop", None)
        elif self.writer.num_sampled >= self._max_tokens:
            self._end("length", header)
        elif header is not None and draft.rewinds < MAX_REWINDS:
            return draft.rewind(draft.tokens_within(header))
        else:
            self._show(draft.show())
        return token.token

    def _end(self, reason: FinishReason, length: int | None) -> None:
        cut = reason == "length" or (self._stopped_by_string and self._constraint is not None)
        self._show(self._draft.finish(length), final=True, cut=cut)
        # An answer whose last call is complete is whole, even if a bound cut the tags behind it.
        called = bool(self.parser.calls) and self.parser.calls[-1].complete
        self._finish_reason = "tool_calls" if called else reason
        self.writer.done = True

    def _show(self, text: str, *, final: bool = False, cut: bool = False) -> None:
        for piece in self.parser.feed(text, final=final, cut=cut):
            self._context.emit(self._event(piece))

    def _event(self, piece: OutputPiece) -> Event:
        index = self.writer.num_sampled
        if piece.kind == "text":
            return events.AnswerToken(piece.text, index)
        if piece.kind == "thought":
            return events.ThoughtToken(piece.text, index)
        return events.CallToken(piece.call, piece.name, piece.text, index)


def _parser(context: SessionContext, *, thinks: bool) -> OutputParser:
    request, chat = context.request, context.chat
    loose = request.tool_choice == "auto" and request.grammar is None
    return OutputParser(
        chat.tool_format if request.may_call else None,
        [tool["function"]["name"] for tool in request.tools] if loose else (),
        thinks=thinks,
        is_open=chat.opens_thinking or request.constrains_answer,
    )


def _forbidden(context: SessionContext, team: Team, protocol: Protocol) -> list[str]:
    """Return how headers start. Models take tools for members of the team and write their headers
    too; a grammar has no room for any.
    """
    request, starts = context.request, team.header_starts
    if request.grammar is not None or not starts:
        return []
    names = [tool["function"]["name"] for tool in request.tools]
    names += [name.capitalize() for name in names]
    return starts + header_starts(protocol, names)
