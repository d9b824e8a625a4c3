"""The parallel phase: workers write paragraphs, which end, repeat, move to the history, and stop.

Decides from what the workers sampled what happens next. Structure is read from this state, never
from text: text only ends a paragraph, where the protocol's rules say so.

Start at `ParallelPhase.postprocess`: `_append` takes each worker's new token. The worker goes on,
ends a paragraph (`_end_paragraph`) or stops (`_retire`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from hogwild_engine.api import events
from hogwild_engine.api.events import Paragraph, Usage, WorkerEnd
from hogwild_engine.api.layout import LAYOUTS, SharedBlocks
from hogwild_engine.api.protocol import Protocol
from hogwild_engine.cache.block import Block
from hogwild_engine.sessions.answer import AnswerPhase
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.phase import FinishedPhase, Phase, Team
from hogwild_engine.sessions.repeats import RepeatRule
from hogwild_engine.sessions.team_blocks import TeamBlocks
from hogwild_engine.sessions.writer import Draft, Writer
from hogwild_engine.step.sampling import SampledToken
from hogwild_engine.text import paragraphs
from hogwild_engine.text.joining import join_paragraphs
from hogwild_engine.text.messages import user_text
from hogwild_engine.text.prompt import missing_newlines
from hogwild_engine.text.stop_strings import held_back_len


class ParallelPhase(Team):
    """Workers of one session from their start to the end of the phase.

    Args:
        context: the session; its prompt is pending already.
        protocol: the rules that the workers write by.

    Attributes:
        step: steps done.
        shared: the blocks that no single worker owns.
        layout: the rule that makes views.
        writers: the workers, in order.
    """

    def __init__(self, context: SessionContext, protocol: Protocol) -> None:
        super().__init__(context)
        request, cache = context.request, context.cache
        layout = LAYOUTS[request.layout]
        self.layout = layout if request.sync_interval is not None else layout.isolated()
        self.protocol = protocol
        self.step = 0
        self._num_forced = len(context.final_prompt)
        task = user_text(request.messages)
        self._repeat_rule = RepeatRule(protocol, task, active=not layout.single_stream)
        self._since_intervention = 0
        self._stopped = self._closed = False
        self._end_reason: WorkerEnd = "stop"  # of workers that still write when the phase ends
        self._usage_at_end: dict[str, int] = {}
        names = [worker.name for worker in request.workers]
        stream = Block(cache)
        self.writers = [
            Writer(
                number,
                name,
                stream if layout.single_stream else Block(cache),
                context.prompt.tokens,
            )
            for number, name in enumerate(names)
        ]
        for writer in self.writers:
            writer.paragraph = sum(p.worker == writer.name for p in request.history)
        headed = not layout.single_stream
        self.header_starts = paragraphs.header_starts(protocol, names) if headed else []
        self._forbidden = self.header_starts if protocol.forbids_headers else []
        self._banned = context.chat.added_ids - context.chat.eos_ids
        self.shared: SharedBlocks[Block] = SharedBlocks(context.common)
        if self.layout.has_headers:
            self.shared = self._write_headers()
        self._team = TeamBlocks(self.layout, self.shared, self.writers)
        self._start_workers()
        self._check_budget()

    def _write_headers(self) -> SharedBlocks[Block]:
        texts = (self.protocol.others_header, self.protocol.after_other, self.protocol.own_header)
        blocks = {text: Block(self._context.cache) for text in self._context.section_headers}
        for text, block in blocks.items():
            tokens = self._context.chat.encode(text)
            self._num_forced += len(tokens)
            self._context.pending.append(block, tokens)
        return SharedBlocks(self._context.common, *(blocks.get(text) for text in texts))

    # What the session asks

    @property
    def over(self) -> bool:
        return self._stopped or all(writer.done for writer in self.writers)

    def following(self) -> Phase:
        """Close the phase; go on to the final answer, or join the paragraphs to one."""
        context = self._context
        self._usage_at_end = {
            "stored_tokens": sum(map(len, self.blocks)),
            "private_tokens": self._team.private_len(),
        }
        self._close()
        if context.request.answer == "write":
            return AnswerPhase.of_team(context, self, self.protocol)
        whole = [paragraph.text for paragraph in self.history if paragraph.complete]
        texts = whole or [paragraph.text for paragraph in self.history]
        text = join_paragraphs(texts, code=self._repeat_rule.is_code)
        if text:
            context.emit(events.AnswerToken(text))
        return FinishedPhase(context, self.blocks, self, text, "stop", self.usage())

    @property
    def blocks(self) -> list[Block]:
        return self._team.all

    def view(self, block: Block, draft: Draft | None) -> list[Block]:
        return self._team.view(block, draft)

    def answer_context(self) -> list[Block]:
        return self._team.answer_context()

    def unpublished(self) -> Collection[Block]:
        interval = self._context.request.sync_interval
        if self.layout.single_stream or (interval is not None and self.step % interval == 0):
            return ()
        return self._team.own

    def banned(self, draft: Draft) -> Collection[int]:
        """Ids of special tokens, which a worker must not sample, and ids that a rewind banned."""
        if draft.constraint:
            return ()
        more = draft.banned()
        return self._banned | set(more) if more else self._banned

    def usage(self) -> Usage:
        return self._context.usage(
            worker_tokens={writer.name: writer.num_sampled for writer in self.writers},
            forced_tokens=self._num_forced,
            steps=self.step,
            **self._usage_at_end,
        )

    # One step

    def postprocess(self, sampled: Sequence[tuple[Draft, SampledToken]]) -> None:
        if not sampled:  # a step that encoded part of the prompt
            return
        for draft, token in sampled:
            self._append(draft, token)
        self.step += 1
        names = tuple(draft.writer.name for draft, _ in sampled)
        self._context.emit(events.Step(self.step, names))
        if not self._stopped:
            self._start_workers()
        self._check_budget()

    def _check_budget(self) -> None:
        """End the phase when its steps are spent, or another step would leave no room."""
        request, team = self._context.request, self._team
        if self.over:
            return
        spent = self.step >= request.max_steps
        longest = team.longest_view(answers=request.answer == "write")
        full = not self._context.budget.fits_step(longest, team.all, team.own)
        if spent or full:
            self._stopped, self._end_reason = True, "length"
            self.cut_short = full or request.answer == "join"

    def _append(self, draft: Draft, token: SampledToken) -> None:
        """Append a sampled token; act on an end of turn, stop string, repeat or paragraph end."""
        writer, request = draft.writer, self._context.request
        writer.num_sampled += 1
        self._since_intervention += 1
        if token.token in self._context.chat.eos_ids:
            self._end_turn(draft, token)
            return
        writer.seen.add(token.token)
        before = draft.add(token)
        stop = draft.find(request.stop, before)
        if stop is not None:
            if self._repeat_rule.has_content(draft, stop):
                self._end_paragraph(draft, stop, cut=True, is_last=True)
            self._retire(writer, "stop")
            return
        if draft.constraint is not None:
            if draft.constraint.finished:
                self._end_paragraph(draft, len(draft.text), cut=False, is_last=True)
                self._retire(writer, "end_of_turn")
            else:
                self._go_on(draft, token.token)
            return
        header = draft.find(self._forbidden, before)
        if header is not None:
            self._end_paragraph(draft, header, cut=True)
            return
        if self._repeat_rule.is_code and draft.own_text().lstrip().startswith("```"):
            self._leave(draft)  # it closes the forced fence: nothing is left
            return
        if not draft.committed and self._rewound_as_repeat(draft):
            return
        if draft.committed and self._repeat_rule.active and self._rewound_at_item(draft):
            return
        end = None
        if not self.layout.single_stream:
            rule, min_chars = self.protocol.paragraph_end, self.protocol.min_chars
            end = paragraphs.paragraph_end(draft.text, before, rule, min_chars)
            if end is None and self._repeat_rule.loops(draft):
                end = len(draft.text)
        if end is not None:
            self._end_paragraph(draft, end, cut=bool(draft.text[end:].strip()))
        else:
            self._go_on(draft, token.token)

    def _go_on(self, draft: Draft, token: int) -> None:
        self._show(draft)
        self._context.pending.append(draft.writer.block, [token], draft, samples=True)

    # Paragraphs

    def _start_workers(self) -> None:
        for writer in self.writers:
            idle = all(other.draft is None for other in self.writers)
            due = idle or self.protocol.stagger * writer.number <= self.step
            if due and writer.draft is None and not writer.done:
                self._open_paragraph(writer)

    def _open_paragraph(self, writer: Writer, pending: Sequence[int] = ()) -> None:
        """Start ``writer``'s next paragraph, behind ``pending`` tokens of its block."""
        request, chat, protocol = self._context.request, self._context.chat, self.protocol
        first = writer.num_sampled == 0
        writer.paragraph += 1
        constraint = self._context.worker_constraint
        forced = protocol.forced_prefix if constraint is None else ""
        if first and constraint is None and not request.history:
            forced += protocol.first_prefix_for(writer.number, writer.name)
        every = protocol.intervention_tokens
        if not first and every is not None and self._since_intervention >= every:
            self._since_intervention = 0
            text = protocol.intervention
            forced += " " + text
            self._context.emit(events.Intervention(self._current_step, writer.name, text))
        header = ""
        if not self.layout.single_stream:
            header = protocol.header_for(writer.name, writer.paragraph)
        # A first token to sample behind, where neither header nor prefix has one.
        tokens = [*pending, *chat.encode(header + forced)] or chat.encode("\n")
        self._num_forced += len(tokens) - len(pending)
        length = len(writer.block)
        draft = Draft(
            writer,
            chat,
            forced,
            # Where paragraphs stay, the pending tokens are the end of the one before.
            start=length if self.layout.moves_paragraphs else length + len(pending),
            base=length + len(tokens),
            watched=[*request.stop, *self._forbidden],
            committed=not self._repeat_rule.active or constraint is not None,
            constraint=constraint and constraint.fresh(),
        )
        self._context.pending.append(writer.block, tokens, draft, samples=True)
        self._show(draft)

    def _end_turn(self, draft: Draft, token: SampledToken) -> None:
        """Act on an end-of-turn token, which ends a paragraph, a worker or the session."""
        writer = draft.writer
        ends_session = self.protocol.end_of_turn == "ends_session"
        if draft.constraint is not None:
            draft.constraint.check_alive()
            self._end_paragraph(draft, len(draft.text), cut=True, is_last=True)
        elif self._repeat_rule.has_content(draft):
            if not ends_session and not self.layout.single_stream:
                self._end_paragraph(draft, len(draft.text), cut=True)
                return
            self._add_to_history(draft, None, complete=True)
        elif not ends_session:
            stub = self._repeat_rule.stub_end(draft, len(draft.text))
            if stub is not None:  # it started a function without a body: let it write the body
                has_filler = bool(draft.text[stub:].strip())
                keep = draft.tokens_within(stub) if has_filler else len(draft.sampled)
                draft.add(token)
                self._rewind(draft, keep)
                return
            draft.add(token)
            self._leave(draft)
            return
        self._retire(writer, "end_of_turn")
        self._stopped = self._stopped or (ends_session and draft.constraint is None)

    def _leave(self, draft: Draft) -> None:
        """Let the worker stop; if it has finished nothing yet, only after a few rewinds.

        Its last sampled token says that nothing is left to write.
        """
        writer, rule = draft.writer, self._repeat_rule
        wrote = any(paragraph.worker == writer.name for paragraph in self.history)
        if not wrote and rule.active and rule.allows_rewind(draft):
            self._rewind(draft, len(draft.sampled) - 1)
        else:
            self._retire(writer, "end_of_turn")

    def _end_paragraph(
        self, draft: Draft, length: int, *, cut: bool, is_last: bool = False
    ) -> None:
        """Close the paragraph after ``length`` characters, and open the worker's next one.

        Args:
            draft: the paragraph.
            length: characters of its text that stay.
            cut: leave out the tokens that exceed it.
            is_last: open no other.
        """
        if self.layout.single_stream:  # its tokens stay, and it is the worker's only one
            is_whole = length == len(draft.text)
            self._add_to_history(draft, None if is_whole else length, complete=True)
            return
        if self._repeat_rule.active and draft.constraint is None:
            if not self._repeat_rule.has_content(draft, length):
                stub = self._repeat_rule.stub_end(draft, length)
                self._rewind(draft, 0 if stub is None else draft.tokens_within(stub))
                return
            if not draft.committed and self._rewound_as_repeat(draft, ended=True):
                return
        text = draft.text[:length] if cut else draft.text
        kept = draft.tokens_within(length)
        self._add_to_history(draft, length, complete=True)
        ending: list[int] = []
        if cut:
            draft.writer.block.truncate(draft.base + kept)
        else:
            ending = [draft.sampled[-1].token]
        self._move_and_reopen(draft, ending, self._closing(text), is_last=is_last)

    def _closing(self, text: str) -> list[int]:
        """Return what must follow a paragraph so that the next one starts after a blank line."""
        closing = ""
        if paragraphs.fence_is_open(text):
            closing = ("" if text.endswith("\n") else "\n") + "```"
        return self._context.chat.encode(closing + missing_newlines(text + closing))

    def _move_and_reopen(
        self, draft: Draft, ending: list[int], closing: list[int], *, is_last: bool
    ) -> None:
        """Move the paragraph to the end of the common block, if the layout does, and go on.

        ``ending`` is the token that ended it, which is not encoded yet: it closes the paragraph or
        opens the worker's next block, as the protocol says.
        """
        writer, block = draft.writer, draft.writer.block
        if self.layout.moves_paragraphs:
            block = self.shared.common
            writer.block.move_to(block)
        opens = self.protocol.ending_token == "opens" and bool(ending)
        tokens = ending if opens else [*ending, *closing]
        if not opens:
            self._num_forced += len(closing)
        if self.protocol.stops_on_boxed and paragraphs.boxed_answer(self.history[-1].text):
            self._stopped = is_last = True
        writer.draft = None
        if not is_last and (opens or block is writer.block):
            self._open_paragraph(writer, tokens)
            return
        self._context.pending.append(block, tokens, draft)
        if not is_last:
            self._open_paragraph(writer)

    def _add_to_history(self, draft: Draft, length: int | None, *, complete: bool) -> None:
        draft.committed = True
        is_cut = length is not None and length < len(draft.text)
        self._tell(events.Token, draft, draft.finish(length, closes_fence=True))
        if draft.constraint is not None:
            check = self._context.check.worker
            fits = draft.constraint.may_end and not (check and check.problem(draft.shown))
            complete = complete and fits and not is_cut
        writer, step = draft.writer, self._current_step
        paragraph = Paragraph(writer.name, writer.paragraph, draft.shown, complete, step=step)
        self.history.append(paragraph)
        self._context.emit(events.ParagraphFinished(step, len(self.history) - 1, paragraph))

    def _retire(self, writer: Writer, reason: WorkerEnd) -> None:
        """Stop the worker for good; drop an open paragraph that is not in the history."""
        if writer.done:
            return
        draft, writer.draft, writer.done = writer.draft, None, True
        if draft is not None and not self.layout.single_stream and not self._in_history(writer):
            self._tell(events.DraftDropped, draft, draft.drop_draft())
            self._context.pending.drop(writer.block, draft.start)
            writer.block.truncate(draft.start)
        self.ends[writer.name] = reason
        self.end_steps[writer.name] = self._current_step
        self._context.emit(events.WorkerFinished(self._current_step, writer.name, reason))

    def _in_history(self, writer: Writer) -> bool:
        numbers = [p.number for p in self.history if p.worker == writer.name]
        return bool(numbers) and numbers[-1] == writer.paragraph

    def _close(self) -> None:
        """End the phase: what is written of open paragraphs stays, and counts as incomplete."""
        self._closed = True
        self._context.pending.stop_sampling()
        for writer in self.writers:
            draft = writer.draft
            if draft is not None:
                self._cut(draft)
            self._retire(writer, self._end_reason)

    def _cut(self, draft: Draft) -> None:
        """Add an open paragraph with content to the history as it stands, without the start of a
        header.
        """
        block, mark = draft.writer.block, self.protocol.unfinished
        length = len(draft.text) - held_back_len(draft.text, self._forbidden)
        if not self._repeat_rule.has_content(draft, length):
            return
        closing = "\n```\n" if paragraphs.fence_is_open(draft.text[:length]) else ""
        if length < len(draft.text):
            stop = draft.base + draft.tokens_within(length)
            self._context.pending.drop(block, stop)
            block.truncate(stop)
        self._add_to_history(draft, length, complete=False)
        if mark and self._context.request.answer == "write" and not self.layout.single_stream:
            tokens = self._context.chat.encode(closing + mark)
            self._num_forced += len(tokens)
            self._context.pending.append(block, tokens, draft)

    # Rewinds

    def _rewound_as_repeat(self, draft: Draft, *, ended: bool = False) -> bool:
        """Rewind the paragraph if it starts like another one; return whether it does."""
        own = [p.text for p in self._paragraphs() if p.worker == draft.writer.name]
        keep = self._repeat_rule.commit(draft, own, self._others_than(draft), ended=ended)
        if keep is None:
            return False
        self._rewind(draft, keep)
        return True

    def _rewound_at_item(self, draft: Draft) -> bool:
        """Rewind the item that stands elsewhere already; return whether there is one.

        After enough rewinds, the paragraph ends before it, and its worker stops.
        """
        item = self._repeat_rule.repeated_item(draft, self._others_than(draft))
        if item is None:
            return False
        if self._repeat_rule.allows_rewind(draft):
            self._rewind(draft, draft.least_probable(item.start, item.stop))
        else:
            self._end_paragraph(draft, item.start, cut=True, is_last=True)
            self._retire(draft.writer, "repeats")
        return True

    def _paragraphs(self) -> Iterator[Paragraph]:
        """Yield the finished paragraphs, of earlier turns too."""
        yield from self._context.request.history
        yield from self.history

    def _others_than(self, draft: Draft) -> list[str]:
        """Return the texts that the draft must not repeat."""
        drafts = (writer.draft for writer in self.writers)
        open_texts = [d.text for d in drafts if d and d is not draft and d.registered]
        return [*(paragraph.text for paragraph in self._paragraphs()), *open_texts]

    def _rewind(self, draft: Draft, keep: int) -> None:
        """Rewind to the first ``keep`` tokens, or retire the worker that was rewound enough."""
        if not self._repeat_rule.allows_rewind(draft):
            self._retire(draft.writer, "repeats")
            return
        self._tell(events.DraftDropped, draft, draft.drop_draft())
        token = draft.rewind(keep)
        self._context.pending.append(draft.writer.block, [token], draft, samples=True)
        self._show(draft)

    # Events

    @property
    def _current_step(self) -> int:
        """The step that is being worked on; the last one once the phase is closed."""
        return self.step if self._closed else self.step + 1

    def _show(self, draft: Draft) -> None:
        """Tell what stands of the paragraph, then what follows and may still be rewound."""
        self._tell(events.Token, draft, draft.show())
        self._tell(events.DraftToken, draft, draft.show_draft())

    def _tell(
        self,
        kind: type[events.Token | events.DraftToken | events.DraftDropped],
        draft: Draft,
        text: str,
    ) -> None:
        if text:
            writer = draft.writer
            self._context.emit(kind(self._current_step, writer.name, writer.paragraph, text))
