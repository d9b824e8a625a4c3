"""Chat template: messages to token ids. User text is data: it never becomes a special token.

A message that says ``<|im_end|>`` must not end its turn. But tokenizers make the special token of
that text wherever they find it, in the template's own text and in a message's content. So each
added token that content spells is replaced by a random placeholder, the template is rendered, and
the placeholder's text is then encoded as plain characters::

    content    Stop at <|im_end|>!
    rendered   <|im_start|>user\\nStop at h5f…x0x!<|im_end|>\\n
    encoded    …tokens of "Stop at ", "<|im", "_end|>", "!", then the one special token

Content without added tokens is tokenized exactly as by ``apply_chat_template``.
"""

from __future__ import annotations

import json
import re
import reprlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from threading import Lock
from typing import Any

from hogwild_engine.api.checks import check_messages
from hogwild_engine.api.errors import NoChatTemplateError, RequestError, error_text
from hogwild_engine.text.constraint import GrammarCompiler
from hogwild_engine.text.messages import Message, plain_calls
from hogwild_engine.text.role_order import alternating_roles
from hogwild_engine.text.speakers import roles_with_names, with_speakers
from hogwild_engine.text.tool_format import OURS, ToolFormat, read_format, tools_as_text
from hogwild_engine.text.tool_results import order_results

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
_NONCE = secrets.token_hex(8)


