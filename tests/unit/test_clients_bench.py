"""Other load clients beside ours: what the counters say of the requests between two looks, in a client's terms."""

from __future__ import annotations

import importlib
import os
import select
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REQUESTS = [(0.5, 3.6, 32), (0.1, 1.65, 32), (0.3, 3.4, 32)]  # first and last token after s, tokens


@pytest.fixture
def clients(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(f"clients.{name}") for name in ("server", "load", "guidellm", "run")}


def counted(requests, **others):
    def histogram(name, values):
        return {f"vllm:{name}_seconds_sum": sum(values), f"vllm:{name}_seconds_count": float(len(values))}

    return {
        **histogram("e2e_request_latency", [last for _, last, _ in requests]),
        **histogram("request_decode_time", [last - first for first, last, _ in requests]),
        **histogram("request_time_per_output_token", [(last - first) / (n - 1) for first, last, n in requests]),
        "vllm:request_success_totalerror": 0.0, **others,
    }  # fmt: skip


def test_means_are_of_the_requests_between_two_looks(clients):
    ours = clients["server"].between(counted(REQUESTS[:1]), counted(REQUESTS))
    assert ours.num == 2
    assert (ours.ttft, ours.tpot, ours.e2e) == pytest.approx((0.2, 0.075, 2.525))
    theirs = clients["guidellm"].expected(ours, clients["load"].Load(output_len=32))
    assert theirs.tpot == pytest.approx((1.65 / 32 + 3.4 / 32) / 2) and theirs.ttft == ours.ttft


@pytest.mark.parametrize("name", ["vllm:request_success_totalerror", "lengthwise_rejected_totalfull"])
def test_requests_that_were_not_served_are_no_comparison(clients, name):
    with pytest.raises(ValueError, match=name):
        clients["server"].between(counted(REQUESTS[:1]), counted(REQUESTS, **{name: 1.0}))


def test_nothing_is_no_comparison(clients):
    with pytest.raises(ValueError, match="0 requests finished"):
        clients["server"].between(counted(REQUESTS), counted(REQUESTS))


@pytest.fixture
def held(tmp_path):
    """(shell code that holds a pipe open in a process that it starts, whether all who held it are gone)."""
    path = tmp_path / "held"
    os.mkfifo(path)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def gone():
        assert select.select([fd], [], [], 10)[0] and os.read(fd, 9) == b"up\n"
        return bool(select.select([fd], [], [], 10)[0]) and os.read(fd, 9) == b""

    yield f"exec 3>{path}; echo up >&3; sleep 30 & ", gone
    os.close(fd)


def test_nothing_is_left_of_a_client_that_takes_too_long(clients, held, monkeypatch, tmp_path):
    run, (code, gone) = clients["run"], held
    monkeypatch.setattr(run, "counters", lambda url: {})
    monkeypatch.setattr(run, "tokenizer", lambda: tmp_path)
    monkeypatch.setattr(run, "LIMIT", 1.0)
    monkeypatch.setitem(run.CLIENTS, "slow", SimpleNamespace(command=lambda *_: ["sh", "-c", code + "wait"]))
    with pytest.raises(subprocess.TimeoutExpired):
        run.measured("slow", tmp_path, clients["server"].Server("http://t", "m"), clients["load"].Load(), tmp_path / "out")
    assert gone()


def test_a_server_that_does_not_leave_is_killed(clients, held, monkeypatch, tmp_path):
    code, gone = held
    words = f"trap '' TERM; {code} echo 'serving m at http://t policy=fcfs'; while :; do sleep 0.1; done"
    monkeypatch.setattr(clients["server"], "LENGTHWISE", ["sh", "-c", words])
    monkeypatch.setattr(importlib.import_module("clients.group"), "PATIENCE", 0.3)
    with clients["server"].serving(tmp_path / "log") as server:
        assert server == ("http://t", "m")
    assert gone()
