"""A day of ServeGen's m-large, about 10^6 requests, in one process on one core: generated, simulated, its results made.

FCFS, Llama-3.1-8B on one H100, which serves the day at 11.6 requests/s in the mean and 41 in the fullest 10 min without a queue
that stays (prompts over 6,144 tokens, 0.13 %, are left out, as in workload=servegen). Each measurement is a process of its own.
CPU seconds are those of the process, threads included; `seconds` is wall time from start to end, imports included, to be taken
on a machine that does nothing else. `rss_mib` is the process's peak. Needs LENGTHWISE_DATA with ServeGen's two files.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from report import arguments, report

FILES = ("servegen_client_windows.parquet", "servegen_length_quantiles.parquet")
ENV = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def one(num_rows: int, duration: float) -> dict[str, float]:
    """Generate and simulate once in this process; CPU seconds by part, peak memory in MiB and what the run came to."""
    from lengthwise.engine.simulated import SimulatedClock
    from lengthwise.experiments.arrivals.replay import Replay
    from lengthwise.experiments.draw import draw
    from lengthwise.experiments.nodes import load_dataset, load_hardware, load_kv, load_policy, load_scheduler, make
    from lengthwise.experiments.recorder import Recorder
    from lengthwise.experiments.run import build
    from lengthwise.experiments.simulate import compose
    from lengthwise.experiments.source import WorkloadSource
    from lengthwise.sched import SLO, serve

    start = time.process_time()
    cfg = compose(policy="fcfs", workload="servegen", arrivals=Replay())
    cfg["workload"] |= {"num_rows": num_rows, "duration": duration}
    workload = draw(load_dataset(cfg), cfg["arrivals"], None, None, 0)
    generated = time.process_time()
    hardware, clock, recorder = load_hardware(cfg), SimulatedClock(), Recorder()
    executor = make(cfg["executor"])(clock=clock, cost=hardware.cost, output_lens=workload.output_len.tolist())
    scheduler = load_scheduler(cfg, load_policy(cfg), load_kv(cfg, hardware, workload.dataset))
    serve(WorkloadSource(workload, None, None, gate=False), scheduler, executor, clock, recorder)
    simulated = time.process_time()
    run = build(recorder, workload, slo=SLO(**cfg["slo"]), cost=hardware.cost, token_budget=cfg["limits"]["token_budget"])
    end = time.process_time()
    assert run.metrics["num_finished"] == len(workload) == scheduler.counts["finished"]
    return {
        "generate_cpu": generated - start,
        "simulate_cpu": simulated - generated,
        "results_cpu": end - simulated,
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "num_requests": len(workload),
        "num_steps": int(run.steps["num_steps"].sum()),
        "ttft_p99": float(run.metrics["ttft_p99"] or float("nan")),
        "late": clock.now - float(workload.arrival[-1]),  # how long after the last arrival the engine was done (s)
    }


def measure(num_rows: int, duration: float) -> dict[str, float]:
    start = time.perf_counter()
    command = [sys.executable, __file__, "one", str(num_rows), str(duration)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | ENV)
    result: dict[str, float] = json.loads(done.stdout)
    return {**result, "seconds": time.perf_counter() - start}


def main() -> None:
    args = arguments(__doc__ or "", repeats=3, rows=1_000_000, seconds=86_400)
    folder = os.environ.get("LENGTHWISE_DATA")
    missing = [name for name in FILES if not (folder and (Path(folder) / name).is_file())]
    if missing:
        sys.exit(f"needs {' and '.join(missing)} under LENGTHWISE_DATA ({folder or 'not set'})")
    runs = [measure(args.rows, args.seconds) for _ in range(args.repeats)]
    report({name: [run[name] for run in runs] for name in runs[0]}, args.json)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "one":
        print(json.dumps(one(int(sys.argv[2]), float(sys.argv[3]))))
    else:
        main()
