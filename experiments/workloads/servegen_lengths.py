"""Lengths of ServeGen's clients: per client, 6 h and field, 65 quantiles at equal distances and a mean.

Between two quantiles lengths lie on a straight line, except above the last but one: there the line is bent so that the mean is
the file's. A straight one up to the longest request would put the mean of some clients at many times theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..dataset import Floats, Ints

NUM_PARTS = 64
QUANTILES = [f"q{i:02d}" for i in range(NUM_PARTS + 1)]
TEXT, IMAGES = ("input_tokens", "text_tokens"), ("image_count", "image_tokens")


@dataclass(frozen=True)
class Field:
    """A distribution for each stretch of time: `quantiles` (n, 65) and the `bend` (n,) of the last part."""

    quantiles: Floats
    bend: Floats

    def draw(self, stretch: Ints, rng: np.random.Generator) -> Ints:
        """A whole number for each entry of `stretch`, which says whose distribution it comes from."""
        part, within = np.divmod(rng.random(len(stretch)) * NUM_PARTS, 1.0)
        at = part.astype(np.int64)
        top = at == NUM_PARTS - 1
        within[top] **= self.bend[stretch[top]]
        low = self.quantiles[stretch, at]
        return np.rint(low + within * (self.quantiles[stretch, at + 1] - low)).astype(np.int64)


@dataclass(frozen=True)
class Lengths:
    """Of one client. starts (n,): when each stretch of time begins, s of the trace, sorted. fields: by name."""

    starts: Ints
    fields: dict[str, Field]

    def stretch(self, times: Floats) -> Ints:
        """Which stretch each time (s of the trace) falls into; before the first, the first."""
        return np.maximum(np.searchsorted(self.starts, times, side="right") - 1, 0)


def read_lengths(file: Path, workload: str) -> dict[int, Lengths]:
    """Client -> its lengths; clients that have none are not in it. Stretches of time without a request are left out."""
    table = pd.read_parquet(file, filters=[("workload", "==", workload)])
    table = table.assign(field=table["field"].astype(str))
    silent = table.loc[(table["field"] == "output_tokens") & (table[QUANTILES[-1]] == 0), ["client", "t"]]
    table = table[~pd.MultiIndex.from_frame(table[["client", "t"]]).isin(pd.MultiIndex.from_frame(silent))]
    out: dict[int, Lengths] = {}
    for client, own in table.sort_values("t", kind="stable").groupby("client", sort=True):
        starts = np.unique(own["t"].to_numpy(np.int64))
        fields = {name: _field(rows) for name, rows in own.groupby("field", sort=True)}
        uneven = any(len(field.bend) != len(starts) for field in fields.values())
        if uneven or "output_tokens" not in fields or not any(name in fields for name in TEXT):
            have = {name: len(field.bend) for name, field in fields.items()}
            raise ValueError(f"{file.name}: client {client} of {workload} lacks lengths; distributions by field: {have}")
        out[int(client)] = Lengths(starts, fields)
    return out


def _field(rows: pd.DataFrame) -> Field:
    quantiles = rows[QUANTILES].to_numpy(np.float64)
    least, most = quantiles[:, -2], quantiles[:, -1]
    below = (quantiles[:, :-2] + quantiles[:, 1:-1]).sum(axis=1) / 2.0
    rest = rows["mean"].to_numpy(np.float64) * NUM_PARTS - below - least  # mean of the last part, above its start
    with np.errstate(divide="ignore", invalid="ignore"):
        bend = np.where(rest > 0, (most - least) / rest - 1.0, np.inf)  # the mean of u^b is 1 / (b + 1)
    return Field(quantiles, np.clip(bend, 0.0, 1000.0))


def draw_lengths(lens: Lengths, times: Floats, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """(prompt_len, output_len), at least 1, of requests at `times` (s of the trace), independent of each other.

    A prompt is its text and all its images, each of a length of its own.
    """
    stretch = lens.stretch(times)
    text = next(name for name in TEXT if name in lens.fields)
    prompt = lens.fields[text].draw(stretch, rng)
    output = lens.fields["output_tokens"].draw(stretch, rng)
    if all(name in lens.fields for name in IMAGES):
        count, each = (lens.fields[name] for name in IMAGES)
        num_images = count.draw(stretch, rng)
        prompt = prompt + _sums(each.draw(np.repeat(stretch, num_images), rng), num_images)
    return np.maximum(prompt, 1), np.maximum(output, 1)


def _sums(values: Ints, counts: NDArray[np.int64]) -> Ints:
    """Sums of the first counts[0] values, the next counts[1], ..."""
    ends = np.concatenate(([0], np.cumsum(values)))
    last = np.cumsum(counts)
    return np.asarray(ends[last] - ends[last - counts], dtype=np.int64)
