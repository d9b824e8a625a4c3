"""Run one candidate with its tests in a process of its own, and say whether they passed.

This keeps the accidents of model-written code in; it is no jail for hostile code. It bounds wall
and CPU time, memory and file size; gives an empty folder as working directory and home, none of the
caller's environment, no input, and drops all output; and kills the process group at the end.
In the process, Python's audit hook refuses sockets, new processes, and changes to files outside
that folder. On Linux, where user namespaces are allowed, it has no network device and its
processes die with it, whatever it calls. Elsewhere native code (`ctypes`) gets past the hook,
a process that leaves its group is not found, and macOS does not enforce the memory limit.
Files that the user can read are readable. Only the standard library can be imported.
"""

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, NamedTuple

CHILD = Path(__file__).with_name("sandbox_child.py").resolve()
REPORT_LIMIT = 4096


class Verdict(NamedTuple):
    """Whether the tests passed, and where not, why not."""

    passed: bool
    reason: str


@cache
def namespace_launcher() -> tuple[str, ...]:
    """The command prefix that takes network and stray processes away; empty where refused."""
    launcher = ("unshare", "--map-root-user", "--net", "--pid", "--kill-child")
    try:
        subprocess.run([*launcher, "true"], check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ()
    return launcher


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Limits for one candidate.

    Attributes:
        wall_s: Time until it is killed, start included.
        cpu_s: CPU time until the kernel ends it.
        memory_mb: Address space of the process.
        file_mb: Size of any one file that it writes.
        launcher: Command that the interpreter is started through.
    """

    wall_s: float = 10.0
    cpu_s: int = 5
    memory_mb: int = 512
    file_mb: int = 16
    launcher: tuple[str, ...] = field(default_factory=namespace_launcher)

    def run(self, source: str, tests: str, preamble: str = "") -> Verdict:
        """Execute preamble, source and tests in turn in one module.

        They passed if the tests ran to their end. The proof is a random token that waits unread
        in a pipe and is sent back after the last test, on a channel that is not standard output:
        leaving early or printing something does not pass.

        Args:
            source: The candidate.
            tests: Python text that raises where the candidate is wrong.
            preamble: Imports and helpers that the candidate may use.
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            job = asdict(self) | {"parts": [preamble, source, tests]}
            Path(folder, "job.json").write_text(json.dumps(job), encoding="utf-8")
            process = subprocess.Popen(
                [*self.launcher, sys.executable, "-S", "-P", "-B", str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env=_environment(folder),
                start_new_session=True,
            )
            try:
                return self._verdict(process)
            finally:
                _end(process)

    def _verdict(self, process: subprocess.Popen[bytes]) -> Verdict:
        deadline = time.monotonic() + self.wall_s
        token = secrets.token_hex(16)
        assert process.stdin
        assert process.stdout
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(token.encode())
        if line := _read_line(process.stdout, deadline):
            return _judge(line, token)
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return Verdict(False, f"timed out after {self.wall_s:g} s")
        return Verdict(False, _ending(status))


def _environment(folder: str) -> dict[str, str]:
    fixed = {"PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    return fixed | {"HOME": folder, "TMPDIR": folder}


def _read_line(stream: IO[bytes], deadline: float) -> bytes:
    """The child's report, bounded; empty if the child ends or time is up before there is one."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while not line.endswith(b"\n") and len(line) < REPORT_LIMIT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return b""
            if not (chunk := os.read(stream.fileno(), REPORT_LIMIT)):
                break
            line += chunk
    return line


def _judge(line: bytes, token: str) -> Verdict:
    with suppress(ValueError, AttributeError, KeyError):
        report = json.loads(line)
        if report.get("token") == token:
            return Verdict(True, "passed")
        return Verdict(False, str(report["reason"]))
    return Verdict(False, "wrote to the channel of its result")


def _ending(status: int) -> str:
    number = -status if status < 0 else status - 128
    if number > 0:
        return f"died of signal {number}"
    return f"ended before its tests did, exit status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdout
    process.stdout.close()
