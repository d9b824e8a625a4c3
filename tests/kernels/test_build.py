"""The C code is compiled on first use, kept, and done without where that fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hogwild_kernels.cpu import build, c_backend

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

PROGRAM = """
import torch
from hogwild_kernels.cpu import c_backend
print(c_backend.build_error())
"""


@pytest.fixture
def hasty(tmp_path: Path) -> str:
    """A compiler that does not optimise."""
    script = tmp_path / "hasty"
    script.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    script.chmod(0o755)
    return str(script)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


def build_error_in_a_new_process(cache: Path, **environment: str) -> tuple[str, str]:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "HOGWILD_CACHE": str(cache), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip(), run.stderr


@needs_compiler
def test_where_there_is_a_compiler_there_is_the_compiled_code() -> None:
    """Everything would run without it, and most tests of it would be left out."""
    assert c_backend.build_error() is None


@needs_compiler
def test_it_is_built_once_and_kept(cache: Path, hasty: str) -> None:
    assert build_error_in_a_new_process(cache, CC=hasty)[0] == "None"
    built = {file: file.stat().st_mtime_ns for file in (cache / "native").iterdir()}
    assert sorted(file.name.split("-")[0] for file in built) == ["bf16", "f32"]
    assert build_error_in_a_new_process(cache, CC=hasty)[0] == "None"
    assert {file: file.stat().st_mtime_ns for file in (cache / "native").iterdir()} == built


@needs_compiler
def test_a_compiler_may_come_with_arguments(cache: Path, hasty: str) -> None:
    assert build_error_in_a_new_process(cache, CC=f"{hasty} -DUNUSED")[0] == "None"
    assert len(list((cache / "native").iterdir())) == 2


def test_a_compiler_that_fails_is_named_once_and_nothing_is_kept(cache: Path) -> None:
    error, log = build_error_in_a_new_process(cache, CC="false")
    assert "false cannot build the native kernels" in error
    assert log.count("attention on the CPU runs on plain torch operators") == 1
    assert list((cache / "native").iterdir()) == []


@needs_compiler
def test_a_folder_that_cannot_be_written_is_no_obstacle(cache: Path, hasty: str) -> None:
    (cache / "native").write_text("not a folder")
    assert build_error_in_a_new_process(cache, CC=hasty)[0] == "None"


@needs_compiler
def test_without_a_home_it_is_built_elsewhere(
    cache: Path, hasty: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(build, "_folder", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(cache))
    built = build._cached([hasty], "bf16", "x.so")
    assert built.parent.parent == cache
    assert built.is_file()


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(c_backend.BuildError, match="install gcc or clang"):
        build.libraries.__wrapped__()
