"""Write a Llama folder as GGUF, Q8_0 or Q4_K_M, for llama.cpp. Runs in llama.cpp's environment: `quantise.py FOLDER TYPE OUT`.

Numbers are quantised by ggml's own `ggml_quantize_chunk`, which the library of xllamacpp exports. Which tensor gets which type
follows llama.cpp's rule for a Llama: in Q4_K_M, values and half of the down projections are Q6_K, as is the tied embedding, and
rows that 256 does not divide fall back (Q4_K to Q5_0, Q6_K to Q8_0), which in SmolLM2 is nearly all of them.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

import gguf
import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Type

FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q6_K: Type.Q8_0}
FILE_TYPES = {"q8_0": gguf.LlamaFileType.MOSTLY_Q8_0, "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M}


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of the safetensors files, as float32."""
    made = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        head_len = int(data[:8].view(np.uint64)[0])
        base = 8 + head_len
        for name, entry in json.loads(bytes(data[8:base])).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            raw = data[base + start : base + end]
            if entry["dtype"] == "BF16":
                numbers = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            elif entry["dtype"] in ("F32", "F16"):
                numbers = raw.view(np.float32 if entry["dtype"] == "F32" else np.float16).astype(np.float32)
            else:
                raise ValueError(f"{name}: dtype {entry['dtype']}")
            made[name] = numbers.reshape(entry["shape"])
    return made


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from rotary halves to rotary pairs, as ggml's Llama has them."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def type_of(name: str, layer: int, num_layers: int, row: int, wanted: str) -> Type:
    """The type of a matrix with rows of `row` numbers."""
    if wanted == "q8_0":
        return Type.Q8_0
    eighth = num_layers // 8
    more = layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2
    kind = Type.Q6_K if name == "token_embd.weight" or (more and ("attn_v" in name or "ffn_down" in name)) else Type.Q4_K
    return FALLBACK[kind] if row % 256 else kind


def quantise(numbers: np.ndarray, kind: Type) -> np.ndarray:
    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    rows, row = numbers.shape
    block, size = gguf.GGML_QUANT_SIZES[kind]
    source = np.ascontiguousarray(numbers, dtype=np.float32)
    target = np.empty((rows, row // block * size), dtype=np.uint8)
    written = library.ggml_quantize_chunk(
        ctypes.c_int(int(kind)), source.ctypes.data_as(ctypes.c_void_p), target.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(row), ctypes.c_void_p(None),
    )  # fmt: skip
    assert written == target.nbytes, (written, target.nbytes)
    return target


def write_vocabulary(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    types = [int(gguf.TokenType.UNUSED)] * vocab_size
    for word, i in made["model"]["vocab"].items():
        tokens[i], types[i] = word, int(gguf.TokenType.NORMAL)
    for added in made["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in made["model"]["merges"]])


def convert(folder: Path, wanted: str, out: Path) -> None:
    """Write `folder` to the file `out`. Raises ValueError for what is not a Llama."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"model type {config['model_type']!r}: only llama")
    layers, heads, kv_heads = (config[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"))
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta", 10_000.0)
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(FILE_TYPES[wanted])
    write_vocabulary(writer, folder, config["vocab_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    tied = config.get("tie_word_embeddings", False)
    for source, numbers in tensors(folder).items():
        if tied and source == "lm_head.weight":
            continue
        name = names.get_name(source, try_suffixes=(".weight",))
        if name is None:
            raise ValueError(f"tensor {source!r} has no place in GGUF")
        if "attn_q" in name or "attn_k" in name:
            numbers = interleave(numbers, heads if "attn_q" in name else kv_heads)
        if numbers.ndim == 1:
            writer.add_tensor(name, numbers)
        else:
            layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
            kind = type_of(name, layer, layers, numbers.shape[1], wanted)
            writer.add_tensor(name, quantise(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
