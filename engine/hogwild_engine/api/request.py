"""One request to the engine: what to answer, by how many workers, under which rules. Plain data,
checked when built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hogwild_engine.api import layout as layouts
from hogwild_engine.api import protocol as protocols
from hogwild_engine.api.config import SamplingParams
from hogwild_engine.api.errors import WorkerNameError, complaint, require
from hogwild_engine.api.events import Paragraph
from hogwild_engine.api.grammar import Grammar

MAX_WORKERS = 256

_NAME = re.compile(r"[^\W_](?:[\w .'-]{0,62}[\w.'-])?")


@dataclass(frozen=True, slots=True)
class Worker:
    """One of the minds that write at the same time.

    Args:
        name: stands in the worker's headers. Letters, digits, spaces and ``. ' - _``; at most 64.
        role: what this worker is told to do; all workers read all roles.

    Raises:
        WorkerNameError: the name is empty or would break a header.
    """

    name: str
    role: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            wanted = (
                "1 to 64 letters, digits, spaces or . ' - _, first a letter or digit, last no space"
            )
            raise WorkerNameError(complaint("workers", wanted, self.name, "choose a plain name"))
        require(
            self.role is None or (isinstance(self.role, str) and bool(self.role.strip())),
            "role",
            "a text or None",
            self.role,
        )


def make_workers(workers: int | Iterable[str | Worker]) -> tuple[Worker, ...]:
    """A team from a number, from names, or from `Worker` objects.

    Raises:
        ConfigError: no worker, or something that is neither a name nor a `Worker`.
        WorkerNameError: a name is unusable or stands twice.
    """
    if isinstance(workers, int) and not isinstance(workers, bool):
        require(1 <= workers <= MAX_WORKERS, "workers", f"1 to {MAX_WORKERS}", workers)
        named = protocols.DEFAULT_NAMES[:workers]
        more = (f"Worker{i}" for i in range(len(named) + 1, workers + 1))
        return tuple(Worker(name) for name in (*named, *more))
    require(
        isinstance(workers, Iterable) and not isinstance(workers, (str, bytes, Mapping)),
        "workers",
        "a number, a list of names, or a list of Worker",
        workers,
    )
    assert isinstance(workers, Iterable)
    team = tuple(_make_worker(member) for member in workers)
    require(1 <= len(team) <= MAX_WORKERS, "workers", f"1 to {MAX_WORKERS}", len(team))
    seen: set[str] = set()
    for worker in team:
        if worker.name.casefold() in seen:
            wanted = "names that differ by more than case"
            raise WorkerNameError(complaint("workers", wanted, worker.name, "rename one of them"))
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

    With one worker there is no protocol: the model answers as ``generate`` would, and
    ``max_tokens`` bounds it.

    Args:
        messages: the conversation in the chat format of transformers: dicts with ``role`` and
            ``content``.
        workers: the team.
        history: paragraphs that the team has already written on the current task.
        protocol: "auto", a preset's name, or a `Protocol`.
        layout: "combined", "interleaved", "contiguous" or "arrival".
        sync_interval: others' open tokens become visible every so many steps. ``None``: workers
            never see each other, finished paragraphs included; what they wrote is merged at the end
            (for ablations).
        answer: "write": one worker writes a final answer with everything in view. "join": the
            paragraphs, in history order, are the answer.
        max_steps: bound on the steps of the parallel phase.
        max_tokens: bound on the sampled tokens of the final answer.
        sampling: how tokens are drawn.
        stop: strings that end the text they appear in; they are not shown.
        tools: tools in OpenAI's form, ``{"type": "function", "function": {…}}``.
        tool_choice: "auto": the answer is text or calls. "any": it is calls. "none": it is text.
            Or the name of the tool to call.
        parallel_tool_calls: whether an answer may hold several calls.
        grammar: what the final answer must look like.
        worker_grammar: what a worker of a team writes: one paragraph that must look like this.
        logprobs: report the probabilities of the answer's tokens.
        ignore_eos: nobody ends a turn: end-of-turn tokens are never drawn (for benchmarks).

    Raises:
        ConfigError: a value is out of range or unknown.
    """

    messages: tuple[dict[str, Any], ...]
    workers: tuple[Worker, ...] = field(default_factory=lambda: make_workers(2))
    history: tuple[Paragraph, ...] = ()
    protocol: str | protocols.Protocol = "auto"
    layout: layouts.LayoutName = "combined"
    sync_interval: int | None = 1
    answer: Literal["write", "join"] = "write"
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
        object.__setattr__(self, "workers", make_workers(self.workers))
        check_team_settings(
            protocol=self.protocol,
            layout=self.layout,
            sync_interval=self.sync_interval,
            answer=self.answer,
            max_steps=self.max_steps,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )
        names = [worker.name for worker in self.workers]
        for paragraph in self.history:
            require(
                paragraph.worker in names, "history", f"paragraphs of {names}", paragraph.worker
            )
        check_answer_settings(self)

    @property
    def constrains_answer(self) -> bool:
        """Whether a grammar decides what the answer looks like."""
        return self.grammar is not None or bool(self.tools)

    @property
    def may_call(self) -> bool:
        """Whether the answer may be calls of tools."""
        return bool(self.tools) and self.tool_choice != "none"


