"""Peer: vLLM on the CPU, offline `LLM.generate`. `vllm_compiled` is its default mode, `vllm_eager` has enforce_eager.

Left to itself it keeps one core for its scheduler and computes on the others, which on two cores is one; the job's `threads`
cores are given by name instead, none reserved. Intel's OpenMP, which comes with it, and tcmalloc where the system has it are
loaded first, as its manual says. Not called vllm.py: a script's folder comes first on the path.
"""

from __future__ import annotations

import ctypes.util
import dataclasses
import gc
import os
import sys
from pathlib import Path
from typing import Any

import job as protocol

BLOCK = 128  # its default on the CPU


class Vllm:
    def __init__(self, job: dict[str, Any]) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{protocol.threads(job) - 1}"
        os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "0"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        self.job = job
        points = [protocol.Point(**fields) for fields in job["points"]]
        self.most = max(p.concurrency for p in points)
        self.max_len = max(1024, -(-(max(p.longest for p in points) + 1) // BLOCK) * BLOCK)
        job["points"] = [dataclasses.asdict(p) for p in sorted(points, key=self.max_num_seqs, reverse=True)]
        self.weight_bytes = None
        self.llm: Any = None
        self.built = 0

    def max_num_seqs(self, point: protocol.Point) -> int:
        """What the engine of a point has. It is fixed when an engine is built, which takes a minute: points whose requests all
        run at once share the one with the most."""
        return self.most if len(point.prompts) <= point.concurrency else point.concurrency

    def prepare(self, point: protocol.Point) -> None:
        if self.built == self.max_num_seqs(point):
            return
        self.close()
        from vllm import LLM

        self.llm = LLM(
            model=self.job["model"],
            dtype={"bf16": "bfloat16", "fp32": "float32"}[self.job["dtype"]],
            max_num_seqs=self.max_num_seqs(point),
            max_model_len=self.max_len,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            enforce_eager=self.job["system"] == "vllm_eager",
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )
        self.built = self.max_num_seqs(point)

    def generate(self, point: protocol.Point) -> list[int]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": p} for p in point.prompts]
        params = [
            SamplingParams(temperature=0.0, max_tokens=n, min_tokens=n, ignore_eos=True, detokenize=False)
            for n in point.output_lens
        ]
        return [len(out.outputs[0].token_ids) for out in self.llm.generate(prompts, params, use_tqdm=False)]

    def close(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()


def preload() -> None:
    """Start this script anew with the libraries that must be loaded first, unless that was done or there are none."""
    libraries = [ctypes.util.find_library("tcmalloc_minimal"), *map(str, Path(sys.prefix, "lib").glob("libiomp5.so"))]
    wanted = ":".join(filter(None, libraries))
    if wanted and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "LD_PRELOAD": wanted})


if __name__ == "__main__":
    preload()
    protocol.run(Vllm)
