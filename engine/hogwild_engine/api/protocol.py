"""How workers share one text: headers, rules, paragraph ends, interventions, final prompt.

A `Protocol` is data; `paragraphs.py` and `session.py` act on it. The strings of `PAPER` are those
of Hogwild! Inference (arXiv 2504.06261 and its authors' code); the rules' wording is our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal

from hogwild_engine.api.errors import require

DEFAULT_NAMES = ("Alice", "Bob", "Carol", "Dave")

ParagraphEnd = Literal["sentence", "blank_line", "fence"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """Every rule of the collaboration.

    ``rules``, ``header`` and ``first_prefixes`` may hold ``{name}`` (the worker), ``{number}`` (of
    its paragraph), ``{names}``, ``{count}`` and ``{roles}`` (their roles, and before these what
    they must know of tools where there are any).

    Args:
        name: how the preset is called.
        rules: told to the model once.
        rules_position: "after_task": behind the last human message; "before_task": in front of the
            first one; "system": in the system message.
        history_header: opens the shared text, at the start of the assistant's turn.
        others_header: stands before the others' open paragraphs in a worker's view.
        after_other: stands behind each other worker's open paragraph but the last.
        own_header: stands behind the last of them.
        header: opens a paragraph, not part of its text. No trailing space: it would double the next
            word's.
        forced_prefix: forced start of each paragraph, part of its text.
        first_prefixes: forced start of each worker's first paragraph, part of its text; the last
            one serves all further workers.
        stagger: steps between the starts of two workers.
        paragraph_end: "sentence": a blank line after sentence punctuation, outside code and
            formulas; "blank_line": a blank line outside code after ``min_chars``; "fence": a closed
            code fence and a newline, or three blank lines.
        min_chars: characters before a blank line ends a paragraph.
        ending_token: what becomes of the token that ended a paragraph: it "closes" it as its last
            token, or "opens" the worker's next block, as published.
        end_of_turn: a worker's end-of-turn token "ends_session", or "ends_paragraph" where text
            stands before it.
        forbids_headers: text that starts another worker's header is cut and ends the paragraph.
        max_repeats: how often a paragraph that opens like another one, or says nothing, is rewound
            before its worker is done; ``None``: nothing is rewound.
        intervention: put in a worker's mouth at the start of a paragraph.
        intervention_tokens: how many tokens of all workers lie between two interventions; ``None``:
            none.
        stops_on_boxed: a finished paragraph with a valid ``\\boxed{…}`` ends the parallel phase.
        final_prompt: forced before the final answer. "close" closes the thinking, or the turn and
            asks for the answer.
        final_question: what "close" asks where the template has no thinking.
        answer_tokens: bound on the final answer beside the request's ``max_tokens``.

    Raises:
        ConfigError: a value is out of range, or a text ends in a space or names an unknown field.
    """

    name: str
    rules: str
    rules_position: Literal["after_task", "before_task", "system"] = "after_task"
    history_header: str = ""
    others_header: str = ""
    after_other: str = "\n\n"
    own_header: str = "\n\n"
    header: str = "**{name} [{number}]:**"
    forced_prefix: str = ""
    first_prefixes: tuple[str, ...] = ()
    stagger: int = 3
    paragraph_end: ParagraphEnd = "blank_line"
    min_chars: int = 40
    ending_token: Literal["closes", "opens"] = "closes"
    end_of_turn: Literal["ends_paragraph", "ends_session"] = "ends_paragraph"
    forbids_headers: bool = True
    max_repeats: int | None = None
    intervention: str = "Quick check: am I doing redundant work? (yes/no):"
    intervention_tokens: int | None = None
    stops_on_boxed: bool = False
    final_prompt: str = "close"
    final_question: str = (
        "Now write the complete final answer to my request, using all that was written above."
    )
    answer_tokens: int | None = None

    def __post_init__(self) -> None:
        known = dict.fromkeys(("name", "number", "names", "count", "roles"), "x")
        texts = {f.name: getattr(self, f.name) for f in fields(self) if f.name in _TEMPLATES}
        texts |= {f"first_prefixes[{i}]": text for i, text in enumerate(self.first_prefixes)}
        for name, text in texts.items():
            try:
                text.format_map(known)
            except (KeyError, ValueError, IndexError) as error:
                require(False, name, f"only the fields {sorted(known)}", text, str(error))
        require("{name}" in self.header, "header", "a text with {name}", self.header)
        require(not self.header.endswith(" "), "header", "no space at the end", self.header)
        require(bool(self.final_prompt), "final_prompt", "'close' or a text", self.final_prompt)
        _require_whole("stagger", self.stagger, 0)
        _require_whole("min_chars", self.min_chars, 0)
        for name, low in (("max_repeats", 0), ("intervention_tokens", 1), ("answer_tokens", 1)):
            if getattr(self, name) is not None:
                _require_whole(name, getattr(self, name), low)

    def header_for(self, name: str, number: int) -> str:
        return self.header.format(name=name, number=number)

    def first_prefix_for(self, index: int, name: str) -> str:
        if not self.first_prefixes:
            return ""
        return self.first_prefixes[min(index, len(self.first_prefixes) - 1)].format(name=name)

    def rules_for(
        self, names: tuple[str, ...], roles: tuple[str | None, ...], *, has_tools: bool
    ) -> str:
        told = [f"{name}: {role}" for name, role in zip(names, roles, strict=True) if role]
        listed = "\n\nRoles:\n" + "\n".join(f"- {line}" for line in told) if told else ""
        return self.rules.format(
            names=", ".join(names[:-1]) + " and " + names[-1],
            count=len(names),
            roles=(" " + _TOOL_RULES if has_tools else "") + listed,
            name=names[0],
            number=1,
        )


def _require_whole(name: str, value: object, low: int) -> None:
    require(type(value) is int and value >= low, name, f"a whole number of at least {low}", value)


_TEMPLATES = frozenset({"rules", "header"})

_RULES = (
    "{{count}} assistants, {{names}}, write the answer at the same time and see each other's text "
    "while it is written. Each of them writes the next {item} that nobody has started yet, in "
    "{form} of its own, and stops when all is written.{{roles}}"
)

_TOOL_RULES = (
    "While they write, no tool can be called and nobody knows or guesses what one would say: they "
    "write which tool to call next and with which arguments, or what a tool's response means."
)

INSTRUCT = Protocol(
    name="instruct",
    rules=_RULES.format(item="part", form="a short paragraph"),
    max_repeats=1,
)

CODE = Protocol(
    name="code",
    rules=_RULES.format(item="item", form="a code block"),
    header="**{name} [{number}]:**\n\n",
    forced_prefix="```python\n",
    paragraph_end="fence",
    max_repeats=3,
)

_OUT_OF_TIME = (
    "\n\nWait, given the limited time, I have to give an answer right now. "
    "Considering all my previous attempts, I have to conclude that the final "
)
BOXED_PROMPT = _OUT_OF_TIME + "answer is \\boxed{"
CODE_PROMPT = _OUT_OF_TIME + "solution code is:\n\n```python\n"

PAPER = Protocol(
    name="paper",
    rules=(
        "You are one of {count} assistants, {names}, who solve the problem below together. All "
        "write their thoughts at the same time, in steps that open with the writer's name and the "
        "number of the step, and each sees what the others are writing while they write it. "
        'Finished steps are gathered under "Past steps"; under "Work in progress (others)" stands '
        'what the others have not finished, under "Work in progress (own)" your own step. Divide '
        "the work: say what you take on, do not do what another is doing or has done, change to "
        "something else as soon as you see that you repeat another, check and correct each other, "
        "and answer questions. Whoever is first to be sure gives the final answer as "
        "\\boxed{{answer}}; nothing can be changed after that.{roles}"
    ),
    rules_position="before_task",
    history_header="### Past steps\n\n",
    others_header="### Work in progress (others)\n\n",
    after_other="<...>\n\n",
    own_header="<...>\n\n### Work in progress (own)\n\n",
    first_prefixes=(" Hi, I'm {name}. Here's how we can", " Hi, I'm {name}."),
    stagger=0,
    paragraph_end="sentence",
    min_chars=0,
    ending_token="opens",
    end_of_turn="ends_session",
    forbids_headers=False,
    intervention_tokens=1024,
    stops_on_boxed=True,
)

PRESETS: Mapping[str, Protocol] = MappingProxyType({p.name: p for p in (PAPER, INSTRUCT, CODE)})


def resolve(protocol: str | Protocol, *, thinking: bool) -> Protocol:
    """The protocol that a request names; "auto" takes `PAPER` inside a thinking template, else
    `INSTRUCT`.

    Raises:
        ConfigError: no preset has that name.
    """
    if isinstance(protocol, Protocol):
        return protocol
    if protocol == "auto":
        return PAPER if thinking else INSTRUCT
    check_name(protocol)
    return PRESETS[protocol]


def check_name(protocol: object) -> None:
    """Raise `ConfigError` unless ``protocol`` is "auto", a preset's name or a `Protocol`."""
    known = isinstance(protocol, str) and (protocol == "auto" or protocol in PRESETS)
    require(
        known or isinstance(protocol, Protocol),
        "protocol",
        f"'auto', one of {sorted(PRESETS)}, or a Protocol",
        protocol,
    )
