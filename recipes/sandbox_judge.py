"""Run the tests of a candidate, which stays in a process of its own, and report one verdict.

Run by `sandbox.py` only. The tests are trusted. They call the candidate's functions by name; plain
values go to its process and come back, so it can return what it likes and do nothing else.
"""

import builtins
import json
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from recipes import sandbox_confine, sandbox_values

sys.path.pop(0)

_CANDIDATE = Path(__file__).with_name("sandbox_candidate.py").resolve()


class Ended(BaseException):
    """The candidate's process ended, or does not keep to its channel. Tests cannot catch it."""


class Candidate:
    """A candidate's process.

    Args:
        job: its preamble, source and limits.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_CANDIDATE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.state = self._ask(job)

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the candidate's own."""

        def call(*args: Any, **kwargs: Any) -> Any:
            reply = self._ask([name, list(args), kwargs])
            if "error" in reply:
                raise _exception(reply)
            try:
                for arg, after in zip(args, reply["args"], strict=True):
                    _write_back(arg, after)
                return reply["value"]
            except (KeyError, TypeError, ValueError) as error:
                raise Ended("wrote to the channel of its values") from error

        call.__name__ = name
        return call

    def _ask(self, message: Any) -> dict[str, Any]:
        calls, replies = self._process.stdin, self._process.stdout
        assert calls
        assert replies
        try:
            calls.write(sandbox_values.dumps(message))
            calls.flush()
        except BrokenPipeError:
            pass  # its last words may still be read
        line = replies.readline(sandbox_values.LINE_LIMIT)
        if not line:
            raise Ended(_ending(self._process.wait()))
        try:
            reply = sandbox_values.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise Ended("wrote to the channel of its values")
        return reply


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    signal.alarm(job["wall_s"] + 1)  # if nobody is left to kill it
    sandbox_confine.limit(cpu_s=job["cpu_s"], memory_mb=job["memory_mb"])
    tests = job.pop("tests")
    report: dict[str, Any] = {"passed": False}
    try:
        candidate = Candidate(job)
        state = candidate.state
        if "unconfined" in state:
            report["unconfined"] = str(state["unconfined"])
        elif "error" in state:
            raise _exception(state)
        else:
            report["hides_files"] = bool(state.get("hides_files"))
            names = types.ModuleType("tests").__dict__
            exec(compile(job["preamble"], "<preamble>", "exec"), names)
            wanted = job["entry_point"]
            for name in state.get("functions", ()):
                if not hasattr(builtins, str(name)) and wanted in (None, name):
                    names[name] = candidate.function(name)
            exec(compile(tests, "<tests>", "exec"), names)
            report["passed"] = True
    except BaseException as error:
        report["reason"] = _reason(error, tests)
    sys.stdout.write(json.dumps(report) + "\n")


def _exception(reply: dict[str, Any]) -> BaseException:
    """The exception that a candidate raised; an ``Ended`` where tests must not catch it."""
    name, message = str(reply["error"]), str(reply.get("message", ""))
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        kind = type(name, (Exception,), {})
    if not issubclass(kind, Exception) or name == "OutOfTime":
        kind = type(name, (Ended,), {})
    try:
        return kind(message)
    except TypeError:  # it takes more than a message
        return type(name, (Exception,), {})(message)


def _write_back(arg: Any, after: Any) -> None:
    """Give a list, dict or set of the tests the content that the candidate left in its copy."""
    if type(arg) is not type(after) or not isinstance(arg, list | dict | set):
        return
    arg.clear()
    (arg.extend if isinstance(arg, list) else arg.update)(after)


def _ending(status: int) -> str:
    if status < 0:
        return f"died of signal {-status}"
    return f"ended before its tests did, exit status {status}"


def _reason(error: BaseException, tests: str) -> str:
    """The error in one line, with the test that it came from."""
    line = ""
    trace = error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == "<tests>":
            line = tests.split("\n")[trace.tb_lineno - 1].strip()
        trace = trace.tb_next
    what = str(error)[:200] if type(error) is Ended else f"{type(error).__name__}: {error}"[:250]
    return what.rstrip(": ") + (f" at `{line[:200]}`" if line else "")


if __name__ == "__main__":
    main()
