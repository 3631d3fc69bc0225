"""OpenMP workers do not keep the cores that others wait for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lengthwise.engine.native.workers import TURNS


def test_workers_spin_briefly_unless_the_user_says_how_they_wait(monkeypatch):
    def said(**env):
        code = "import os, lengthwise.engine.native; print(os.environ.get('GOMP_SPINCOUNT'))"
        rest = {key: value for key, value in os.environ.items() if not key.startswith(("GOMP_", "OMP_"))}
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**rest, **env}).stdout.strip()

    assert said() == TURNS and said(GOMP_SPINCOUNT="7") == "7" and said(OMP_WAIT_POLICY="passive") == "None"


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_gives_its_workers_back_and_gets_others():
    code = """
import os, threading
from lengthwise.engine.native.workers import give_back
import torch
torch.set_num_threads(3)
def region():
    return torch.ones(1 << 20).exp().sum().item()
count = lambda: len(os.listdir("/proc/self/task"))
region()
before = count()
given = give_back()
for _ in range(1000):
    if count() < before: break
    threading.Event().wait(0.01)
print(int(given), before - count())
assert region() == region()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "3"}
    )
    assert done.stdout.split() == ["1", "2"], done.stdout + done.stderr
