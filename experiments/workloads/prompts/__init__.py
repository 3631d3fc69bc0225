"""Prompts of this project: what people ask a model for, by template and topic, with the answers that were collected to them.

The texts are here (`texts.py`); how long a model's answers are comes from a file of `lengthwise collect`, or from the one that
is embedded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...dataset import UNANSWERED, Dataset
from ..files import find_file
from .texts import written

EMBEDDED = "embedded"
ANSWERS = Path(__file__).with_name("answers.parquet")


def load(answers: str | None = EMBEDDED, *, group: str = "template", sample: int = 0, seed: int = 0) -> Dataset:
    """Written prompts as a Dataset with the columns template, topic and kind.

    answers: a file of collected answers (see `find_file`), or "embedded" for those of this package; output_len is answer number
    `sample`, samples (N, k) are all of them, and prompts without answers are left out, counted. None, or where none are
    embedded: every prompt, output_len 1, prompt_len in characters, unit "unanswered", which nothing can be trained on. group:
    template, topic or prompt, what a split between training and test may not divide. seed: see `written`.

    Raises FileNotFoundError, or ValueError on another group, on a file of another form and on a sample that there is not.
    """
    prompts = written(seed)
    texts = [prompt.text for prompt in prompts]
    columns = {name: np.array([getattr(prompt, name) for prompt in prompts]) for name in ("template", "topic", "kind")}
    groups = {"template": columns["template"], "topic": columns["topic"], "prompt": np.array(texts)}
    if group not in groups:
        raise ValueError(f"group {group!r} is not one of {', '.join(groups)}")
    dataset = Dataset(
        name="prompts",
        prompt_len=np.array([len(text) for text in texts], dtype=np.int64),
        output_len=np.ones(len(texts), dtype=np.int64),
        unit=UNANSWERED,
        source="written for this project",
        licence="Apache-2.0",
        group=np.unique(groups[group], return_inverse=True)[1].astype(np.int64),
        prompts=texts,
        columns=columns,
        notes={"group": group, "seed": seed},
    )
    if answers is None or (answers == EMBEDDED and not ANSWERS.is_file()):
        return dataset
    from ...collected import join, read

    return join(dataset, read(ANSWERS if answers == EMBEDDED else find_file(answers)), sample)
