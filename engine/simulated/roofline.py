"""The smooth roofline: the matrix products of a step are bound by compute or by reading the weights, with a soft knee.

Everything but the knee is linear, and the knee depends on whole tokens only: its power is computed once per token count and
looked up from then on, so decode steps stay exactly linear in context and every path adds the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lengthwise.sched import INF, Chunk

from .check import not_negative, positive
from .cost import CostModel, HostOverhead
from .work import Work

MAX_SHARPNESS = 32.0  # beyond it a power of microseconds underflows to 0, and a step would be free


class Roofline(CostModel):
    """step = base + (compute^p + memory^p)^(1/p) + token x n + row x rows + [rows] decode + context / kv rate
    + sum over chunks of (chunk + attention_flops x length x (start + length / 2) / attention rate), in seconds.

    n: tokens of the step (decoding rows + chunk tokens). compute = flops_per_token x n / (peak_flops x compute_efficiency);
    memory = weight_bytes / (bandwidth x memory_efficiency); p = sharpness, from 1 (both added) to 32 (the greater alone).
    attention_flops: per pair of a query and a key, 4 x layers x heads x head dim. base, token, row, decode and chunk are
    seconds. `host` is added. A tensor-parallel group is one device with the sum of its peaks and bandwidths; what its
    all-reduces take is in base and token. Williams et al., "Roofline" (CACM 2009), made smooth.

    Utilisation by `work` is at most 1 where the efficiencies are, a token's `token` seconds cover the writing of its KV, and
    reading a token's KV takes longer than attending it: then every byte and operation counted has its time in the step.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        weight_bytes: float,
        kv_bytes_per_token: float,
        attention_flops: float,
        peak_flops: float,
        bandwidth: float,
        compute_efficiency: float,
        memory_efficiency: float,
        kv_efficiency: float,
        attention_efficiency: float,
        sharpness: float,
        base: float = 0.0,
        token: float = 0.0,
        row: float = 0.0,
        decode: float = 0.0,
        chunk: float = 0.0,
        host: HostOverhead | None = None,
        fitted_range: Mapping[str, float] | None = None,
    ) -> None:
        positive(
            peak_flops=peak_flops, bandwidth=bandwidth, compute_efficiency=compute_efficiency,
            memory_efficiency=memory_efficiency, kv_efficiency=kv_efficiency, attention_efficiency=attention_efficiency,
            sharpness=sharpness,
        )  # fmt: skip
        if not 1 <= sharpness <= MAX_SHARPNESS:
            raise ValueError(f"sharpness={sharpness} must be from 1 to {MAX_SHARPNESS}")
        not_negative(
            flops_per_token=flops_per_token, weight_bytes=weight_bytes, kv_bytes_per_token=kv_bytes_per_token,
            attention_flops=attention_flops, base=base, token=token, row=row, decode=decode, chunk=chunk,
        )  # fmt: skip
        self.host = host or HostOverhead()
        self.work = Work(flops_per_token, weight_bytes, kv_bytes_per_token, attention_flops, peak_flops, bandwidth)
        self.compute = flops_per_token / (peak_flops * compute_efficiency)  # s per token
        self.memory = weight_bytes / (bandwidth * memory_efficiency)  # s
        self.per_context = kv_bytes_per_token / (bandwidth * kv_efficiency)  # s per token attended
        self.per_attention = attention_flops / (peak_flops * attention_efficiency)  # s per pair of tokens
        self.sharpness, self.token = sharpness, token
        self.base = base + self.host.step
        self.row = row + self.host.row
        self.decode = decode
        self.chunk = chunk + self.host.row
        self._set_range(fitted_range)
        self._products: dict[int, float] = {}  # tokens -> s; filled as needed, always by the same scalar expression
        self._lines: dict[int, tuple[float, float, float]] = {}  # rows -> decode line

    def decode_line(self, num_rows: int, context: float) -> tuple[float, float, float]:
        line = self._lines.get(num_rows)
        if line is None:
            a = self.base + self._product(num_rows) + self.row * num_rows + (self.decode if num_rows else 0.0)
            line = self._lines[num_rows] = (a, self.per_context, INF)
        return line

    def step(self, num_rows: int, context: float, chunks: Sequence[Chunk]) -> float:
        n, work = num_rows, 0.0
        for _, start, length, _ in chunks:
            n += length
            work += length * (start + length / 2)
        product = self._products.get(n)
        if product is None:
            product = self._product(n)
        t = self.base + product + self.row * num_rows + (self.decode if num_rows else 0.0)
        return t + self.per_context * context + self.chunk * len(chunks) + self.per_attention * work

    def _product(self, n: int) -> float:
        p = self.sharpness
        t: float = ((self.compute * n) ** p + self.memory**p) ** (1 / p) + self.token * n
        self._products[n] = t
        return t
