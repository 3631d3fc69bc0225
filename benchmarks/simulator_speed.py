"""Requests simulated per CPU second, recorder included, on Azure-conversation-like lengths (mean 879 in, 228 out).

Poisson arrivals at 4/s and 12/s, Llama-3.1-8B on one H100, FCFS and SRPT (noisy oracle). Each measurement is a process of its
own, so that memory is that run's and nothing is warm. `cost_ratio_1e6_1e4` is CPU time a request at 10^6 requests over that at
10^4 (FCFS, 4/s); `rss_mib_1e6` the greater peak of the 10^6 runs. `fast_forward_ratio_4rps` is CPU time with every step planned
singly over that with fast-forward (FCFS, same results bit for bit).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from report import arguments, report


def one(policy: str, rate: float, num_requests: int, fast_forward: bool = True) -> dict[str, float]:
    """Simulate once in this process; CPU seconds of the run (arrivals to columns) and peak memory in MiB."""
    from lengthwise.engine.simulated import SimulatedClock, SimulatedExecutor
    from lengthwise.experiments.draw import draw, stream
    from lengthwise.experiments.nodes import load_dataset, load_hardware, load_kv, load_policy, load_scheduler, make
    from lengthwise.experiments.recorder import Recorder
    from lengthwise.experiments.simulate import compose
    from lengthwise.experiments.source import WorkloadSource
    from lengthwise.sched import serve

    predictor = "none" if policy == "fcfs" else "noisy_oracle"
    cfg = compose(policy=policy, predictor=predictor, workload="azure_conv_like", rate=rate, num_requests=num_requests)
    workload = draw(load_dataset(cfg), make(cfg["arrivals"]), num_requests, rate, 0, resample=True)
    predictions = None
    if predictor != "none":
        predictions = make(cfg["predictor"]).from_truth(workload.output_len, stream(0, "predictor"))
    hardware = load_hardware(cfg)
    clock = SimulatedClock()
    executor = SimulatedExecutor(clock, hardware.cost, workload.output_len.tolist(), fast_forward=fast_forward)
    scheduler = load_scheduler(cfg, load_policy(cfg), load_kv(cfg, hardware, workload.dataset))
    start = time.process_time()
    recorder = Recorder()
    serve(WorkloadSource(workload, predictions, None, gate=predictions is not None), scheduler, executor, clock, recorder)
    requests, _ = recorder.requests(), recorder.steps()
    cpu = time.process_time() - start
    assert len(requests["rid"]) == num_requests == scheduler.counts["finished"]
    return {"cpu": cpu, "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measure(policy: str, rate: float, num_requests: int, *options: str) -> dict[str, float]:
    command = [sys.executable, __file__, "one", policy, str(rate), str(num_requests), *options]
    result: dict[str, float] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return result


def main() -> None:
    args = arguments(__doc__ or "", repeats=5, requests=20_000, large=1_000_000, large_repeats=3)
    samples: dict[str, list[float]] = {}
    for rate in (4, 12):
        for policy in ("fcfs", "srpt"):
            runs = [measure(policy, rate, args.requests) for _ in range(args.repeats)]
            samples[f"{policy}_{rate}rps_requests_per_cpu_s"] = [args.requests / r["cpu"] for r in runs]
    single = [measure("fcfs", 4, args.requests, "single-steps")["cpu"] for _ in range(args.repeats)]
    fast = sorted(args.requests / x for x in samples["fcfs_4rps_requests_per_cpu_s"])[args.repeats // 2]
    samples["fast_forward_ratio_4rps"] = [cpu / fast for cpu in single]
    small = sorted(measure("fcfs", 4, args.large // 100)["cpu"] for _ in range(args.repeats))[args.repeats // 2]
    large = [measure("fcfs", 4, args.large) for _ in range(args.large_repeats)]
    other = [measure("srpt", 12, args.large) for _ in range(args.large_repeats)]
    samples["cost_ratio_1e6_1e4"] = [r["cpu"] / 100 / small for r in large]
    samples["rss_mib_1e6"] = [max(a["rss_mib"], b["rss_mib"]) for a, b in zip(large, other, strict=True)]
    report(samples, args.json)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "one":
        print(json.dumps(one(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), "single-steps" not in sys.argv)))
    else:
        main()
