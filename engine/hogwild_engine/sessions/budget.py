"""How many tokens and pages a session may fill. Knows lengths; not what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hogwild_engine.api.errors import PromptTooLongError, error_text
from hogwild_engine.api.request import Request
from hogwild_engine.cache.block import Block

ANSWER_SHARE = 0.5
"""While a team thinks, at most this share of what its prompt leaves free is kept for the answer."""

STEP_MARGIN = 8
"""Tokens that a worker may add in a step beside a header: its own, and a paragraph's end."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a session may fill: tokens in a view, and pages of ``page_size`` tokens each."""

    context_len: int
    num_pages: int
    page_size: int

    def pages(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)


class Budget:
    """The share of the limits that one session reserves.

    ``max_tokens`` and ``max_steps`` are bounds: a session with less room writes less, and ends with
    finish reason "length". While workers write, room for ``max_tokens`` is kept for the answer, but
    at most half of what the prompt leaves free; the answer may fill all that is left then.

    Args:
        request: what the session does.
        limits: what the model and the page pool allow.
        prompt_len: tokens of the prompt.
        final_len: tokens of the final-answer prompt.
        num_writers: workers of the team; 0 for a single worker, which has no parallel phase.
        step_tokens: most tokens that one worker adds in one step.
        header_lens: tokens of each section header.

    Attributes:
        num_pages: pages that are reserved for the whole session. It ends with finish reason
            "length" rather than take more.

    Raises:
        PromptTooLongError: the prompt, the final-answer prompt and a header of each worker do not
            fit, so there is no room for any answer.
    """

    def __init__(
        self,
        request: Request,
        limits: SessionLimits,
        *,
        prompt_len: int,
        final_len: int,
        num_writers: int,
        step_tokens: int,
        header_lens: Sequence[int] = (),
    ) -> None:
        self._limits = limits
        self._growth = num_writers * step_tokens
        overhead = final_len + sum(header_lens) + self._growth + 1
        _require_room(limits, request, prompt_len, overhead)
        min_tokens = prompt_len + overhead
        header_pages = sum(map(limits.pages, header_lens))
        min_pages = limits.pages(min_tokens) + header_pages
        min_pages += 2 * num_writers + 3 if num_writers else 0
        if min_pages > limits.num_pages:
            wanted = f"a prompt that fits {limits.num_pages} pages"
            todo = f"it needs {min_pages} pages of {limits.page_size} tokens: raise num_pages"
            raise PromptTooLongError(error_text("messages", wanted, f"{prompt_len} tokens", todo))
        written = min(2 * request.max_steps + step_tokens, limits.context_len)
        max_tokens = min_tokens + num_writers * written + request.max_tokens
        if request.answer == "write" or not num_writers:
            # The view of the answer holds every block. The answer's own pages begin anew.
            max_tokens = min(max_tokens, limits.context_len + limits.page_size)
        # Partly filled pages, and a paragraph that stands twice while it moves.
        spare = 3 * num_writers + 8 + limits.pages(request.max_steps) if num_writers else 0
        spare += header_pages
        self.num_pages = min(limits.num_pages, limits.pages(max_tokens) + spare)
        free = limits.context_len - min_tokens
        free = min(free, (self.num_pages - min_pages) * limits.page_size)
        kept = min(request.max_tokens, int(ANSWER_SHARE * free)) if request.answer == "write" else 0
        self._answer_len = final_len + kept

    def fits_step(self, view_len: int, blocks: Sequence[Block], own: Sequence[Block]) -> bool:
        """Return whether every worker may write on and an answer still fits behind.

        Args:
            view_len: tokens of the longest view now.
            blocks: all blocks of the session.
            own: of these, the workers' own.
        """
        if view_len + self._growth + self._answer_len > self._limits.context_len:
            return False
        held = sum(len(block.pages) for block in blocks)
        moving = max(len(block.pages) for block in own)
        growing = 2 * len(own) + self._limits.pages(self._growth)
        needed = held + moving + growing + self._limits.pages(self._answer_len) + 1
        return needed <= self.num_pages

    def answer_tokens(self, view_len: int, blocks: Sequence[Block]) -> int:
        """Return how many tokens an answer may have before its view or the pages are full.

        Args:
            view_len: tokens that stand before the answer in its view.
            blocks: all blocks of the session.
        """
        free = self.num_pages - sum(len(block.pages) for block in blocks)
        return min(self._limits.context_len - view_len, free * self._limits.page_size)


def _require_room(limits: SessionLimits, request: Request, prompt_len: int, overhead: int) -> None:
    """Raise an error if a prompt, and what every session adds to it, exceed the context."""
    longest = limits.context_len - overhead
    if longest < 1:
        wanted = f"headers and a final-answer prompt of fewer than {limits.context_len} tokens"
        todo = "that is the context: take fewer workers, shorter names or a shorter protocol"
        got = f"{overhead} tokens for {len(request.workers)}"
        raise PromptTooLongError(error_text("workers", wanted, got, todo))
    if prompt_len > longest:
        todo = f"the context holds {limits.context_len} tokens: shorten the messages"
        wanted = f"a prompt of at most {longest} tokens"
        raise PromptTooLongError(error_text("messages", wanted, f"{prompt_len} tokens", todo))
