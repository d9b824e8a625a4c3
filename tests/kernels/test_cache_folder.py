"""Where the cache is, and what in it is believed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from hogwild_kernels.cache_folder import cache_folder, require_private

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HOGWILD_CACHE", str(folder))
    return folder


def test_the_environment_sets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOGWILD_CACHE", str(tmp_path / "own"))
    assert cache_folder("x") == tmp_path / "own" / "x"
    monkeypatch.delenv("HOGWILD_CACHE")
    assert cache_folder("x") == tmp_path / "xdg" / "hogwild" / "x"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("x") == tmp_path / ".cache" / "hogwild" / "x"


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_it_is_made_for_its_user_alone(cache: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        folder = cache_folder("a")
    finally:
        os.umask(before)
    for path in (folder, cache):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert cache_folder("a") == folder


@pytest.mark.parametrize("level", ["a", ".", ".."])
def test_a_folder_that_others_can_write_to_is_refused(cache: Path, level: str) -> None:
    folder = cache_folder("a")
    opened = (cache / level).resolve()
    mode = opened.stat().st_mode
    opened.chmod(0o777)
    with pytest.raises(PermissionError, match=f"others can write to {opened}: run chmod go-w"):
        cache_folder("a")
    opened.chmod(0o1777)  # as /tmp: nobody replaces what is another's
    if level == "a":
        with pytest.raises(PermissionError, match="others can write"):
            cache_folder("a")
    else:
        assert cache_folder("a") == folder
    opened.chmod(mode)


@as_root
@pytest.mark.parametrize("level", ["a", ".", ".."])
def test_a_folder_of_another_user_is_refused(cache: Path, level: str) -> None:
    cache_folder("a")
    os.chown(cache / level, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache_folder("a")
    os.chown(cache / level, 0, 0)


@as_root
def test_another_users_link_is_refused_and_ones_own_is_followed(
    cache: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    cache.symlink_to(elsewhere)
    assert cache_folder("a") == elsewhere / "a"
    os.lchown(cache, 12345, 12345)
    with pytest.raises(PermissionError, match="belongs to another user"):
        cache_folder("a")


def test_a_link_that_leads_nowhere_is_an_error(cache: Path, tmp_path: Path) -> None:
    cache.symlink_to(tmp_path / "gone")
    with pytest.raises(OSError, match=r"gone|cache"):
        cache_folder("a")
    assert not (tmp_path / "gone").exists()


def test_files_are_held_to_the_same(cache: Path) -> None:
    file = cache_folder("a") / "file"
    file.touch(0o600)
    require_private(file)
    for mode in (0o620, 0o602, 0o1602):
        file.chmod(mode)
        if mode == 0o620 and file.stat().st_gid == 0 and os.geteuid() == 0:
            continue  # root's group may have root alone
        with pytest.raises(PermissionError, match="others can write"):
            require_private(file)
    link = file.with_name("link")
    link.symlink_to(file)
    with pytest.raises(PermissionError, match="is a link"):
        require_private(link)


@as_root
def test_a_group_with_other_members_counts_as_others(cache: Path) -> None:
    file = cache_folder("a") / "file"
    file.touch(0o600)
    os.chown(file, 0, 12345)
    file.chmod(0o660)
    with pytest.raises(PermissionError, match="others can write"):
        require_private(file)


def test_without_a_home_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("HOGWILD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OSError, match="set HOGWILD_CACHE"):
        cache_folder("a")
