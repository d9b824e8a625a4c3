"""The parallel phase: workers write paragraphs, which end, repeat, move to the history, and stop.

Decides from what the workers drew what happens next. Structure is read from this state, never from
text: text only ends a paragraph, the protocol's rules say where.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hogwild_engine.api import events, layout
from hogwild_engine.api.events import Event, Paragraph, WorkerEnd
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.sessions.draft import Draft
from hogwild_engine.sessions.pending_tokens import PendingTokens
from hogwild_engine.sessions.writer import Writer
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text import paragraphs
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.prompt import missing_newlines


class ParallelPhase:
    """Workers of one session from their start to the end of the phase.

    Args:
        request: what to do.
        protocol: by which rules.
        chat: turns text into ids and back.
        cache: where blocks live.
        ledger: takes what is to be encoded.
        emit: takes events.
        common: the block of prompt and history; the prompt is owed already.

    Attributes:
        step: steps done.
        history: paragraphs that this session added, in order.
        num_forced: tokens that the protocol wrote.
        header_starts: the texts that open a worker's header.
        ends: why each worker stopped, by name.
    """

    def __init__(
        self,
        request: Request,
        protocol: Protocol,
        chat: ChatTemplate,
        cache: KVCache,
        ledger: PendingTokens,
        emit: Callable[[Event], None],
        common: Block,
    ) -> None:
        self.protocol = protocol
        self.step = 0
        self.history: list[Paragraph] = []
        self.num_forced = 0
        self._request = request
        self._chat = chat
        self._ledger = ledger
        self._emit = emit
        self._code = protocol.paragraph_end == "fence"
        self._stream = Block(cache) if request.layout == "arrival" else None
        self._moves = layout.moves_paragraphs(request.layout) and request.sync_interval is not None
        self._cache = cache
        self._parts = layout.Parts(common, None, None, None)
        self.writers = [
            Writer(number, worker.name, Block(cache) if self._stream is None else self._stream)
            for number, worker in enumerate(request.workers)
        ]
        names = [worker.name for worker in request.workers]
        headed = self._stream is None
        self.header_starts = paragraphs.header_starts(protocol, names) if headed else []
        self._guards = self.header_starts if protocol.forbids_headers else []
        self._banned = chat.structural - chat.ends
        self.ends: dict[str, WorkerEnd] = {}
        self._since_intervention = 0
        self._stopped = self._closed = False
        for writer in self.writers:
            writer.paragraph = sum(p.worker == writer.name for p in request.history)

    def start(self) -> None:
        """Take the first pages: headers, and the workers' first paragraphs."""
        if layout.shows_headers(self._request.layout):
            self._make_headers()
        self._start_workers()

    def _make_headers(self) -> None:
        texts = (self.protocol.others_header, self.protocol.after_other, self.protocol.own_header)
        made = {text: Block(self._cache) for text in dict.fromkeys(texts) if text}
        self._parts = layout.Parts(self._parts.common, *(made.get(text) for text in texts))
        for text, block in made.items():
            self._force(block, text)

    # What the session asks

    @property
    def blocks(self) -> list[Block]:
        """Every block of the phase but the common one, each once."""
        blocks = [writer.block for writer in self.writers]
        blocks += [part for part in self._parts[1:] if part is not None]
        return list({id(block): block for block in blocks}.values())

    @property
    def _now(self) -> int:
        """The step that is being worked on; the last one once the phase is closed."""
        return self.step if self._closed else self.step + 1

    @property
    def running(self) -> bool:
        return not self._stopped and not all(writer.done for writer in self.writers)

    def view(self, block: Block, writer: Writer | None) -> list[Block]:
        """What the writer of ``block`` reads; shared text reads the common block."""
        common = self._parts.common
        if block is common:
            return [common]
        if writer is None:
            return [common, block]
        others = [w.block for w in self.writers if w is not writer and len(w.block)]
        return layout.view(
            self._request.layout,
            self._parts,
            others,
            block,
            sees_others=self._request.sync_interval is not None,
        )

    def answer_view(self, answer: Block) -> list[Block]:
        """What the writer of the final answer reads: everything."""
        written = [block for block in (w.block for w in self.writers) if len(block)]
        written = written[:1] if self._stream is not None else written
        return layout.answer_view(self._parts, written, answer)

    def hidden(self) -> list[Block]:
        """Blocks of which others see nothing new in the coming pass."""
        interval = self._request.sync_interval
        if interval is not None and self.step % interval == 0:
            return []
        return [writer.block for writer in self.writers if writer.block is not self._stream]

    def banned(self, writer: Writer) -> Collection[int]:
        """Ids that ``writer`` must not draw: structure is not a worker's to write."""
        draft = writer.draft
        if draft and draft.constraint:
            return ()
        more = draft.banned() if draft else ()
        return self._banned | set(more) if more else self._banned

    # One step

    def advance(self, writer: Writer, drawn: SampledToken) -> None:
        """Take in the token that ``writer`` drew."""
        draft = writer.draft
        assert draft is not None
        writer.num_sampled += 1
        self._since_intervention += 1
        if drawn.token in self._chat.ends:
            self._end_turn(writer, draft, drawn)
            return
        writer.seen.add(drawn.token)
        fresh = draft.add(drawn)
        stop = self._found(draft, self._request.stop, fresh)
        if stop is not None:
            if self._says_something(draft, stop):
                if self._stream is not None:
                    self._keep(writer, draft, stop, complete=True)
                else:
                    self._end_paragraph(writer, draft, stop, cut=True)
            self._retire(writer, "stop")
            return
        if draft.constraint is not None:
            if draft.constraint.finished:
                self._end_bound(writer, draft, by_token=False)
            else:
                self._show(writer, draft.show())
                self._ledger.owe(writer.block, [drawn.token], writer, samples=True)
            return
        guard = self._found(draft, self._guards, fresh)
        if guard is not None:
            self._end_paragraph(writer, draft, guard, cut=True)
            return
        if self._code and _written(draft).startswith("```"):
            self._retire(writer, "end_of_turn")  # it closes the forced fence: nothing is left
            return
        if not draft.committed and self._commit(writer, draft):
            return
        end = None
        if self._stream is None:
            end = self._end_of_paragraph(draft.text, fresh)
        if end is not None:
            self._end_paragraph(writer, draft, end, cut=bool(draft.text[end:].strip()))
            return
        self._show(writer, draft.show())
        self._ledger.owe(writer.block, [drawn.token], writer, samples=True)

    def end_step(self, drew: Sequence[Writer]) -> None:
        """All workers of this step have advanced."""
        self.step += 1
        self._emit(events.Step(self.step, tuple(writer.name for writer in drew)))
        if not self._stopped:
            self._start_workers()

    def close(self, reason: WorkerEnd) -> None:
        """End the phase: what is written of open paragraphs stays, and counts as incomplete."""
        self._closed = True
        self._ledger.silence()
        for writer in self.writers:
            draft = writer.draft
            if draft is not None and self._says_something(draft):
                self._keep(writer, draft, None, complete=False)
            self._retire(writer, reason)

    # Paragraphs

    def _start_workers(self) -> None:
        for writer in self.writers:
            nobody_writes = not any(other.active for other in self.writers)
            due = nobody_writes or self.protocol.stagger * writer.number <= self.step
            if due and writer.draft is None and not writer.done:
                self._open_paragraph(writer)

    def _open_paragraph(self, writer: Writer, lead: Sequence[int] = ()) -> None:
        """Start ``writer``'s next paragraph, behind the ``lead`` tokens that are still owed to its
        block.
        """
        first = writer.num_sampled == 0
        writer.paragraph += 1
        bound = self._request.worker_grammar
        forced = self.protocol.forced_prefix if bound is None else ""
        if first and bound is None and not self._request.history:
            forced += self.protocol.first_prefix_for(writer.number, writer.name)
        every = self.protocol.intervention_tokens
        if not first and every is not None and self._since_intervention >= every:
            self._since_intervention = 0
            forced += " " + self.protocol.intervention
            text = self.protocol.intervention
            self._emit(events.Intervention(self._now, writer.name, text))
        header = ""
        if self._stream is None:
            header = self.protocol.header_for(writer.name, writer.paragraph)
        start = len(writer.block)
        tokens = [*lead, *self._chat.encode(header + forced)]
        if not tokens:  # a first row to draw from
            tokens = self._chat.encode("\n")
        self.num_forced += len(tokens) - len(lead)
        self._ledger.owe(writer.block, tokens, writer, samples=True)
        writer.draft = Draft(
            self._chat.decode,
            self._chat.hidden,
            forced,
            base=len(writer.block),
            start=start,
            watched=[*self._request.stop, *self._guards],
            committed=self.protocol.max_repeats is None or self._stream is not None or bool(bound),
            constraint=bound and self._chat.grammars.compile(bound, self._request.max_steps),
        )
        self._show(writer, writer.draft.show())

    def _end_turn(self, writer: Writer, draft: Draft, drawn: SampledToken) -> None:
        """The worker drew an end-of-turn token."""
        if draft.constraint is not None:
            self._end_bound(writer, draft, by_token=True)
            return
        says = self._says_something(draft)
        ends_session = self.protocol.end_of_turn == "ends_session"
        if says and not ends_session and self._stream is None:
            self._end_paragraph(writer, draft, len(draft.text), cut=True)
            return
        stub = None if says or ends_session else self._stub_end(draft, len(draft.text))
        if stub is not None and self._stream is None:  # it took something on
            has_filler = bool(draft.text[stub:].strip())
            keep = draft.tokens_within(stub) if has_filler else len(draft.drawn)
            draft.add(drawn)
            self._retry(writer, draft, keep)
            return
        if says:
            self._keep(writer, draft, None, complete=True)
        self._retire(writer, "end_of_turn")
        self._stopped = self._stopped or ends_session

    def _end_bound(self, writer: Writer, draft: Draft, *, by_token: bool) -> None:
        """The text is all that the workers' grammar wants: the worker is done."""
        if self._stream is not None:
            self._keep(writer, draft, None, complete=True)
        else:
            self._end_paragraph(writer, draft, len(draft.text), cut=by_token)
        self._retire(writer, "end_of_turn")

    def _end_paragraph(self, writer: Writer, draft: Draft, length: int, *, cut: bool) -> None:
        """Close the paragraph after ``length`` characters; ``cut`` leaves out tokens that reach
        beyond.
        """
        text = draft.text[:length]
        rewinds = self.protocol.max_repeats is not None and draft.constraint is None
        if rewinds and not self._says_something(draft, length):
            stub = self._stub_end(draft, length)
            self._retry(writer, draft, 0 if stub is None else draft.tokens_within(stub))
            return
        if not draft.committed and self._commit(writer, draft, ended=True):
            return
        raw = draft.text
        kept = draft.tokens_within(length) if cut else len(draft.drawn)
        self._keep(writer, draft, length, complete=True)
        ending: list[int] = []
        if cut:
            writer.block.truncate(draft.base + kept)
            raw = text
        else:
            ending = [draft.drawn[-1].token]
        self._move_and_reopen(writer, ending, self._closing(raw))

    def _closing(self, text: str) -> list[int]:
        """What must follow a paragraph's text so that the next one starts after a blank line."""
        closing = ""
        if paragraphs.fence_is_open(text):
            closing = ("" if text.endswith("\n") else "\n") + "```"
        return self._chat.encode(closing + missing_newlines(text + closing))

    def _move_and_reopen(self, writer: Writer, ending: list[int], closing: list[int]) -> None:
        opens = self.protocol.ending_token == "opens" and bool(ending)
        lead = ending if opens else [*ending, *closing]
        if not opens:
            self.num_forced += len(closing)
        if self._moves:
            writer.block.move_to(self._parts.common)
            if not opens:
                self._ledger.owe(self._parts.common, lead)
                lead = []
        writer.draft = None
        if self.protocol.stops_on_boxed and paragraphs.boxed_answer(self.history[-1].text):
            self._stopped = True
            self._ledger.owe(self._parts.common if self._moves else writer.block, lead)
            return
        self._open_paragraph(writer, lead)

    def _keep(self, writer: Writer, draft: Draft, length: int | None, *, complete: bool) -> None:
        """Add the paragraph to the history."""
        draft.committed = True
        self._show(writer, draft.finish(length, closes_fence=True))
        paragraph = Paragraph(writer.name, writer.paragraph, draft.shown, complete, step=self._now)
        self.history.append(paragraph)
        self._emit(events.ParagraphFinished(self._now, len(self.history) - 1, paragraph))

    def _retire(self, writer: Writer, reason: WorkerEnd) -> None:
        """The worker writes no more; an open paragraph that is not in the history is dropped."""
        if writer.done:
            return
        draft, writer.draft, writer.done = writer.draft, None, True
        if draft is not None and self._stream is None and not self._in_history(writer):
            self._ledger.forget(writer.block)
            writer.block.truncate(draft.start)
        self.ends[writer.name] = reason
        self._emit(events.WorkerFinished(self._now, writer.name, reason))

    def _in_history(self, writer: Writer) -> bool:
        last = [p.number for p in self.history if p.worker == writer.name]
        return bool(last) and last[-1] == writer.paragraph

    # Repeats

    def _commit(self, writer: Writer, draft: Draft, *, ended: bool = False) -> bool:
        """Compare the paragraph's opening with the others', and let it show once it will not be
        rewound any more; returns whether it was rewound or dropped.
        """
        if not draft.registered:
            span = paragraphs.opening(draft.text, code=self._code, ended=ended)
            if span is None:
                return False
            others = [p.text for p in (*self._request.history, *self.history)]
            others += [w.draft.text for w in self.writers if w.draft and w.draft.registered]
            if paragraphs.repeats(span.key, others, code=self._code):
                self._retry(writer, draft, draft.weakest_within(span.start, span.stop))
                return True
            draft.registered = True
        whole_lines = draft.text.rfind("\n") + 1
        draft.committed = not self._code or self._says_something(draft, whole_lines)
        return False

    def _stub_end(self, draft: Draft, length: int) -> int | None:
        """Where in the text the body is missing of the function that its first ``length``
        characters begin; ``None`` where they begin none, or nothing is ever rewound.
        """
        if not self._code or self.protocol.max_repeats is None:
            return None
        own = len(draft.forced)
        stub = paragraphs.stub_end(draft.text[own:length])
        return None if stub is None else own + stub

    def _retry(self, writer: Writer, draft: Draft, keep: int) -> None:
        """Rewind to behind the first ``keep`` drawn tokens, or let the worker go where that was
        tried enough.
        """
        limit = self.protocol.max_repeats or 0
        if draft.attempts >= limit or not draft.drawn:
            self._retire(writer, "repeats")
            return
        draft.rewind(keep)
        last = draft.base + keep - 1
        token = writer.block.tokens[last]
        writer.block.truncate(last)
        self._ledger.owe(writer.block, [token], writer, samples=True)

    # Small things

    def _force(self, block: Block, text: str) -> None:
        tokens = self._chat.encode(text)
        self.num_forced += len(tokens)
        self._ledger.owe(block, tokens)

    def _found(self, draft: Draft, strings: Sequence[str], fresh: int) -> int | None:
        longest = max(map(len, strings), default=0)
        since = max(len(draft.forced), fresh - longest)
        return paragraphs.first_of(draft.text, strings, since) if strings else None

    def _end_of_paragraph(self, text: str, fresh: int) -> int | None:
        rule, min_chars = self.protocol.paragraph_end, self.protocol.min_chars
        return paragraphs.paragraph_end(text, fresh, rule, min_chars)

    def _says_something(self, draft: Draft, length: int | None = None) -> bool:
        """Whether the worker itself wrote anything in the first ``length`` characters."""
        return paragraphs.has_content(draft.text[len(draft.forced) : length], code=self._code)

    def _show(self, writer: Writer, text: str) -> None:
        if text:
            self._emit(events.Token(self._now, writer.name, writer.paragraph, text))


def _written(draft: Draft) -> str:
    """What the worker itself wrote, white space in front left out."""
    return draft.text[len(draft.forced) :].lstrip()
