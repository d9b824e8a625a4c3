"""Messages to token ids through the model's own chat template. Message content is data: it never
becomes structure.

Content without added tokens is tokenised exactly as ``apply_chat_template`` does. Where content
spells an added token (``<|im_end|>``, ``<tool_call>``, …), the spelling is replaced by a random
mark before the template sees it, and the mark is encoded as plain text afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Any

from hogwild_engine.api.errors import NoChatTemplateError, RequestError, complaint
from hogwild_engine.text.constraint import GrammarCompiler
from hogwild_engine.text.role_order import stricter
from hogwild_engine.text.tool_format import OURS, ToolFormat, adapt, read_format

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class ChatTemplate:
    """Renders conversations for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
        name: the model's name, for messages to the user.
        ends: ids that end a turn.

    Attributes:
        structural: ids of added tokens, white space excepted; data never yields one.
        hidden: ids of special tokens, which never show in text.
    """

    def __init__(self, tokenizer: Any, name: str, ends: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._texts: dict[
            int, str
        ] = {}  # of single ids, which a detokenizer asks for again and again
        self._lock = (
            Lock()
        )  # a fast tokenizer must not be reconfigured while another thread uses it
        self.ends = frozenset(ends)
        self.hidden = frozenset(
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        ) | frozenset(tokenizer.all_special_ids)
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        spelled = sorted((text for text in added if text.strip()), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        self.structural = frozenset(added[text] for text in spelled)

    @property
    def thinking(self) -> bool:
        """Whether the template opens a section of thoughts before the answer."""
        return THINK_OPEN in (self._tokenizer.chat_template or "")

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether the template itself opens the thoughts where the answer begins."""
        mark = secrets.token_hex(8)
        rendered = self._template([{"role": "user", "content": mark}], ())
        return THINK_OPEN in rendered.rpartition(mark)[2]

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How tool calls are written; ours where the template's form does not show in text."""
        form = read_format(self._template)
        ids = self.encode(form.opening + form.between + form.closing + (form.joint or ""))
        return form if self.hidden.isdisjoint(ids) else OURS

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles grammars for the tokenizer."""
        return GrammarCompiler(self._tokenizer, self.ends)

    def spell(self, text: str) -> str:
        """Text of our own as an expression of Lark: added tokens by id, the rest quoted."""
        parts: list[str] = []
        start = 0
        for found in self._spelled.finditer(text):
            token = self._tokenizer.convert_tokens_to_ids(found.group())
            if self.grammars.is_special(token):
                parts += [_quoted(text[start : found.start()]), f"<[{token}]>"]
                start = found.end()
        return " ".join(part for part in (*parts, _quoted(text[start:])) if part)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, nothing cleaned up."""
        if len(ids) != 1:
            return self._decode(ids)
        text = self._texts.get(ids[0])
        if text is None:
            text = self._texts[ids[0]] = self._decode(ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def encode(self, text: str) -> list[int]:
        """Ids of text of our own; added tokens in it are structure."""
        try:
            with self._lock:
                return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair
            wanted = "text that UTF-8 can encode"
            raise RequestError(complaint("messages", wanted, ascii(text[:40]))) from error

    def encode_data(self, text: str) -> list[int]:
        """Ids of anybody's text; no id of an added token is among them."""
        ids: list[int] = []
        for piece in self._harmless(text):
            ids += self._encode_piece(piece)
        return ids

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Ids of a conversation that the assistant is to answer.

        A last message of role "assistant" is a prefix that the answer continues. A template that
        wants turns in alternation, or no system message, gets neighbours merged.

        Raises:
            NoChatTemplateError: the tokenizer has none.
            RequestError: the template refuses the messages.
        """
        if not self.tool_format.native and (tools or any(map(_uses_tools, messages))):
            messages, tools = adapt(messages, tools), ()
        marks = _Marks(self._spelled)
        safe = [marks.replace_in(message, keep=("role", "type")) for message in messages]
        safe_tools = [marks.replace_in(tool, keep=("type",)) for tool in tools]
        ids: list[int] = []
        for text, is_data in marks.split(self._render(safe, safe_tools)):
            ids += self.encode_data(text) if is_data else self.encode(text)
        return ids

    def _render(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        """The template's text; where it refuses the turns as they are, of turns merged."""
        try:
            return self._template(messages, tools)
        except RequestError:
            for turns in stricter(messages):
                with suppress(RequestError):
                    return self._template(turns, tools)
            raise

    def closing(self, question: str) -> str:
        """The text that closes an answer of the assistant, asks ``question`` as the user, and opens
        the next answer.
        """
        mark = secrets.token_hex(8)
        turns = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": mark},
            {"role": "user", "content": question},
        ]
        return self._template(turns, ()).rpartition(mark)[2]

    def _template(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        if not self._tokenizer.chat_template:
            wanted = "a model whose tokenizer has a chat template"
            todo = "use an instruct or chat model"
            raise NoChatTemplateError(complaint("model", wanted, self._name, todo))
        continues = messages[-1]["role"] == "assistant"
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
            )
        except Exception as error:
            roles = [message["role"] for message in messages]
            wanted = f"messages that the chat template of {self._name!r} takes"
            raise RequestError(complaint("messages", wanted, roles, str(error))) from error

    def _harmless(self, text: str) -> list[str]:
        """Cut ``text`` until no piece spells an added token."""
        pieces: list[str] = []
        start = 0
        while found := self._spelled.search(text, start):
            if found.end() - found.start() == 1:
                wanted = "text that the tokenizer can spell without added tokens"
                raise RequestError(complaint("messages", wanted, found.group(), "leave it out"))
            middle = (found.start() + found.end()) // 2
            pieces.append(text[start:middle])
            start = middle
        return [piece for piece in (*pieces, text[start:]) if piece]

    def _encode_piece(self, piece: str) -> list[int]:
        ids = self.encode(piece)
        if self.structural.isdisjoint(ids):
            return ids
        if len(piece) == 1:
            wanted = "text that the tokenizer can spell without added tokens"
            raise RequestError(complaint("messages", wanted, piece, "leave it out"))
        middle = len(piece) // 2
        return [*self._encode_piece(piece[:middle]), *self._encode_piece(piece[middle:])]


def _uses_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


class _Marks:
    """Random marks that stand for spellings of added tokens while a template is rendered."""

    def __init__(self, spelled: re.Pattern[str]) -> None:
        self._spelled = spelled
        self._nonce = "h" + secrets.token_hex(12)
        self._texts: list[str] = []

    def replace_in(self, value: Any, keep: tuple[str, ...] = ()) -> Any:
        if isinstance(value, str):
            return self._spelled.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {
                self.replace_in(key): item if key in keep else self.replace_in(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.replace_in(item) for item in value]
        return value

    def _mark(self, found: re.Match[str]) -> str:
        self._texts.append(found.group())
        return f"{self._nonce}x{len(self._texts) - 1}x"

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The rendered text in pieces: (text, whether it is data)."""
        pieces = re.split(f"{self._nonce}x([0-9]+)x", text)
        return [
            (self._texts[int(piece)] if place % 2 else piece, bool(place % 2))
            for place, piece in enumerate(pieces)
            if piece
        ]
