"""Fixtures that several files share: the embedded model in float32, one engine for all tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from langchain_core.messages import HumanMessage

import traffic
from hogwild_agents import ChatHogwild
from hogwild_agents.langchain import engines
from hogwild_engine.api.config import EngineConfig
from hogwild_engine.api.protocol import INSTRUCT
from hogwild_engine.loading.pretrained import Pretrained
from hogwild_engine.text.chat_template import ChatTemplate
from hogwild_kernels.backends import PREFILL_BACKENDS
from recipes.sandbox import Sandbox, SandboxError
from sequences import plain
from session_harness import SessionHarness
from tiny import tiny_model

if TYPE_CHECKING:
    from hogwild_engine.engine import Engine

# Equal engine settings share one engine, so the weights are loaded once a run.
EMBEDDED = {"model": "smollm2-135m", "dtype": "float32", "num_pages": 192}

# Workers start at once, and text shows when it is written: nothing waits to see whether it repeats,
# which a model this small does a lot.
OPEN = replace(INSTRUCT, name="open", stagger=0, max_repeats=None)


@pytest.fixture(scope="session")
def embedded() -> dict[str, Any]:
    """Settings of a `ChatHogwild` on the embedded model's shared engine."""
    return dict(EMBEDDED)


@pytest.fixture(scope="session")
def team_llm(embedded: dict[str, Any]) -> ChatHogwild:
    """Two workers, greedy, on a small budget."""
    budgets = {"max_steps": 6, "max_tokens": 3, "seed": 7}
    return ChatHogwild(workers=2, temperature=0, protocol=OPEN, **budgets, **embedded)


@pytest.fixture(scope="session")
def lone_llm(embedded: dict[str, Any]) -> ChatHogwild:
    """The plain model, greedy, on a small budget."""
    return ChatHogwild(workers=1, temperature=0, max_tokens=8, seed=7, **embedded)


@pytest.fixture
def all_pages_free() -> Callable[[Engine], bool]:
    """Whether an engine gives back all its pages, within the step that it may still be in."""

    def check(engine: Engine) -> bool:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            stats = engine.stats()
            idle = stats.sessions == stats.waiting == 0
            if idle and stats.free_pages == stats.num_pages:
                return True
            time.sleep(0.01)
        return False

    return check


@pytest.fixture(scope="session")
def smollm(lone_llm: ChatHogwild) -> Engine:
    """The engine of the embedded model in float32, shared with the adapters' tests."""
    return lone_llm.engine


@pytest.fixture(scope="session")
def smollm_model() -> Any:
    """The embedded model in float32 as transformers gives it; the engine took its own one apart."""
    from hogwild_engine.loading.pretrained import load_pretrained

    return load_pretrained(EngineConfig(dtype="float32")).model


@pytest.fixture(scope="session")
def tokenizer(smollm: Engine) -> Any:
    """The embedded model's tokenizer, which serves tiny models too."""
    return smollm.tokenizer


@pytest.fixture(scope="session")
def chat(tokenizer: Any) -> ChatTemplate:
    """The embedded model's chat format."""
    return ChatTemplate(tokenizer, "smollm2-135m", [tokenizer.eos_token_id])


@pytest.fixture(scope="session")
def tiny_engine(tokenizer: Any) -> Iterator[Callable[..., Engine]]:
    """Makes an engine on a tiny random model, one a family, with steps of few tokens.

    A talkative one ends sentences, paragraphs and turns by itself, after a handful of tokens.
    """
    from hogwild_engine.engine import Engine

    engines: dict[tuple[str, bool], Engine] = {}
    ends = {".": 2.5, "\n\n": 3.0, "<|im_end|>": 2.0}
    loud = {tokenizer.encode(text)[0]: factor for text, factor in ends.items()}

    def make(family: str = "llama", *, talkative: bool = False) -> Engine:
        if (family, talkative) not in engines:
            config = EngineConfig(
                model=f"tiny-{family}", num_pages=256, page_size=8, max_num_batched_tokens=40
            )
            model = tiny_model(family, loud=loud if talkative else None)
            engines[family, talkative] = Engine(config, loaded=Pretrained(model, tokenizer))
        return engines[family, talkative]

    yield make
    for engine in engines.values():
        engine.close()


@pytest.fixture(scope="session")
def tiny_llm(tiny_engine: Callable[..., Engine]) -> ChatHogwild:
    """One worker on a tiny random model that ends its answers by itself: fast, without ability."""
    settings: dict[str, Any] = {"model": "smollm2-135m", "dtype": "float32", "num_pages": 251}
    llm = ChatHogwild(workers=1, temperature=1.0, seed=1, max_tokens=96, max_steps=8, **settings)
    config = llm.make_call([HumanMessage("x")]).config
    engines.REGISTRY.put(config, tiny_engine("llama", talkative=True))
    return llm


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    sandbox = Sandbox(wall_s=8, cpu_s=5)
    try:
        assert isinstance(sandbox.hides_files, bool)
    except SandboxError as error:
        pytest.skip(str(error))
    return sandbox


@pytest.fixture(scope="module")
def shared_sessions(chat: ChatTemplate) -> SessionHarness:
    return SessionHarness(chat)


@pytest.fixture
def sessions(shared_sessions: SessionHarness) -> Iterator[SessionHarness]:
    yield shared_sessions
    shared_sessions.clear()


@pytest.fixture
def sequence_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Both prefill backends run here, by `sequences.plain`; query tokens and keys of every call."""
    calls: list[tuple[int, int]] = []

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((q.shape[0], k.shape[0]))
        return plain(q, k, v, **options)

    for backend in PREFILL_BACKENDS.values():
        monkeypatch.setattr(backend, "supports", lambda _: None)
        monkeypatch.setattr(backend, "attend", attend)
    return calls


@pytest.fixture
def tidy_engine(tiny_engine: Callable[..., Engine]) -> Iterator[Engine]:
    """A tiny engine that ends paragraphs and turns; every test must leave its pages free."""
    engine = tiny_engine("llama", talkative=True)
    yield engine
    traffic.wait_until(lambda: traffic.pages_held(engine) == 0)
    assert engine.stats().sessions == engine.stats().waiting == 0
