"""Run model-written Python with its tests, so that it can compute and do nothing else.

What is promised, by whom, on Linux, as root or not, in a container or not:

- It writes nothing, anywhere; opens no socket; starts no process or thread; sends no signal and
  changes no file's owner, mode, time or attribute. The kernel refuses every system call that is not
  on a list of what a computation needs (seccomp), whatever the code goes through: Python, C
  extensions or `ctypes`.
- It reads the standard library and no other file (Landlock, Linux 5.13). Where the kernel has no
  Landlock, it can read what the user can read, and `Sandbox.hides_files` is false; names and
  sizes of files (`stat`) are visible everywhere.
- It cannot forge its verdict. Tests run in another process, which calls the candidate's functions:
  plain values go there and back. The candidate holds no descriptor but those of these two pipes.
- Wall and CPU time and memory are bounded, and both processes are killed at the end.

Without Linux or libseccomp nothing is executed: `SandboxError`. No promise covers faults of the
kernel, or what timing betrays. Only the standard library can be imported.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

_JUDGE = Path(__file__).with_name("sandbox_judge.py").resolve()
_REPORT_LIMIT = 4096


class SandboxError(Exception):
    """Nothing here can confine a candidate, so it was not executed."""


class Verdict(NamedTuple):
    """Whether the tests passed, and where not, why not."""

    passed: bool
    reason: str


@dataclass(frozen=True)
class Sandbox:
    """Limits for one candidate.

    Attributes:
        wall_s: Time until it is killed, start included.
        cpu_s: CPU time until the kernel ends it.
        memory_mb: Address space of the process.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512

    def run(
        self, source: str, tests: str, preamble: str = "", entry_point: str | None = None
    ) -> Verdict:
        """Execute the candidate; call it from its tests. It passed if these ran to their end.

        Args:
            source: The candidate.
            tests: Trusted Python text that raises where the candidate is wrong. It calls functions
                with plain data: numbers, text, lists, tuples, sets, dicts. Lists, dicts and sets
                among the arguments are left as the function left them.
            preamble: Trusted imports and helpers that both may use.
            entry_point: The candidate's function that tests may call; None for all that it defines.

        Raises:
            SandboxError: this machine has nothing that confines it.
        """
        report = self._report(
            {"source": source, "tests": tests, "preamble": preamble, "entry_point": entry_point}
        )
        return Verdict(report["passed"], "passed" if report["passed"] else report["reason"])

    @cached_property
    def hides_files(self) -> bool:
        """Whether a candidate can read no file but the standard library's.

        Raises:
            SandboxError: this machine has nothing that confines it.
        """
        return bool(
            Sandbox()._report({"source": "", "tests": "", "preamble": ""}).get("hides_files")
        )

    def _report(self, job: dict[str, Any]) -> dict[str, Any]:
        limits = asdict(self) | {"wall_s": round(self.wall_s) + 1}
        process = subprocess.Popen(
            # The interpreter itself: a virtual environment is not readable in there.
            [os.path.realpath(sys.executable), "-I", "-S", "-B", str(_JUDGE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"LANG": "C.UTF-8", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        try:
            assert process.stdin
            assert process.stdout
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps({"entry_point": None} | job | limits).encode())
            line = _read_line(process.stdout, time.monotonic() + self.wall_s)
        finally:
            _end(process)
        if line is None:
            return {"passed": False, "reason": f"timed out after {self.wall_s:g} s"}
        if not line:
            return {"passed": False, "reason": f"the tests died, exit status {process.returncode}"}
        report = json.loads(line)
        if "unconfined" in report:
            raise SandboxError(f"generated code is not executed: {report['unconfined']}")
        return report


def _read_line(stream: IO[bytes], deadline: float) -> bytes | None:
    """The judge's report; empty if it ends without one, None if time is up."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            if not (chunk := os.read(stream.fileno(), _REPORT_LIMIT)):
                return b""
            line += chunk
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout
    process.stdout.close()
