"""The recipes' sandbox: what passes, what is limited, what stays out."""

import os
import sys
import time
from pathlib import Path

import pytest

from recipes.sandbox import Sandbox, namespace_launcher

ROOT = Path(__file__).resolve().parents[2]


ADD = "def add(a, b):\n    return a + b\n"
ADD_TESTS = "assert add(1, 2) == 3\nassert add(0, 0) == 0\n"


def test_a_right_function_passes_and_a_failure_names_its_test(sandbox: Sandbox):
    assert sandbox.run(ADD, ADD_TESTS) == (True, "passed")
    passed, reason = sandbox.run(ADD.replace("+", "*"), ADD_TESTS)
    assert not passed
    assert reason == "AssertionError at `assert add(1, 2) == 3`"


@pytest.mark.parametrize(
    "source",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "def add(a, b): raise SystemExit(0)",
        "import os\ndef add(a, b): os._exit(0)",
        "print('passed')\nprint('{\"token\": \"\"}', flush=True)\nimport os; os._exit(0)",
        "import sys; sys.modules['json'].dumps = lambda report: '{\"token\": null}'",
        "import threading, os; threading.Timer(0.1, os._exit, [0]).start()\nwhile True: pass",
        "def add(a, b: return a + b",
        "def add(a, b):\n    return '\0'",
        "def check(*_): pass",
        "class Odd(Exception):\n    def __str__(self): 1 / 0\nraise Odd",
        "def add(a, b): return add(a, b)",
        "import ctypes; ctypes.string_at(0)",
        "raise ValueError('\\ud800')",
        "",
    ],
)
def test_what_does_not_get_through_its_tests_has_not_passed(source: str):
    assert not Sandbox().run(source, ADD_TESTS).passed


def test_a_result_cannot_be_written_to_whatever_is_open(sandbox: Sandbox):
    source = """
import os
for fd in range(64):
    try:
        os.write(fd, b'{"token": "00000000000000000000000000000000"}\\n' * 9999)
    except OSError:
        pass
"""
    assert not sandbox.run(source, ADD_TESTS).passed


@pytest.mark.parametrize(
    "source",
    [
        "while True:\n    pass",
        "def f():\n    while True: pass\nwhile True:\n    try: f()\n    except BaseException: pass",
        "10 ** 10 ** 9",
    ],
)
def test_an_endless_loop_is_ended_by_cpu_time(source: str):
    began = time.monotonic()
    verdict = Sandbox(wall_s=20, cpu_s=1).run(source, "")
    assert not verdict.passed
    assert "timed out" not in verdict.reason
    assert time.monotonic() - began < 15


def test_an_idle_wait_is_ended_by_wall_time(sandbox: Sandbox):
    began = time.monotonic()
    short = Sandbox(wall_s=0.5, launcher=sandbox.launcher)
    assert short.run("import time; time.sleep(60)", "") == (False, "timed out after 0.5 s")
    assert time.monotonic() - began < 5


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS does not enforce RLIMIT_AS")
@pytest.mark.parametrize(
    "source", ["bytearray(4 << 30)", "x = []\nwhile True: x.append('x' * 10**6)"]
)
def test_a_memory_bomb_hits_the_limit(sandbox: Sandbox, source: str):
    small = Sandbox(memory_mb=128, launcher=sandbox.launcher)
    assert small.run(source, "") == (False, "MemoryError")


def test_output_is_dropped_and_input_is_empty(sandbox: Sandbox):
    source = (
        "import os, sys\nfor _ in range(300): print('x' * 10**5)\nsys.stderr.write('y' * 10**6)"
    )
    assert sandbox.run(source, "assert sys.stdin.read() == ''").passed
    assert sandbox.run("input()", "").reason.startswith("EOFError")


def test_a_huge_file_hits_the_limit(sandbox: Sandbox):
    source = "with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))"
    assert sandbox.run(source, "").reason.startswith("OSError")


def test_the_callers_environment_and_folder_stay_out(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    source = """
import os, sys, tempfile
assert "SOME_API_KEY" not in os.environ and "PYTHONPATH" not in os.environ
assert os.listdir(".") == []
assert os.path.samefile(os.environ["HOME"], ".")
assert os.path.samefile(tempfile.gettempdir(), ".")
try:
    import recipes
except ImportError:
    pass
else:
    raise AssertionError(recipes)
with open("mine", "w") as file:
    file.write("x")
os.rename("mine", "yours")
os.utime("yours")
os.remove("yours")
"""
    assert sandbox.run(source, "") == (True, "passed")


@pytest.mark.parametrize(
    "statement",
    [
        "os.remove({path!r})",
        "open({path!r}, 'w')",
        "open({path!r}, 'a')",
        "os.open({path!r}, os.O_RDWR)",
        "os.truncate({path!r}, 0)",
        "os.rename({path!r}, 'mine')",
        "shutil.rmtree(os.path.dirname({path!r}))",
        "os.symlink(os.path.dirname({path!r}), 'link'); open('link/kept', 'w')",
        "pathlib.Path({path!r}).write_bytes(b'')",
    ],
)
def test_files_elsewhere_are_safe(sandbox: Sandbox, tmp_path: Path, statement: str):
    path = tmp_path / "kept"
    path.write_text("kept")
    source = "import os, pathlib, shutil\n" + statement.format(path=str(path))
    assert sandbox.run(source, "").reason.startswith("PermissionError")
    assert path.read_text() == "kept"


def test_a_candidate_may_delete_its_own_folder(sandbox: Sandbox):
    source = ADD + "import os, shutil\nshutil.rmtree(os.getcwd())\n"
    assert sandbox.run(source, ADD_TESTS).passed


@pytest.mark.parametrize(
    "statement",
    [
        "socket.create_connection(('127.0.0.1', 9), 1)",
        "socket.socket()",
        "socket.getaddrinfo('localhost', 80)",
        "urllib.request.urlopen('http://127.0.0.1:9', timeout=1)",
        "os.fork()",
        "os.system('true')",
        "os.execv('/bin/true', ['true'])",
        "subprocess.run(['true'])",
        "os.kill(os.getppid(), 9)",
    ],
)
def test_network_and_processes_are_refused(sandbox: Sandbox, statement: str):
    source = f"import os, socket, subprocess, urllib.request\n{statement}"
    passed, reason = sandbox.run(source, "")
    assert not passed
    assert "is not allowed here" in reason


@pytest.mark.skipif(not namespace_launcher(), reason="no user namespaces here")
def test_in_namespaces_there_is_no_network_device_but_loopback():
    source = "devices = [row.split(':')[0].strip() for row in open('/proc/self/net/dev')][2:]"
    assert Sandbox().run(source, "assert devices in ([], ['lo']), devices") == (True, "passed")


def test_processes_that_native_code_started_are_killed_in_the_end(sandbox: Sandbox, tmp_path: Path):
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    leaves_its_group = "libc.setsid()" if sandbox.launcher else "pass"
    source = f"""
import ctypes, os, time
libc = ctypes.CDLL(None)
if libc.fork() == 0:
    {leaves_its_group}
    libc.write(libc.open({os.fsencode(fifo)!r}, os.O_WRONLY), b"x", 1)
    libc.sleep(30)
    os._exit(0)
time.sleep(0.3)
"""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert sandbox.run(source, "").passed
        assert os.read(reader, 1) == b"x"
        assert reaches_end_of_file(reader)
    finally:
        os.close(reader)


def reaches_end_of_file(reader: int) -> bool:
    """Whether every writer is gone within two seconds."""
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        try:
            return os.read(reader, 1) == b""
        except BlockingIOError:
            time.sleep(0.01)
    return False
