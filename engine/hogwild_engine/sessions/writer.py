"""One writer of a session: a worker, or whoever writes the final answer. State only; session.py
decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.draft import Draft


@dataclass(eq=False)
class Writer:
    """Attributes:
    number: counts the session's writers from 0; seeds the writer's noise.
    name: as in headers; empty for the answer.
    block: what it writes to.
    draft: the paragraph it is at; ``None`` before it starts and after it is done.
    paragraph: number of that paragraph, from 1.
    num_sampled: tokens drawn so far, rewound ones included.
    seen: tokens under the repetition penalty.
    done: writes no more.
    """

    number: int
    name: str
    block: Block
    draft: Draft | None = None
    paragraph: int = 0
    num_sampled: int = 0
    seen: set[int] = field(default_factory=set)
    done: bool = False

    @property
    def active(self) -> bool:
        return self.draft is not None and not self.done
