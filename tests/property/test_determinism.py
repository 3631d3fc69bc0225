"""Same seed, same bytes: in a new process, whatever PYTHONHASHSEED."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from harness import POLICIES

from lengthwise.sched.contract import hostile, rehearse

TESTS = Path(__file__).resolve().parents[1]


def digest() -> str:
    """A hash over the logs of 40 hostile runs, one for each policy."""
    text = hashlib.sha256()
    for i, (name, make) in enumerate(POLICIES.items()):
        log, scheduler = rehearse(make(), hostile(np.random.default_rng([7, i])))
        ends = list(log.ended_at.items())  # in the order of the ends
        text.update(repr((name, log.steps, ends, scheduler.num_preemptions, scheduler.recomputed_tokens)).encode())
    return text.hexdigest()


def test_a_new_process_with_another_hash_seed_writes_the_same_bytes():
    code = "import importlib.util as u, sys; s = u.spec_from_file_location('here', sys.argv[1]); m = u.module_from_spec(s); "
    code += "s.loader.exec_module(m); print(m.digest())"
    found = {digest()}
    for seed in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS)}
        run = subprocess.run([sys.executable, "-c", code, __file__], env=env, capture_output=True, text=True, check=True)
        found.add(run.stdout.strip())
    assert len(found) == 1, found
