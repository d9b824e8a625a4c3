"""Events that a session streams, and the data in them. Plain data: no tensors.

Every event has a ``type``, which `Event.as_dict` and the command line print. The events of one
session come in order; the last one is `Finished` or `Failed`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

FinishReason = Literal["stop", "length", "tool_calls"]
WorkerEnd = Literal["end_of_turn", "stop", "repeats", "length"]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A paragraph of the history.

    Args:
        worker: name of the worker that wrote it.
        number: counts that worker's paragraphs from 1.
        text: the text without its header.
        complete: ``False`` if the parallel phase ended before the worker ended the paragraph, or
            if it does not fit its grammar: a stop string cut it, or its schema has a keyword that
            only finished text can be checked for.
        step: the step in which it ended; 0 for paragraphs of the request's history.
    """

    worker: str
    number: int
    text: str
    complete: bool = True
    step: int = 0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the answer.

    Args:
        name: the tool's name; empty if the answer was cut before it.
        arguments: a JSON object as text; without an ``error``, it fits the tool's schema.
        complete: ``False`` if the answer's maximum length or a stop string cut it.
        error: why the call is not valid; empty if it is.
    """

    name: str
    arguments: str
    complete: bool = True
    error: str = ""


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A token of the answer with its log probability.

    Args:
        text: the decoded token, with a replacement character for bytes that are no character.
        utf8: the token's bytes, 0 to 255. A character may take several tokens: their bytes, joined,
            are its UTF-8.
        logprob: natural logarithm of its probability at temperature 1, among the tokens that a
            grammar allowed.
    """

    text: str
    utf8: tuple[int, ...]
    logprob: float


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, steps and time that a session took.

    Args:
        prompt_tokens: tokens of the rendered prompt, including the request's history.
        cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        worker_tokens: tokens sampled by each worker, by name.
        answer_tokens: tokens sampled for the final answer.
        thought_tokens: answer tokens that a single worker spent on thinking.
        forced_tokens: tokens that the protocol wrote: headers, prefixes, interventions and the
            final-answer prompt.
        steps: steps of the parallel phase.
        forward_steps: forward steps in which the session took part, including prefill and answer.
        duration_s: seconds from the first forward step to the end.
        stored_tokens: tokens in the session's KV cache at the end of the parallel phase.
        private_tokens: tokens that separate KV caches would hold instead, one for each worker's
            view.
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
        """All sampled tokens."""
        return sum(self.worker_tokens.values()) + self.answer_tokens


@dataclass(frozen=True, slots=True)
class Event:
    """Base class of all events."""

    type: ClassVar[str] = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the event as plain data that ``json.dumps`` takes."""
        return {"type": self.type, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Step(Event):
    """A step of the parallel phase is over.

    Args:
        step: counts from 1.
        active: names of the workers that sampled a token in it.
    """

    type: ClassVar[str] = "step"
    step: int
    active: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Token(Event):
    """A worker's text grew. Not every sampled token sends an event: half a character, or a text
    that may become a stop string, waits for the next token.
    """

    type: ClassVar[str] = "token"
    step: int
    worker: str
    paragraph: int
    text: str


@dataclass(frozen=True, slots=True)
class DraftToken(Event):
    """A worker's paragraph grew by text that may still be rewound.

    Such texts add up until a `Token` brings what stands of them, or `DraftDropped` says that they
    were rewound.
    """

    type: ClassVar[str] = "draft"
    step: int
    worker: str
    paragraph: int
    text: str


@dataclass(frozen=True, slots=True)
class DraftDropped(Event):
    """Text of a paragraph was rewound: it repeats other text, or says nothing.

    Args:
        text: what came as `DraftToken` since the last `Token`; what stands of it comes again.
    """

    type: ClassVar[str] = "draft_dropped"
    step: int
    worker: str
    paragraph: int
    text: str


@dataclass(frozen=True, slots=True)
class ParagraphFinished(Event):
    """A paragraph was added to the history at ``index`` (from 0)."""

    type: ClassVar[str] = "paragraph"
    step: int
    index: int
    paragraph: Paragraph


@dataclass(frozen=True, slots=True)
class Intervention(Event):
    """The protocol started a worker's paragraph with ``text``; its next `Token` includes it."""

    type: ClassVar[str] = "intervention"
    step: int
    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class WorkerFinished(Event):
    """A worker stopped for the rest of the session."""

    type: ClassVar[str] = "worker_finished"
    step: int
    worker: str
    reason: WorkerEnd


@dataclass(frozen=True, slots=True)
class AnswerToken(Event):
    """The final answer grew.

    Args:
        text: the new text.
        index: number of answer tokens sampled so far.
    """

    type: ClassVar[str] = "answer_token"
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class ThoughtToken(Event):
    """The thinking section of a single worker's answer grew."""

    type: ClassVar[str] = "thought_token"
    text: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class CallToken(Event):
    """A tool call of the answer began or grew.

    Args:
        call: index of the call in the answer, from 0.
        name: the tool's name in the call's first event, then ``None``.
        text: new text of its arguments.
        index: number of answer tokens sampled so far.
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
        text: the final answer: the texts of all `AnswerToken` events, joined.
        finish_reason: "stop": the model or a stop string ended the answer. "tool_calls": it ends
            with tool calls. "length": ``max_tokens``, the context or the KV cache ended it.
        paragraphs: the paragraphs that the team wrote, in order, without the request's history.
        usage: tokens, steps and time.
        seed: the seed of the session's sampling.
        sampling: its other settings, by name.
        ends: why each worker of a team stopped, by name.
        end_steps: the step in which it stopped, by name.
        thought: the thinking section of a single worker.
        calls: the answer's tool calls; the last one may be cut.
        logprobs: the answer's tokens, if the request asked for log probabilities.
        error: why a constrained answer does not fit its grammar: a stop string or the model's end
            of turn cut it, or a check of the finished text failed. Empty if it fits, and if the
            finish reason is "length".
    """

    type: ClassVar[str] = "answer"
    text: str
    finish_reason: FinishReason
    paragraphs: tuple[Paragraph, ...]
    usage: Usage
    seed: int
    ends: dict[str, WorkerEnd] = field(default_factory=dict)
    end_steps: dict[str, int] = field(default_factory=dict)
    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenProbability, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)
    error: str = ""


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
