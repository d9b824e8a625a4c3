"""The recipes' sandbox: what passes, what is limited, what the kernel refuses."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipes.sandbox import Sandbox, SandboxError, Verdict
from recipes.sandbox_values import dumps, loads

ROOT = Path(__file__).resolve().parents[2]

ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0\n"


def test_a_right_function_passes_and_a_failure_names_its_test(sandbox: Sandbox):
    assert sandbox.run(ADD, ADD_TESTS) == (True, "passed")
    passed, reason = sandbox.run(ADD.replace("+", "*"), ADD_TESTS)
    assert not passed
    assert reason == "AssertionError at `assert add(1, 2) == 3`"


def test_calls_pass_plain_data_both_ways(sandbox: Sandbox):
    source = """
import collections, itertools
def same(value): return value
def sort(values): values.sort()
def count(text): return collections.Counter(text)
def pairs(n): return ((i, i) for i in range(n))
def fail(): raise KeyError("k")
def odd(): return object()
"""
    tests = """
values = [1, 2**80, 1.5, float("inf"), "\\ud800é", b"\\0", None, True, 1j, (1,), {1: {2}}, [[]]]
for value in (*values, values, tuple(values), frozenset([1]), {"tuple": [1]}, range(3)):
    assert same(value) == value and type(same(value)) is type(value), value
assert same(value=1) == 1
mine = [3, 1]
sort(mine)
assert mine == [1, 3]
assert count("aab") == {"a": 2, "b": 1}
assert pairs(2) != [(0, 0), (1, 1)] and list(pairs(2)) == [(0, 0), (1, 1)]
try:
    fail()
except KeyError as error:
    assert error.args == ("'k'",)
try:
    odd()
except TypeError as error:
    assert "object is not plain data" in str(error)
"""
    assert sandbox.run(source, tests) == (True, "passed")


@pytest.mark.parametrize(
    "line", [b"{}", b"[", b'{"range": 1}', b'{"set": [{"list": []}]}', b'{"x": 1}']
)
def test_a_line_that_is_no_value_is_a_value_error(line: bytes):
    with pytest.raises(ValueError, match=r"."):
        loads(line)
    assert loads(dumps({"a": (1, {2})})) == {"a": (1, {2})}


ALWAYS_EQUAL = """
class Equal(int):
    def __eq__(self, other): return True
def add(a, b): return Equal(7)
"""
FORGES = """
import os, json
for fd in range(256):
    try:
        os.write(fd, b'{"passed": true, "reason": ""}\\n' * 99)
    except OSError:
        pass
"""
OPENS_THE_JUDGES_DESCRIPTORS = """
import os
for name in ("self", os.getpid(), os.getppid()):
    for fd in range(16):
        try:
            with open(f"/proc/{name}/fd/{fd}", "w") as file:
                file.write('{"passed": true}\\n')
        except OSError:
            pass
