"""Peer: llama.cpp's server in this process, through xllamacpp: `concurrency` slots, continuous batching, prompts as token ids.

The wheel on the registry is built for AVX2 (its `get_system_info` says so), not for the AVX-512 of newer machines.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import job as protocol
import xllamacpp


class Llama:
    def __init__(self, job: dict[str, Any]) -> None:
        self.path, self.threads = job["gguf"], protocol.threads(job)
        self.weight_bytes = os.path.getsize(self.path)
        self.server: Any = None
        self.slots = (0, 0)

    def prepare(self, point: protocol.Point) -> None:
        per_slot = -(-(point.longest + 8) // 256) * 256
        if self.slots == (point.concurrency, per_slot):
            return
        self.close()
        params = xllamacpp.CommonParams()
        params.model.path = self.path
        params.n_parallel, params.n_ctx = point.concurrency, point.concurrency * per_slot
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self.threads
        params.n_gpu_layers = 0
        params.cont_batching = True
        params.cache_prompt = False
        params.cache_ram_mib = 0
        params.fit_params = False
        params.ui = False
        self.server = xllamacpp.Server(params)
        self.slots = (point.concurrency, per_slot)

    def complete(self, prompt: list[int], num_tokens: int) -> int:
        wanted = {
            "prompt": prompt, "n_predict": num_tokens, "max_tokens": num_tokens, "temperature": 0.0, "top_k": 1,
            "ignore_eos": True, "cache_prompt": False,
        }  # fmt: skip
        answer = self.server.handle_completions(wanted)
        if "usage" not in answer:
            raise RuntimeError(str(answer)[:300])
        return int(answer["usage"]["completion_tokens"])

    def generate(self, point: protocol.Point) -> list[int]:
        with ThreadPoolExecutor(point.concurrency) as pool:
            return list(pool.map(self.complete, point.prompts, point.output_lens))

    def close(self) -> None:
        self.server = None


if __name__ == "__main__":
    protocol.run(Llama)
