"""What the phases of one session share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hogwild_engine.api.events import Event, Usage
from hogwild_engine.api.layout import LAYOUTS
from hogwild_engine.api.request import Request
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.cache.prefix_cache import Prefix
from hogwild_engine.sessions.budget import STEP_MARGIN, Budget, SessionLimits
from hogwild_engine.sessions.final_prompt import answer_constraint, final_prompt_text
from hogwild_engine.sessions.pending_tokens import PendingTokens
from hogwild_engine.step.sampling import ResolvedSampling
from hogwild_engine.text.answer_check import AnswerCheck, warn_of_left_out
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.prompt import Prompt, make_prompt


class SessionContext:
    """The request, its prompt, its part of the cache, and what it has to tell and to encode.

    Args:
        request: what to do.
        chat: turns messages into ids and ids into text.
        sampling: the request's settings, all decided.
        cache: where blocks live.
        limits: what the model and the page pool allow.

    Attributes:
        common: the block of the prompt and the history; empty until the session begins.
        pending: tokens that wait for a step.
        emit: takes events for the session's reader.
        events: events that were not read yet.
        final_text: the text of the final-answer prompt; empty for a single worker.
        final_prompt: the same as tokens.
        constraint: what the answer is held to; ``None`` for free text.
        worker_constraint: what each paragraph is held to, at its start; each takes a fresh copy.
        check: what neither holds, and is checked in finished text.

    Raises:
        PromptTooLongError: prompt and final-answer prompt leave no room for an answer.
        RequestError: the messages cannot be rendered.
        NoChatTemplateError: the model has none.
    """

    def __init__(
        self,
        request: Request,
        chat: ChatTemplate,
        sampling: ResolvedSampling,
        cache: KVCache,
        limits: SessionLimits,
    ) -> None:
        self.request = request
        self.chat = chat
        self.sampling = sampling
        self.cache = cache
        self.prompt = make_prompt(request, chat)
        self.prefix = Prefix(self.prompt.tokens, limits.page_size)
        self.common = Block(cache)
        self.pending = PendingTokens()
        self.events: list[Event] = []
        self.emit: Callable[[Event], None] = self.events.append
        self.started_at = time.perf_counter()
        self.final_text = ""
        if self.prompt.protocol is not None and request.answer == "write":
            self.final_text = final_prompt_text(self.prompt.protocol, chat, request)
        self.final_prompt = chat.encode(self.final_text)
        self.constraint = answer_constraint(request, chat)
        self.check = AnswerCheck.of(request)
        warn_of_left_out(request)
        worker_grammar = request.worker_grammar
        self.worker_constraint = worker_grammar and chat.grammars.compile(worker_grammar)
        self.budget = Budget(
            request,
            limits,
            prompt_len=len(self.prompt.tokens),
            final_len=len(self.final_prompt),
            header_lens=[len(chat.encode(text)) for text in self.section_headers],
            num_writers=len(request.workers) if self.prompt.protocol else 0,
            step_tokens=_max_step_tokens(request, self.prompt, chat),
        )

    @property
    def section_headers(self) -> list[str]:
        """Texts of the section headers; each has a block of its own, and stands in views once or
        behind every other worker. Empty in layouts without them.
        """
        protocol = self.prompt.protocol
        if protocol is None or not LAYOUTS[self.request.layout].has_headers:
            return []
        texts = (protocol.others_header, protocol.after_other, protocol.own_header)
        return [text for text in dict.fromkeys(texts) if text]

    def start(self) -> None:
        """Start the clock, and take pages of the pool that hold the prompt's beginning."""
        self.started_at = time.perf_counter()
        self.reuse_prefix()

    @property
    def encoded_len(self) -> int:
        """Tokens of the common block that are encoded."""
        return self.pending.encoded_len(self.common)

    def reuse_prefix(self) -> None:
        """Skip what comes next of the prompt if pages of the pool hold it already."""
        encoded = self.encoded_len
        reused = self.prefix.reuse(self.cache.pool, self.common, encoded)
        self.pending.skip(self.common, encoded, reused)

    def usage(self, **counts: Any) -> Usage:
        """Return what the session has cost so far, with the phase's own ``counts``."""
        return Usage(
            prompt_tokens=len(self.prompt.tokens),
            cached_tokens=self.prefix.num_reused,
            forward_steps=self.pending.num_steps,
            duration_s=time.perf_counter() - self.started_at,
            **counts,
        )

    def forget_prefix(self) -> None:
        """Let no other session find the pages of the prompt."""
        for page in self.common.pages:
            self.cache.pool.drop_key(page)

    def register_prefix(self) -> None:
        """Let other sessions find the pages that the encoded prompt fills."""
        self.prefix.keep(self.cache.pool, self.common, self.encoded_len)


def _max_step_tokens(request: Request, prompt: Prompt, chat: ChatTemplate) -> int:
    """Return the most tokens that a worker adds in one step: a header and forced text."""
    protocol = prompt.protocol
    if protocol is None:
        return 1
    most = 0
    for place, worker in enumerate(request.workers):
        before = sum(paragraph.worker == worker.name for paragraph in request.history)
        digits = range(1, len(str(before + request.max_steps + 1)) + 1)
        numbers = {int(first * count) for count in digits for first in "19"}
        rest = protocol.forced_prefix + protocol.first_prefix_for(place, worker.name)
        rest += protocol.intervention
        headers = {protocol.header_for(worker.name, number) for number in numbers}
        most = max(most, *(len(chat.encode(header + rest)) for header in headers))
    return most + STEP_MARGIN