os._exit(0)
"""


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "def add(a, b): raise SystemExit(0)",
        "import os\ndef add(a, b): os._exit(0)",
        "print('passed')\nprint('{\"passed\": true}', flush=True)\nimport os; os._exit(0)",
        "import sys; sys.modules['json'].dumps = lambda report: '{\"passed\": true}'",
        "import threading, os; threading.Timer(0.1, os._exit, [0]).start()\nwhile True: pass",
        "def add(a, b: return a + b",
        "def add(a, b):\n    return '\0'",
        "def check(*_): pass",
        "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
        "def add(a, b): return add(a, b)",
        "import ctypes; ctypes.string_at(0)",
        "raise ValueError('\\ud800')",
        "",
        ALWAYS_EQUAL,
        FORGES,
        FORGES + ADD,
        OPENS_THE_JUDGES_DESCRIPTORS,
        "import sys, gc\nfor o in gc.get_objects():\n"
        "    if isinstance(o, dict) and 'passed' in o: o['passed'] = True\n",
        "def add(a, b):\n    return {'value': 3}\n",
        "import os\ndef add(a, b):\n    os.write(3, b'{\"dict\": 1}\\n' * 99)\n    return 3",
    ],
)
def test_what_does_not_get_through_its_tests_has_not_passed(sandbox: Sandbox, source: str):
    assert not sandbox.run(source, ADD_TESTS).passed


def test_a_candidate_cannot_replace_what_its_tests_use(sandbox: Sandbox):
    source = "def isclose(*_): return True\ndef sorted(_): return [1]\ndef half(x): return 9"
    preamble, tests = "from math import isclose", "assert isclose(half(4), 2)"
    assert not sandbox.run(source, tests, preamble, "half").passed
    assert not sandbox.run(source, "assert sorted([2]) == [1]").passed


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "def f():\n    while True: pass\nwhile True:\n    try: f()\n    except BaseException: pass",
        "10 ** 10 ** 9",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_an_endless_loop_is_ended_by_cpu_time(sandbox: Sandbox, source: str):
    began = time.monotonic()
    verdict = Sandbox(wall_s=20, cpu_s=1).run(source, "")
    assert not verdict.passed
    assert "timed out" not in verdict.reason
    assert time.monotonic() - began < 15


def test_an_endless_test_is_ended_too(sandbox: Sandbox):
    verdict = Sandbox(wall_s=20, cpu_s=1).run("def f(): return 10**15", "for _ in range(f()): pass")
    assert not verdict.passed


def test_an_idle_wait_is_ended_by_wall_time(sandbox: Sandbox):
    began = time.monotonic()
    short = Sandbox(wall_s=0.5)
    assert short.run("import time; time.sleep(60)", "") == (False, "timed out after 0.5 s")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "source", ["bytearray(4 << 30)", "x = []\nwhile True: x.append('x' * 10**6)"]
)
def test_a_memory_bomb_hits_the_limit(sandbox: Sandbox, source: str):
    assert Sandbox(memory_mb=128).run(source, "") == (False, "MemoryError")


def test_output_is_dropped_and_input_is_empty(sandbox: Sandbox):
    source = (
        "import os, sys\nfor _ in range(300): print('x' * 10**5)\nsys.stderr.write('y' * 10**6)"
    )
    assert sandbox.run(source + "\nassert sys.stdin.read() == ''", "").passed
    assert sandbox.run("input()", "").reason.startswith("EOFError")


def test_the_standard_library_can_be_imported_and_nothing_else(sandbox: Sandbox):
    source = """
import asyncio, bz2, csv, ctypes, datetime, decimal, fractions, hashlib, heapq, json, lzma, random
import re, sqlite3, ssl, statistics, tempfile, threading, uuid, zlib
hashlib.sha256(b"").hexdigest(), datetime.datetime.now(), random.random(), uuid.uuid4()
for name in ("recipes", "recipes.sandbox_confine", "pytest", "torch"):
    try:
        __import__(name)
    except ImportError:
        pass
    else:
        raise AssertionError(name)
"""
    assert sandbox.run(source, "") == (True, "passed")


def test_the_callers_environment_and_files_stay_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    if not sandbox.hides_files:
        pytest.skip("no Landlock here")
    monkeypatch.setenv("SOME_API_KEY", "secret")
    secret = tmp_path / "id_ed25519"
    secret.write_text("secret")
    source = "import os\nassert 'SOME_API_KEY' not in os.environ"
    assert sandbox.run(source, "") == (True, "passed")
    paths = (str(secret), f"/proc/{os.getpid()}/environ", "/proc/self/environ", "/etc/passwd")
    for path in paths:
        assert sandbox.run(f"open({path!r}).read()", "").reason.startswith("PermissionError")
    for folder in (str(tmp_path), "/", "/proc", str(Path.home())):
        assert not sandbox.run(f"import os; os.listdir({folder!r})", "").passed


# What the kernel refuses. Each line runs first outside, where it must do its damage: a line that
# cannot work would show nothing.

SETUP = """
import ctypes, os, pathlib, shutil, sqlite3, subprocess, socket, sys, urllib.request
folder = {folder!r}
kept = os.path.join(folder, "kept")
new = os.path.join(folder, "new")
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    if getattr(libc, name)(*args) < 0:
        raise OSError(ctypes.get_errno(), name)
