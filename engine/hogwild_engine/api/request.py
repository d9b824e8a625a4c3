"""Requests to the engine: the messages to answer, the team of workers, and their settings. Plain
data, checked at construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from hogwild_engine.api import layout as layouts
from hogwild_engine.api import protocol as protocols
from hogwild_engine.api.checks import check_messages, require_choice, require_int
from hogwild_engine.api.config import SamplingParams
from hogwild_engine.api.errors import WorkerNameError, error_text, require
from hogwild_engine.api.events import Paragraph
from hogwild_engine.api.grammar import Grammar

MAX_WORKERS = 256
AnswerMode = Literal["write", "join"]

_NAME = re.compile(r"[^\W_](?:[\w .'-]{0,62}[\w.'-])?")


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of the team.

    Args:
        name: used in the headers of the worker's paragraphs. 1 to 64 letters, digits, spaces and
            ``. ' - _``.
        role: what this worker should do. All workers read all roles. ``None``: no role.

    Raises:
        WorkerNameError: the name is empty or would break a header.
        ConfigError: the role is empty or no text.
    """

    name: str
    role: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            wanted = (
                "1 to 64 letters, digits, spaces or . ' - _, first a letter or digit, last no space"
            )
            raise WorkerNameError(error_text("workers", wanted, self.name, "choose a plain name"))
        is_role = isinstance(self.role, str) and bool(self.role.strip())
        require(self.role is None or is_role, "role", "a text or None", self.role)


def make_workers(workers: int | Iterable[str | Worker]) -> tuple[Worker, ...]:
    """Return a team.

    Args:
        workers: a number of workers with default names, names, or `Worker` objects.

    Raises:
        ConfigError: there is no worker, or something that is neither a name nor a `Worker`.
        WorkerNameError: a name is invalid or used twice.
    """
    if isinstance(workers, int) and not isinstance(workers, bool):
        require(1 <= workers <= MAX_WORKERS, "workers", f"1 to {MAX_WORKERS}", workers)
        named = protocols.DEFAULT_NAMES[:workers]
        more = (f"Worker{i}" for i in range(len(named) + 1, workers + 1))
        return tuple(Worker(name) for name in (*named, *more))
    is_list = isinstance(workers, Iterable) and not isinstance(workers, (str, bytes, Mapping))
    require(is_list, "workers", "a number, a list of names, or a list of Worker", workers)
    assert isinstance(workers, Iterable)
    team = tuple(_make_worker(member) for member in workers)
    require(1 <= len(team) <= MAX_WORKERS, "workers", f"1 to {MAX_WORKERS}", len(team))
    seen: set[str] = set()
    for worker in team:
        if worker.name.casefold() in seen:
            wanted = "names that differ by more than case"
            raise WorkerNameError(error_text("workers", wanted, worker.name, "rename one of them"))
        seen.add(worker.name.casefold())
    return team


def _make_worker(member: object) -> Worker:
    if isinstance(member, Worker):
        return member
    require(isinstance(member, str), "workers", "names or Worker objects", member)
    return Worker(str(member))


