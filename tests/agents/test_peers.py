"""The recipe that measures against other systems: what it compares, and with which figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hogwild_agents.bench.measurement import Measured
from hogwild_agents.bench.prompts import Prompts
from hogwild_agents.bench.systems import OURS, BenchConfig, Loaded, Reading, SystemName
from hogwild_engine.engine import Engine
from recipes import bench_peers, peer_llama, peer_openvino
from recipes.bench_peers import FILE, LLAMA, OPENVINO, main

SECONDS = {OURS: 1.0, OPENVINO: 2.0, LLAMA: 4.0}


def reading(system: str, count: int, repeat: int) -> Reading:
    slow = (1.0, 5.0, 1.0)[repeat]
    run = Measured(512, 512, 1.0, steps=10, tokens=10 * count, decode_s=slow * SECONDS[system])
    name = SystemName(system, "bfloat16" if system == OURS else FILE, count)
    return Reading(512, 1, repeat, name, run)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a test say which systems are there; nothing is loaded and nothing runs."""

    def these(*systems: str) -> None:
        @contextmanager
        def loaded(*_: object) -> Iterator[Loaded]:
            yield Loaded({}, cast(Any, None), {"threads": 2})

        def rounds(config: BenchConfig, *_: object) -> Iterator[Reading]:
            for repeat in range(config.repeats):
                for count in config.workers:
                    yield from (reading(system, count, repeat) for system in systems)

        monkeypatch.setattr(bench_peers, "loaded", loaded)
        monkeypatch.setattr(bench_peers, "rounds", rounds)

    return these


def test_each_n_is_compared_with_peers_of_the_same_n_in_the_same_turn(
    measured: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(OURS, OPENVINO, LLAMA)
    file = tmp_path / "peers.json"
    assert main(["--sequences", "4", "1", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    ours = [row for row in report["figures"] if row["system"] == OURS]
    assert [row["workers"] for row in ours] == [1, 4]
    assert [row["over"] for row in ours] == [{OPENVINO: 2.0, LLAMA: 4.0}] * 2
    assert len(report["readings"]) == 3 * 2 * 3
    out = capsys.readouterr().out
    assert out.count("2.00×") == out.count("4.00×") == 2


def test_a_peer_that_is_not_there_has_no_ratio(
    measured: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured(OURS, OPENVINO)
    file = tmp_path / "peers.json"
    assert main(["--sequences", "2", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["figures"][0]["over"] == {OPENVINO: 2.0, LLAMA: None}
    assert "4.00×" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--model", "some/model"], ".gguf"),
        (["--model", "none.gguf"], "none.gguf"),
        (["--sequences", "0"], "workers"),
        (["--dtypes", "int7"], "dtype"),
        (["--json", "no/such/folder/file.json"], "no/such/folder"),
    ],
)
def test_bad_usage_is_said_in_one_line(
    args: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(args)
    assert named in capsys.readouterr().err.splitlines()[-1]


class FakeLlama:
    """Stands in for llama-cpp-python: notes which sequences hold which positions."""

    def __init__(self) -> None:
        self.held: dict[int, list[tuple[int, int]]] = {}
        self.rows: list[int] = []
        self.drawn = 100

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_: SimpleNamespace()

    def llama_batch_init(self, rows: int, *_: int) -> SimpleNamespace:
        lists = {name: [0] * rows for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(n_tokens=0, seq_id=[[0] for _ in range(rows)], **lists)

    def llama_memory_clear(self, *_: object) -> None:
        self.held = {}

    def llama_memory_seq_cp(self, _: object, source: int, target: int, *__: int) -> None:
        self.held[target] = list(self.held[source])

    def llama_decode(self, _: object, batch: SimpleNamespace) -> int:
        self.rows = [row for row in range(batch.n_tokens) if batch.logits[row]]
        for row in range(batch.n_tokens):
            held = self.held.setdefault(batch.seq_id[row][0], [])
            held.append((batch.pos[row], batch.token[row]))
        return 0

    def llama_sampler_sample(self, _: object, __: object, row: int) -> int:
        assert row in self.rows
        self.drawn += 1
        return self.drawn


def test_llama_gives_every_sequence_the_prompt_and_its_own_tokens_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, prompt = FakeLlama(), list(range(1, 700))
    monkeypatch.setitem(sys.modules, "llama_cpp", cast(Any, fake))
    system = peer_llama.LlamaSystem(None, lambda _: prompt, sequences=3, context=800, threads=1)
    for seed in (1, 2):  # the second run starts anew
        run = system.measure(["task"], 4, seed)
        assert (run.prompt_tokens, run.steps, run.tokens) == (699, 4, 12)
        assert fake.held.keys() == {0, 1, 2}
        written = [[token for _, token in held[699:]] for held in fake.held.values()]
        for held in fake.held.values():
            assert [position for position, _ in held] == list(range(699 + 5))
            assert [token for _, token in held[:699]] == prompt
        assert len({token for tokens in written for token in tokens}) == 3 * 5


@pytest.mark.slow
def test_openvino_decodes_as_many_sequences_from_our_tokens_as_it_is_asked_for(
    smollm: Engine,
) -> None:
    pytest.importorskip("openvino_genai")

    def render(task: str) -> list[int]:
        return smollm.chat.render([{"role": "user", "content": task}])

    pipeline = peer_openvino.load_pipeline(bench_peers.gguf_of("smollm2-135m"), threads=1)
    (task,) = Prompts(smollm).tasks(96, 1, 1)
    for count in (1, 3):
        run = peer_openvino.OpenVinoSystem(pipeline, render, count).measure([task], 5, 1)
        assert (run.steps, run.tokens) == (5, 5 * count)
        assert run.prompt_tokens == run.prefilled == len(render(task))
