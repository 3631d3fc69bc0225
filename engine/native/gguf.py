"""GGUF files, converted once: weights as fp32 safetensors, tokenizer and chat template beside them, in the cache.

transformers reads a GGUF in half a minute and what it has read cannot be saved; the copy made here loads in seconds. Values are
those of the file's quantised numbers, so nothing is lost by keeping fp32, from which any precision is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from .cache import cache_dir
from .checkpoint import read, read_weights

log = logging.getLogger(__name__)

FORM = 1  # raise it when what is written changes
HEAD = 1 << 24  # bytes at either end of a file that its key covers


def converted(path: Path) -> Path:
    """The folder that holds `path` (a GGUF file) as transformers saves a model; made on the first call, which several
    processes may make at once. Raises ValueError when the file is no GGUF that transformers can read."""
    if not path.is_file():
        raise ValueError(f"there is no GGUF file {path}")
    target = cache_dir("models") / f"{path.stem}-{key_of(path)}"
    if target.is_dir():
        return target
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(
            f"{path.name} is a GGUF file; transformers reads it with: pip install {' '.join(missing)} (extra `native`)"
        )
    log.info("converting %s, once, into %s", path.name, target)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.stem}-", dir=target.parent))
    quiet = contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
    try:
        with quiet:  # transformers' progress bars look at no terminal
            convert(path, scratch)
        try:
            os.rename(scratch, target)
        except OSError:
            if not target.is_dir():  # else another process was first
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def key_of(path: Path) -> str:
    """Of the file's size and both its ends: the head holds all names and the tokenizer, and what follows is weights."""
    size = path.stat().st_size
    digest = hashlib.sha256(f"{FORM} {size} ".encode())
    with path.open("rb") as file:
        digest.update(file.read(HEAD))
        file.seek(max(size - HEAD, 0))
        digest.update(file.read(HEAD))
    return digest.hexdigest()[:16]


def convert(path: Path, folder: Path) -> None:
    """Write `path` into `folder` as safetensors with its configuration and tokenizer. Raises ValueError for one that
    transformers cannot read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        found = read_weights(AutoModelForCausalLM, str(path.parent), dtype=torch.float32, **given)
        tokenizer = read(AutoTokenizer, str(path.parent), **given)
    except ValueError as error:
        raise ValueError(
            f"transformers cannot read {path.name} ({path.stat().st_size:,} bytes, is it whole?): {error}"
        ) from error
    config = found.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # with it nothing can be saved
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config, dtype=torch.float32)
    model.load_state_dict(found.state_dict(), strict=False, assign=True)
    model.tie_weights()
    left = sorted(name for name, tensor in model.named_parameters() if tensor.is_meta)
    if left:
        raise ValueError(f"{path.name} has no weights for {', '.join(left[:3])} ({len(left)} in all)")
    if found.generation_config is not None:
        model.generation_config = found.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