@dataclass(frozen=True, slots=True)
class Request:
    """One task for one team.

    A single worker needs no protocol: the model answers as transformers' ``generate`` would.

    Args:
        messages: the conversation in the chat format of transformers: dicts with ``role`` and
            ``content``, and ``name`` for the name of a speaker.
        workers: the team; anything that `make_workers` takes.
        history: paragraphs that the team wrote before on this task.
        protocol: the name of a preset, a `Protocol`, or "auto": "paper" for models whose chat
            template has thinking, "instruct" for others.
        layout: what each worker sees of the others: "combined", "interleaved", "contiguous" or
            "arrival"; see `hogwild_engine.api.layout`.
        sync_interval: steps after which the others' new tokens become visible. ``None``: workers
            never see each other, and their paragraphs are merged at the end (for ablations).
        answer: "write": one worker writes the final answer and sees all paragraphs. "join": the
            paragraphs, in the order of the history, are the answer.
        max_steps: maximum number of steps of the parallel phase.
        max_tokens: maximum number of sampled tokens of the final answer. While workers write, at
            most half of what the prompt leaves free in the context is kept for it.
        sampling: how tokens are sampled.
        stop: strings that end the text of the worker, or the answer, in which they appear. They are
            not part of the text.
        tools: tools in OpenAI's format, ``{"type": "function", "function": {…}}``.
        tool_choice: "auto": the answer is text or calls. "any": it is calls. "none": it is text.
            Or the name of the tool to call.
        parallel_tool_calls: allow several calls in one answer.
        grammar: constrains the final answer.
        worker_grammar: constrains each worker of a team; a worker then writes one paragraph.
        logprobs: report the log probabilities of the answer's tokens.
        ignore_eos: never sample an end-of-turn token (for benchmarks).

    Raises:
        ConfigError: a value is out of range or unknown, or two settings exclude each other.
        RequestError: a message has no role or no content.
        WorkerNameError: a worker's name is invalid or used twice.
    """

    messages: tuple[dict[str, Any], ...]
    workers: tuple[Worker, ...] = field(default_factory=lambda: make_workers(2))
    history: tuple[Paragraph, ...] = ()
    protocol: str | protocols.Protocol = "auto"
    layout: layouts.LayoutName = "combined"
    sync_interval: int | None = 1
    answer: AnswerMode = "write"
    max_steps: int = 512
    max_tokens: int = 1024
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    worker_grammar: Grammar | None = None
    logprobs: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        require(bool(self.messages), "messages", "at least one message", self.messages)
        check_messages(self.messages)
        object.__setattr__(self, "workers", make_workers(self.workers))
        check_settings(**{name: getattr(self, name) for name in _CHECKS})
        names = [worker.name for worker in self.workers]
        for author in (paragraph.worker for paragraph in self.history):
            require(author in names, "history", f"paragraphs of {names}", author)
        _check_tools(self)
        _check_combinations(self)

    @property
    def constrains_answer(self) -> bool:
        """Whether the answer is constrained by a grammar, its own or that of tool calls."""
        return self.grammar is not None or bool(self.tools)

    @property
    def may_call(self) -> bool:
        """Whether the answer may contain tool calls."""
        return bool(self.tools) and self.tool_choice != "none"


def check_settings(**settings: object) -> None:
    """Check settings of `Request`, each by itself. Needs no model and no other setting.

    Args:
        settings: values by name.

    Raises:
        ConfigError: a value is out of range or unknown.
    """
    for name, value in settings.items():
        _CHECKS[name](name, value)


def _check_protocol(name: str, value: Any) -> None:
    protocols.resolve(value, thinking=False)


def _check_stop(name: str, value: Any) -> None:
    valid = isinstance(value, (tuple, list)) and all(isinstance(s, str) and s for s in value)
    require(valid, name, "a list of non-empty strings", value)


def _check_grammar(name: str, value: Any) -> None:
    require(value is None or isinstance(value, Grammar), name, "a Grammar or None", value)


_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "protocol": _check_protocol,
    "layout": partial(require_choice, choices=get_args(layouts.LayoutName)),
    "sync_interval": partial(require_int, low=1, optional=True),
    "answer": partial(require_choice, choices=get_args(AnswerMode)),
    "max_steps": partial(require_int, low=1),
    "max_tokens": partial(require_int, low=1),
    "stop": _check_stop,
    "grammar": _check_grammar,
    "worker_grammar": _check_grammar,
}


def _check_tools(request: Request) -> None:
    names = [_tool_name(tool) for tool in request.tools]
    require(len({*names}) == len(names), "tools", "tools of different names", names)
    choice = request.tool_choice
    require_choice("tool_choice", choice, ["auto", "any", "none", *names])
    must_call = choice not in ("auto", "none")
    require(bool(names) or not must_call, "tools", "at least one tool to choose", request.tools)
    both = request.grammar is not None and must_call
    fix = "leave the choice of tools to the model"
    require(not both, "grammar", "none beside a tool_choice that forces calls", choice, fix)


def _check_combinations(request: Request) -> None:
    """Check settings that exclude each other."""
    is_team, constrained = len(request.workers) > 1, request.constrains_answer
    alone = request.worker_grammar is not None and not is_team
    fix = "constrain the answer of a single worker by grammar"
    require(not alone, "worker_grammar", "a team of workers", 1, fix)
    endless = request.ignore_eos and (constrained or request.worker_grammar is not None)
    fix = "constrained text ends where its grammar does"
    require(not endless, "ignore_eos", "False with tools or a grammar", True, fix)
    joins = request.answer == "join" and is_team and constrained
    fix = "tools and grammars cannot constrain joined paragraphs"
    require(not joins, "answer", "'write' with tools or a grammar", request.answer, fix)


def _tool_name(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    wanted = "functions in OpenAI's format, each with a name"
    require(isinstance(name, str) and bool(name), "tools", wanted, tool)
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    valid = parameters is None or _describes_object(parameters)
    require(valid, "tools", f"a schema of an object as parameters of {name}", parameters)
    return str(name)


def _describes_object(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    options = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    members = [member for option in options if isinstance(option, list) for member in option]
    return schema.get("type", "object") == "object" and all(map(_describes_object, members))
