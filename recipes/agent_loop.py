"""An agent with two tools answers three questions, with one worker and with two.

    python recipes/agent_loop.py --model Qwen/Qwen2.5-Coder-1.5B-Instruct

Needs LangChain (pip install langchain). The transcript shows what workers think, which calls the
model makes and what the tools give. The embedded model calls no tools: this is meant for models
that were trained to.
"""

import argparse
import ast
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.tools import tool
from rich.console import Console

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hogwild_agents import ChatHogwild

QUESTIONS = (
    "What is 17 * 23 + 4?",
    "What is the capital of France?",
    "What is the population of Italy?",
)
SYSTEM_PROMPT = (
    "Answer with the help of the tools: call one for every calculation and every fact about a "
    "country. Once the tool has responded, tell the user the answer in one plain sentence."
)
COUNTRIES = {
    "france": {"capital": "Paris", "population": "68 million", "area": "640,000 km²"},
    "italy": {"capital": "Rome", "population": "59 million", "area": "301,000 km²"},
}
OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression such as '2 * (3 + 4)'."""
    try:
        return f"{expression} = {value_of(ast.parse(expression, mode='eval').body)}"
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError) as error:
        return f"error: {error}"


def value_of(node: ast.expr) -> float:
    """The value of numbers joined by ``+ - * /``.

    Raises:
        ValueError: it is something else.
    """
    match node:
        case ast.Constant(int() | float() as number):
            return number
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            return OPERATORS[type(kind)](value_of(left), value_of(right))
    raise ValueError("only numbers, brackets and + - * / are known")


@tool
def lookup(country: str, what: str) -> str:
    """Look up the capital, population or area of a country."""
    return COUNTRIES.get(country.lower(), {}).get(what.lower(), "not found")


def ask(llm: ChatHogwild, question: str) -> list[AnyMessage]:
    """The conversation that an agent has with its tools over one question."""
    agent = create_agent(llm, [calculator, lookup], system_prompt=SYSTEM_PROMPT)
    return agent.invoke({"messages": [HumanMessage(question)]}, {"recursion_limit": 9})["messages"]


def lines_of(messages: Sequence[AnyMessage]) -> Iterator[str]:
    """A conversation as a reader would write it down, the workers' thoughts included."""
    for message in messages:
        if isinstance(message, AIMessage):
            for block in message.content_blocks:
                if block["type"] == "reasoning":
                    worker = block.get("extras", {}).get("worker", "thought")
                    yield f"    {worker}: {' '.join(block.get('reasoning', '').split())}"
            for call in message.tool_calls:
                arguments = ", ".join(f"{name}={value!r}" for name, value in call["args"].items())
                yield f"  calls {call['name']}({arguments})"
        if message.text:
            yield f"{message.type}: {message.text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="hub id, folder or GGUF file (default: the embedded model)")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    options = parser.parse_args(argv)
    chosen = {} if options.model is None else {"model": options.model}
    console = Console(highlight=False, markup=False)
    for workers in options.workers:
        llm = ChatHogwild(workers=workers, max_steps=16, max_tokens=64, temperature=0, **chosen)
        console.print(f"# {workers} {'worker' if workers == 1 else 'workers'}")
        for question in QUESTIONS:
            for line in lines_of(ask(llm, question)):
                console.print(line)
            console.print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
