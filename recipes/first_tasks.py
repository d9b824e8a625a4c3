"""Forty short tasks as a newcomer would give them to a team, and what tends to go wrong.

    python recipes/first_tasks.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct --workers 2

Twenty tasks ask for code and twenty for prose. Each runs once a seed, with `answer="join"`. The
table gives the share of runs

- in which every worker finished a paragraph,
- whose answer runs: its code blocks, one behind the other, raise no error and define each function
  that was asked for (code only),
- that write something twice: a function, or a line of three words or more,
- in which a paragraph echoes the task,
- whose answer ends in a piece of a worker's header, or inside a paragraph that was cut.
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from langchain_core.messages import AIMessage
from rich.console import Console
from rich.table import Table

from hogwild_agents import ChatHogwild
from hogwild_engine.api.config import EMBEDDED_MODEL
from hogwild_engine.text.paragraphs import repeats_any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.sandbox import Sandbox

FUNCTIONS = (
    "is_even(n), is_odd(n)",
    "add(a, b), subtract(a, b)",
    "square(x), cube(x)",
    "first_word(text), last_word(text)",
    "maximum(values), minimum(values)",
    "count_vowels(text), count_words(text)",
    "celsius_to_fahrenheit(c), fahrenheit_to_celsius(f)",
    "is_palindrome(text), reverse(text)",
    "factorial(n), fibonacci(n)",
    "gcd(a, b), lcm(a, b)",
    "flatten(nested), unique(values)",
    "to_upper(text), to_lower(text), swap_case(text)",
    "area_of_circle(r), area_of_square(a), area_of_triangle(b, h)",
    "is_prime(n), reverse_words(text), count_vowels(text), fibonacci(n)",
    "mean(values), median(values), mode(values)",
    "read_lines(path), count_lines(path)",
    "merge(a, b), intersect(a, b), difference(a, b)",
    "fizz(n), buzz(n), fizzbuzz(n)",
    "push(stack, item), pop(stack), peek(stack)",
    "encode(text, shift), decode(text, shift)",
)

PROSE: tuple[str, ...] = (
    "Plan a weekend in Rome: food, sights, transport and budget.",
    "Plan a day in Lisbon: morning, afternoon and evening.",
    "Describe tea, coffee and cocoa, a short paragraph each.",
    "Name the advantages and the disadvantages of working from home.",
    "Explain what a compiler, an interpreter and a linker do.",
    "Write a packing list for a hiking trip: clothes, food and tools.",
    "Give three tips for sleeping better and three for waking up early.",
    "Compare cats and dogs as pets: cost, care and company.",
    "Describe the four seasons, two sentences each.",
    "Plan a birthday party for a child: guests, games, cake and music.",
    "List five fruits and five vegetables with one fact about each.",
    "Explain how a bicycle, a car and a train brake.",
    "Write a weekly plan for learning Spanish: words, grammar and speaking.",
    "What should a new manager do in the first week, month and quarter?",
    "Describe three inventions that changed medicine.",
    "Write a shopping list for pasta, for a salad and for a dessert.",
    "Explain the water cycle: evaporation, clouds and rain.",
    "Give a beginner a plan for running five kilometres: training, shoes and food.",
    "Name what a city needs to be friendly to bicycles.",
    "Describe breakfast, lunch and dinner in Japan.",
)


class Outcome(NamedTuple):
    """What one run showed."""

    is_code: bool
    all_wrote: bool
    runs: bool
    repeats: bool
    echoes: bool
    ragged: bool


def task_of(functions: str) -> str:
    return f"Write Python functions, each in its own code block: {functions}."


def judge(task: str, functions: str | None, reply: AIMessage) -> Outcome:
    """Judge a reply to ``task``, which asks for ``functions`` or for prose."""
    text, about = reply.text, reply.response_metadata
    paragraphs = about["paragraphs"]
    wrote = {p["worker"] for p in paragraphs if p["complete"]}
    items = re.findall(r"^def (\w+)", text, re.MULTILINE) if functions else _lines(text)
    return Outcome(
        is_code=functions is not None,
        all_wrote=wrote == set(about["workers"]),
        runs=functions is not None and _runs(text, re.findall(r"(\w+)\(", functions)),
        repeats=any(count > 1 for count in Counter(items).values()),
        echoes=any(_echoes(p["text"], task) for p in paragraphs),
        ragged=bool(re.search(r"\*\*\w*( \[\d*)?$", text))
        or any(not p["complete"] and p["text"] and p["text"] in text for p in paragraphs),
    )


def _lines(text: str) -> list[str]:
    lines = [" ".join(re.findall(r"\w+", line.lower())) for line in text.splitlines()]
    return [line for line in lines if len(line.split()) >= 3]


def _echoes(text: str, task: str) -> bool:
    words = [word.lower() for word in re.findall(r"\w+", text)[:12]]
    return len(words) >= 3 and repeats_any(" ".join(words), [task], code=False)


def _runs(text: str, names: Sequence[str]) -> bool:
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    asked = "\n".join(f"assert callable({name})" for name in names)
    return Sandbox().run("\n\n".join(blocks), asked).passed


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """Return the shares, code and prose apart."""
    table = Table("", "runs", "all wrote", "answer runs", "repeats", "echoes", "ragged end")
    for label, is_code in (("code", True), ("prose", False)):
        chosen = [outcome for outcome in outcomes if outcome.is_code == is_code]
        shares = [sum(column) / len(chosen) for column in list(zip(*chosen, strict=True))[1:]]
        cells = [f"{share:.2f}" for share in shares]
        cells[1] = cells[1] if is_code else ""
        table.add_row(label, str(len(chosen)), *cells)
    return table


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Forty short tasks for a team.")
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=128)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write every reply to this file")
    options = parser.parse_args(args)
    llm = ChatHogwild(
        model=options.model,
        quantization=options.quantization,
        workers=options.workers,
        max_steps=options.max_steps,
        temperature=options.temperature,
        answer="join",
    )
    outcomes: list[Outcome] = []
    records: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        for protocol, tasks in (("code", [*map(task_of, FUNCTIONS)]), ("instruct", [*PROSE])):
            model = llm.bind(seed=seed, protocol=protocol)
            replies = model.batch([*tasks], config={"max_concurrency": options.parallel})
            for place, (task, reply) in enumerate(zip(tasks, replies, strict=True)):
                functions = FUNCTIONS[place] if protocol == "code" else None
                outcome = judge(task, functions, reply)
                about = {**reply.response_metadata, **outcome._asdict()}
                records.append({"task": task, "text": reply.text, **about})
                outcomes.append(outcome)
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))
    Console().print(table_of(outcomes))


if __name__ == "__main__":
    main()
