"""Measure what int8 quantization changes: greedy tokens and logits against bfloat16.

    python recipes/int8_error.py
    python recipes/int8_error.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --json result.json

The model in bfloat16 answers each of twenty questions greedily. The same model in each precision
then encodes prompt and answer in one forward. A greedy token has changed if the most probable next
token is not the answer's. The logits' error is relative: norm of the difference over norm. The
float32 row shows how much of the error comes from bfloat16 itself.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from hogwild_engine import EngineConfig
from hogwild_engine.api.config import EMBEDDED_MODEL
from hogwild_engine.cache.block import Block
from hogwild_engine.cache.kv_cache import KVCache
from hogwild_engine.loading.load import load_model
from hogwild_engine.step.batch import Chunk, build_batch
from hogwild_engine.step.model_runner import ModelRunner

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list in place.",
    "Name three uses of a brick, each in one sentence.",
    "What is 17 times 24? Show the steps.",
    "Explain what a mutex is to a beginner.",
    "Translate into French: The train leaves at nine.",
    "Write a haiku about the sea.",
    "How does photosynthesis work?",
    "Give a SQL query that counts orders by customer.",
    "What are the primary colours, and why those?",
    "Write a regular expression for dates like 2024-05-31 and explain it.",
    "Summarise the story of Romeo and Juliet.",
    "What should I look at when buying a used bicycle?",
    "Write a C function that returns the length of a string.",
    "Why do leaves turn red in autumn?",
    "Plan a three-day trip to Rome.",
    "What is the difference between TCP and UDP?",
    "Write a short letter that asks a neighbour for quiet at night.",
    "Explain binary search with an example.",
    "List five healthy breakfasts.",
)
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}
PAGE_SIZE = 32


class Text(NamedTuple):
    """A prompt with its answer, as token ids."""

    ids: list[int]
    prompt_len: int


class Reader:
    """A model in one precision, and a cache for one text."""

    def __init__(self, model: str, precision: str) -> None:
        config = EngineConfig(model=model, page_size=PAGE_SIZE, **PRECISIONS[precision])
        loaded = load_model(config)
        self._chat = loaded.chat
        cache = KVCache(loaded.shapes, 64, PAGE_SIZE)
        self._runner = ModelRunner(loaded.forward, cache, loaded.windows)

    def logits(self, block: Block, start: int, count: int) -> torch.Tensor:
        """Encode ``count`` tokens of ``block`` and return the logits after each."""
        batch = build_batch([[Chunk(block, start, count, [block])]])
        batch.logit_indices = list(range(count))
        return self._runner.run(batch).float()

    def answer(self, question: str, num_tokens: int) -> Text:
        prompt = self._chat.render([{"role": "user", "content": question}])
        block = Block(self._runner.cache)
        block.append(prompt)
        logits = self.logits(block, 0, len(prompt))
        for _ in range(num_tokens):
            block.append([int(logits[-1].argmax())])
            logits = self.logits(block, len(block) - 1, 1)
        ids = list(block.tokens)
        block.release()
        return Text(ids, len(prompt))

    def read(self, text: Text) -> torch.Tensor:
        """Return the logits for each token of the answer, ``[num_tokens, V]``."""
        block = Block(self._runner.cache)
        block.append(text.ids)
        logits = self.logits(block, 0, len(text.ids))
        block.release()
        return logits[text.prompt_len - 1 : -1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default=EMBEDDED_MODEL, help="hub id, folder or GGUF file")
    add("--tokens", type=int, default=100, metavar="N", help="of each answer (default: 100)")
    add("--questions", type=int, default=len(QUESTIONS), metavar="N", help="only the first N")
    add("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    options = parser.parse_args(argv)
    questions, console = QUESTIONS[: options.questions], Console(stderr=True)

    plain = Reader(options.model, "bfloat16")
    asked = track(questions, "answering in bfloat16", console=console)
    texts = [plain.answer(question, options.tokens) for question in asked]
    wanted = [plain.read(text) for text in texts]
    del plain
    rows = {
        name: compare(Reader(options.model, name), texts, wanted, name, console)
        for name in PRECISIONS
        if name != "bfloat16"
    }

    table = Table(title=f"Against bfloat16, {len(texts)} answers of {options.tokens} tokens")
    for column in ("precision", "greedy tokens that change", "logits' relative error"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, f"{row['changed']:.1%}", f"{row['error']:.3f}")
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"model": options.model, **rows}, indent=2))
    return 0


def compare(
    reader: Reader, texts: list[Text], wanted: list[torch.Tensor], name: str, console: Console
) -> dict[str, float]:
    """Return the share of greedy tokens that change, and the relative error of all logits."""
    changed = total = 0
    difference = size = 0.0
    for text, exact in zip(
        track(texts, f"reading in {name}", console=console), wanted, strict=True
    ):
        got = reader.read(text)
        changed += int((got.argmax(-1) != exact.argmax(-1)).sum())
        total += len(exact)
        difference += float((got - exact).square().sum())
        size += float(exact.square().sum())
    return {"changed": changed / total, "error": (difference / size) ** 0.5}


if __name__ == "__main__":
    sys.exit(main())
