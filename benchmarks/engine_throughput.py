"""Output tokens/s of the native engine, transformers, vLLM on the CPU and llama.cpp, in one run, beside the machine's limit.

Two models in bf16 (SmolLM2-135M; a random Llama of 198M), at 128 tokens in and out with 1, 8 and 32 requests, and 64 requests
of log-normal lengths at 8 and 32 at a time (peers/points.py). Everyone generates exactly the tokens asked for, greedily, from
the same token ids; the time holds prefill and leaves out loading, compiling and a warm-up. Each (system, model) is a child
process in an environment of its own (peers/setup.py makes them; what is not there is left out and so are its ratios).
Repetitions go round all systems, so that drift hits all alike. A run that is cut off goes on where it was: `--log`.

`ratio_MODEL_C`: ours over the faster of transformers and vLLM, each in its faster variant; `llamacpp_ratio_MODEL_C`: 8-bit
weights over llama.cpp's Q8_0; `limit_share_MODEL_C`: ours in bf16 over the limit (peers/limit.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from peers.job import Point
from peers.limit import Shape
from peers.models import MODELS, model_folder
from peers.points import POINTS, make_points
from peers.results import MACHINE, SYSTEMS, Log, digests, figures, limit_of
from peers.run import Run
from report import report

PEERS = Path(__file__).resolve().parent / "peers"


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    pythons = find_peers(args.peers)
    systems = [s for s in args.systems if s.split("_")[0] in pythons]
    for missing in sorted({s.split("_")[0] for s in args.systems} - pythons.keys()):
        print(f"{missing}: left out, no environment in {args.peers} (peers/setup.py makes it)")
    folders = {model: model_folder(model, args.models_folder) for model in args.models}
    configs = {model: json.loads((folder / "config.json").read_text()) for model, folder in folders.items()}
    shapes = {model: Shape.of(config) for model, config in configs.items()}
    points = {
        model: make_points(args.points, config["vocab_size"], config["max_position_embeddings"], args.quick)
        for model, config in configs.items()
    }
    log = Log(args.log, digests(points, args.threads))
    jobs = [(s, m, r) for r in range(args.repeat) for m in args.models for s in (MACHINE, *turned(systems, r))]
    run = Run(args, pythons, folders, points, shapes, log)
    print(f"about {run.left(jobs) / 60:.0f} minutes are left to measure; kept in {args.log}")
    if args.dry_run:
        return 0
    failed = run.all(jobs)
    samples = figures(log, points, shapes)
    if samples:
        report(samples, args.json)
    table(log, systems, points, shapes)
    for line in failed:
        print(f"failed: {line}")
    return int(bool(failed) or not samples)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2", "llama198m"])
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="short lengths, to see that it works")
    parser.add_argument("--log", type=Path, help="JSON lines, one a measurement; those there already are not measured again")
    parser.add_argument("--peers", type=Path, help="the folder that peers/setup.py was given")
    parser.add_argument("--models-folder", type=Path, help="where the random models are kept")
    parser.add_argument(
        "--give-up",
        type=float,
        default=0.85,
        metavar="SHARE",
        help="a peer's variant that in the first repetition reaches less than this share of its other variant is not repeated",
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for one child")
    parser.add_argument("--dry-run", action="store_true", help="only say how long it would take")
    args = parser.parse_args(argv)
    if args.log is None or args.peers is None or args.models_folder is None:
        from lengthwise.engine.native.cache import cache_dir

        args.peers = args.peers or cache_dir("peers")
        args.models_folder = args.models_folder or cache_dir("models", "benchmark")
        args.log = args.log or cache_dir("benchmark") / f"engine_throughput-{commit()}.jsonl"
    return args


def commit() -> str:
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=PEERS)
    return head.stdout.strip() or "unknown"


def find_peers(folder: Path) -> dict[str, str]:
    """Peer -> the Python to run it with."""
    index = folder / "peers.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    return {"transformers": sys.executable, "ours": sys.executable, **known}


def turned(systems: list[str], repetition: int) -> list[str]:
    """Another system first in each repetition."""
    at = repetition * len(systems) // 3 % max(len(systems), 1)
    return systems[at:] + systems[:at]


def table(log: Log, systems: Sequence[str], points: dict[str, list[Point]], shapes: dict[str, Shape]) -> None:
    """Print tokens/s and the share of the limit for the weights that each system reads."""
    for model, listed in points.items():
        print(f"\n{model}: output tokens/s (share of the limit)")
        print(f"{'':20}" + "".join(f"{p.name:>16}" for p in listed))
        for system in systems:
            cells = []
            for point in listed:
                rate = log.median(system, model, point.name)
                limit = limit_of(log, system, model, point, shapes[model]) if rate else None
                cells.append("" if rate is None else f"{rate:.1f}" + (f" ({rate / limit:.0%})" if limit else ""))
            print(f"{system:20}" + "".join(f"{cell:>16}" for cell in cells))
        limits = [limit_of(log, "ours_eager", model, point, shapes[model]) for point in listed]
        print(f"{'limit, bf16':20}" + "".join(f"{'' if x is None else f'{x:.1f}':>16}" for x in limits))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a child is ended too
    sys.exit(main())
