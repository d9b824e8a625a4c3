"""What one run of one system measured, and how all systems sample."""

from __future__ import annotations

from dataclasses import dataclass

TEMPERATURE = 0.6
TOP_P = 0.9


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one system: the prompts of some requests, then steps in which all of them decode.

    Args:
        prompt_tokens: tokens of one request's prompt.
        prefilled: prompt tokens of all requests that went through the model.
        prefill_s: seconds from the call until every request has its first token.
        steps: steps after that, up to the first request's end.
        tokens: tokens decoded in these steps, by all workers of all requests.
        decode_s: seconds of these steps.
        forward_s: of these, seconds inside the model's forward; ``None`` if not known.
        cache_bytes: most bytes of keys and values; ``None`` if not known.
        private_cache_bytes: bytes of a private cache for each worker; ``None`` if not known.
    """

    prompt_tokens: int
    prefilled: int
    prefill_s: float
    steps: int
    tokens: int
    decode_s: float
    forward_s: float | None = None
    cache_bytes: int | None = None
    private_cache_bytes: int | None = None

    @property
    def step_ms(self) -> float:
        return 1000 * self.decode_s / self.steps

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.decode_s

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefilled / self.prefill_s

    @property
    def outside_forward(self) -> float | None:
        """Share of a step that is not the model's forward."""
        return None if self.forward_s is None else 1 - self.forward_s / self.decode_s
