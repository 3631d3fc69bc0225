"""The server that clients are measured against: `lengthwise serve` as a process of its own, and its own times of its requests.

Its counters give exact sums: what they grew by while a client ran is of that client's requests alone.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from .group import group
from .load import Times

LENGTHWISE = [sys.executable, "-c", "import sys; from lengthwise.cli import main; sys.exit(main(sys.argv[1:]))"]
START = 300.0  # s that a model may take to be converted, loaded and verified
TPOT, E2E, DECODE = (
    f"vllm:{name}_seconds" for name in ("request_time_per_output_token", "e2e_request_latency", "request_decode_time")
)
BAD = ("lengthwise_rejected", *(f"vllm:request_success_total{reason}" for reason in ("error", "timeout")))


class Server(NamedTuple):
    url: str
    model: str


@contextlib.contextmanager
def serving(log: Path, *overrides: str) -> Iterator[Server]:
    """On a free port until the block ends; what it prints goes to `log`. Raises RuntimeError where it does not start."""
    command = [*LENGTHWISE, "serve", "server.port=0", *overrides]
    with log.open("w") as file, group(command, file, subprocess.STDOUT) as child:
        yield started(child, log)


def started(child: subprocess.Popen[bytes], log: Path) -> Server:
    end = time.monotonic() + START
    while time.monotonic() < end and child.poll() is None:
        if found := re.search(r"^serving (\S+) at (http://\S+) ", log.read_text(), re.MULTILINE):
            return Server(found[2], found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the server does not start:\n{log.read_text()}")


def counters(url: str) -> dict[str, float]:
    """What it has counted, by name, and by reason or kind where there are several."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        sample.name + "".join(sample.labels.get(label, "") for label in ("finished_reason", "kind")): sample.value
        for family in families for sample in family.samples if "le" not in sample.labels
    }  # fmt: skip


def between(before: dict[str, float], after: dict[str, float]) -> Times:
    """Means over the requests that finished between two looks: to the first token, (last - first) / (tokens - 1), to the last.
    Those that their client gave up are left out. Raises ValueError where none finished, one failed or was refused."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    num = grown[E2E + "_count"]
    bad = {name: n for name, n in grown.items() if n and name.startswith(BAD)}
    if num == 0 or bad or grown[TPOT + "_count"] != num:
        raise ValueError(f"{num:g} requests finished, {grown[TPOT + '_count']:g} of more than one token; and there are {bad}")
    e2e, decode, tpot = (grown[name + "_sum"] / num for name in (E2E, DECODE, TPOT))
    return Times(int(num), e2e - decode, tpot, e2e)
