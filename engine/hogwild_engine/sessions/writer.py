"""A writer of a session, a worker or the writer of the final answer, and the text it is at."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hogwild_engine.cache.block import Block
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text import paragraphs, stop_strings
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.constraint import Constraint
from hogwild_engine.text.detokenizer import Detokenizer


class Writer:
    """Who writes to a block.

    Attributes:
        number: counts the session's writers from 0; keys the writer's random numbers.
        name: as in headers; empty for the answer.
        block: where its tokens go.
        draft: the paragraph it is writing; ``None`` before it starts, between two phases, and after
            its end.
        paragraph: number of that paragraph, from 1.
        num_sampled: tokens sampled so far, rewound ones included.
        seen: token ids under the repetition penalty.
        done: it writes no more.
    """

    def __init__(self, number: int, name: str, block: Block, seen: Collection[int]) -> None:
        self.number = number
        self.name = name
        self.block = block
        self.draft: Draft | None = None
        self.paragraph = 0
        self.num_sampled = 0
        self.seen = set(seen)
        self.done = False


class Draft:
    """An open paragraph: its tokens, its text, and how much of the text was shown to the caller.

    Args:
        writer: who writes it; its ``draft`` becomes this one.
        chat: decodes tokens; its hidden ids never show.
        forced: the part of the text that was put in the writer's mouth.
        start: length of the writer's block before the paragraph, its header included.
        base: length of the writer's block before the first sampled token.
        watched: strings that end the text where they begin; a beginning of one is held back.
        strips: leave out white space at the text's two ends.
        committed: whether text may be shown; a paragraph whose start may be rewound is not.
        constraint: the grammar that sampled tokens are held to, the forced start left out.

    Attributes:
        text: all of it so far.
        shown: what was shown of it.
        sampled: the sampled tokens that stand.
        registered: whether other paragraphs must not start like this one.
        settled: length of the text behind which an item may be rewound; ``None`` if none may.
        rewinds: how often it was rewound.
        banned_ids: token ids that rewinds banned, by place in the paragraph.
        text_ends: length of the text after each sampled token.
    """

    def __init__(
        self,
        writer: Writer,
        chat: ChatTemplate,
        forced: str,
        *,
        start: int,
        base: int,
        watched: Sequence[str] = (),
        strips: bool = True,
        committed: bool = True,
        constraint: Constraint | None = None,
    ) -> None:
        self.writer = writer
        writer.draft = self
        self.forced = forced
        self.start = start
        self.base = base
        self.strips = strips
        self.committed = committed
        self.constraint = constraint
        self.registered = False
        self.settled: int | None = None
        self.rewinds = 0
        self.shown = ""
        self._chat = chat
        self._watched = watched
        self._num_shown = 0
        self._drafted = ""
        self.banned_ids: dict[int, set[int]] = {}
        self._reset()

    def _reset(self) -> None:
        self.text = self.forced
        self.sampled: list[SampledToken] = []
        self.text_ends: list[int] = []
        self._detokenizer = Detokenizer(self._chat.decode, self._chat.special_ids)

    def add(self, token: SampledToken) -> int:
        """Append a sampled token; return the text's length before it."""
        before = len(self.text)
        if self.constraint is not None:
            self.constraint.accept(token.token)
        self.text += self._detokenizer.add(token.token)
        self.sampled.append(token)
        self.text_ends.append(len(self.text))
        return before

    def banned(self) -> Collection[int]:
        """Return the token ids that must not come next."""
        return self.banned_ids.get(len(self.sampled), ())

    def own_text(self, length: int | None = None) -> str:
        """Return what the writer itself wrote within the first ``length`` characters."""
        return self.text[len(self.forced) : length]

    def find(self, strings: Sequence[str], before: int) -> int | None:
        """Return where the first of ``strings`` begins in what the writer wrote.

        Args:
            strings: what to look for.
            before: length of the text before its last token: earlier text was searched already.
        """
        longest = max(map(len, strings), default=0)
        since = max(len(self.forced), before - longest)
        return stop_strings.find_first(self.text, strings, since) if strings else None

    def tokens_within(self, length: int) -> int:
        """Return how many sampled tokens lie wholly in the first ``length`` characters."""
        return sum(end <= length for end in self.text_ends)

    def least_probable(self, start: int, stop: int) -> int:
        """Return the place of the least probable token whose text touches ``[start, stop)``."""
        starts = [len(self.forced), *self.text_ends[:-1]]
        touching = [
            place
            for place, (begin, end) in enumerate(zip(starts, self.text_ends, strict=True))
            if begin < stop and end > start
        ]
        return min(touching or [0], key=lambda place: self.sampled[place].probability)

    def rewind(self, keep: int) -> int:
        """Forget all sampled tokens but the first ``keep``, also in the writer's block, and ban the
        token that stood there.

        Returns:
            The last token that stands. It was cut from the block too: encode it again for the
            logits of another continuation.
        """
        self.banned_ids.setdefault(keep, set()).add(self.sampled[keep].token)
        self.rewinds += 1
        self.registered = self.registered and self.committed
        if self.constraint is not None:
            self.constraint.rollback(len(self.sampled))
        kept = self.sampled[:keep]
        self._reset()
        for token in kept:
            self.add(token)
        block, last = self.writer.block, self.base + keep - 1
        token = block.tokens[last]
        block.truncate(last)
        if self.settled is not None:
            self.settled = min(self.settled, len(self.text))
        return token

    def show(self) -> str:
        """Return the text that may be shown now and was not before."""
        if not self.committed:
            return ""
        return self._show_to(self._text_not_held()[: self.settled])

    def show_draft(self) -> str:
        """Return the text that grew and may still be rewound."""
        draft = self._text_not_held()[self._num_shown :]
        if not draft.strip():
            return ""
        fresh = draft[len(self._drafted) :]
        self._drafted = draft
        return fresh

    def drop_draft(self) -> str:
        """Return what `show_draft` returned since the last text was shown, and forget it."""
        dropped, self._drafted = self._drafted, ""
        return dropped

    def _text_not_held(self) -> str:
        """Return the text without an end that may become a watched string."""
        held = stop_strings.held_back_len(self.text, self._watched)
        return self.text[: len(self.text) - held]

    def finish(self, length: int | None = None, *, closes_fence: bool = False) -> str:
        """Close the text, cut to ``length`` characters, and return what was not shown of it.

        Args:
            length: characters that stay; ``None`` for all, half a character at the end included.
            closes_fence: end a code fence that is open in the text.
        """
        if length is None:
            self.text += self._detokenizer.flush()
        self.text = self.text[:length]
        if closes_fence and paragraphs.fence_is_open(self.text):
            self.text = self.text.rstrip() + "\n```"
        return self._show_to(self.text)

    def _show_to(self, text: str) -> str:
        stop = len(text.rstrip() if self.strips else text)
        fresh = self.text[self._num_shown : stop]
        self._num_shown = max(self._num_shown, stop)
        if self.strips and not self.shown:
            fresh = fresh.lstrip()
        if fresh:
            self._drafted = ""
        self.shown += fresh
        return fresh