class ChatTemplate:
    """Renders conversations for one tokenizer, and encodes and decodes text.

    Args:
        tokenizer: a transformers tokenizer.
        name: the model's name, for error messages.
        eos_ids: ids of end-of-turn tokens.

    Attributes:
        added_ids: ids of added tokens such as ``<|im_end|>`` or ``<tool_call>``, without tokens of
            white space. User text is never encoded to one of them.
        special_ids: ids of special tokens, which have no text for users.
    """

    def __init__(self, tokenizer: Any, name: str, eos_ids: Iterable[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._decoded: dict[int, str] = {}  # detokenizers decode the same single ids again
        # A fast tokenizer must not be reconfigured while another thread uses it.
        self._lock = Lock()
        self.eos_ids = frozenset(eos_ids)
        added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset(special.union(tokenizer.all_special_ids))
        texts = sorted((text for text in added if text.strip()), key=len, reverse=True)
        self._added_tokens = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self.added_ids = frozenset(added[text] for text in texts)

    @property
    def thinking(self) -> bool:
        """Whether the template knows a thinking section before the answer."""
        return THINK_OPEN in (self._tokenizer.chat_template or "")

    @cached_property
    def opens_thinking(self) -> bool:
        """Whether a rendered conversation ends with an open thinking section."""
        return THINK_OPEN in self._text_after_nonce([{"role": "user", "content": _NONCE}])

    @cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls; ours if the template's one has special tokens, which have no
        text.
        """
        form = read_format(self._apply_template)
        ids = self.encode(form.opening + form.between + form.closing + (form.separator or ""))
        return form if self.special_ids.isdisjoint(ids) else OURS

    @cached_property
    def _roles_with_names(self) -> frozenset[str]:
        return roles_with_names(self._apply_template)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of grammars for this tokenizer."""
        return GrammarCompiler(self._tokenizer, self.eos_ids)

    def to_lark(self, text: str) -> str:
        """Return a Lark expression of literal text.

        Example: ``<tool_call>\\n`` becomes ``<[151657]> "\\n"`` if the tag is a special token.
        """
        parts: list[str] = []
        start = 0
        for found in self._added_tokens.finditer(text):
            token = self._tokenizer.convert_tokens_to_ids(found.group())
            if self.grammars.is_special(token):
                parts += [_quoted(text[start : found.start()]), f"<[{token}]>"]
                start = found.end()
        return " ".join(part for part in (*parts, _quoted(text[start:])) if part)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, with special tokens, without clean-up."""
        if len(ids) != 1:
            return self._decode(ids)
        text = self._decoded.get(ids[0])
        if text is None:
            text = self._decoded[ids[0]] = self._decode(ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def to_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        return self.grammars.to_bytes(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of trusted text, in which added tokens are tokens."""
        try:
            with self._lock:
                return self._tokenizer.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeError) as error:  # half of a surrogate pair
            wanted = "text that UTF-8 can encode"
            raise RequestError(error_text("messages", wanted, ascii(text[:40]))) from error

    def encode_data(self, text: str) -> list[int]:
        """Return the ids of user text, in which added tokens are plain characters.

        Raises:
            RequestError: a single character of the text is an added token.
        """
        return [i for piece in self._cut_added_tokens(text) for i in self._encode_piece(piece)]

    def _cut_added_tokens(self, text: str) -> Iterator[str]:
        """Yield pieces of ``text``, cut in the middle of every added token that it spells."""
        start = 0
        while found := self._added_tokens.search(text, start):
            # Search on from the cut: its right half may start another added token.
            cut = found.start() + max(1, len(found.group()) // 2)
            yield text[start:cut]
            start = cut
        if start < len(text):
            yield text[start:]

    def _encode_piece(self, piece: str) -> list[int]:
        """Encode a piece; halve it while the tokenizer still finds an added token in it.

        It may: half of an added token can be another one, and a tokenizer's normalizer can make one
        of other characters.
        """
        ids = self.encode(piece)
        if self.added_ids.isdisjoint(ids):
            return ids
        if len(piece) == 1:
            wanted = "text that the tokenizer can spell without added tokens"
            raise RequestError(error_text("messages", wanted, piece, "leave it out"))
        middle = len(piece) // 2
        return [*self._encode_piece(piece[:middle]), *self._encode_piece(piece[middle:])]

    def render(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> list[int]:
        """Return the ids of a conversation, up to where the assistant's answer begins.

        If the last message has the role "assistant" and calls no tools, the answer continues it.
        For templates that refuse the order of roles, neighbouring messages are merged. Names of
        speakers and the order of tool results are rendered for all templates; see
        `hogwild_engine.text.speakers` and `hogwild_engine.text.tool_results`.

        Args:
            messages: dicts with ``role`` and ``content``, and ``name``, ``tool_calls`` or
                ``tool_call_id`` where they have one.
            tools: tools in OpenAI's format.

        Raises:
            NoChatTemplateError: the tokenizer has no chat template.
            RequestError: the template refuses the messages, or one of them has no role.
        """
        check_messages(messages)
        messages = [plain_calls({"content": None, **message}) for message in messages]
        continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
        messages = order_results(self.name_speakers(messages))
        if not self.tool_format.native and (tools or any(map(_uses_tools, messages))):
            messages, tools = tools_as_text(messages, tools), ()
        placeholders = _Placeholders(self._added_tokens)
        safe = [placeholders.hide(message, keep=("role", "type")) for message in messages]
        safe_tools = [placeholders.hide(tool, keep=("type",)) for tool in tools]
        ids: list[int] = []
        for text, is_data in placeholders.split(self._render_text(safe, safe_tools, continues)):
            ids += self.encode_data(text) if is_data else self.encode(text)
        return ids

    def name_speakers(self, messages: Sequence[Message]) -> list[Message]:
        """Write the names of speakers into their texts, unless the template renders them."""
        return with_speakers(messages, native=self._roles_with_names)

    def _render_text(self, messages: Sequence[Any], tools: Sequence[Any], continues: bool) -> str:
        try:
            return self._apply_template(messages, tools, continues=continues)
        except RequestError:
            for changed in alternating_roles(with_speakers(messages)):
                with suppress(RequestError):
                    return self._apply_template(changed, tools, continues=continues)
            raise

    def follow_up(self, question: str) -> str:
        """Return the text that ends the assistant's turn, asks ``question`` as the user and begins
        the next answer.
        """
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _NONCE},
            {"role": "user", "content": question},
        ]
        return self._text_after_nonce(messages)

    def _text_after_nonce(self, messages: Sequence[Message]) -> str:
        return self._apply_template(messages, ()).rpartition(_NONCE)[2]

    def _apply_template(
        self, messages: Sequence[Any], tools: Sequence[Any], *, continues: bool = False
    ) -> str:
        if not self._tokenizer.chat_template:
            wanted = "a model whose tokenizer has a chat template"
            fix = "use an instruct or chat model"
            raise NoChatTemplateError(error_text("model", wanted, self._name, fix))
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=not continues,
                continue_final_message=continues,
            )
        except Exception as error:
            roles = reprlib.repr([message["role"] for message in messages])
            wanted = f"messages that the chat template of {self._name!r} takes"
            text = f"messages: wanted {wanted}, got the roles {roles}; {self._reason(error)}"
            # Not `from error`: its text may hold the conversation, and tracebacks are logged.
            raise RequestError(text) from None

    def _reason(self, error: Exception) -> str:
        """Return what a template says of its error, without the messages that it may quote."""
        said, source = str(error), str(self._tokenizer.chat_template)
        # The template's own words are literals in its source; what follows them may be content.
        literal = next((said[:end] for end in range(len(said), 7, -1) if said[:end] in source), "")
        ending = "…" if literal and literal != said else ""
        return f"{type(error).__name__}: {literal}{ending}" if literal else type(error).__name__


def _uses_tools(message: Message) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


class _Placeholders:
    """Random words that stand for added tokens in content while a template is rendered.

    Args:
        added_tokens: matches the texts of added tokens.
    """

    def __init__(self, added_tokens: re.Pattern[str]) -> None:
        self._added_tokens = added_tokens
        self._nonce = "h" + secrets.token_hex(12)  # no user can guess it
        self._texts: list[str] = []

    def hide(self, value: Any, keep: tuple[str, ...] = ()) -> Any:
        """Replace added tokens in all strings and keys of ``value``, except values of ``keep``."""
        if isinstance(value, str):
            return self._added_tokens.sub(self._placeholder, value)
        if isinstance(value, Mapping):
            return {
                self.hide(key): item if key in keep else self.hide(item)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def _placeholder(self, found: re.Match[str]) -> str:
        self._texts.append(found.group())
        return f"{self._nonce}x{len(self._texts) - 1}x"

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """Yield the rendered text in pieces: the text, and whether it is data."""
        # re.split returns text and placeholder numbers in turn.
        for place, piece in enumerate(re.split(f"{self._nonce}x([0-9]+)x", rendered)):
            if place % 2:
                yield self._texts[int(piece)], True
            elif piece:
                yield piece, False
