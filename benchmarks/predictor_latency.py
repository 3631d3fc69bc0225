"""What learned length predictors cost on ShareGPT: wall time of one prediction, and CPU time of out-of-fold training.

Each is also printed as a ratio to the TF-IDF ridge in the same run. Needs the extra `data`.
"""

from __future__ import annotations

import time

from report import arguments, report

from lengthwise.experiments.nodes import load_dataset, make
from lengthwise.experiments.simulate import compose
from lengthwise.predictors.profiling import profile_latency
from lengthwise.predictors.splits import out_of_fold


def main() -> None:
    args = arguments(__doc__ or "", repeats=3)
    samples: dict[str, list[float]] = {}
    for _ in range(args.repeats):
        cost: dict[str, dict[str, float]] = {}
        for name in ("ridge", "prompt_length", "gbdt"):
            cfg = compose(predictor=name, workload="sharegpt")
            data = load_dataset(cfg)
            start = time.process_time()
            out_of_fold(
                lambda node=cfg["predictor"]: make(node),
                data.asked(), data.output_len, data.censored, data.group,
            )  # fmt: skip
            spent = time.process_time() - start
            fitted = make(cfg["predictor"])
            fitted.fit(data.asked(), data.output_len, data.cut, group=data.group)
            profile = profile_latency(fitted, data.asked())
            cost[name] = {"single_ms": profile.single * 1e3, "batch64_ms": profile.batch * 1e3, "out_of_fold_cpu_s": spent}
        for name, figures in cost.items():
            for figure, value in figures.items():
                samples.setdefault(f"{name}_{figure}", []).append(value)
                if name != "ridge":
                    samples.setdefault(f"{name}_{figure}_ratio_to_ridge", []).append(value / cost["ridge"][figure])
    report(samples, args.json)


if __name__ == "__main__":
    main()