def check_answer_settings(request: Request) -> None:
    """Check tools and grammars against each other.

    Raises:
        ConfigError: they cannot be served.
    """
    for name in ("grammar", "worker_grammar"):
        value = getattr(request, name)
        require(value is None or isinstance(value, Grammar), name, "a Grammar or None", value)
    names = [_tool_name(tool) for tool in request.tools]
    require(len({*names}) == len(names), "tools", "tools of different names", names)
    choice, choices = request.tool_choice, ["auto", "any", "none", *names]
    require(choice in choices, "tool_choice", f"one of {choices}", choice)
    forced = choice not in ("auto", "none")
    require(bool(names) or not forced, "tools", "at least one tool to choose", request.tools)
    both = request.grammar is not None and forced
    todo = "leave the choice of tools to the model"
    require(not both, "grammar", "none beside a tool_choice that forces calls", choice, todo)
    alone = request.worker_grammar is not None and len(request.workers) == 1
    todo = "one worker's answer is bound by grammar"
    require(not alone, "worker_grammar", "a team of workers to write by it", 1, todo)
    todo = "text under a grammar ends where the grammar does"
    bound = request.constrains_answer or request.worker_grammar is not None
    endless = request.ignore_eos and bound
    require(not endless, "ignore_eos", "False with tools or a grammar", True, todo)
    joins = request.answer == "join" and len(request.workers) > 1 and request.constrains_answer
    todo = "joined paragraphs are no answer that tools or a grammar could shape"
    require(not joins, "answer", "'write' with tools or a grammar", request.answer, todo)


def _tool_name(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    wanted = "functions in OpenAI's form, each with a name"
    require(isinstance(name, str) and bool(name), "tools", wanted, tool)
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    takes_object = parameters is None or _describes_object(parameters)
    require(takes_object, "tools", f"a schema of an object as parameters of {name}", parameters)
    return str(name)


def _describes_object(schema: object) -> bool:
    if not isinstance(schema, Mapping):
        return False
    options = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    members = [member for option in options if isinstance(option, list) for member in option]
    return schema.get("type", "object") == "object" and all(map(_describes_object, members))


def check_team_settings(
    *,
    protocol: object = "auto",
    layout: object = "combined",
    sync_interval: object = 1,
    answer: object = "write",
    max_steps: object = 1,
    max_tokens: object = 1,
    stop: object = (),
) -> None:
    """Check the settings of a request that need no model.

    Raises:
        ConfigError: a value is out of range or unknown.
    """
    protocols.check_name(protocol)
    require(layout in layouts.LAYOUTS, "layout", f"one of {list(layouts.LAYOUTS)}", layout)
    require(answer in ("write", "join"), "answer", "'write' or 'join'", answer)
    require(
        sync_interval is None or (type(sync_interval) is int and sync_interval >= 1),
        "sync_interval",
        "a whole number of at least 1, or None",
        sync_interval,
    )
    for name, value in (("max_steps", max_steps), ("max_tokens", max_tokens)):
        require(type(value) is int and value >= 1, name, "a whole number of at least 1", value)
    require(
        isinstance(stop, (tuple, list)) and all(isinstance(s, str) and s for s in stop),
        "stop",
        "a list of non-empty strings",
        stop,
    )
