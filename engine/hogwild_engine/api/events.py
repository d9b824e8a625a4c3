"""What a session tells its reader, as it happens. Plain data: no tensors, nothing of the engine.

Every event has ``type``, the word that `as_dict` and the command line print. Events of one session
come in order; `Finished` or `Failed` is the last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

FinishReason = Literal["stop", "length", "tool_calls"]
WorkerEnd = Literal["end_of_turn", "stop", "repeats", "length"]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One piece of the history.

    Args:
        worker: name of the worker that wrote it.
        number: counts that worker's paragraphs from 1.
        text: without its header.
        complete: the worker ended it; ``False`` where the parallel phase was cut.
        step: the step in which it ended; 0 for paragraphs that came with the request.
    """

    worker: str
    number: int
    text: str
    complete: bool = True
    step: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an answer asks for.

    Args:
        name: the tool's; empty where the answer was cut before it.
        arguments: a JSON object as text, valid under the tool's schema where ``complete``.
        complete: ``False`` where a budget cut it.
    """

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A token of the answer: its text alone, and the natural logarithm of its probability at
    temperature 1 among the tokens that a grammar allowed.
    """

    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Usage:
    """What a session cost.

    Args:
        prompt_tokens: tokens of the rendered prompt, history of the request included.
        cached_tokens: of these, how many came from a cache.
        worker_tokens: tokens sampled by each worker.
        answer_tokens: tokens sampled for the final answer.
        thought_tokens: of these, how many a single worker spent on thoughts.
        forced_tokens: tokens that the protocol wrote: headers, prefixes, interventions, final
            prompt.
        steps: sequential steps of the parallel phase.
        forward_steps: forward steps that served the session, prefill and answer included.
        duration_s: seconds from the first pass to the end.
        stored_tokens: tokens whose keys and values the session held at the end of the parallel
            phase.
        private_tokens: what a cache of its own for each worker would have held for the same views.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    worker_tokens: dict[str, int] = field(default_factory=dict)
    answer_tokens: int = 0
    thought_tokens: int = 0
    forced_tokens: int = 0
    steps: int = 0
    forward_steps: int = 0
    duration_s: float = 0.0
    stored_tokens: int = 0
    private_tokens: int = 0

    @property
    def output_tokens(self) -> int:
        return sum(self.worker_tokens.values()) + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    type: ClassVar[str] = ""

    def as_dict(self) -> dict[str, Any]:
        """The event as plain data that ``json.dumps`` takes."""
        return {"type": self.type, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Step(Event):
    """One forward pass of the parallel phase is over.

    Args:
        step: counts from 1.
        active: names of the workers that wrote a token in it.
    """

    type: ClassVar[str] = "step"
    step: int
    active: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Token(Event):
    """A worker's text grew. A token whose text is held back (half a character, a possible stop
    string) sends none.
    """

    type: ClassVar[str] = "token"
    step: int
    worker: str
    paragraph: int
    text: str


@dataclass(frozen=True, slots=True)
class ParagraphFinished(Event):
    """A paragraph moved to the history, at place ``index`` (from 0)."""

    type: ClassVar[str] = "paragraph"
    step: int
    index: int
    paragraph: Paragraph


@dataclass(frozen=True, slots=True)
class Intervention(Event):
    """The protocol put ``text`` in the worker's mouth; the worker's next `Token` shows it too."""

    type: ClassVar[str] = "intervention"
    step: int
    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkerFinished(Event):
    """A worker writes no more in this session."""

    type: ClassVar[str] = "worker_finished"
    step: int
    worker: str
    reason: WorkerEnd


@dataclass(frozen=True, slots=True)
class AnswerToken(Event):
    """The final answer grew.

    Args:
        text: the new text.
        index: answer tokens drawn so far.
    """

    type: ClassVar[str] = "answer_token"
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ThoughtToken(Event):
    """The thoughts of a single worker grew: what a thinking model writes before its answer."""

    type: ClassVar[str] = "thought_token"
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class CallToken(Event):
    """A tool call of the answer began or grew.

    Args:
        call: its place among the answer's calls, from 0.
        name: the tool's, in the call's first event; ``None`` later.
        text: more of its arguments.
        index: answer tokens drawn so far.
    """

    type: ClassVar[str] = "call_token"
    call: int
    name: str | None
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The session is over.

    Args:
        text: the final answer, equal to its `AnswerToken` texts joined.
        finish_reason: "stop" where the model or a stop rule ended it, "tool_calls" where it ended
            with calls, "length" where a budget, the context or the page pool ended it.
        paragraphs: the history, in order, paragraphs of the request left out.
        usage: what it cost.
        seed: the seed that the session sampled with.
        ends: why each worker of a team stopped, by name.
        thought: what a single worker thought before its answer.
        calls: tool calls that the answer asks for; the last one may be cut.
        logprobs: the answer's tokens, where the request asked for them.
    """

    type: ClassVar[str] = "answer"
    text: str
    finish_reason: FinishReason
    paragraphs: tuple[Paragraph, ...]
    usage: Usage
    seed: int
    ends: dict[str, WorkerEnd] = field(default_factory=dict)
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenProbability, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The session ended with an error."""

    type: ClassVar[str] = "failed"
    error: Exception

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "error": type(self.error).__name__,
            "message": str(self.error),
        }
