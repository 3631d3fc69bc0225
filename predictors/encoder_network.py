"""EncoderNetwork: a tokenizer and a transformer with a small head, from a checkpoint or an artefact: texts in, numbers out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from transformers.utils import logging as said

from .predictor import State

Floats = NDArray[np.float64]
_UNREADABLE = (OSError, ValueError, KeyError, ImportError, RuntimeError)
_WEIGHT = "weight/"  # before a weight's name among an artefact's arrays


class EncoderNetwork:
    """model: a transformers model for sequence classification, whose num_labels are the outputs; a long text keeps
    `max_tokens` of its tokens, `truncation_side` ("left" or "right") being cut. hidden: widths of layers before the outputs."""

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        pad: int,
        *,
        max_tokens: int,
        truncation_side: str,
        hidden: Sequence[int],
        device: str,
    ) -> None:
        most = getattr(model.config, "max_position_embeddings", None) or max_tokens
        if max_tokens > most:
            raise ValueError(f"max_tokens={max_tokens}: {type(model).__name__} has positions for {most}")
        if hidden:
            put_before(model, hidden)
        tokenizer.no_padding()
        tokenizer.enable_truncation(max_tokens, direction=truncation_side)
        self.tokenizer, self.pad, self.device = tokenizer, pad, torch.device(device)
        self.model = model.to(self.device)

    @classmethod
    def from_checkpoint(cls, origin: str, num_outputs: int, **shape: Any) -> EncoderNetwork:
        """Read `origin`, a folder or a name on the hub; the outputs' layers are drawn at random. shape: as the constructor's.

        Code that comes with a checkpoint is never run. Raises ValueError where it cannot be read.
        """
        verbosity = said.get_verbosity()
        said.set_verbosity(logging.ERROR)  # that the outputs' layers are new is no news; what else is missing is refused below
        try:
            tokenizer = AutoTokenizer.from_pretrained(origin, trust_remote_code=False)
            model, found = AutoModelForSequenceClassification.from_pretrained(
                origin, num_labels=num_outputs, dtype=torch.float32, trust_remote_code=False, output_loading_info=True
            )
        except _UNREADABLE as error:
            raise ValueError(f"model {origin!r} cannot be read: {str(error).strip().splitlines()[0]}") from error
        finally:
            said.set_verbosity(verbosity)
        inner = f"{model.base_model_prefix}."
        if missing := sorted(name for name in found["missing_keys"] if name.startswith(inner) and "pooler" not in name):
            raise ValueError(f"model {origin!r} has no weights for {', '.join(missing[:3])} ({len(missing)} in all)")
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"model {origin!r} has no tokenizer that saves as one JSON text")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        model.config.pad_token_id = 0 if pad is None else int(pad)
        return cls(model, backend, model.config.pad_token_id, **shape)

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens (at least one, at most max_tokens) of each text, special ones included."""
        clean = [text.encode("utf-8", "replace").decode() for text in texts]  # half a surrogate pair is no text to a tokenizer
        return [encoded.ids or [self.pad] for encoded in self.tokenizer.encode_batch(clean)]

    def forward(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """B rows of tokens -> outputs (B, K), padded on the right; in whatever mode the model is."""
        longest = max(map(len, token_ids))
        ids = torch.full((len(token_ids), longest), self.pad, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, tokens in enumerate(token_ids):
            ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
            mask[row, : len(tokens)] = 1
        out: Tensor = self.model(input_ids=ids.to(self.device), attention_mask=mask.to(self.device)).logits.float()
        return out

    def outputs(self, token_ids: Sequence[Sequence[int]], rows_at_once: int) -> Floats:
        """N >= 0 rows of tokens -> (N, K), without dropout. With rows_at_once=1 a row is the same in any batch, bit for bit."""
        self.model.eval()
        parts = [np.zeros((0, self.model.config.num_labels))]
        with torch.inference_mode():
            for start in range(0, len(token_ids), rows_at_once):
                parts.append(self.forward(token_ids[start : start + rows_at_once]).cpu().numpy().astype(np.float64))
        return np.concatenate(parts)

    def state(self) -> State:
        """Configuration and tokenizer as JSON texts, weights as arrays."""
        config = self.model.config.to_dict() | {"_name_or_path": ""}
        weights = {_WEIGHT + name: value.cpu().numpy() for name, value in self.model.state_dict().items()}
        return State({"pad": self.pad}, weights, {"config": json.dumps(config), "tokenizer": self.tokenizer.to_str()})

    @classmethod
    def from_state(cls, state: State, **shape: Any) -> EncoderNetwork:
        """The inverse of `state`. Raises ValueError where the installed transformers builds another model of it."""
        config = AutoConfig.for_model(**json.loads(state.texts["config"]))
        classes: Any = AutoModelForSequenceClassification
        with seeded(0):  # what is drawn is overwritten, but must not move the program's own random numbers
            model = classes.from_config(config).float()
            out = cls(model, Tokenizer.from_str(state.texts["tokenizer"]), int(state.values["pad"]), **shape)
        arrays = {name.removeprefix(_WEIGHT): value for name, value in state.arrays.items() if name.startswith(_WEIGHT)}
        try:
            out.model.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})
        except RuntimeError as error:
            raise ValueError(f"the artefact's weights do not fit this version's model: {error}") from error
        return out


def put_before(model: Any, hidden: Sequence[int]) -> None:
    """Replace the model's last linear layer by layers of `hidden` widths with ReLU and a new last one. Raises ValueError where
    the model has no single last layer."""
    name = next((n for n in ("classifier", "score") if isinstance(getattr(model, n, None), nn.Linear)), None)
    if name is None:
        raise ValueError(f"{type(model).__name__} has no single linear classifier to put layers {list(hidden)} before")
    last = getattr(model, name)
    widths = [last.in_features, *hidden]
    layers = [layer for a, b in zip(widths, hidden, strict=False) for layer in (nn.Linear(a, b), nn.ReLU())]
    setattr(model, name, nn.Sequential(*layers, nn.Linear(widths[-1], last.out_features)))


@contextmanager
def seeded(seed: int, device: str = "cpu") -> Iterator[None]:
    """torch draws by `seed` inside, and goes on outside as if nothing had been drawn."""
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
