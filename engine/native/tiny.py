"""Tiny random models of many architectures, made in place: for tests and for trying the engine without a download.

Weights are drawn wide enough that attention is not flat and greedy outputs vary: with the usual small ones a wrong position
or a lost block would hardly change a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .loading import device_of, dtype_of, shared_by
from .model import ServedModel

LLAMA = {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
WINDOWED = {**LLAMA, "sliding_window": 32, "head_dim": 16}
FULL, SLIDING = "full_attention", "sliding_attention"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # name: (model_type, what is not the default)
    "llama": ("llama", LLAMA),
    "qwen2": ("qwen2", LLAMA),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 16}),
    "mistral": ("mistral", WINDOWED),
    "gemma": ("gemma", {**LLAMA, "head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": (
        "gemma2",
        {**WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "gemma3_text",
        {**WINDOWED, "num_hidden_layers": 3, "query_pre_attn_scalar": 16, "layer_types": [SLIDING, SLIDING, FULL]},
    ),
    "phi3": ("phi3", {**LLAMA, "pad_token_id": 0}),
    "olmo2": ("olmo2", LLAMA),
    "opt": ("opt", {"ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64}),
    "gpt2": ("gpt2", {"n_layer": 2, "n_head": 4}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "granite": ("granite", {**LLAMA, "logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7}),
    "starcoder2": ("starcoder2", {**LLAMA, "sliding_window": 24}),
    "cohere": ("cohere", {**LLAMA, "logit_scale": 0.25, "pad_token_id": 0}),
    "phi": ("phi", {**LLAMA, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def tiny(
    family: str = "llama",
    seed: int = 0,
    dtype: str = "fp32",
    device: str = "cpu",
    vocab_size: int = 128,
    hidden_size: int = 64,
    max_positions: int = 2048,
    eos_token_id: int | None = None,
    verify: bool = False,
    tensor_parallel: int = 1,
    **config: Any,
) -> ServedModel:
    """A random model of `family` (a key of FAMILIES), the same for the same arguments, without a tokenizer. config: further
    fields of its configuration. eos_token_id None: nothing ends a text. tensor_parallel: see load_model. Raises ValueError for
    a family, dtype or device not known."""
    shape = {"vocab_size": vocab_size, "hidden_size": hidden_size, "max_positions": max_positions, **config}
    if tensor_parallel != 1:
        load = partial(tiny, family, seed, dtype, eos_token_id=eos_token_id, verify=verify, **shape)
        return shared_by(tensor_parallel, device, load)
    made = tiny_model(family, seed, dtype, device, eos_token_id=eos_token_id, **shape)
    return ServedModel(made, name=f"tiny-{family}", verify=verify)


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    dtype: str = "fp32",
    device: str = "cpu",
    vocab_size: int = 128,
    hidden_size: int = 64,
    max_positions: int = 2048,
    eos_token_id: int | None = None,
    **config: Any,
) -> PreTrainedModel:
    """The transformers model behind `tiny`, as its library makes it."""
    if family not in FAMILIES:
        raise ValueError(f"family {family!r} is not one of {', '.join(FAMILIES)}")
    kept, place = dtype_of(dtype), device_of(device)
    kind, fields = FAMILIES[family]
    made = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "max_position_embeddings": max_positions,
            "bos_token_id": None,
            "eos_token_id": eos_token_id,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            **fields,
            **config,
        },
    )
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        model: Any = auto.from_config(made, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                parameter.copy_(noise * (2.0 / parameter.shape[-1] ** 0.5))
            else:
                parameter.add_(noise * 0.1)  # norms and biases stay near what they begin with
    served: PreTrainedModel = model.to(device=place, dtype=kept).eval()
    return served
