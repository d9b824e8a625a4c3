"""Agents that hand over to each other: every answer is an answer, not the rest of another's."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.graph import START, MessagesState, StateGraph

from hogwild_agents import ChatHogwild, HogwildNode

TASK = HumanMessage("What is 2+2?")
THERE = {"name": "transfer_to_math", "args": {}, "id": "1"}
BACK = {"name": "transfer_back_to_supervisor", "args": {}, "id": "2"}
HANDED_OVER = [
    AIMessage("", tool_calls=[THERE], name="supervisor"),
    ToolMessage("Successfully transferred to math", tool_call_id="1", name=THERE["name"]),
]
HANDED_BACK = [
    AIMessage("Transferring back", tool_calls=[BACK], name="math"),
    ToolMessage("Successfully transferred back", tool_call_id="2", name=BACK["name"]),
]
ANSWER = AIMessage("2+2 is 4.", name="math")


def transfer_to_math() -> str:
    """Ask the mathematician."""
    return "Successfully transferred to math"


@pytest.mark.parametrize(
    "history", [[*HANDED_OVER, ANSWER], [*HANDED_OVER, ANSWER, *HANDED_BACK]], ids=["text", "call"]
)
async def test_a_supervisor_answers_after_a_hand_off(
    lone_llm: ChatHogwild, team_llm: ChatHogwild, history: list[Any]
) -> None:
    messages = [TASK, *history]
    for llm in (lone_llm, team_llm):
        answers = [
            llm.invoke(messages).text,
            "".join(chunk.text for chunk in llm.stream(messages)),
            (await llm.ainvoke(messages)).text,
            HogwildNode(llm).invoke({"messages": messages})["messages"][0].text,
        ]
        assert all(answer.strip() for answer in answers)
    bound = lone_llm.bind_tools([transfer_to_math]).invoke(messages)
    assert bound.text.strip() or bound.tool_calls


def test_a_graph_of_a_supervisor_and_an_expert_ends_with_an_answer(lone_llm: ChatHogwild) -> None:
    def ask_expert(state: MessagesState) -> dict[str, Any]:
        return {"messages": [*HANDED_OVER, ANSWER]}

    graph = StateGraph(MessagesState)
    graph.add_node("expert", ask_expert)
    graph.add_node("supervisor", create_agent(lone_llm, [transfer_to_math], name="supervisor"))
    graph.add_edge(START, "expert")
    graph.add_edge("expert", "supervisor")
    last = graph.compile().invoke({"messages": [TASK]}, {"recursion_limit": 9})["messages"][-1]
    assert last.name == "supervisor"
    assert last.text.strip()
