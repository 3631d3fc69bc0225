"""Prompts of this project: what people ask a model for, by template and topic, with the answers that were collected to them.

The texts are here (`texts.py`); how long a model's answers are comes from a file of `lengthwise collect`, or from the one that
is embedded.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...dataset import UNANSWERED, Dataset
from ..files import find_file
from .texts import held_out, templates, topics, written

EMBEDDED = "embedded"
PARTS = ("learn", "held_out")
ANSWERS = Path(__file__).with_name("answers.parquet")


def load(
    answers: str | None = EMBEDDED, *, group: str = "template", sample: int = 0, seed: int = 0, part: str | None = None
) -> Dataset:
    """Written prompts as a Dataset with the columns template, topic and kind.

    answers: a file of collected answers (see `find_file`), or "embedded" for those of this package; output_len is answer number
    `sample`, samples (N, k) are all of them, and prompts without answers are left out, counted. None, or where none are
    embedded: every prompt, output_len 1, prompt_len in characters, unit "unanswered", which nothing can be trained on. group:
    template, topic or prompt, what a split between training and test may not divide. seed: see `written`. part: "held_out":
    the prompts whose template and topic are both held out (see `held_out`); "learn": those of which neither is; None: all.

    Raises FileNotFoundError, or ValueError on another group or part, on a file of another form and on a sample that there is
    not.
    """
    if part not in (None, *PARTS):
        raise ValueError(f"part {part!r} is not one of {', '.join(PARTS)}")
    prompts = written(seed)
    if part is not None:
        apart = part == "held_out"
        sides = held_out(templates()), held_out(topics())
        prompts = [p for p in prompts if (p.template in sides[0]) == (p.topic in sides[1]) == apart]
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
        notes={"group": group, "seed": seed, **({} if part is None else {"part": part})},
    )
    if answers is None or (answers == EMBEDDED and not ANSWERS.is_file()):
        return dataset
    from ...collected import join, read

    return join(dataset, read(ANSWERS if answers == EMBEDDED else find_file(answers)), sample)
