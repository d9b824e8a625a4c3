"""The inside of `sandbox.py`: limits itself, executes the job in its folder, reports one line.

Run by `sandbox.py` only, never imported. It knows the candidate; it does not know what may follow.
"""

import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn")
REFUSED += ("os.system", "os.kill", "pty.", "signal.pthread_kill", "resource.")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink")
CHANGES += ("os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class OutOfTime(BaseException):
    """The CPU limit was reached; the kernel kills a candidate that ignores it a second later."""


def main() -> None:
    with open("job.json", encoding="utf-8") as file:
        job = json.load(file)
    os.remove("job.json")
    token_fd, report_fd = _take_channels()
    _set_limits(job)
    sys.addaudithook(_guard(os.path.realpath(".")))
    try:
        _execute(job["parts"])
        report = {"token": os.read(token_fd, 64).decode()}
    except BaseException as error:
        report = {"reason": _reason(error, job["parts"])}
    os.write(report_fd, json.dumps(report).encode() + b"\n")
    os._exit(0)


def _take_channels() -> tuple[int, int]:
    """Move the pipes out of the candidate's way: its own input is empty, its output is dropped."""
    token_fd, report_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return token_fd, report_fd


def _set_limits(job: dict[str, Any]) -> None:
    signal.signal(signal.SIGXCPU, _out_of_time)
    mb = 1 << 20
    wanted = (
        (resource.RLIMIT_CPU, job["cpu_s"], job["cpu_s"] + 1),
        (resource.RLIMIT_AS, job["memory_mb"] * mb, job["memory_mb"] * mb),
        (resource.RLIMIT_FSIZE, job["file_mb"] * mb, job["file_mb"] * mb),
        (resource.RLIMIT_CORE, 0, 0),
    )
    for kind, soft, hard in wanted:
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):
            # macOS refuses some of them; the wall limit holds everywhere.
            continue


def _out_of_time(number: int, frame: types.FrameType | None) -> None:
    raise OutOfTime("the CPU limit was reached")


def _guard(home: str) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that refuses network, processes, and changes outside of `home`."""
    realpath, fsdecode, inside = os.path.realpath, os.fsdecode, home + os.sep

    def changes_outside(paths: tuple[Any, ...]) -> bool:
        named = [fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
        return any(p != os.devnull and not (realpath(p) + os.sep).startswith(inside) for p in named)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not allowed here")
        if event == "open":
            if args[2] & WRITES and changes_outside(args[:1]):
                raise PermissionError(f"not allowed to write {args[0]!r}")
        elif event.startswith(CHANGES) and changes_outside(args[:2]):
            raise PermissionError(f"{event} is not allowed on {args[0]!r}")

    return hook


def _execute(parts: list[str]) -> None:
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    for number, part in enumerate(parts):
        code = compile(part, f"<part {number}>", "exec", dont_inherit=True)
        exec(code, module.__dict__)


def _reason(error: BaseException, parts: list[str]) -> str:
    """The error in one line, with the test that it came from."""
    line = ""
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == f"<part {len(parts) - 1}>":
            line = parts[-1].split("\n")[trace.tb_lineno - 1].strip()
        trace = trace.tb_next
    try:
        message = str(error)
    except BaseException:
        message = "(no message)"
    where = f" at `{line[:200]}`" if line else ""
    return f"{type(error).__name__}: {message[:200]}".rstrip(": ") + where


if __name__ == "__main__":
    main()
