"""The engine's parts on a bench: a model over a NaN-filled cache, sessions that a test scripts.

No engine thread runs here: a test decides what each step holds and sees all that comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch

from hogwild_agents.langchain.replies import Reply
from hogwild_engine.api.events import AnswerToken, Event, Finished, ThoughtToken, Usage
from hogwild_engine.api.request import Request
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.loading import rope_probe
from hogwild_engine.sessions.answer import AnswerPhase
from hogwild_engine.sessions.budget import SessionLimits
from hogwild_engine.sessions.context import SessionContext
from hogwild_engine.sessions.parallel import ParallelPhase
from hogwild_engine.sessions.phase import Phase
from hogwild_engine.sessions.session import ScheduledStep, Session
from hogwild_engine.sessions.writer import Writer
from hogwild_engine.step import attention_hook
from hogwild_engine.step.batch import Batch, Chunk, build_batch
from hogwild_engine.step.forward import TransformersForward
from hogwild_engine.step.fused_llama import FusedLlamaForward
from hogwild_engine.step.model_runner import ModelRunner
from hogwild_engine.step.sampling import ResolvedSampling, SampledToken, SamplingRow, sample
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_engine.text.output_parser import OutputParser
from hogwild_kernels.api import AttentionBackend
from hogwild_kernels.backends import choose_backends
from oracle import Seen, attend

GREEDY = ResolvedSampling(0.0, 1.0, 0, 0.0, 1.0, 0)


class ModelHarness:
    """A model and a cache of its own, in which what was never written is NaN.

    ``fused`` runs the forward without module calls in place of transformers' own.
    """

    def __init__(
        self,
        model: Any,
        *,
        num_pages: int = 96,
        page_size: int = 8,
        attention: str = "auto",
        prefill: str = "auto",
        fused: bool = False,
    ) -> None:
        attention_hook.register()
        self.model = model
        shapes, self.windows = rope_probe.layer_shapes(model, next(model.parameters()).device)
        backends = choose_backends(attention, prefill, [shape.spec for shape in shapes])
        self.cache = KVCache(shapes, num_pages, page_size, backends)
        for group in self.cache.groups:
            group.keys.fill_(torch.nan)
            group.values.fill_(torch.nan)
        assert not fused or FusedLlamaForward.fits(model, shapes)
        forward = (
            FusedLlamaForward(model, shapes, self.windows) if fused else TransformersForward(model)
        )
        self.runner = ModelRunner(forward, self.cache, self.windows)

    def block(self, tokens: Sequence[int] = ()) -> Block:
        block = Block(self.cache)
        block.append(tokens)
        return block

    def run(self, chunks: Sequence[Chunk], *, all_logits: bool = True) -> torch.Tensor:
        """One step of one session; logits of all query tokens by default, in float32."""
        batch = batch_of(chunks)
        if all_logits:
            batch.logit_indices = list(range(len(batch.tokens)))
        return self.runner.run(batch).float()

    def stored(self, layer: int, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values of a block, ``[S, KH, D]``."""
        slots = torch.tensor(block.slots(0, len(block)), dtype=torch.int64)
        size = self.cache.pool.page_size
        keys, values = self.cache.layers[layer]
        return keys[slots // size, slots % size], values[slots // size, slots % size]

    def inv_freq(self, layer: int) -> torch.Tensor:
        """Inverse frequencies of a layer, 0 where it does not rotate. ``[D/2]``."""
        rotation = self.cache.shapes[layer].rotation
        padded = torch.zeros(rotation.head_dim // 2, dtype=torch.float64)
        padded[: len(rotation.inv_freq)] = torch.tensor(rotation.inv_freq, dtype=torch.float64)
        return padded * rotation.sign

    @property
    def all_free(self) -> bool:
        return self.cache.pool.num_free == self.cache.pool.num_pages


def model_of(engine: Any) -> Any:
    """The model of an engine that runs transformers' own forward."""
    forward = engine._runner.forward
    assert isinstance(forward, TransformersForward)
    return forward._model


@contextmanager
def plain(model: Any) -> Iterator[Any]:
    """The model with transformers' own attention; nothing else may run it meanwhile."""
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            yield model
    finally:
        model.set_attn_implementation(attention_hook.ATTENTION_NAME)


def batch_of(chunks: Sequence[Chunk]) -> Batch:
    """The batch of one session, all that stands in its views published."""
    for chunk in chunks:
        for block in chunk.view:
            block.publish()
    return build_batch([chunks])


class Attended(NamedTuple):
    """What one layer's attention was given and gave back in one step."""

    q: torch.Tensor
    out: torch.Tensor
    options: dict[str, Any]
    backend: str


@dataclass
class Reads:
    """What a feed should read: other blocks as far as visible, then its own up to each row."""

    block: Block
    start: int
    count: int
    others: Sequence[tuple[Block, int]]


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Attended]]:
    """Collect every call of attention, layer by layer."""
    calls: list[Attended] = []
    attend = AttentionBackend.attend

    def record(
        self: AttentionBackend, q: torch.Tensor, *args: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(self, q, *args, **options)
        calls.append(Attended(q.clone(), out.clone(), options, self.name))
        return out, lse

    with monkeypatch.context() as patch:
        patch.setattr(AttentionBackend, "attend", record)
        yield calls


def check_attention(
    harness: ModelHarness,
    calls: Sequence[Attended],
    reads: Sequence[Reads],
    *,
    tolerance: float = 2e-5,
    every: int = 1,
) -> None:
    """Hold the attention of one step to the oracle, in each row of every n-th layer."""
    assert len(calls) == len(harness.cache.layers)
    for layer in range(0, len(calls), every):
        call, wanted = calls[layer], []
        for chunk in reads:
            wanted += _rows(harness, layer, call, chunk, len(wanted))
        got, empty = call.out.double().split([len(wanted), len(call.out) - len(wanted)])
        torch.testing.assert_close(got, torch.stack(wanted), atol=tolerance, rtol=tolerance)
        assert not empty.any()  # rows that fill a step up read nothing


def _rows(
    harness: ModelHarness, layer: int, call: Attended, chunk: Reads, first_row: int
) -> Iterator[torch.Tensor]:
    window = harness.windows[layer]
    own_start = sum(visible for _, visible in chunk.others)
    for index in range(chunk.count):
        position = chunk.start + index
        start, view = 0, []
        for block, visible in (*chunk.others, (chunk.block, position + 1)):
            lo = 0 if window is None else max(0, own_start + position - window + 1 - start)
            view.append((start, Seen(*harness.stored(layer, block), lo, visible)))
            start += visible
        options = {
            "scale": call.options["scale"],
            "softcap": call.options.get("softcap"),
            "sinks": call.options.get("sinks"),
        }
        q = call.q[first_row + index]
        yield attend(q, view, harness.inv_freq(layer), own_start, **options)[0]


@contextmanager
def sampled_by_writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[int]]]:
    """Collect the tokens that an engine rows for its one session, by number of the writer."""
    tokens: dict[int, list[int]] = {}

    def record(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        sampled = sample(logits, rows)
        for draw, token in zip(rows, sampled, strict=True):
            tokens.setdefault(draw.writer, []).append(token.token)
        return sampled

    with monkeypatch.context() as patch:
        patch.setattr("hogwild_engine.engine.sample", record)
        yield tokens


class Script:
    """A session whose workers write what the test says.

    Args:
        harness: gives the cache, and runs the steps where ``runs``.
        chat: the tokenizer's chat format.
        request: what the session does.
        texts: what each worker writes, by name, the answer's writer under "". A string is encoded,
            an int is one token.
        runs: run the model in every step; off where only the protocol is looked at.
    """

    def __init__(
        self,
        harness: ModelHarness,
        chat: ChatTemplate,
        request: Request,
        texts: Mapping[str, Iterable[str | int]],
        *,
        context_len: int = 4096,
        num_pages: int | None = None,
        runs: bool = False,
        filler: str = " word",
    ) -> None:
        self.harness = harness
        self.chat = chat
        self.events: list[Event] = []
        self.turns = 0
        self._runs = runs
        self._filler = chat.encode(filler)[0]
        self._queues: dict[str, list[int]] = {}
        self._looped: dict[str, list[int]] = {}
        for name, pieces in texts.items():
            self.say(name, *pieces)
        pool = harness.cache.pool
        limits = SessionLimits(context_len, num_pages or pool.num_pages, pool.page_size)
        self.session = Session(SessionContext(request, chat, GREEDY, harness.cache, limits))
        self.names = [worker.name for worker in request.workers]
        self.session.begin()
        self._phases: list[Phase] = [self.session.phase]
        self.events += self.session.drain_events()

    def say(self, name: str, *pieces: str | int) -> None:
        """Queue what ``name`` writes next."""
        for piece in pieces:
            ids = [piece] if isinstance(piece, int) else self.chat.encode(piece)
            self._queues.setdefault(name, []).extend(ids)

    def loop(self, name: str, text: str) -> None:
        """Let ``name`` write ``text`` in each of its paragraphs, and go on with it when rewound."""
        self._looped[name] = self.chat.encode(text)

    def step(
        self, limit: int = 10_000, check: Callable[[ScheduledStep], None] | None = None
    ) -> list[Event]:
        """One step; returns its events. ``check`` is called before sampled tokens are taken in."""
        scheduled = self.session.schedule(limit)
        if self._runs:
            self.harness.runner.run(build_batch([scheduled.chunks]))
        if check is not None:
            check(scheduled)
        sampled = [SampledToken(self._next(row.writer), 0.5) for row in scheduled.rows]
        events = self.session.postprocess(sampled)
        if self.session.phase is not self._phases[-1]:
            self._phases.append(self.session.phase)
        self.events += events
        self.turns += 1
        return events

    def run(self, max_turns: int = 400) -> list[Event]:
        """Passes until the session is finished; returns all events."""
        while self.session.finished is None:
            assert self.turns < max_turns, "the session does not end"
            self.step()
        return self.events

    def _next(self, writer: int) -> int:
        name = "" if self.answering else self.names[writer]
        if name in self._looped:
            ids = self._looped[name]
            draft = self.writers[writer].draft
            place = len(draft.sampled) if draft is not None else 0
            return ids[place] if place < len(ids) else self._filler
        queue = self._queues.get(name, [])
        return queue.pop(0) if queue else self._filler

    @property
    def parallel(self) -> Any:
        """The parallel phase; ``None`` for a single worker."""
        return next((phase for phase in self._phases if isinstance(phase, ParallelPhase)), None)

    @property
    def answer(self) -> AnswerPhase:
        """The answer phase, while it lasts and after its end."""
        return next(phase for phase in self._phases if isinstance(phase, AnswerPhase))

    @property
    def answering(self) -> bool:
        return not isinstance(self.session.phase, ParallelPhase)

    @property
    def writers(self) -> list[Writer]:
        return self.parallel.writers if self.parallel else []

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def thinking_answer(pieces: Sequence[str]) -> tuple[list[Any], Any]:
    """What a lone thinking model that writes ``pieces`` answers: in chunks, and whole."""
    parser, reply = OutputParser(None, thinks=True), Reply("r", "thinker", False, "write")
    events: list[Event] = []
    for number, piece in enumerate([*pieces, ""]):
        for kind, text, *_ in parser.feed(piece, final=number == len(pieces)):
            events.append(ThoughtToken(text) if kind == "thought" else AnswerToken(text))
    usage = Usage(answer_tokens=9, thought_tokens=4)
    events.append(Finished(parser.text, "stop", (), usage, seed=1, thought=parser.thought))
    chunks = [chunk for event in events if (chunk := reply.chunk(event))]
    return chunks, Reply("r", "thinker", False, "write").message(cast(Finished, events[-1]))
