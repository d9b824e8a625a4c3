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


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that does not optimise."""
    script = tmp_path_factory.mktemp("compiler") / "hasty"
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
    def homeless(name: str) -> Path:
        raise FileNotFoundError("Could not determine home directory.")

    monkeypatch.setattr(build, "cache_folder", homeless)
    monkeypatch.setattr("tempfile.tempdir", str(cache))
    build._temporary_folder.cache_clear()
    built = build._cached([hasty], "bf16", "x")
    build._temporary_folder.cache_clear()
    assert built.parent.parent == cache
    assert built.is_file()


@pytest.fixture(scope="module")
def once_built(tmp_path_factory: pytest.TempPathFactory, hasty: str) -> Path:
    folder = tmp_path_factory.mktemp("built")
    assert build_error_in_a_new_process(folder, CC=hasty)[0] == "None"
    return folder


@pytest.fixture
def built(once_built: Path, cache: Path) -> Path:
    """A cache with the libraries that `hasty` compiled."""
    shutil.copytree(once_built, cache, dirs_exist_ok=True)
    return cache


def damaged(library: Path, kind: str) -> None:
    content = bytearray(library.read_bytes())
    if kind == "empty":
        content.clear()
    elif kind == "cut":
        del content[len(content) // 2 :]
    elif kind == "changed":
        content[len(content) // 2] ^= 1
    library.write_bytes(content)


@needs_compiler
@pytest.mark.parametrize("kind", ["empty", "cut", "changed"])
def test_a_damaged_library_is_compiled_again_and_never_loaded(
    built: Path, hasty: str, kind: str
) -> None:
    for library in (built / "native").iterdir():
        damaged(library, kind)
    assert build_error_in_a_new_process(built, CC=hasty)[0] == "None"
    kept = {file.name: file.read_bytes() for file in (built / "native").iterdir()}
    assert len(kept) == 2
    for name, content in kept.items():
        assert build._digest(content) in name


@needs_compiler
@pytest.mark.parametrize("kind", ["writable folder", "writable file", "other owner", "link"])
def test_a_library_that_others_may_have_written_is_not_loaded(
    built: Path, hasty: str, tmp_path: Path, kind: str
) -> None:
    """It would run as soon as it is loaded: its constructor makes a file."""
    native, proof = built / "native", tmp_path / "proof"
    source = tmp_path / "evil.c"
    source.write_text(
        "#include <stdio.h>\n"
        f'__attribute__((constructor)) void run(void) {{ fopen("{proof}", "w"); }}'
    )
    evil = tmp_path / "evil.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", str(source), "-o", str(evil)], check=True)
    digest = build._digest(evil.read_bytes())
    for file in list(native.iterdir()):
        key = file.stem.rpartition("-")[0]
        file.unlink()
        planted = native / f"{key}-{digest}.so"
        planted.write_bytes(evil.read_bytes())
        if kind == "writable file":
            planted.chmod(0o757)
        elif kind == "other owner":
            if os.geteuid() != 0:
                pytest.skip("only root can give files away")
            os.chown(planted, 12345, 12345)
        elif kind == "link":
            planted.unlink()
            planted.symlink_to(evil)
    if kind == "writable folder":
        native.chmod(0o777)
    error, log = build_error_in_a_new_process(built, CC=hasty)
    assert error == "None"
    assert not proof.exists()
    assert ("others can write to" in log) is (kind == "writable folder")


@needs_compiler
def test_processes_that_build_at_the_same_time_all_load_it(cache: Path, hasty: str) -> None:
    environment = {**os.environ, "HOGWILD_CACHE": str(cache), "CC": hasty}
    command = [sys.executable, "-c", PROGRAM]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert {process.communicate()[0].strip() for process in running} == {"None"}
    assert len(list((cache / "native").iterdir())) == 2


def test_no_compiler_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(c_backend.BuildError, match="install gcc or clang"):
        build.libraries.__wrapped__()
