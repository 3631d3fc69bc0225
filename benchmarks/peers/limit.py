"""The least time that a point can take: in every step, weights and KV over read bandwidth, or FLOPs over GEMM rate.

Requests start first come, first served, as many as the concurrency, prompts whole; a step's decoding rows and new prompts share
one pass over the weights. Attention's own FLOPs, activations and embeddings of tokens are left out, so that the true limit is a
little lower.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from .job import Point


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama as the limit sees it. body: weights that every token passes; head: those that only emitted tokens do."""

    body: int
    head: int
    kv_numbers: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """From a config.json."""
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        dim = config.get("head_dim") or hidden // heads
        query, kv = heads * dim, config["num_key_value_heads"] * dim
        layer = 2 * hidden * query + 2 * hidden * kv + 3 * hidden * config["intermediate_size"]
        return cls(config["num_hidden_layers"] * layer, hidden * config["vocab_size"], config["num_hidden_layers"] * 2 * kv)

    @property
    def num_weights(self) -> int:
        return self.body + self.head


def least_seconds(point: Point, shape: Shape, weight_bytes: float, bandwidth: float, flops: float, kv_bytes: int = 2) -> float:
    """Seconds that `point` takes at the limit. bandwidth: bytes/s read; flops: FLOP/s; kv_bytes: of one number of KV."""
    waiting = deque(zip(map(len, point.prompts), point.output_lens, strict=True))
    running: list[tuple[int, int]] = []  # context, tokens left
    seconds = 0.0
    while waiting or running:
        context = sum(c for c, _ in running)
        body_tokens = emitted = len(running)
        running = [(c + 1, left - 1) for c, left in running if left > 1]
        while waiting and emitted < point.concurrency:
            prompt_len, output_len = waiting.popleft()
            body_tokens += prompt_len
            emitted += 1
            if output_len > 1:
                running.append((prompt_len + 1, output_len - 1))
        read = weight_bytes + context * shape.kv_numbers * kv_bytes
        work = 2 * (body_tokens * shape.body + emitted * shape.head)
        seconds += max(read / bandwidth, work / flops)
    return seconds


def least_rate(point: Point, *args: Any, **kwargs: Any) -> float:
    """Output tokens/s at the limit."""
    return sum(point.output_lens) / least_seconds(point, *args, **kwargs)
