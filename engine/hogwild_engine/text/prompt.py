"""From a request to the tokens that stand before anything is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hogwild_engine.api.errors import RequestError
from hogwild_engine.api.protocol import Protocol, resolve
from hogwild_engine.api.request import Request
from hogwild_engine.text.chat_template import THINK_OPEN, ChatTemplate


class Prompt(NamedTuple):
    """What a session starts from.

    Args:
        tokens: the rendered conversation, the history header and the request's own history.
        protocol: ``None`` for a single worker.
    """

    tokens: list[int]
    protocol: Protocol | None


def make_prompt(request: Request, chat: ChatTemplate) -> Prompt:
    """Render a request.

    Raises:
        NoChatTemplateError: the model has no chat template.
        RequestError: the template refuses the messages.
    """
    if len(request.workers) == 1:
        tokens = chat.render(request.messages, request.tools)
        for paragraph in request.history:
            tokens += chat.encode_data(paragraph.text.strip()) + chat.encode("\n\n")
        if request.constrains_answer and chat.thinking and not chat.opens_thinking:
            tokens += chat.encode(THINK_OPEN + "\n")
        return Prompt(tokens, None)
    protocol = resolve(request.protocol, thinking=chat.thinking)
    tokens = _render_with_rules(request, protocol, chat)
    if chat.thinking and not chat.opens_thinking:
        tokens += chat.encode(THINK_OPEN + "\n")
    tokens += chat.encode(protocol.history_header)
    tokens += chat.encode(missing_newlines(chat.decode(tokens[-8:])))
    for paragraph in request.history:
        header = protocol.header_for(paragraph.worker, paragraph.number)
        between = "" if header[-1].isspace() or not paragraph.text.strip() else " "
        tokens += chat.encode(header)
        tokens += chat.encode_data(between + paragraph.text.strip())
        tokens += chat.encode("\n\n")
    return Prompt(tokens, protocol)


def missing_newlines(text: str) -> str:
    """What makes ``text`` end in a blank line, as every paragraph starts after one."""
    trailing = len(text) - len(text.rstrip("\n"))
    return "\n" * max(0, 2 - trailing)


def _render_with_rules(request: Request, protocol: Protocol, chat: ChatTemplate) -> list[int]:
    rules = protocol.rules_for(
        tuple(worker.name for worker in request.workers),
        tuple(worker.role for worker in request.workers),
        has_tools=request.may_call,
    )
    if protocol.rules_position == "system":
        try:
            return chat.render(_in_system(request.messages, rules), request.tools)
        except RequestError:  # the template knows no system role
            return chat.render(_in_turn(request.messages, rules, first=True), request.tools)
    first = protocol.rules_position == "before_task"
    return chat.render(_in_turn(request.messages, rules, first=first), request.tools)


def _in_system(messages: Sequence[dict[str, Any]], rules: str) -> list[dict[str, Any]]:
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": rules}, *messages]
    head = {**messages[0], "content": _joined(messages[0]["content"], rules)}
    return [head, *messages[1:]]


def _in_turn(
    messages: Sequence[dict[str, Any]], rules: str, *, first: bool
) -> list[dict[str, Any]]:
    """Rules in front of the first human message, or behind the last one."""
    places = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not places:
        return [*messages, {"role": "user", "content": rules}]
    place = places[0] if first else places[-1]
    content = messages[place]["content"]
    told = _joined(rules, content) if first else _joined(content, rules)
    return [*messages[:place], {**messages[place], "content": told}, *messages[place + 1 :]]


def _joined(before: Any, after: Any) -> Any:
    """Two contents, a blank line between them; each is a text or a list of parts."""
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    parts = [
        [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        for content in (before, after)
    ]
    return [*parts[0], {"type": "text", "text": "\n\n"}, *parts[1]]
