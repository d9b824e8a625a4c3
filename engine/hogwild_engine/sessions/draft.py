"""The paragraph that a writer is at: its tokens, its text, and how much of that may be shown."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text import paragraphs
from hogwild_engine.text.constraint import Constraint
from hogwild_engine.text.detokenizer import Decode, Detokenizer


@dataclass
class Draft:
    """An open paragraph. ``text`` is all of it so far, ``shown`` what was given out.

    Args:
        decode: token ids to text.
        hidden: ids that never show.
        forced: the part of its text that was put in the writer's mouth.
        base: length of the writer's block before the first drawn token.
        start: length of the writer's block before the paragraph, its header included.
        watched: strings that end the text where they begin; a beginning of one is held back.
        strips: leave out white space at the text's two ends.
        committed: whether text may be shown; a paragraph that may yet be rewound is not.
        registered: whether others must not open like this one.
        constraint: the grammar that what is drawn is bound to, the forced start left out.
    """

    decode: Decode
    hidden: Collection[int]
    forced: str
    base: int
    start: int
    watched: Sequence[str] = ()
    strips: bool = True
    committed: bool = True
    registered: bool = False
    constraint: Constraint | None = None
    drawn: list[SampledToken] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # length of the text after each drawn token
    bans: dict[int, set[int]] = field(default_factory=dict)  # by place in the paragraph
    attempts: int = 0
    shown: str = ""

    def __post_init__(self) -> None:
        self.text = self.forced
        self._given = 0
        self._detokenizer = Detokenizer(self.decode, self.hidden)

    def add(self, drawn: SampledToken) -> int:
        """Take a token in; returns the text's length before it."""
        before = len(self.text)
        if self.constraint is not None:
            self.constraint.take(drawn.token)
        self.text += self._detokenizer.add(drawn.token)
        self.drawn.append(drawn)
        self.ends.append(len(self.text))
        return before

    def banned(self) -> Collection[int]:
        """Tokens that must not come next."""
        return self.bans.get(len(self.drawn), ())

    def tokens_within(self, length: int) -> int:
        """How many drawn tokens lie wholly in the first ``length`` characters."""
        return sum(end <= length for end in self.ends)

    def rewind(self, keep: int) -> None:
        """Forget all drawn tokens but the first ``keep``; the next one there must be another."""
        self.bans.setdefault(keep, set()).add(self.drawn[keep].token)
        self.attempts += 1
        self.registered = False
        kept = self.drawn[:keep]
        if self.constraint is not None:
            self.constraint.rollback(len(self.drawn))
        self.drawn, self.ends, self.text = [], [], self.forced
        self._detokenizer = Detokenizer(self.decode, self.hidden)
        for drawn in kept:
            self.add(drawn)

    def weakest_within(self, start: int, stop: int) -> int:
        """Place of the least probable drawn token whose text touches ``start … stop - 1``."""
        starts = [len(self.forced), *self.ends[:-1]]
        touching = [
            place
            for place, (begin, end) in enumerate(zip(starts, self.ends, strict=True))
            if begin < stop and end > start
        ]
        return min(touching or [0], key=lambda place: self.drawn[place].probability)

    def show(self) -> str:
        """The text that may be given out now and was not before."""
        if not self.committed:
            return ""
        held = paragraphs.held_back(self.text, self.watched)
        kept = self.text[: len(self.text) - held]
        return self._give(len(kept.rstrip() if self.strips else kept))

    def finish(self, length: int | None = None, *, closes_fence: bool = False) -> str:
        """Close the text, cut to ``length`` characters, and a code fence that is open in it; give
        out the rest of it.
        """
        if length is None:
            self.text += self._detokenizer.flush()
        self.text = self.text[:length]
        if closes_fence and paragraphs.fence_is_open(self.text):
            self.text = self.text.rstrip() + "\n```"
        return self._give(len(self.text.rstrip() if self.strips else self.text))

    def _give(self, stop: int) -> str:
        given = self.text[self._given : stop]
        self._given = max(self._given, stop)
        if self.strips and not self.shown:
            given = given.lstrip()
        self.shown += given
        return given
