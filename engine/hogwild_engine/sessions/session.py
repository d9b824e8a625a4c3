"""The state machine of one request: prefill, parallel phase, final answer. Knows tokens and blocks,
not tensors.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hogwild_engine.api import events
from hogwild_engine.api.errors import PromptTooLongError, complaint
from hogwild_engine.api.events import Event, FinishReason, Usage
from hogwild_engine.api.request import Request
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.cache.prefix_cache import Prefix
from hogwild_engine.sessions.answer import AnswerPhase, Bounds, answer_constraint, final_prompt_text
from hogwild_engine.sessions.parallel import ParallelPhase
from hogwild_engine.sessions.pending_tokens import PendingTokens
from hogwild_engine.sessions.writer import Writer
from hogwild_engine.step.batch import Chunk, view_len
from hogwild_engine.step.sampling import ResolvedSampling, SampledToken, SamplingRow
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.output_parser import OutputParser
from hogwild_engine.text.paragraphs import header_starts
from hogwild_engine.text.prompt import make_prompt

STEP_MARGIN = 8
"""Tokens that a worker may add in a step beside a header: its own, and a paragraph's end."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may fill: tokens in a view, and pages of ``page_size`` tokens each."""

    context_len: int
    num_pages: int
    page_size: int

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)


class ScheduledStep(NamedTuple):
    """A session's part of one pass. ``draws`` are in the order of the sampling feeds."""

    feeds: list[Chunk]
    hidden: list[Block]
    draws: list[SamplingRow]


