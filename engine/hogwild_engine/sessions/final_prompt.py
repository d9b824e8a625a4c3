"""What is put before a team's final answer, and the grammar that an answer is held to."""

from __future__ import annotations

from hogwild_engine.api.protocol import Protocol
from hogwild_engine.api.request import Request
from hogwild_engine.text.call_grammar import call_grammar
from hogwild_engine.text.chat_template import THINK_CLOSE, ChatTemplate
from hogwild_engine.text.constraint import Constraint

_QUESTION_BEFORE_TOOLS = (
    "Now call a tool for what my request asks, and rely on no guess written above; where no tool "
    "fits, write the complete final answer."
)
_QUESTION_AFTER_TOOLS = (
    "Now tell me the answer to my request in one or more plain sentences, using what the tools "
    "have given. Call a tool only for what is still missing."
)


def final_prompt_text(protocol: Protocol, chat: ChatTemplate, request: Request) -> str:
    """Return the final-answer prompt.

    A protocol's own words cannot start an answer that is constrained: the grammar holds all of it.
    """
    if protocol.final_prompt != "close" and not request.constrains_answer:
        return protocol.final_prompt
    if chat.thinking:
        return f"{THINK_CLOSE}\n\n"
    if not request.may_call:
        return chat.follow_up(protocol.final_question)
    has_results = request.messages[-1]["role"] == "tool"
    return chat.follow_up(_QUESTION_AFTER_TOOLS if has_results else _QUESTION_BEFORE_TOOLS)


def answer_constraint(request: Request, chat: ChatTemplate) -> Constraint | None:
    """Return the constraint that the request's grammar or tools put on its answer.

    Raises:
        RequestError: no answer can fit it, or llguidance refuses it.
    """
    grammar = request.grammar
    if request.tools:
        grammar = call_grammar(
            request.tools,
            request.tool_choice,
            chat.tool_format,
            chat.to_lark,
            parallel=request.parallel_tool_calls,
            answer=grammar,
        )
    return chat.grammars.compile(grammar) if grammar else None
