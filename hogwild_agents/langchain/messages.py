"""From LangChain messages to the messages and the history of an engine request.

The current task begins at the last human message. After it, AI messages with a worker's name are
history, and so are a worker's reasoning blocks. Of earlier tasks only the answers are kept; what
the workers wrote stands in for a missing answer.

An AI message with another name is another agent's. On the current task it is something to answer,
so it becomes a user message with that name: a model continues its own last text, and would have
nothing to add to the finished text of another. A message with tool calls stays the assistant's.
"""

from __future__ import annotations

import json
import reprlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    ToolMessage,
    convert_to_messages,
)

from hogwild_agents.langchain.errors import ContentError, RequestError
from hogwild_engine.api.errors import error_text
from hogwild_engine.api.events import Paragraph

_ROLES = {
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
}
_REASONING = frozenset({"reasoning", "thinking", "redacted_thinking"})
_CALLS = frozenset({"tool_call", "tool_call_chunk", "tool_use", "invalid_tool_call"})


class Conversation(NamedTuple):
    """The parts of a request that come from messages.

    Args:
        messages: in the chat format of transformers.
        history: paragraphs that the team has written on the current task.
    """

    messages: tuple[dict[str, Any], ...]
    history: tuple[Paragraph, ...]


def to_messages(given: Any) -> list[BaseMessage]:
    """Return LangChain messages for anything that LangChain takes as messages.

    Raises:
        RequestError: one of them is none, for example a dict without a role.
    """
    wanted = "a list of messages, or of dicts or tuples with a role and content"
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(error_text("messages", wanted, type(given).__name__))
    try:
        return convert_to_messages(given)
    except Exception:
        # Without the cause: its text holds the message, and tracebacks are logged.
        shapes = reprlib.repr([_shape(message) for message in given])
        raise RequestError(f"messages: wanted {wanted}, got {shapes}") from None


def to_conversation(messages: Sequence[BaseMessage], names: Collection[str] = ()) -> Conversation:
    """Convert LangChain messages.

    Args:
        messages: the input of a chat model.
        names: names of the workers. A single worker has no history: its messages are answers.

    Raises:
        ContentError: a content block is not text.
        RequestError: there is no message, or one of an unknown role.
    """
    team = names if len(names) > 1 else ()
    if not messages:
        raise RequestError(error_text("messages", "at least one message", messages))
    humans = [place for place, message in enumerate(messages) if _role(message) == "user"]
    task = humans[-1] + 1 if humans else 0
    turns, history = _current(messages[task:], team, names)
    earlier = [_without_own_name(turn, names) for turn in _earlier(messages[:task], team)]
    return Conversation((*earlier, *turns), tuple(history))


def _earlier(messages: Iterable[BaseMessage], team: Collection[str]) -> Iterator[dict[str, Any]]:
    unanswered: list[str] = []
    for message in messages:
        if _is_paragraph(message, team):
            unanswered.append(_text(message))
            continue
        if unanswered and not isinstance(message, AIMessage):
            yield {"role": "assistant", "content": "\n\n".join(unanswered)}
        unanswered.clear()
        yield _turn(message)


def _current(
    messages: Iterable[BaseMessage], team: Collection[str], names: Collection[str]
) -> tuple[list[dict[str, Any]], list[Paragraph]]:
    turns: list[dict[str, Any]] = []
    # By id: with `output_mode="full_history"` a paragraph is a message and a block of the answer.
    written: dict[object, tuple[str, str]] = {}
    for message in messages:
        if _is_paragraph(message, team):
            written.setdefault(message.id or object(), (str(message.name), _text(message)))
            continue
        thoughts = _thoughts(message)
        by_team = [block for block in thoughts if _worker(block) in team]
        for block in by_team:
            text = (str(_worker(block)), _thought(block))
            written.setdefault(_id(block) or object(), text)
        turn = _without_own_name(_turn(message), names)
        if _is_from_another(turn):
            turns.append({**turn, "role": "user"})
            continue
        if others := [_thought(block) for block in thoughts if block not in by_team]:
            turn["reasoning_content"] = "".join(others)
        if turn["content"] or "tool_calls" in turn or not by_team:
            turns.append(turn)
    return turns, list(_numbered(written.values()))


