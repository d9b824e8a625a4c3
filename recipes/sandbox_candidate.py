"""The process of a candidate: confines itself, executes the source, and answers calls.

Run by `sandbox_judge.py` only. It knows neither the tests nor where the verdict goes: what it
writes is read as the value of a call.
"""

import builtins
import os
import signal
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes import sandbox_confine, sandbox_values

for _name in ["recipes", *(name for name in sys.modules if name.startswith("recipes."))]:
    sys.modules.pop(_name, None)
sys.path.pop(0)


class OutOfTime(BaseException):
    """The CPU limit was reached; the kernel kills a candidate that ignores it a second later."""


def main() -> None:
    calls, replies = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    job = sandbox_values.loads(calls.readline())
    signal.signal(signal.SIGXCPU, _out_of_time)
    try:
        sandbox_confine.limit(cpu_s=job["cpu_s"], memory_mb=job["memory_mb"])
        hides_files = sandbox_confine.confine()
    except (sandbox_confine.ConfineError, OSError, ValueError) as error:
        _send(replies, sandbox_values.dumps({"unconfined": str(error)}))
        return
    module = types.ModuleType("candidate")
    sys.modules["candidate"] = module
    names = module.__dict__
    try:
        _execute(job["preamble"], "<preamble>", names)
        given = dict(names)
        _execute(job["source"], "<candidate>", names)
    except BaseException as error:
        _send(replies, _failure(error))
        return
    own = [name for name, value in names.items() if value is not given.get(name)]
    functions = [n for n in own if callable(names[n]) and not hasattr(builtins, n)]
    state = {"functions": functions, "hides_files": hides_files}
    _send(replies, sandbox_values.dumps(state))
    for line in calls:
        _send(replies, _answer(names, *sandbox_values.loads(line)))


def _execute(text: str, name: str, names: dict[str, Any]) -> None:
    exec(compile(text, name, "exec", dont_inherit=True), names)


def _answer(names: Mapping[str, Any], name: str, args: list[Any], kwargs: dict[str, Any]) -> bytes:
    """Call a function; reply with its value, and with the arguments as it left them."""
    try:
        return sandbox_values.dumps({"value": names[name](*args, **kwargs), "args": args})
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> bytes:
    try:
        message = str(error)[:200]
    except BaseException:
        message = "(no message)"
    return sandbox_values.dumps({"error": type(error).__name__, "message": message})


def _send(replies: int, line: bytes) -> None:
    while line:
        line = line[os.write(replies, line) :]


def _out_of_time(number: int, frame: types.FrameType | None) -> None:
    raise OutOfTime("the CPU limit was reached")


if __name__ == "__main__":
    main()
    os._exit(0)