class Session:
    """One request from its prompt to its answer.

    Making one checks that it fits and takes no pages; `begin` does.

    Args:
        request: what to do.
        chat: turns messages into ids and ids into text.
        sampling: the request's settings, all decided.
        room: what the model and the pool allow.

    Attributes:
        num_pages: most pages that it will hold; it ends with finish reason "length" rather than
            take more.
        finished: the last event, once there.

    Raises:
        PromptTooLongError: prompt and final_prompt leave no room for an answer.
        RequestError: the messages cannot be rendered.
        NoChatTemplateError: the model has none.
    """

    def __init__(
        self, request: Request, chat: ChatTemplate, sampling: ResolvedSampling, room: SessionLimits
    ) -> None:
        self.request = request
        self.finished: events.Finished | None = None
        self.started_at: float | None = None
        self._chat = chat
        self._sampling = sampling
        self._prompt = make_prompt(request, chat)
        self._prefix = Prefix(self._prompt.tokens, room.page_size)
        self._constraint = answer_constraint(request, chat)
        if request.worker_grammar is not None:  # refused here, or by nobody before it runs
            chat.grammars.compile(request.worker_grammar, request.max_steps)
        self._finisher: list[int] = []
        self._finisher_text = ""
        if self._prompt.protocol is not None and request.answer == "write":
            self._finisher_text = final_prompt_text(self._prompt.protocol, chat, request)
            self._finisher = chat.encode(self._finisher_text)
        self._step_tokens = self._most_step_tokens()
        self._room = room
        self.num_pages = self._pages_needed()
        self._events: list[Event] = []
        self._ledger = PendingTokens()
        self._drawing: list[Writer] = []
        self._cache: KVCache | None = None
        self._common: Block | None = None
        self._parallel: ParallelPhase | None = None
        self._answer: AnswerPhase | None = None
        self._cut_short = False
        self._stored = self._private = 0

    def _pages_needed(self) -> int:
        """Pages to set aside for the whole session, at most those that the pool has."""
        prompt, workers = len(self._prompt.tokens), len(self.request.workers)
        team = workers if self._prompt.protocol else 0
        least = prompt + len(self._finisher) + team * self._step_tokens + 1
        pages = self._room.pages(least) + (2 * team + 3 if team else 0)
        if least > self._room.context_len:
            wanted = f"a prompt of at most {self._room.context_len - least + prompt} tokens"
            todo = f"the context holds {self._room.context_len} tokens: shorten the messages"
            raise PromptTooLongError(complaint("messages", wanted, f"{prompt} tokens", todo))
        if pages > self._room.num_pages:
            wanted = f"a prompt that fits {self._room.num_pages} pages"
            todo = f"it needs {pages} pages of {self._room.page_size} tokens: raise num_pages"
            raise PromptTooLongError(complaint("messages", wanted, f"{prompt} tokens", todo))
        written = team * min(2 * self.request.max_steps + self._step_tokens, self._room.context_len)
        most = least + written + self.request.max_tokens
        # What `_fits_another_step` keeps free beside the tokens: partly filled pages, and a move.
        spare = 3 * team + 8 + self._room.pages(self.request.max_steps) if team else 0
        return min(self._room.num_pages, self._room.pages(most) + spare)

    def _most_step_tokens(self) -> int:
        """Most tokens that a worker adds in one step."""
        protocol = self._prompt.protocol
        if protocol is None:
            return 1
        names = [worker.name for worker in self.request.workers]
        first = max((protocol.first_prefix_for(i, n) for i, n in enumerate(names)), key=len)
        header = max((protocol.header_for(name, 10**4) for name in names), key=len)
        text = header + protocol.forced_prefix + first + protocol.intervention
        return len(self._chat.encode(text)) + STEP_MARGIN

    # What the engine asks

    @property
    def is_prefill(self) -> bool:
        return self._ledger.is_prefill

    @property
    def num_owed(self) -> int:
        """Tokens that the next pass could encode."""
        return self._ledger.num_tokens

    def begin(self, cache: KVCache) -> None:
        """Take the first pages and get ready for the first pass."""
        self.started_at = time.perf_counter()
        self._cache = cache
        common = self._common = Block(cache)
        self.reuse_prefix()
        protocol = self._prompt.protocol
        if protocol is None:
            self._start_answer(0, common, self._prompt.tokens, splits=True)
            return
        self._ledger.owe(common, self._prompt.tokens[len(common) :], splits=True)
        self._parallel = ParallelPhase(
            self.request, protocol, self._chat, cache, self._ledger, self._events.append, common
        )
        self._parallel.start()
        for writer in self._parallel.writers:
            writer.seen.update(self._prompt.tokens)
        if not self._fits_another_step():
            self._cut_short = True
            self._end_parallel()

    @property
    def next_key(self) -> bytes | None:
        """Key of the page of its prompt that the next pass would encode."""
        assert self._common is not None
        return self._prefix.next_key(self._ledger.encoded_len(self._common))

    def reuse_prefix(self) -> None:
        """Skip what comes next of the prompt where pages hold it already."""
        assert self._cache is not None
        assert self._common is not None
        encoded = self._ledger.encoded_len(self._common)
        reached = self._prefix.reuse(self._cache.pool, self._common, encoded)
        if reached > encoded:
            self._ledger.recall(self._common, encoded, reached)

    def take(self, limit: int) -> ScheduledStep:
        """This session's part of the next pass, ``limit`` tokens of it where it can be split."""
        parallel = self._parallel if self._answer is None else None
        hidden = parallel.hidden() if parallel else []
        feeds, self._drawing = self._ledger.take(limit, self._view)
        draws = [
            SamplingRow(
                self._sampling,
                writer.number,
                writer.num_sampled,
                writer.seen if self._sampling.repetition_penalty != 1 else (),
                self._banned(writer),
                writer.draft.constraint if writer.draft else None,
            )
            for writer in self._drawing
        ]
        return ScheduledStep(feeds, hidden, draws)

    def advance(self, drawn: Sequence[SampledToken]) -> list[Event]:
        """Take in what the pass drew, one token a draw of `take`; returns what happened."""
        self._keep_prefix()
        if self._answer is not None:
            for token in drawn:
                following = self._answer.advance(token)
                self._ledger.owe(self._answer.block, following, self._answer.writer, samples=True)
                if not following:
                    self._finish(self._answer.parser.text, self._answer.finish_reason or "stop")
        elif self._parallel is not None and drawn:
            for writer, token in zip(self._drawing, drawn, strict=True):
                self._parallel.advance(writer, token)
            self._parallel.end_step(self._drawing)
            self._check_end()
        return self.drain()

    def drain(self) -> list[Event]:
        """Events that were not given out yet."""
        told, self._events[:] = list(self._events), []
        return told

    def release(self) -> None:
        """Give all pages back. Safe to call again."""
        blocks = self._parallel.blocks if self._parallel else []
        for block in (self._common, self._answer and self._answer.block, *blocks):
            if block is not None:
                block.release()

    def usage(self) -> Usage:
        """What it has cost so far."""
        parallel, answer = self._parallel, self._answer
        drawn = {w.name: w.num_sampled for w in parallel.writers} if parallel else {}
        seconds = time.perf_counter() - self.started_at if self.started_at is not None else 0.0
        return Usage(
            prompt_tokens=len(self._prompt.tokens),
            cached_tokens=self._prefix.num_reused,
            worker_tokens=drawn,
            answer_tokens=answer.writer.num_sampled if answer else 0,
            thought_tokens=answer.num_thought if answer else 0,
            forced_tokens=(parallel.num_forced + len(self._finisher)) if parallel else 0,
            steps=parallel.step if parallel else 0,
            forward_steps=self._ledger.num_passes,
            duration_s=seconds,
            stored_tokens=self._stored,
            private_tokens=self._private,
        )

    def _keep_prefix(self) -> None:
        assert self._cache is not None
        assert self._common is not None
        encoded = self._ledger.encoded_len(self._common)
        self._prefix.keep(self._cache.pool, self._common, encoded)

    def _banned(self, writer: Writer) -> Collection[int]:
        banned: Collection[int] = ()
        if self._answer is not None:
            banned = self._answer.banned()
        elif self._parallel is not None:
            banned = self._parallel.banned(writer)
        return {*banned, *self._chat.ends} if self.request.ignore_eos else banned

    # Phases

    def _view(self, block: Block, writer: Writer | None) -> Sequence[Block]:
        if self._answer is not None and block is self._answer.block:
            return self._parallel.answer_view(block) if self._parallel else [block]
        assert self._parallel is not None
        return self._parallel.view(block, writer)

    def _check_end(self) -> None:
        assert self._parallel is not None
        done = not self._parallel.running
        spent = self._parallel.step >= self.request.max_steps
        full = not done and not self._fits_another_step()
        if done or spent or full:
            self._cut_short = full or (spent and not done and self.request.answer == "join")
            self._end_parallel()

    def _end_parallel(self) -> None:
        parallel = self._parallel
        assert parallel is not None
        assert self._cache is not None
        self._count_stored(parallel)
        parallel.close("length" if self._cut_short or parallel.running else "stop")
        if self.request.answer == "join":
            text = "\n\n".join(paragraph.text for paragraph in parallel.history)
            if text:
                self._events.append(events.AnswerToken(text))
            self._finish(text, "stop")
            return
        self._start_answer(len(parallel.writers), Block(self._cache), self._finisher)

    def _count_stored(self, parallel: ParallelPhase) -> None:
        assert self._common is not None
        self._stored = sum(len(block) for block in (self._common, *parallel.blocks))
        self._private = sum(view_len(parallel.view(w.block, w)) for w in parallel.writers)

    def _start_answer(
        self, number: int, block: Block, tokens: Sequence[int], *, splits: bool = False
    ) -> None:
        writer = Writer(number, "", block, seen=set(self._prompt.tokens))
        protocol, request = self._prompt.protocol, self.request
        missing = tokens[len(block) :]
        most = [request.max_tokens, self._answer_room(len(missing))]
        forced = ""
        if protocol is not None and not request.constrains_answer:
            if protocol.answer_tokens is not None:
                most.append(protocol.answer_tokens)
            if protocol.final_prompt != "close":
                forced = self._finisher_text
        bounds = Bounds(
            max(1, min(most)),
            request.stop,
            self._guards(),
            self._constraint,
        )
        self._answer = AnswerPhase(
            writer, self._chat, bounds, self._reader(), forced, len(tokens), self._events.append
        )
        self._ledger.owe(writer.block, missing, writer, samples=True, splits=splits)

    def _guards(self) -> list[str] | None:
        """Texts that a team's answer must not hold; where a grammar binds it, it cannot. Models
        take tools for members of the team and write headers for them too.
        """
        if self._parallel is None:
            return None
        guards = self._parallel.header_starts
        if self.request.grammar is not None or not guards:
            return []
        names = [tool["function"]["name"] for tool in self.request.tools]
        names += [name.capitalize() for name in names]
        return guards + header_starts(self._parallel.protocol, names)

    def _reader(self) -> OutputParser:
        request, chat = self.request, self._chat
        loose = request.tool_choice == "auto" and request.grammar is None
        return OutputParser(
            chat.tool_format if request.may_call else None,
            [tool["function"]["name"] for tool in request.tools] if loose else (),
            thinks=chat.thinking and self._prompt.protocol is None,
            is_open=chat.opens_thinking or request.constrains_answer,
        )

    def _finish(self, text: str, reason: FinishReason) -> None:
        history = tuple(self._parallel.history) if self._parallel else ()
        if self._parallel is None and self._common is not None:
            self._stored = self._private = len(self._common)
            # One writer's answer goes on where its prompt ends: a later turn may start with both.
            self._prefix.extend(self._common.tokens)
            self._keep_prefix()
        # An answer that is bound says itself whether it is whole, however short the thinking was.
        if self._cut_short and (self._answer is None or not self.request.constrains_answer):
            reason = "length"
        seed = self._sampling.seed
        ends = self._parallel.ends if self._parallel else {}
        self.finished = events.Finished(text, reason, history, self.usage(), seed, ends)
        if answer := self._answer:
            self.finished = replace(
                self.finished,
                thought=answer.parser.thought,
                calls=answer.parser.calls,
                logprobs=answer.logprobs if self.request.logprobs else (),
            )
        self._events.append(self.finished)

    # SessionLimits

    def _answer_room(self, forced: int) -> int:
        """Tokens that the answer may draw before the view or the pages are full."""
        assert self._common is not None
        blocks = [self._common, *(self._parallel.blocks if self._parallel else ())]
        stored = sum(len(block) for block in blocks)
        free = self.num_pages - sum(len(block.pages) for block in blocks)
        return min(self._room.context_len - stored, free * self._room.page_size) - forced

    def _fits_another_step(self) -> bool:
        """Whether every worker may write on and an answer still fits behind."""
        parallel = self._parallel
        assert parallel is not None
        assert self._common is not None
        blocks = [self._common, *parallel.blocks]
        growth = self._step_tokens * len(parallel.writers)
        answer = len(self._finisher)
        if self.request.answer == "write":
            answer += self.request.max_tokens
        views = [view_len(parallel.view(w.block, w)) for w in parallel.writers]
        if max(views) + growth + answer > self._room.context_len:
            return False
        held = sum(len(block.pages) for block in blocks)
        moving = max(len(w.block.pages) for w in parallel.writers)
        growing = 2 * len(parallel.writers) + self._room.pages(growth)
        return held + moving + growing + self._room.pages(answer) + 1 <= self.num_pages
