"""The host's share of a step, and the time from the start of Python to the first token.

Steps: C requests decode at a context of about 192 tokens in bf16, by the real scheduler, executor and recorder, timed as
`lengthwise profile` times them (experiments/profile.py): plan; executor, which is input preparation, greedy sampling and
bookkeeping, all of submit and collect but the forward; book; and the forward, the LM head included. Medians of at least 100
steps in each round; rounds go over eager (packed linears) and compiled in turn. `host_share_MODEL_C` is all but the forward
over the whole step, `host_share_MODEL_compiled_C` the same of the compiled decoder.

Start-up: a child process loads the model with its tokenizer, verified as it is by default, and answers one short chat with one
token; the time is the parent's, from before the child is there. What is made once (converted weights, kernels, the compiled
decoder) and the file cache are warm: each has a run before that does not count. Beside it transformers in the same round, the
same folder and precision, `generate` of one token: `startup_MODEL_eager_ratio` is ours over theirs. MODELs: peers/models.py.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers.models import MODELS, model_folder
from report import report

CONTEXT, BLOCK = 192, 16  # tokens
PROMPT = "What is the capital of France?"
Samples = dict[str, list[float]]


def served(name: str, folder: Path) -> Any:
    """A bf16 ServedModel as `model=smollm2` or `model=hf` loads it."""
    from lengthwise.engine.native.loading import load_model, smollm2

    return smollm2() if name == "smollm2" else load_model(str(folder))


def first_token_ours(name: str, folder: Path, compiled: bool) -> int:
    from lengthwise.engine.native.engine import NativeEngine
    from lengthwise.engine.native.generate import generate

    engine = NativeEngine(served(name, folder), compiled=compiled)
    (answer,) = generate(engine, [engine.model.encode_chat(PROMPT)], 1)
    return answer.token_ids[0]


def first_token_transformers(name: str, folder: Path) -> int:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": PROMPT}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        ids = tokenizer(PROMPT).input_ids
    given = torch.tensor([ids])
    with torch.inference_mode():
        out = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=1, do_sample=False, pad_token_id=0)
    return int(out[0, -1])


STARTS: dict[str, Callable[[str, Path], int]] = {
    "eager": lambda name, folder: first_token_ours(name, folder, False),
    "compiled": lambda name, folder: first_token_ours(name, folder, True),
    "transformers": first_token_transformers,
}


def start_seconds(args: argparse.Namespace, way: str) -> float:
    """From before a Python that loads and answers by `way` is started to its first token. Raises RuntimeError if it fails."""
    options = ["--model", args.model, "--models-folder", str(args.models_folder)]
    options += [] if args.threads is None else ["--threads", str(args.threads)]
    command = [sys.executable, __file__, "--first-token", way, *options]
    with tempfile.TemporaryFile("w+") as errors:
        begun = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child:
            assert child.stdout is not None
            said = child.stdout.readline()
            seconds = time.perf_counter() - begun
        if child.returncode or not said.strip().isdecimal():
            errors.seek(0)
            raise RuntimeError(f"{way} gave no token: {errors.read()[-2000:]}")
    return seconds


def startup(args: argparse.Namespace, samples: Samples) -> None:
    ways = [*args.modes, "transformers"]
    for way in ways:
        start_seconds(args, way)
    for _ in range(args.repeats):
        seconds = {way: start_seconds(args, way) for way in ways}
        for way, took in seconds.items():
            samples.setdefault(f"startup_{args.model}_{way}_s", []).append(took)
            if way != "transformers":
                ratio = took / seconds["transformers"]
                samples.setdefault(f"startup_{args.model}_{way}_ratio", []).append(ratio)


def steps(args: argparse.Namespace, samples: Samples) -> None:
    from lengthwise.engine.native.engine import NativeEngine
    from lengthwise.engine.simulated.kernels import Batch
    from lengthwise.experiments.profile import Bench, pool_need

    folder = model_folder(args.model, args.models_folder)
    states = {c: Batch(c, c * (CONTEXT - args.steps // 2), ()) for c in args.concurrency}
    room = max(pool_need(state, BLOCK, args.steps) for state in states.values())
    benches = {}
    for mode in args.modes:
        engine = NativeEngine(served(args.model, folder), compiled=mode == "compiled")
        benches[mode] = Bench(engine, room, max(args.concurrency), BLOCK)
        print(f"{mode}: {engine.linears} linear layers, attention {engine.attention.name}")
    for _ in range(args.repeats):
        for mode, bench in benches.items():
            for c, state in states.items():
                turns = bench.turns(state, args.steps)
                name = f"{args.model}_{c}" if mode == "eager" else f"{args.model}_{mode}_{c}"
                found = {
                    "plan_us": [1e6 * turn.planning for turn in turns],
                    "executor_us": [1e6 * turn.executor for turn in turns],
                    "book_us": [1e6 * turn.booking for turn in turns],
                    "forward_ms": [1e3 * (turn.total - turn.host) for turn in turns],
                    "step_ms": [1e3 * turn.total for turn in turns],
                    "host_share": [turn.host / turn.total for turn in turns],
                }
                for figure, values in found.items():
                    samples.setdefault(f"{figure}_{name}", []).append(statistics.median(values))


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.threads is not None:
        import torch

        torch.set_num_threads(args.threads)
    if args.first_token:
        print(STARTS[args.first_token](args.model, model_folder(args.model, args.models_folder)), flush=True)
        return
    samples: Samples = {}
    if "steps" in args.parts:
        steps(args, samples)
    if "startup" in args.parts:
        startup(args, samples)
    report(samples, args.json)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine, commit, n, figures and spread here")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--parts", nargs="+", choices=("steps", "startup"), default=["steps", "startup"])
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=100, help="timed in each round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds")
    parser.add_argument("--threads", type=int, help="of the CPU; as torch has them")
    parser.add_argument("--quick", action="store_true", help="one round of ten steps, to see that it works")
    parser.add_argument("--models-folder", type=Path, help="where the random models are kept")
    parser.add_argument("--first-token", choices=STARTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.quick:
        args.steps, args.repeats = 10, 1
    if args.models_folder is None:
        from lengthwise.engine.native.cache import cache_dir

        args.models_folder = cache_dir("models", "benchmark")
    return args


if __name__ == "__main__":
    main()
