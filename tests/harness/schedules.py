"""Random schedules: the same sessions alone and beside others, and the bits of their logits.

Run as a program, so that the environment can choose the path of the C code (docs/chat_model.md says
how): ``python tests/harness/schedules.py 8 llama:float32:none`` draws eight schedules and fails at
the first session whose logits or tokens differ from those of a run alone.
"""

from __future__ import annotations

import random
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from hogwild_engine import Engine, EngineConfig, Protocol, Request, SamplingParams
from hogwild_engine.api.request import make_workers
from hogwild_engine.loading.pretrained import Pretrained, load_pretrained
from hogwild_engine.step import sampling
from tiny import schedule_model

Trace = dict[int, list[tuple[int, int, int, int]]]
"""Of each session, by its seed: writer, index, bits of the logits, token of every sampled row."""

_PROTOCOL = Protocol(name="short", rules="Go.", min_chars=0, max_repeats=None, stagger=2)
_LAYOUTS = ("combined", "interleaved", "contiguous", "arrival")
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "12", "lazy", "dogs", "that sleep.\n\n")
DRAWS_OF_A_SEED = 4
"""Schedules of the same sessions."""


def draw_requests(seed: int, count: int) -> list[Request]:
    """Return sessions that differ in everything; two of them share the start of their prompt."""
    chance = random.Random(seed)
    drawn = []
    for number in range(count):
        text = " ".join(chance.choices(_WORDS, k=chance.choice((1, 9, 40, 110, 300, 600))))
        if number % 3 == 1:
            text = f"{drawn[-1].messages[0]['content']} {text}"
        temperature = chance.choice((0.0, 0.7, 1.5))
        params = SamplingParams(
            temperature=temperature,
            top_k=chance.choice((0, 0, 8)),
            top_p=chance.choice((1.0, 0.9)),
            seed=1000 * seed + number,
        )
        drawn.append(
            Request(
                ({"role": "user", "content": text},),
                workers=make_workers(chance.randint(1, 4)),
                protocol=_PROTOCOL,
                layout=chance.choice(_LAYOUTS),
                sync_interval=chance.choice((1, 1, 3, None)),
                max_steps=chance.randint(3, 14),
                max_tokens=chance.randint(2, 9),
                answer=chance.choice(("write", "join")),
                sampling=params,
            )
        )
    return drawn


@contextmanager
def traced() -> Iterator[Trace]:
    """Record each row of logits that engines sample from, and its token."""
    trace: Trace = {}
    sample = sampling.sample

    def record(logits: torch.Tensor, rows: Sequence[sampling.SamplingRow]) -> Any:
        bits = [zlib.crc32(row.contiguous().view(torch.uint8).numpy().tobytes()) for row in logits]
        sampled = sample(logits, rows)
        for row, hashed, (token, _) in zip(rows, bits, sampled, strict=True):
            trace.setdefault(row.sampling.seed, []).append((row.writer, row.index, hashed, token))
        return sampled

    with patch("hogwild_engine.engine.sample", record):
        yield trace


def run(engine: Engine, requests: Sequence[Request], chance: random.Random | None) -> Trace:
    """Run sessions one after another, or all beside each other where ``chance`` draws the order."""
    with traced() as trace:
        if chance is None:
            for request in requests:
                engine.submit(request).result(120)
            return trace
        order = list(requests)
        chance.shuffle(order)
        handles = []
        for request in order:
            if chance.random() < 0.3:  # one that is cancelled, or that fails
                other = replace(request, sampling=replace(request.sampling, seed=9**9))
                disturbing = engine.submit(other)
                threading.Timer(chance.random() / 20, disturbing.cancel).start()
            handles.append(engine.submit(request))
            if chance.random() < 0.3:
                handles[-1].result(120)
        for handle in handles:
            handle.result(120)
        trace.pop(9**9, None)
        return trace


def draw_config(config: EngineConfig, chance: random.Random) -> EngineConfig:
    """Return other settings of which no token may depend."""
    return replace(
        config,
        max_num_batched_tokens=chance.choice((5, 17, 33, 64, 200, 512)),
        prefix_cache=chance.random() < 0.6,
        page_size=chance.choice((8, 16, 32)),
        num_threads=chance.choice((1, 2, 3)),
    )


def first_difference(alone: Trace, other: Trace) -> str | None:
    """Say which session differs first, and at which of its samples."""
    for seed, rows in alone.items():
        for place, (wanted, got) in enumerate(zip(rows, other.get(seed, []), strict=False)):
            if wanted != got:
                return f"session {seed}, sample {place}: wanted {wanted}, got {got}"
        if len(rows) != len(other.get(seed, [])):
            return f"session {seed}: wanted {len(rows)} samples, got {len(other.get(seed, []))}"
    return None


def check(
    tokenizer: Any, family: str, dtype: torch.dtype, quantization: Any, draws: int, seed: int = 0
) -> str | None:
    """Compare ``draws`` schedules with runs alone; return what differs first."""
    name: Any = str(dtype).removeprefix("torch.")
    config = EngineConfig(
        model=f"random-{family}",
        dtype=name,
        quantization=quantization,
        num_pages=2048,
        page_size=16,
        num_threads=1,
        prefix_cache=False,
    )

    def engine(config: EngineConfig) -> Engine:
        return Engine(config, loaded=Pretrained(schedule_model(family).to(dtype), tokenizer))

    requests = draw_requests(seed, 4)
    with engine(config) as one:
        alone = run(one, requests, None)
    for draw in range(draws):
        chance = random.Random(1000 * seed + draw)
        drawn = draw_config(config, chance)
        with engine(drawn) as other:
            for time in ("cold", "warm"):
                if difference := first_difference(alone, run(other, requests, chance)):
                    return f"draw {draw} ({time}, {drawn}): {difference}"
    return None


def main() -> None:
    """Draw schedules of each kind. Each has sessions of its own where there are many draws."""
    draws, *kinds = sys.argv[1:]
    tokenizer = load_pretrained(EngineConfig(dtype="bfloat16")).tokenizer
    for kind in kinds:
        family, dtype, quantization = kind.split(":")
        for seed in range(-(-int(draws) // DRAWS_OF_A_SEED)):
            count = min(DRAWS_OF_A_SEED, int(draws) - seed * DRAWS_OF_A_SEED)
            parts = (tokenizer, family, getattr(torch, dtype), quantization, count, seed)
            if difference := check(*parts):
                sys.exit(f"{kind}, seed {seed}: {difference}")


if __name__ == "__main__":
    main()
