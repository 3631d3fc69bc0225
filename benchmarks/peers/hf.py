"""Peer: transformers. `transformers_static` is `generate` on batches; `transformers_batch` its continuous batching.

Static batches are `concurrency` requests in order, padded on the left, each as long as its longest; only the tokens asked for
count. Continuous batching goes through the manager behind `generate_batch`, which takes a length for each request
(`generate_batch` itself has one for all): the loop, the cache and the scheduler are the same.
"""

from __future__ import annotations

import math
from typing import Any

import job as protocol
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAGE = 256  # their default


def load_model(job: dict[str, Any]) -> Any:
    torch.set_num_threads(protocol.threads(job))
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=DTYPES[job["dtype"]], attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    return model


class Static:
    def __init__(self, job: dict[str, Any]) -> None:
        self.model = load_model(job)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

    def prepare(self, point: protocol.Point) -> None:
        pass

    @torch.inference_mode()
    def generate(self, point: protocol.Point) -> list[int]:
        lens = []
        for i in range(0, len(point.prompts), point.concurrency):
            prompts, wanted = point.prompts[i : i + point.concurrency], point.output_lens[i : i + point.concurrency]
            width, steps = max(map(len, prompts)), max(wanted)
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            out = self.model.generate(ids, attention_mask=mask, max_new_tokens=steps)
            lens += [min(n, out.shape[1] - width) for n in wanted]
        return lens

    def close(self) -> None:
        pass


class Continuous:
    def __init__(self, job: dict[str, Any]) -> None:
        self.model = load_model(job)
        self.weight_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.manager: Any = None

    def prepare(self, point: protocol.Point) -> None:
        self.close()
        cb = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=point.concurrency * math.ceil(point.longest / PAGE) + 8,
            max_batch_tokens=2048,
            max_requests_per_batch=point.concurrency,
            allow_block_sharing=False,
        )
        hints = WorkloadHints(
            max_prompt_length=max(map(len, point.prompts)),
            max_generated_length=max(point.output_lens),
            num_requests=len(point.prompts),
        )
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(point.output_lens))
        with torch.inference_mode():
            self.manager = self.model.init_continuous_batching(config, cb, hints)
            self.manager.warmup()
            self.manager.start()

    @torch.inference_mode()
    def generate(self, point: protocol.Point) -> list[int]:
        names = [
            self.manager.add_request(prompt, max_new_tokens=n, eos_token_id=-1)
            for prompt, n in zip(point.prompts, point.output_lens, strict=True)
        ]
        lens: dict[str, int] = {}
        while len(lens) < len(names):
            result = self.manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                lens[result.request_id] = len(result.generated_tokens)
            elif result is None and not self.manager.is_running():
                raise RuntimeError("the generation thread ended")
        return [lens[name] for name in names]

    def close(self) -> None:
        if self.manager is not None:
            self.manager.stop(block=True, timeout=10)
            self.manager.destroy()
            self.manager = None


def load(job: dict[str, Any]) -> protocol.System:
    return Static(job) if job["system"] == "transformers_static" else Continuous(job)


if __name__ == "__main__":
    protocol.run(load)
