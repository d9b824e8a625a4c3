"""Protocols: how workers share one text. Headers, rules, ends of paragraphs, final-answer prompt.

A `Protocol` is data; `sessions/` and `text/paragraphs.py` act on it. The strings of `PAPER` are
those of Hogwild! Inference (arXiv 2504.06261 and its authors' code), except the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from string import Formatter
from types import MappingProxyType
from typing import Literal, get_args

from hogwild_engine.api.checks import require_choice, require_int
from hogwild_engine.api.errors import require

DEFAULT_NAMES = ("Alice", "Bob", "Carol", "Dave")

RulesPosition = Literal["after_task", "before_task", "system"]
ParagraphEnd = Literal["sentence", "blank_line", "fence"]
EndingToken = Literal["closes", "opens"]
EndOfTurn = Literal["ends_paragraph", "ends_session"]


@dataclass(frozen=True, slots=True)
class Protocol:
    """Prompts and rules by which the workers of a team write one text together.

    Three settings are templates, in which ``{{`` and ``}}`` stand for braces: ``header``, with the
    fields ``{name}`` (the worker) and ``{number}`` (of its paragraph); ``first_prefixes``, with
    ``{name}``; and ``rules``, with ``{names}`` and ``{count}`` (of all workers), ``{roles}`` (the
    workers' roles, after a sentence about tools if the request has any), and ``{name}`` and
    ``{number}`` of the first paragraph. The other texts stand as they are.

    Args:
        name: name of the preset.
        rules: instructions that are added to the messages.
        rules_position: where: "after_task": after the last user message; "before_task": before the
            first user message; "system": in the system message.
        history_header: text before the history, at the start of the assistant's turn.
        others_header: text before the others' open paragraphs in a worker's view.
        after_other: text after each other worker's open paragraph, except the last.
        own_header: text between the last of these and the worker's own paragraph.
        header: text before each paragraph, not part of it. It must not end in a space, because
            tokens of words start with one.
        forced_prefix: text that starts every paragraph, as if its worker had written it.
        first_prefixes: texts that start each worker's first paragraph, after ``forced_prefix``;
            further workers take the last one.
        stagger: steps between the starts of two workers.
        paragraph_end: what ends a paragraph. "sentence": a blank line after a punctuation mark,
            outside code and formulas. "blank_line": a blank line outside code, after ``min_chars``.
            "fence": a closed code fence with a newline, or three blank lines.
        min_chars: minimum number of characters before a blank line ends a paragraph.
        ending_token: where the token that ended a paragraph goes: "closes": it is the last one of
            the paragraph; "opens": it is the first one of the worker's next block, as in the paper.
        end_of_turn: what a worker's end-of-turn token does: "ends_session", or "ends_paragraph" if
            the paragraph has text, and else ends the worker.
        forbids_headers: cut a paragraph where it starts the header of another one.
        max_repeats: how often a paragraph that starts like another one, or has no content, is
            rewound before its worker is stopped. ``None``: paragraphs are never rewound.
        intervention: text that starts a paragraph, as if its worker had written it, to make the
            worker check for redundant work.
        intervention_tokens: sampled tokens of all workers between two interventions. ``None``: no
            interventions.
        stops_on_boxed: end the parallel phase when a finished paragraph has a non-empty
            ``\\boxed{…}``.
        final_prompt: forced text before the final answer. "close": close the thinking section; for
            models without one, end the assistant's turn and ask ``final_question``.
        final_question: user message that asks for the final answer.
        answer_tokens: maximum number of tokens of the final answer, beside the request's
            ``max_tokens``. ``None``: no further maximum.

    Raises:
        ConfigError: a value is out of range, or a template has a field that it cannot have.
    """

    name: str
    rules: str
    rules_position: RulesPosition = "after_task"
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
    ending_token: EndingToken = "closes"
    end_of_turn: EndOfTurn = "ends_paragraph"
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
        for field in fields(self):
            if field.type == "str":
                value = getattr(self, field.name)
                require(isinstance(value, str), field.name, "a text", value)
        prefixes = self.first_prefixes
        are_texts = isinstance(prefixes, tuple) and all(isinstance(text, str) for text in prefixes)
        require(are_texts, "first_prefixes", "a tuple of texts", prefixes)
        _require_template("rules", self.rules, ("names", "count", "roles", "name", "number"))
        _require_template("header", self.header, ("name", "number"))
        for place, text in enumerate(prefixes):
            _require_template(f"first_prefixes[{place}]", text, ("name",))
        named = any(field == "name" for _, field, _, _ in Formatter().parse(self.header))
        require(named, "header", "a text with {name}", self.header)
        require(not self.header.endswith(" "), "header", "no space at the end", self.header)
        require(bool(self.final_prompt), "final_prompt", "'close' or a text", self.final_prompt)
        require_choice("rules_position", self.rules_position, get_args(RulesPosition))
        require_choice("paragraph_end", self.paragraph_end, get_args(ParagraphEnd))
        require_choice("ending_token", self.ending_token, get_args(EndingToken))
        require_choice("end_of_turn", self.end_of_turn, get_args(EndOfTurn))
        require_int("stagger", self.stagger, 0)
        require_int("min_chars", self.min_chars, 0)
        require_int("max_repeats", self.max_repeats, 0, optional=True)
        require_int("intervention_tokens", self.intervention_tokens, 1, optional=True)
        require_int("answer_tokens", self.answer_tokens, 1, optional=True)

    def header_for(self, name: str, number: int) -> str:
        """Return the header of a worker's paragraph, for example ``**Bob [2]:**``."""
        return self.header.format(name=name, number=number)

    def first_prefix_for(self, index: int, name: str) -> str:
        """Return the text that starts the first paragraph of the worker at ``index`` (from 0)."""
        if not self.first_prefixes:
            return ""
        return self.first_prefixes[min(index, len(self.first_prefixes) - 1)].format(name=name)

    def rules_for(
        self, names: tuple[str, ...], roles: tuple[str | None, ...], *, has_tools: bool
    ) -> str:
        """Return the rules for a team of two or more; one role, or ``None``, for each name."""
        lines = [f"- {name}: {role}" for name, role in zip(names, roles, strict=True) if role]
        listed = "\n\nRoles:\n" + "\n".join(lines) if lines else ""
        return self.rules.format(
            names=", ".join(names[:-1]) + " and " + names[-1],
            count=len(names),
            roles=(" " + _TOOL_RULES if has_tools else "") + listed,
            name=names[0],
            number=1,
        )


def _require_template(name: str, text: str, allowed: tuple[str, ...]) -> None:
    """Require that the fields of a template are among those that it is filled with."""
    listed = ", ".join(f"{{{field}}}" for field in allowed)
    wanted = f"a template with no field but {listed}"
    todo = "write {{ and }} for braces"
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:  # a single brace
        require(False, name, wanted, text, f"{error}: {todo}")
        return
    for _, field, spec, conversion in parsed:
        plain = field is None or (field in allowed and not spec and not conversion)
        require(plain, name, wanted, text, todo)


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

# The wording of the authors' code, for comparison with the paper.
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
    """Return the protocol that a request names.

    Args:
        protocol: a `Protocol`, the name of a preset, or "auto".
        thinking: whether the model's chat template has thinking: "auto" is `PAPER` then, else
            `INSTRUCT`.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(protocol, Protocol):
        return protocol
    known = {"auto": PAPER if thinking else INSTRUCT, **PRESETS}
    is_known = isinstance(protocol, str) and protocol in known
    wanted = f"'auto', one of {sorted(PRESETS)}, or a Protocol"
    require(is_known, "protocol", wanted, protocol)
    return known[protocol]
