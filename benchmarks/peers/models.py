"""The two models of the throughput benchmark, as folders that every peer can load, and a tiny one to try the script with.

`llama198m` is random: speed does not depend on what the weights say. It has a byte-level tokenizer with made-up merges, because
llama.cpp loads no model without a vocabulary; prompts are token ids, so nothing depends on it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

MODELS = ("smollm2", "llama198m", "tiny")
LLAMA = {
    "llama198m": {
        "num_hidden_layers": 14, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32_000, "max_position_embeddings": 4096,
    },
    "tiny": {
        "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 2000, "max_position_embeddings": 1024,
    },
}  # fmt: skip


def model_folder(name: str, root: Path) -> Path:
    """The folder of model `name` in bf16, made on first use: below `root`, or where the loader keeps SmolLM2. Raises ValueError
    for a name that there is not, or with what is missing."""
    if name == "smollm2":
        from lengthwise.engine.native.gguf import converted
        from lengthwise.engine.native.loading import smollm2_file

        return converted(smollm2_file())
    if name not in LLAMA:
        raise ValueError(f"model {name!r}: one of {', '.join(MODELS)}")
    folder = root / name
    if not (folder / "config.json").exists():
        making = root / f"{name}.part"
        shutil.rmtree(making, ignore_errors=True)
        random_llama(making, LLAMA[name])
        making.rename(folder)
    return folder


def random_llama(folder: Path, shape: dict[str, int]) -> None:
    """Write a Llama with random bf16 weights, tied embeddings and the tokenizer into `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **shape, tie_word_embeddings=True, rms_norm_eps=1e-5, bos_token_id=0, eos_token_id=1, initializer_range=0.05
    )  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)


def tokenizer(vocab_size: int):  # type: ignore[no-untyped-def]
    """Byte-level pairs: two special tokens, the 256 bytes, then as many pairs of bytes as fit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(a, b) for a in alphabet for b in alphabet][: vocab_size - 2 - len(alphabet)]
    words = ["<s>", "</s>", *alphabet, *(a + b for a, b in merges)]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
