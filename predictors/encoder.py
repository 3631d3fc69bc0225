"""Encoder: a pretrained transformer reads the prompt and is fine-tuned to say something about the answer's length.

What it says is its head's (heads/): a number, buckets, an order. The published predictors of this kind are nodes of their own
(ssjf.py, s3.py, ltr_ranker.py, pars.py): this class with their model, head and schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .encoder_network import EncoderNetwork, seeded
from .fine_tuning import Schedule, fine_tune
from .folds import Ints
from .heads.head import Head, made
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import MIN_ROWS, LengthPredictor, State, TrainingRows
from .prompts import Prompts


class Encoder(LengthPredictor):
    """model: a checkpoint's folder or its name on the hub. head: see heads/head.py. A prompt keeps max_tokens of its tokens,
    the `truncation_side` being cut; hidden: widths of layers between the encoder and the outputs. The rest: fine_tuning.py.

    Weights, dropout and batches follow `seed`: on a CPU the same rows give the same predictor, for one number of threads.
    rows_at_once: prompts in one forward pass of a prediction; more than 1 is faster on a GPU, but a row then depends on its
    batch in the last bits. Censored rows are the head's matter: lower bounds, never lengths. Heads that are calibrated get a
    tenth of the rows set aside, whole groups, or about MIN_ROWS of fewer rows.
    """

    name = "encoder"
    needs_text = True

    def __init__(
        self,
        model: str,
        head: Head | Mapping[str, Any],
        max_tokens: int = 512,
        truncation_side: str = "right",
        hidden: Sequence[int] = (),
        learning_rate: float = 2e-5,
        weight_decay: float = 0.01,
        decay: bool = False,
        batch_size: int = 32,
        num_epochs: int = 5,
        freeze_after: int | None = None,
        frozen_learning_rate: float = 1e-4,
        seed: int = 0,
        device: str = "cpu",
        rows_at_once: int = 1,
        latency: LatencyModel | None = None,
    ) -> None:
        if max_tokens < 1 or rows_at_once < 1 or truncation_side not in ("left", "right"):
            raise ValueError(f"{max_tokens=}, {rows_at_once=}: at least 1; {truncation_side=}: left or right")
        self._schedule = Schedule(
            learning_rate, weight_decay, decay, batch_size, num_epochs, freeze_after, frozen_learning_rate
        )  # fmt: skip
        self.model, self.head = model, made(head)
        self.max_tokens, self.truncation_side, self.hidden = max_tokens, truncation_side, list(hidden)
        self.learning_rate, self.weight_decay, self.decay = learning_rate, weight_decay, decay
        self.batch_size, self.num_epochs = batch_size, num_epochs
        self.freeze_after, self.frozen_learning_rate = freeze_after, frozen_learning_rate
        self.seed, self.device, self.rows_at_once = seed, device, rows_at_once
        self.latency = latency
        self.losses: list[float] = []  # of each epoch of the fit
        self._network: EncoderNetwork | None = None

    @property
    def fitted(self) -> bool:
        return self._network is not None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "head": self.head.settings()}

    def learn(self, rows: TrainingRows) -> None:
        learned, aside = self._divided(rows)
        self.head.learn_labels(rows.lengths[learned], rows.censored[learned])
        with seeded(self.seed, self.device):
            network = EncoderNetwork.from_checkpoint(self.model, self.head.num_outputs, **self._shape())
            token_ids = network.token_ids(rows.prompts.texts or ())
            self.losses = fine_tune(
                network, self.head, [token_ids[i] for i in learned.tolist()], rows.lengths[learned], rows.censored[learned],
                self._schedule, self.seed, self.name,
            )  # fmt: skip
        # A kernel's last bits depend on where weights lie: from here on they lie as an artefact's will.
        self._network = EncoderNetwork.from_state(network.state(), **self._shape())
        if aside.size:
            outputs = self._network.outputs([token_ids[i] for i in aside.tolist()], self.rows_at_once)
            self.head.calibrate(outputs, rows.lengths[aside], rows.censored[aside])

    def _divided(self, rows: TrainingRows) -> tuple[Ints, Ints]:
        """(rows to train on, rows set aside for calibration: whole groups, or none)."""
        if not self.head.sets_rows_aside:
            return np.arange(len(rows.lengths)), np.arange(0)
        fold = rows.folds(min(max(len(rows.lengths) // MIN_ROWS, 2), 10))
        return np.flatnonzero(fold != 0), np.flatnonzero(fold == 0)

    def _shape(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("max_tokens", "truncation_side", "hidden", "device")}

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._network is not None
        token_ids = self._network.token_ids(prompts.texts or ())
        return self.head.predictions(self._network.outputs(token_ids, self.rows_at_once))

    def state(self) -> State:
        self._need_fitted()
        assert self._network is not None
        network, head = self._network.state(), self.head.state()
        values = {**network.values, "losses": self.losses, "head": head.values}
        return State(values, {**network.arrays, **head.arrays}, network.texts)

    def restore(self, state: State) -> None:
        self._network = EncoderNetwork.from_state(state, **self._shape())
        self.head.restore(State(state.values["head"], state.arrays))
        self.losses = list(state.values["losses"])