def _numbered(written: Iterable[tuple[str, str]]) -> Iterator[Paragraph]:
    count: Counter[str] = Counter()
    for worker, text in written:
        count[worker] += 1
        yield Paragraph(worker, count[worker], text)


def _is_paragraph(message: BaseMessage, team: Collection[str]) -> TypeGuard[AIMessage]:
    return isinstance(message, AIMessage) and message.name in team and not message.tool_calls


def _turn(message: BaseMessage) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": _role(message), "content": _text(message)}
    if message.name:
        turn["name"] = message.name
    if isinstance(message, AIMessage) and message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": _plain(call["args"])},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    return turn


def _without_own_name(turn: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Drop a worker's name from its own answer, lest it begins its next one with it."""
    if turn["role"] == "assistant" and turn.get("name") in names:
        return {key: value for key, value in turn.items() if key != "name"}
    return turn


def _is_from_another(turn: dict[str, Any]) -> bool:
    return turn["role"] == "assistant" and "name" in turn and "tool_calls" not in turn


def _shape(message: object) -> object:
    """Return what a message is without what it says."""
    return sorted(map(str, message)) if isinstance(message, Mapping) else type(message).__name__


def _role(message: BaseMessage) -> str:
    if isinstance(message, FunctionMessage):
        return "tool"
    role_name = message.role if isinstance(message, ChatMessage) else message.type
    # Chunks are typed by their class: "AIMessageChunk".
    role = _ROLES.get(role_name.removesuffix("MessageChunk").lower())
    if role is None:
        raise RequestError(error_text("messages", f"roles of {sorted(_ROLES)}", role_name))
    return role


def _text(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        text = message.content
    else:
        # A model's blocks are pieces of one text, a user's are separate paragraphs.
        joint = "" if isinstance(message, AIMessage) else "\n"
        blocks = (block for block in message.content if not _is_handled_elsewhere(block, message))
        text = joint.join(_block_text(block, message) for block in blocks)
    if isinstance(message, AIMessage) and message.invalid_tool_calls:
        calls = ({"name": c["name"], "arguments": c["args"]} for c in message.invalid_tool_calls)
        text = "\n".join([text, *map(json.dumps, calls)]).lstrip("\n")
    return text


def _is_handled_elsewhere(block: str | dict[Any, Any], message: BaseMessage) -> bool:
    """Whether the block is reasoning, or a call that the message holds as a tool call too."""
    if isinstance(block, str) or not isinstance(message, AIMessage):
        return False
    known = {call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)}
    return _kind(block) in _REASONING or (_kind(block) in _CALLS and _id(block) in known)


def _block_text(block: str | dict[Any, Any], message: BaseMessage) -> str:
    if isinstance(block, str):
        return block
    if block.get("type") == "text" and isinstance(block.get("text"), str):
        return block["text"]
    todo = "describe it in words: the model reads only text"
    raise _unreadable(message.type, "text, or blocks of type 'text'", _kind(block) or block, todo)


def _thoughts(message: BaseMessage) -> list[dict[str, Any]]:
    if not isinstance(message, AIMessage) or isinstance(message.content, str):
        return []
    blocks = (block for block in message.content if isinstance(block, dict))
    return [block for block in blocks if _kind(block) in _REASONING]


def _thought(block: dict[str, Any]) -> str:
    text = block.get("reasoning") or block.get("thinking") or ""
    if not isinstance(text, str):
        raise _unreadable("ai", "reasoning that is text", text, "leave the block out")
    return text


def _worker(block: dict[str, Any]) -> str | None:
    extras = block.get("extras")
    worker = extras.get("worker") if isinstance(extras, dict) else None
    return worker if isinstance(worker, str) else None


def _kind(block: dict[Any, Any]) -> str | None:
    kind = block.get("type")
    return kind if isinstance(kind, str) else None


def _id(block: dict[Any, Any]) -> str | None:
    block_id = block.get("id")
    return block_id if isinstance(block_id, str) else None


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(arguments))
    except (TypeError, ValueError, RecursionError) as error:
        wanted = "tool calls whose arguments JSON can hold"
        raise RequestError(error_text("messages", wanted, arguments, str(error))) from error


def _unreadable(kind: str, wanted: str, came: object, todo: str) -> ContentError:
    return ContentError(error_text(f"content of a {kind} message", wanted, came, todo))
