"""The cache on disk: where it is, and whether what lies in it may be believed.

It is ``$HOGWILD_CACHE``, else ``$XDG_CACHE_HOME/hogwild``, else ``~/.cache/hogwild``, and may be
deleted at any time. What it holds is run and loaded, so it must be this user's alone: another user
who can write to the folder, to a file in it or to a folder above it could put anything there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def cache_folder(name: str) -> Path:
    """Return the cache's folder ``name``. It is made if it is missing, for this user alone.

    Raises:
        OSError: there is no home, the folder cannot be made, or others can write to it.
    """
    folder = _cache() / name
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    for path in dict.fromkeys((folder, *folder.parents)):  # a link leads where its owner likes
        _require_owner(path)
    resolved = folder.resolve()
    for path in (resolved, *resolved.parents):
        require_private(path, sticky=path != resolved)
    return resolved


def require_private(path: Path, *, sticky: bool = False) -> None:
    """Refuse a file or folder that another user owns or can write to; root may.

    Args:
        path: what is about to be believed. Links are not followed: a link is refused.
        sticky: take a folder in which all may write, but nobody replaces what is another's.

    Raises:
        OSError: it is not private, or is not there.
    """
    status = path.lstat()
    if os.name != "posix":
        return
    _require_owner(path)
    mode = status.st_mode
    if stat.S_ISLNK(mode):
        raise PermissionError(f"{path} is a link: remove it")
    writable = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if writable and not (sticky and mode & stat.S_ISVTX):
        raise PermissionError(f"others can write to {path}: run chmod go-w on it")


def sync(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cache() -> Path:
    if own := os.environ.get("HOGWILD_CACHE"):
        return Path(own).expanduser().absolute()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError("there is no home: set HOGWILD_CACHE to a folder") from error
    return (Path(base) / "hogwild").absolute()


def _require_owner(path: Path) -> None:
    owner = path.lstat().st_uid
    if os.name == "posix" and owner not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user (id {owner})")


def _is_own_group(group: int) -> bool:
    """Whether a group has no member but this user, as where every user has a group."""
    import grp
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    alone = group == user.pw_gid and entry.gr_name == user.pw_name
    return alone and set(entry.gr_mem) <= {user.pw_name}
