"""Which text is rewound: repeats, what nobody asked for, functions without a body."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hogwild_engine.api.protocol import Protocol
from hogwild_engine.sessions.writer import Draft
from hogwild_engine.text import paragraphs
from hogwild_engine.text.paragraphs import Item


class RepeatRule:
    """Finds where a draft must be rewound to. Changes nothing but a draft's marks.

    Args:
        protocol: says how often a paragraph is rewound, and whether paragraphs are code.
        task: what the users' messages say.
        active: ``False`` where nothing is ever rewound: text of others stands behind it.
    """

    def __init__(self, protocol: Protocol, task: str, *, active: bool) -> None:
        self.is_code = protocol.paragraph_end == "fence"
        self.active = active and protocol.max_repeats is not None
        self._max_repeats = protocol.max_repeats or 0
        self._task = task
        self._task_words = set(re.findall(r"\w+", task))

    def allows_rewind(self, draft: Draft) -> bool:
        """Return whether the draft may be rewound once more."""
        return bool(draft.sampled) and draft.rewinds < self._max_repeats

    def has_content(self, draft: Draft, length: int | None = None) -> bool:
        """Return whether the writer itself wrote anything in the first ``length`` characters."""
        return paragraphs.has_content(draft.own_text(length), code=self.is_code)

    def commit(
        self, draft: Draft, own: Sequence[str], others: Sequence[str], *, ended: bool = False
    ) -> int | None:
        """Compare the start of the draft with other paragraphs, and commit it once it will not be
        rewound any more.

        Prose must not start like the task either. In code, a worker whose paragraphs define what
        the task names goes on with nothing else: the rest would be calls and helpers that nobody
        asked for.

        Args:
            draft: the paragraph to look at.
            own: its worker's finished paragraphs.
            others: the texts that it must not start like, ``own`` included.
            ended: it is whole, so even a short start counts.

        Returns:
            How many tokens to keep when it repeats another text: all before the least probable one
            of its start. ``None`` if it may go on.
        """
        if not draft.registered:
            start = paragraphs.paragraph_start(draft.text, code=self.is_code, ended=ended)
            if start is None:
                return None
            taken = others if self.is_code else [self._task, *others]
            repeats = paragraphs.repeats_any(start.key, taken, code=self.is_code)
            if repeats or (self.is_code and self._is_unasked(start.key, own)):
                return draft.least_probable(start.start, start.stop)
            draft.registered = True
        whole_lines = draft.text.rfind("\n") + 1
        draft.committed = not self.is_code or self.has_content(draft, whole_lines)
        return None

    def _is_unasked(self, key: str, own: Sequence[str]) -> bool:
        starts = [start.key for text in own if (start := paragraphs.code_start(text))]
        return bool(starts) and all(map(self._is_named, starts)) and not self._is_named(key)

    def _is_named(self, key: str) -> bool:
        return paragraphs.defined_name(key) in self._task_words

    def repeated_item(self, draft: Draft, others: Sequence[str]) -> Item | None:
        """Return the first item of the draft that stands in another paragraph, or earlier in it.

        Settles the text before the first item of which too little is written.

        Args:
            draft: the paragraph to look at; its start is committed.
            others: the other paragraphs' texts.
        """
        start = draft.settled or 0
        for item in paragraphs.items(draft.text, start, code=self.is_code):
            draft.settled = item.start
            if item.key is None:
                return None
            texts = [*others, draft.text[: item.start]]
            lines = [line for text in texts for line in text.splitlines()]
            if paragraphs.repeats_line(item.key, lines, code=self.is_code):
                return item
        draft.settled = len(draft.text)
        return None

    def loops(self, draft: Draft) -> bool:
        """Return whether prose has come back to a sentence of its own."""
        return self.active and not self.is_code and paragraphs.repeats_sentence(draft.own_text())

    def stub_end(self, draft: Draft, length: int) -> int | None:
        """Return where in the text the missing body of a function belongs.

        ``None`` unless the first ``length`` characters are the head of a function without a body:
        after ``def add(a, b):\\n    pass``, it is the end of the first line.
        """
        if not (self.is_code and self.active):
            return None
        stub = paragraphs.stub_end(draft.own_text(length))
        return None if stub is None else len(draft.forced) + stub
