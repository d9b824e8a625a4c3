"""Which text is rewound: a paragraph that starts like another one, a function without a body."""

from __future__ import annotations

from collections.abc import Sequence

from hogwild_engine.api.protocol import Protocol
from hogwild_engine.sessions.writer import Draft
from hogwild_engine.text import paragraphs


class RepeatRule:
    """Finds where a draft must be rewound to. Changes nothing but a draft's marks.

    Args:
        protocol: says how often a paragraph is rewound, and whether paragraphs are code.
        active: ``False`` where nothing is ever rewound: text of others stands behind it.
    """

    def __init__(self, protocol: Protocol, *, active: bool) -> None:
        self.is_code = protocol.paragraph_end == "fence"
        self.active = active and protocol.max_repeats is not None
        self._max_repeats = protocol.max_repeats or 0

    def allows_rewind(self, draft: Draft) -> bool:
        """Return whether the draft may be rewound once more."""
        return bool(draft.sampled) and draft.rewinds < self._max_repeats

    def has_content(self, draft: Draft, length: int | None = None) -> bool:
        """Return whether the writer itself wrote anything in the first ``length`` characters."""
        return paragraphs.has_content(draft.own_text(length), code=self.is_code)

    def commit(self, draft: Draft, others: Sequence[str], *, ended: bool = False) -> int | None:
        """Compare the start of the draft with other paragraphs, and commit it once it will not be
        rewound any more.

        Args:
            draft: the paragraph to look at.
            others: the texts that it must not start like.
            ended: it is whole, so even a short start counts.

        Returns:
            How many tokens to keep when it repeats another text: all before the least probable one
            of its start. ``None`` if it may go on.
        """
        if not draft.registered:
            start = paragraphs.paragraph_start(draft.text, code=self.is_code, ended=ended)
            if start is None:
                return None
            if paragraphs.repeats_any(start.key, others, code=self.is_code):
                return draft.least_probable(start.start, start.stop)
            draft.registered = True
        whole_lines = draft.text.rfind("\n") + 1
        draft.committed = not self.is_code or self.has_content(draft, whole_lines)
        return None

    def stub_end(self, draft: Draft, length: int) -> int | None:
        """Return where in the text the missing body of a function belongs.

        ``None`` unless the first ``length`` characters are the head of a function without a body:
        after ``def add(a, b):\\n    pass``, it is the end of the first line.
        """
        if not (self.is_code and self.active):
            return None
        stub = paragraphs.stub_end(draft.own_text(length))
        return None if stub is None else len(draft.forced) + stub
