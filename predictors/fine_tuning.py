"""Fine-tuning: AdamW over shuffled batches of prompts, with the schedules that the released length predictors use."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .encoder_network import EncoderNetwork
from .heads.head import Bools, Floats, Head

log = logging.getLogger(__name__)

_STREAM = 0xF1E7  # keeps the batches' random stream apart from other uses of a seed


@dataclass(frozen=True)
class Schedule:
    """decay: the learning rate falls to 0 in a straight line. freeze_after: epochs after which only the layers above the
    encoder learn, at frozen_learning_rate; None: never. Raises ValueError on what cannot be trained by."""

    learning_rate: float
    weight_decay: float
    decay: bool
    batch_size: int
    num_epochs: int
    freeze_after: int | None = None
    frozen_learning_rate: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("learning_rate", "frozen_learning_rate"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name}={getattr(self, name)}: within (0, 1)")
        if not 0.0 <= self.weight_decay < 1.0 or self.batch_size < 1 or self.num_epochs < 1:
            raise ValueError(
                f"weight_decay={self.weight_decay}: within [0, 1); batch_size={self.batch_size}, "
                f"num_epochs={self.num_epochs}: at least 1"
            )


def fine_tune(
    network: EncoderNetwork,
    head: Head,
    token_ids: Sequence[Sequence[int]],
    lengths: Floats,
    censored: Bools,
    schedule: Schedule,
    seed: int,
    name: str,
) -> list[float]:
    """Train `network` (mutated) by the loss of `head` on N rows; returns the mean loss of each epoch.

    A bar is shown on a terminal under `name`. Batches are shuffled by `seed`; dropout draws from torch's generator. Raises
    ValueError when the loss is no longer a number.
    """
    from rich.console import Console
    from rich.progress import Progress

    model, rows = network.model, len(token_ids)
    length = torch.tensor(lengths, dtype=torch.float32, device=network.device)
    cut = torch.tensor(censored, dtype=torch.bool, device=network.device)
    shuffle = np.random.default_rng(np.random.SeedSequence([_STREAM, seed]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, weight_decay=schedule.weight_decay)
    num_steps = schedule.num_epochs * math.ceil(rows / schedule.batch_size)
    rate, step, losses = schedule.learning_rate, 0, []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(name, total=num_steps)
        for epoch in range(schedule.num_epochs):
            if epoch == schedule.freeze_after:
                model.base_model.requires_grad_(False)
                rate = schedule.frozen_learning_rate
            model.train()
            order, total = shuffle.permutation(rows), 0.0
            for start in range(0, rows, schedule.batch_size):
                batch = order[start : start + schedule.batch_size]
                at = torch.from_numpy(batch).to(network.device)
                for group in optimizer.param_groups:
                    group["lr"] = rate * (1.0 - step / num_steps if schedule.decay else 1.0)
                loss = head.loss(network.forward([token_ids[i] for i in batch.tolist()]), length[at], cut[at])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                total += float(loss.detach()) * len(batch)
                step += 1
                bar.advance(task)
            losses.append(total / rows)
            log.info("%s: epoch %d of %d, loss %.4f", name, epoch + 1, schedule.num_epochs, losses[-1])
            if not math.isfinite(losses[-1]):
                raise ValueError(f"{name}: the loss is {losses[-1]} after epoch {epoch + 1}: a smaller learning_rate may help")
    model.base_model.requires_grad_(True)
    return losses
