"""The recipe that measures against other systems: what it compares, and with which figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from hogwild_agents.bench import OURS, ArmName, BenchConfig, Loaded, Reading
from hogwild_agents.bench_prompts import Prompts
from hogwild_engine.engine import Engine
from hogwild_engine.measured import Measured
from recipes import bench_peers, peer_openvino
from recipes.bench_peers import FILE, LLAMA, OPENVINO, main

SECONDS = {OURS: 1.0, OPENVINO: 2.0, LLAMA: 4.0}


def reading(system: str, count: int, repeat: int) -> Reading:
    slow = (1.0, 5.0, 1.0)[repeat]
    run = Measured(512, 512, 1.0, steps=10, tokens=10 * count, decode_s=slow * SECONDS[system])
    name = ArmName(system, "bfloat16" if system == OURS else FILE, count)
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
        run = peer_openvino.OpenVinoArm(pipeline, render, count).measure([task], 5, 1)
        assert (run.steps, run.tokens) == (5, 5 * count)
        assert run.prompt_tokens == run.prefilled == len(render(task))