"""
WRITES = [
    "os.remove(kept)",
    "open(kept, 'w')",
    "open(kept, 'a').write('x')",
    "open(kept, 'r+').write('x')",
    "os.close(os.open(kept, os.O_RDONLY | os.O_TRUNC))",
    "os.truncate(kept, 0)",
    "os.rename(kept, new)",
    "os.replace(kept, new)",
    "shutil.rmtree(folder)",
    "os.mkdir(new)",
    "os.symlink(kept, new)",
    "os.link(kept, new)",
    "pathlib.Path(kept).write_bytes(b'')",
    "fd = os.open(folder, os.O_RDONLY); os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=fd)",
    "fd = os.open(folder, os.O_RDONLY); os.rename('kept', 'new', src_dir_fd=fd, dst_dir_fd=fd)",
    "fd = os.open(folder, os.O_RDONLY); os.unlink('kept', dir_fd=fd)",
    "open('new', 'w', opener=lambda name, flags: os.open(new, flags))",
    "c = sqlite3.connect(new); c.execute('create table t (x)'); c.commit()",
    "os.mkfifo(new)",
    "os.mknod(new)",
    "os.setxattr(kept, 'user.x', b'x')",
    "os.chmod(kept, 0o777)",
    "os.utime(kept, (1, 1))",
    "call('creat', new.encode(), 0o600)",
    "call('open', new.encode(), os.O_CREAT | os.O_WRONLY, 0o600)",
    "call('unlink', kept.encode())",
    "call('mkdir', new.encode(), 0o700)",
    "os.chdir(folder); open('new', 'w')",
    "import mmap; fd = os.open(kept, os.O_RDWR); mmap.mmap(fd, 4)[0] = 120",
    "os.posix_spawn('/bin/sh', ['sh', '-c', 'echo > ' + new], {}); os.wait()",
]


def contents(folder: Path) -> list[tuple[object, ...]]:
    def attributes(path: Path) -> tuple[object, ...]:
        stat = path.lstat()
        xattrs = os.listxattr(path) if path.is_file() else []
        text = path.read_bytes() if path.is_file() else b""
        return (path.name, stat.st_mode, stat.st_mtime_ns, text, xattrs)

    return [attributes(path) for path in sorted(folder.iterdir())] if folder.is_dir() else []


@pytest.fixture
def target() -> Iterator[Path]:
    """A folder with a file; not in tmpfs, which has no extended attributes of users."""
    folder = ROOT / ".pytest_cache" / f"sandbox-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "kept").write_text("kept")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("statement", WRITES)
def test_nothing_is_written_anywhere(sandbox: Sandbox, target: Path, statement: str):
    source = SETUP.format(folder=str(target)) + statement
    before = contents(target)
    verdict = sandbox.run(source, "")
    assert contents(target) == before
    assert not verdict.passed, verdict
    run = subprocess.run([sys.executable, "-c", source], check=False, capture_output=True)
    if b"not supported" not in run.stderr:
        assert contents(target) != before, "the statement does nothing outside either"


@pytest.mark.parametrize(
    "statement",
    [
        "socket.create_connection(('127.0.0.1', {port}), 1)",
        "socket.socket()",
        "socket.socket(socket.AF_UNIX)",
        "socket.socketpair()",
        "urllib.request.urlopen('http://127.0.0.1:{port}', timeout=1)",
        "call('socket', 2, 1, 0)",
        "os.fork()",
        "call('fork')",
        "call('syscall', 57)",
        "os.execv('/bin/true', ['true'])",
        "call('execv', b'/bin/true', None)",
        "subprocess.run(['true'])",
        "assert os.system('true') == 0",
        "import threading; threading.Thread(target=print).start()",
        "os.kill(os.getppid(), 9)",
        "os.kill({pid}, 9)",
        "call('kill', {pid}, 9)",
        "call('ptrace', 16, {pid}, 0, 0)",
        "os.pidfd_open({pid})",
        "call('unshare', 0x10000000)",
        "call('mount', b't', b'/tmp', b't', 0, 0)",
        "call('syscall', 425, 8, 0)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {pid})",
        "import fcntl; fcntl.flock(0, fcntl.LOCK_EX)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
        "import resource; resource.prlimit({pid}, resource.RLIMIT_CPU, (9, 9))",
        "call('setpriority', 0, {pid}, 19)",
        "call('shmget', 0, 4096, 0o1600)",
        "call('memfd_create', b'x', 0)",
        "os.setsid()",
    ],
)
def test_sockets_processes_and_signals_are_refused(sandbox: Sandbox, statement: str):
    bystander = subprocess.Popen(["sleep", "60"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        port = server.getsockname()[1]
        source = SETUP.format(folder="/") + statement.format(pid=bystander.pid, port=port)
        assert not sandbox.run(source, "").passed
        with pytest.raises(BlockingIOError):
            server.accept()
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_no_process_is_left_behind(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    assert not Sandbox(wall_s=1).run("import time\ndef f(): time.sleep(60)\n", "f()").passed
    time.sleep(0.2)
    assert running_in_group(started[0].pid) == []


def running_in_group(group: int) -> list[str]:
    """Names of the processes of a group that are not dead."""
    running = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid_and_name, _, rest = file.read_text().rpartition(")")
        except OSError:
            continue
        state, _, process_group = rest.split()[:3]
        if int(process_group) == group and state not in "ZX":
            running.append(pid_and_name)
    return running


def test_without_what_confines_it_nothing_is_executed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The candidate's process finds no libseccomp."""
    for file in (ROOT / "recipes").glob("sandbox*.py"):
        text = file.read_text().replace("libseccomp.so.2", "libseccomp.so.none")
        (tmp_path / file.name).write_text(text)
    monkeypatch.setattr("recipes.sandbox._JUDGE", tmp_path / "recipes" / "sandbox_judge.py")
    (tmp_path / "recipes").mkdir()
    for file in tmp_path.glob("*.py"):
        file.rename(tmp_path / "recipes" / file.name)
    with pytest.raises(SandboxError, match=r"not executed: .*install libseccomp"):
        Sandbox().run("while True: pass", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_has_the_same_promises(target: Path):
    """The rest of this file runs as whoever runs it; this as a user without any privilege."""
    python = "/usr/bin/python3"
    version = [python, "-c", "import sys; print(sys.version_info >= (3, 11))"]
    if not Path(python).is_file() or b"True" not in subprocess.check_output(version):
        pytest.skip("no interpreter that another user may run")
    os.chown(target, 65534, 65534)
    os.chown(target / "kept", 65534, 65534)
    before = contents(target)
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from recipes.sandbox import Sandbox
assert Sandbox().run({ADD!r}, {ADD_TESTS!r}).passed
for statement in {WRITES!r}:
    assert not Sandbox().run({SETUP.format(folder=str(target))!r} + statement, "").passed, statement
print("held")
"""
    run = subprocess.run(
        [python, "-B", "-c", code],
        check=False,
        capture_output=True,
        text=True,
        user=65534,
        group=65534,
    )
    assert run.stdout == "held\n", run.stderr
    assert contents(target) == before


def test_a_verdict_is_a_plain_pair(sandbox: Sandbox):
    assert sandbox.run("raise ValueError('x')", "") == Verdict(False, "ValueError: x")
