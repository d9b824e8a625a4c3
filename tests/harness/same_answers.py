"""One request asked in many ways through `ChatHogwild`, and whether its answers are one.

Run as a program, so that the environment can choose the path of the C code: see schedules.py.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hogwild_agents import ChatHogwild, HogwildError

PROMPT = "Name the planets, and say of each in one line what a traveller would see first."
OTHERS = ("Hi.", "Count from 1 to 40: " + " ".join(map(str, range(9))), "Why is the sky blue?")


def answer(message: Any) -> tuple[str, str]:
    """Return a message's text and the bits of its log probabilities."""
    content = message.response_metadata["logprobs"]["content"]
    return message.text, str([item["logprob"] for item in content])


def ways(llm: ChatHogwild) -> dict[str, tuple[str, str]]:
    """Ask in many ways; return the answers by the way."""
    asked: dict[str, tuple[str, str]] = {}
    asked["first call"] = answer(llm.invoke(PROMPT))
    asked["second call"] = answer(llm.invoke(PROMPT))
    chunks = list(llm.stream(PROMPT))
    asked["stream"] = answer(sum(chunks[1:], chunks[0]))
    llm.batch(list(OTHERS))
    *_, beside = llm.batch([*OTHERS, PROMPT])
    asked["in a batch"] = answer(beside)
    try:
        llm.invoke("one two " * 30_000)
    except HogwildError:
        asked["after a failed request"] = answer(llm.invoke(PROMPT))
    next(iter(llm.stream(OTHERS[1])))  # a reader that leaves
    asked["beside a cancelled request"] = answer(llm.invoke(PROMPT))
    with ThreadPoolExecutor(6) as pool:
        for number, message in enumerate(pool.map(llm.invoke, [PROMPT] * 6)):
            asked[f"{number} of six at once"] = answer(message)
    return asked


def main() -> None:
    dtype: Any = sys.argv[1]
    common: dict[str, Any] = {"dtype": dtype, "logprobs": True, "seed": 0, "max_tokens": 8}
    settings: dict[str, Any]
    for settings in (
        {"workers": 1, "temperature": 1.5},
        {"workers": 2, "temperature": 0, "max_steps": 5},
    ):
        asked: dict[str, Any] = {}
        for prefix_cache in (True, False):
            llm = ChatHogwild(**common, **settings, prefix_cache=prefix_cache, num_pages=512)
            asked |= {f"{way}, {prefix_cache=}": text for way, text in ways(llm).items()}
        first, *_ = asked.values()
        if others := {way: text for way, text in asked.items() if text != first}:
            sys.exit(f"{settings}: wanted {first}, got {others}")


if __name__ == "__main__":
    main()
