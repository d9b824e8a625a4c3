"""Prompt of a session: the tokens before the first sampled token."""

from __future__ import annotations

from typing import NamedTuple

from hogwild_engine.api.errors import RequestError
from hogwild_engine.api.protocol import Protocol, resolve
from hogwild_engine.api.request import Request
from hogwild_engine.text.chat_template import THINK_OPEN, ChatTemplate
from hogwild_engine.text.messages import add_to_system, add_to_user


class Prompt(NamedTuple):
    """The prompt of a session.

    Args:
        tokens: the rendered messages, the history header and the request's history.
        protocol: the team's protocol; ``None`` for a single worker.
    """

    tokens: list[int]
    protocol: Protocol | None


def make_prompt(request: Request, chat: ChatTemplate) -> Prompt:
    """Render the prompt of a request.

    Raises:
        NoChatTemplateError: the model has no chat template.
        RequestError: the template refuses the messages.
    """
    if len(request.workers) == 1:
        return Prompt(_single_prompt(request, chat), None)
    protocol = resolve(request.protocol, thinking=chat.thinking)
    return Prompt(_team_prompt(request, protocol, chat), protocol)


def _single_prompt(request: Request, chat: ChatTemplate) -> list[int]:
    tokens = chat.render(request.messages, request.tools)
    for paragraph in request.history:
        tokens += chat.encode_data(paragraph.text.strip()) + chat.encode("\n\n")
    # A grammar constrains all text after the thinking section, so that must begin here or never.
    return tokens + (_think_open(chat) if request.constrains_answer else [])


def _team_prompt(request: Request, protocol: Protocol, chat: ChatTemplate) -> list[int]:
    tokens = _render_with_rules(request, protocol, chat) + _think_open(chat)
    tokens += chat.encode(protocol.history_header)
    tokens += chat.encode(missing_newlines(chat.decode(tokens[-8:])))
    for paragraph in request.history:
        header = protocol.header_for(paragraph.worker, paragraph.number)
        between = "" if header[-1].isspace() or not paragraph.text.strip() else " "
        tokens += chat.encode(header)
        tokens += chat.encode_data(between + paragraph.text.strip())
        tokens += chat.encode("\n\n")
    return tokens


def _think_open(chat: ChatTemplate) -> list[int]:
    """Return the tokens that open the thinking section, unless the template opens it itself."""
    return chat.encode(THINK_OPEN + "\n") if chat.thinking and not chat.opens_thinking else []


def missing_newlines(text: str) -> str:
    """Return the newlines after which ``text`` ends in a blank line, as before each paragraph."""
    trailing = len(text) - len(text.rstrip("\n"))
    return "\n" * max(0, 2 - trailing)


def _render_with_rules(request: Request, protocol: Protocol, chat: ChatTemplate) -> list[int]:
    rules = protocol.rules_for(
        tuple(worker.name for worker in request.workers),
        tuple(worker.role for worker in request.workers),
        has_tools=request.may_call,
    )
    # First: the rules that are added to a message are not what its speaker said.
    spoken = chat.name_speakers(request.messages)
    position = protocol.rules_position
    if position == "system":
        try:
            return chat.render(add_to_system(spoken, rules), request.tools)
        except RequestError:  # the template refuses system messages
            position = "before_task"
    messages = add_to_user(spoken, rules, first=position == "before_task")
    return chat.render(messages, request.tools)
