"""ServedModel: a Hugging Face decoder that computes packed batches. Its code runs as it is; only its attention is ours.

Shapes: N tokens, E tokens whose hidden state is wanted, V* vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .attention.backend import Attention
from .attention.interface import NAME, Attached, Current
from .batch import Batch
from .pool import LayerSpec, Pool
from .probe import choose_attention, finish, probe
from .verify import verify as compare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class ServedModel:
    """Owns `model`, which is put into eval mode and whose attention implementation is ours from now on.

    layers: what each attention layer keeps of a token, in order. max_positions: the longest sequence in tokens. widest: of the
    projections of a layer, in numbers. inner: the callable that computes hidden states (1, N, hidden); compiling replaces it.
    verify: compare with the model's own forward first (verify.py); `verified` is the error found. Raises ValueError, with the
    reason, for a model that the packed path cannot serve.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, name: str = "", verify: bool = False
    ) -> None:
        self.model = cast(Any, model)  # its methods carry no types
        self.model.eval()
        self.config: Any = model.config
        self.tokenizer = tokenizer
        self.name = name or type(model).__name__
        decoder = self.model.get_decoder()
        self.inner: Callable[..., Any] = decoder
        probed = probe(model, decoder)
        self.layers: list[LayerSpec] = probed.specs
        self.logit_scale, self.logit_cap = probed.logit_scale, probed.logit_cap
        self._modules = probed.modules
        self._current = Current()
        choose_attention(model, NAME)
        self.vocab_size = probed.vocab_size
        self.max_positions = max_positions(self.config)
        self.eos_ids = eos_ids(model, tokenizer, self.vocab_size)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        outer = {id(p) for part in ends for p in part.parameters()}
        inner = [p.shape for p in self.model.parameters() if p.dim() >= 2 and id(p) not in outer]
        self.widest = max(max(shape[-2:]) for shape in inner)
        self.num_params = sum(p.numel() for p in self.model.parameters())
        self.verified: float | None = None
        if verify:
            self.verified = compare(self)

    num_ranks = 1  # processes that share it

    @property
    def current_batch(self) -> Batch | None:
        """What is being computed, from within a forward."""
        return self._current.batch

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def weight_bytes(self) -> int:
        """As they are kept now: less once they are quantised."""
        return sum(t.numel() * t.element_size() for t in chain(self.model.parameters(), self.model.buffers()))

    def attach(self, attention: Attention, pools: Sequence[Pool]) -> None:
        """Let layer i keep its KV in pools[i], by `attention`. Raises ValueError unless there is one pool a layer."""
        if len(pools) != len(self.layers):
            raise ValueError(f"{len(pools)} pools for {len(self.layers)} layers")
        for module, spec, pool in zip(self._modules, self.layers, pools, strict=True):
            module.lengthwise = Attached(spec, attention, pool, self._current)  # type: ignore[assignment]

    def new_pools(self, attention: Attention, num_blocks: int, block_size: int, kv_dtype: str) -> list[Pool]:
        """Empty KV memory of every layer, attached; on all ranks, where there are several. Raises ValueError for what
        `attention` cannot do."""
        pools = [attention.new_pool(spec, num_blocks, block_size, kv_dtype, self.device) for spec in self.layers]
        ServedModel.attach(self, attention, pools)
        return pools

    def detach(self) -> None:
        """Let go of the pools."""
        for module in self._modules:
            if hasattr(module, "lengthwise"):
                del module.lengthwise

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Hidden states after the final norm of the tokens in batch.emit, (E, hidden). Mutates the attached pools."""
        self._current.batch = batch
        try:
            ids, positions = batch.token_ids[None], batch.positions[None]
            out = self.inner(input_ids=ids, position_ids=positions, use_cache=False, attention_mask=None)
            hidden: Tensor = out.last_hidden_state[0]
        finally:
            self._current.batch = None
        return hidden.index_select(0, batch.emit)

    def close(self) -> None:
        """Let go of pools and of whatever else runs for this model."""
        self.detach()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits (E, V*) of `hidden` (E, hidden), with the model's own scale and softcap."""
        return finish(self.model.get_output_embeddings()(hidden).float(), self.logit_scale, self.logit_cap)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the tokenizer puts around a text. Raises ValueError without one."""
        return list(self._tokenizer()(text).input_ids)

    def encode_chat(self, text: str) -> list[int]:
        """Prompt ids of a chat whose one user turn is `text`, up to where the answer begins; plain `encode` where the model has
        no chat template."""
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            return self.encode(text)
        turns = [{"role": "user", "content": text}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
        return [int(i) for i in ids]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        return str(self._tokenizer().decode(list(ids), skip_special_tokens=True))

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: it takes token ids only")
        return self.tokenizer


def max_positions(config: Any) -> int:
    """Longest sequence in tokens. Where RoPE changes its frequencies with the longest sequence of a forward, only as far as it
    does not: a packed request would else depend on its neighbours."""
    most = getattr(config, "max_position_embeddings", None)
    if most is None:
        raise ValueError(f"{type(config).__name__} states no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
            if original and original < most:
                log.warning("%s RoPE: served up to %d of %d positions", part["rope_type"], original, most)
                most = original
    return int(most)


def eos_ids(model: PreTrainedModel, tokenizer: Any, vocab_size: int) -> frozenset[int]:
    """Every id that ends a text: of the generation config, else of the config, and of the tokenizer."""
    found: set[int] = set()
    generation = getattr(model, "generation_config", None)
    given = getattr(generation, "eos_token_id", None)
    if given is None:
        given = getattr(model.config, "eos_token_id", None)
    for some in (given, getattr(tokenizer, "eos_token_id", None)):
        found.update(some if isinstance(some, list | tuple) else [] if some is None else [some])
    return frozenset(int(i) for i in found if 0 <= int(i) < vocab_size)
