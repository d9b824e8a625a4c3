"""The distribution's shape: three packages, nothing that shadows another library."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGES = {
    "hogwild_agents": "hogwild_agents",
    "hogwild_engine": "engine/hogwild_engine",
    "hogwild_kernels": "kernels/hogwild_kernels",
}


def modules(folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}


def run_at_root(code: str, **env: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def sdist_files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("sdist")
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    with tarfile.open(sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


@pytest.mark.parametrize("folder", ["engine", "kernels"])
def test_a_source_folder_is_no_package_of_its_own(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_test_folder_is_a_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_the_kernels_folder_does_not_shadow_the_library_kernels(tmp_path: Path) -> None:
    library = tmp_path / "kernels" / "__init__.py"
    library.parent.mkdir()
    library.touch()
    code = "import kernels; print(kernels.__file__)"
    assert run_at_root(code, PYTHONPATH=str(tmp_path)).strip() == str(library)


def test_transformers_imports_from_the_repository_root() -> None:
    # transformers looks for its own `kernels` below its lazy top level.
    run_at_root("from transformers.models.llama import modeling_llama as m; m.LlamaForCausalLM")


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel_files: set[str]) -> None:
    top = {name.partition("/")[0] for name in wheel_files}
    assert top == {*PACKAGES, f"hogwild_agents-{PROJECT['version']}.dist-info"}


@pytest.mark.parametrize(("package", "folder"), PACKAGES.items())
def test_the_wheel_holds_every_module_and_the_type_marker(
    wheel_files: set[str], package: str, folder: str
) -> None:
    expected = {f"{package}/{name}" for name in modules(folder) | {"py.typed"}}
    assert expected <= wheel_files


def test_the_sdist_can_be_built_and_tested(sdist_files: set[str]) -> None:
    sources = {
        f"{folder}/{name}"
        for folder in [*PACKAGES.values(), "tests", "recipes"]
        for name in modules(folder)
    }
    markers = {f"{folder}/py.typed" for folder in PACKAGES.values()}
    assert sources | markers | {"pyproject.toml", "README.md", "LICENSE"} <= sdist_files


def test_the_sdist_holds_no_environment_or_weights(sdist_files: set[str]) -> None:
    top = {name.partition("/")[0] for name in sdist_files}
    assert not top & {".venv", ".git", "build", "dist"}
    assert not [name for name in sdist_files if name.endswith((".gguf", ".safetensors"))]


def test_the_installed_version_is_the_one_in_pyproject() -> None:
    assert importlib.metadata.version("hogwild-agents") == PROJECT["version"]


def test_the_architecture_page_names_every_module() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = ("hogwild_agents", "engine/hogwild_engine", "kernels/hogwild_kernels")
    modules = {p.name for package in packages for p in (ROOT / package).rglob("*.py")}
    missing = [name for name in sorted(modules) if f"{name}`" not in page]
    assert missing == ["__main__.py"]
