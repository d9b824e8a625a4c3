"""Forked processes, processes that end while a model loads, and event loops beside the first load:
each in processes of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tiny import save_tiny

START = """
import asyncio, json, multiprocessing, os, sys, threading, time
from concurrent.futures import ProcessPoolExecutor
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableParallel
from hogwild_agents import ChatHogwild
from hogwild_agents.langchain.engines import REGISTRY

small = dict(max_tokens=4, num_pages=64, num_threads=2)
llm = ChatHogwild(model=sys.argv[1], workers=1, temperature=0, **small)
def ask(text="hi"):
    return llm.invoke(text).text
def error_of(act):
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""

FORKS = """
import torch
torch.randn(999, 999) @ torch.randn(999, 999)  # OpenMP's workers, which no child has
want = ask()
engine = llm.engine
request = llm.make_call([HumanMessage("hi")]).request
handle, done = engine.submit(request), engine.submit(request)
done.result(60)

def all_ways():
    assert engine.closed and error_of(lambda: engine.submit(request))
    both = RunnableParallel(a=llm, b=llm).invoke("hi")
    answers = [both["a"].text, both["b"].text, asyncio.run(llm.ainvoke("hi")).text]
    return answers == [want] * 3

def inherited():
    engine.close()  # waits for no thread
    handle.cancel()
    async def read():
        async for _ in handle:
            pass
    acts = (lambda: engine.submit(request), lambda: engine.count_tokens([{"role": "user"}]),
            lambda: handle.result(5), lambda: list(handle), lambda: asyncio.run(read()))
    return [error_of(act) for act in acts]

def in_child(function, *locks):
    here, there = multiprocessing.Pipe()
    held, free = threading.Event(), threading.Event()
    def hold():
        for lock in locks:
            lock.acquire()
        held.set()
        free.wait()
        for lock in locks:
            lock.release()
    threading.Thread(target=hold).start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        there.send(function())
        sys.exit(0)  # with all that runs at exit
    free.set()
    got = here.recv() if here.poll(100) else "hangs"
    assert os.waitpid(pid, 0)[1] == 0
    return got

context = multiprocessing.get_context("fork")
with ProcessPoolExecutor(1, mp_context=context) as pool:
    pooled = pool.submit(ask).result(100) == want
report = {
    "pooled": pooled,
    "all ways": in_child(all_ways, engine._wake, REGISTRY._lock, handle._changed),
    "inherited": in_child(inherited, engine._wake, handle._changed),
    "parent": ask() == want,
}
print(json.dumps(report))
"""

FORK_DURING_LOAD = """
loading = threading.Thread(target=ask)
loading.start()
while not REGISTRY._num_loading:
    time.sleep(0.01)
here, there = multiprocessing.Pipe()
pid = os.fork()
if pid == 0:
    there.send([error_of(ask), error_of(lambda: asyncio.run(llm.ainvoke("hi")))])
    os._exit(0)
report = here.recv() if here.poll(60) else "hangs"
loading.join()
print(json.dumps(report))
"""

SMALL_STACKS = """
threading.stack_size(256 * 1024)
answers = []
thread = threading.Thread(target=lambda: answers.append(ask("word " * 300)))
thread.start()
thread.join()
print(json.dumps([len(answers), threading.stack_size()]))
"""

HEARTBEAT = """
gaps = []
async def beat():
    last = time.perf_counter()
    while True:
        await asyncio.sleep(0.002)
        now = time.perf_counter()
        gaps.append(now - last)
        last = now

async def main():
    beating = asyncio.create_task(beat())
    await asyncio.sleep(0.2)
    await llm.ainvoke("hi")
    beating.cancel()

asyncio.run(main())
print(json.dumps(max(gaps)))
"""

LEAVE = {
    "ctrl-c in invoke": "ask()",
    "ctrl-c in ainvoke": "asyncio.run(llm.ainvoke('hi'))",
    "ctrl-c in a constructor": "from hogwild_engine import *; Engine(EngineConfig(sys.argv[1]))",
    "the end of the program": "threading.Thread(target=ask, daemon=True).start(); time.sleep({})",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> str:
    """The folder of a tiny model."""
    return save_tiny(tmp_path_factory.mktemp("tiny"), tokenizer, context_len=1024)


def start(script: str, model: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(str(root / folder) for folder in (".", "engine", "kernels"))
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", START + script, model],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )


def run(script: str, model: str) -> Any:
    """Run a script and return what it prints last, JSON."""
    process = start(script, model)
    try:
        out, err = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail("the process hangs")
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def test_forked_processes_load_engines_of_their_own(model: str) -> None:
    """Whoever holds locks or runs OpenMP workers in the parent, and by whichever way to fork."""
    report = run(FORKS, model)
    inherited = report.pop("inherited")
    assert report == {"pooled": True, "all ways": True, "parent": True}
    assert len(inherited) == 5
    for error in inherited:
        assert error.startswith("EngineClosedError: ")
        assert "one of this process" in error
        assert "make a new engine here, or start processes by 'spawn'" in error


def test_a_process_that_is_forked_during_a_load_says_so_at_once(model: str) -> None:
    for error in run(FORK_DURING_LOAD, model):
        assert error.startswith("EngineClosedError: engine: wanted a process that loads models")
        assert "'spawn'" in error


def test_threads_with_small_stacks_are_served(model: str) -> None:
    """The engine's threads have stacks of their own size; the setting stays as it was."""
    assert run(SMALL_STACKS, model) == [1, 256 * 1024]


def test_the_first_call_hardly_stops_the_event_loop() -> None:
    """Imports and the load run beside the loop. The bound is for noisy machines: 0.1 s else."""
    assert any(run(HEARTBEAT, "smollm2-135m") < 0.15 for _ in range(3))


@pytest.mark.parametrize("how", LEAVE)
def test_a_process_that_ends_while_a_model_loads_ends_well(model: str, how: str) -> None:
    """Python must not kill a thread that is inside torch: that aborts the process."""
    for delay_s in (0.4, 1.6, 2.8):
        script = "print('ready', flush=True)\n" + LEAVE[how].format(delay_s)
        process = start(script, model)
        assert process.stdout is not None
        process.stdout.readline()
        if "ctrl-c" in how:
            time.sleep(delay_s)
            process.send_signal(signal.SIGINT)
        try:
            _, err = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("the process hangs")
        allowed = {0, 1, -signal.SIGINT} if "ctrl-c" in how else {0}
        assert process.returncode in allowed, err
