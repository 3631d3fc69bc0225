"""ModelShape: the sizes of a dense decoder, whole and as one rank of a tensor-parallel group computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder in 2-byte numbers, split over `tp` ranks. Sizes in elements.

    Numbers of the whole group, unless a name says `rank`. gated: the feed-forward has a gate beside its up projection (Llama);
    without it (OPT, BLOOM) there are two products, not three. Raises ValueError where `tp` does not divide heads or widths:
    engines then copy KV heads to several ranks, which nothing here prices.
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    num_params: float
    tp: int = 1
    gated: bool = True

    def __post_init__(self) -> None:
        if self.tp < 1:
            raise ValueError(f"tp={self.tp} must be 1 or more")
        for name in ("num_heads", "num_kv_heads", "intermediate"):
            if getattr(self, name) % self.tp:
                raise ValueError(f"tp={self.tp} does not divide {name}={getattr(self, name)} of {self.name}")

    @property
    def rank_heads(self) -> tuple[int, int]:
        """(query heads, KV heads) of one rank."""
        return self.num_heads // self.tp, self.num_kv_heads // self.tp

    @property
    def products(self) -> list[tuple[int, int]]:
        """(n, k) of the matrix products of one layer on one rank: qkv, o, gate and up, down."""
        q, kv = (heads * self.head_dim for heads in self.rank_heads)
        wide = self.intermediate // self.tp
        return [(q + 2 * kv, self.hidden), (self.hidden, q), ((1 + self.gated) * wide, self.hidden), (self.hidden, wide)]

    @property
    def head(self) -> tuple[int, int]:
        """(n, k) of the head on one rank: its share of the vocabulary, rounded up."""
        return -(-self.vocab // self.tp), self.hidden

    @property
    def layer_params(self) -> int:
        return self.tp * self.num_layers * sum(n * k for n, k in self.products)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_flops(self) -> int:
        """Per pair of a query and a key, all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim

    @property
    def elementwise_bytes(self) -> int:
        """Bytes a token moves on one rank in a layer's fused elementwise kernels: two add + norm (whole on every rank), rotary
        + KV write, gated activation."""
        q, kv = (heads * self.head_dim for heads in self.rank_heads)
        return 2 * (2 * 4 * self.hidden + 2 * (q + 2 * kv) + 3 * self.intermediate // self.tp)


PRODUCTS = ("qkv", "o", "gate_up", "down")  # names of `products`, in order

MODELS = {
    "llama31_8b": ModelShape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14336, 128256, 8.03e9),
    "llama2_7b": ModelShape("Llama-2-7B", 32, 4096, 32, 32, 128, 11008, 32000, 6.738e9),
    "qwen25_7b": ModelShape("Qwen2.5-7B", 28, 3584, 28, 4, 128, 18944, 152064, 7.616e9),
    "qwen25_32b": ModelShape("Qwen2.5-32B", 64, 5120, 40, 8, 128, 27648, 152064, 3.2764e10),
    "qwen25_72b": ModelShape("Qwen2.5-72B", 80, 8192, 64, 8, 128, 29568, 152064, 7.2706e10),
    "llama2_70b": ModelShape("Llama-2-70B", 80, 8192, 64, 8, 128, 28672, 32000, 6.8977e10),
    "llama31_70b": ModelShape("Llama-3.1-70B", 80, 8192, 64, 8, 128, 28672, 128256, 7.0554e10),
    "opt_13b": ModelShape("OPT-13B", 40, 5120, 40, 40, 128, 20480, 50272, 1.2853e10, gated=False),
    "opt_66b": ModelShape("OPT-66B", 64, 9216, 72, 72, 128, 36864, 50272, 6.5717e10, gated=False),
    "bloom_176b": ModelShape("BLOOM-176B", 70, 14336, 112, 112, 128, 57344, 250880, 1.76247e11, gated=False),
}
