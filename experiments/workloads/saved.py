"""A workload saved by an earlier run (`keep_workload=true`) or by `save_workload`: replay it with arrivals=replay load=null.

With `answered` the answers are as long as that run's own were: of a model that decided itself (lengths=free), so measured once
and the same for whoever schedules them later.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..dataset import Dataset
from ..load_runs import read_requests
from ..reshape import take
from ..saved import load_workload


def load(path: str, answered: bool = False) -> Dataset:
    """The requests saved in the folder `path`: relative to LENGTHWISE_DATA (where set), else to the current folder.

    answered: output_len is what came, censored where it was cut at max_new_tokens; requests that came and did not finish are
    dropped, counted. Raises FileNotFoundError where the folder is no longer in its cell's, ValueError where its lengths were
    not free.
    """
    from .files import find_file

    folder = find_file(Path(path).expanduser() / "workload.json").parent
    dataset = load_workload(folder)
    return _answered(dataset, folder.parent) if answered else dataset


def _answered(dataset: Dataset, cell: Path) -> Dataset:
    if not (cell / "requests.parquet").is_file():
        raise FileNotFoundError(f"{cell} holds no requests.parquet: answers are those of the cell that kept the workload")
    decided = json.loads((cell / "summary.json").read_text())["provenance"].get("lengths")
    if decided != "free":
        raise ValueError(f"the answers of {cell} are no model's own: its lengths are {decided or 'simulated'}, not free")
    came = read_requests(cell, ["rid", "status", "reason", "output_len"])
    done = came[came["status"] == "finished"]
    rows = done["rid"].to_numpy(np.int64)
    if not rows.size:
        raise ValueError(f"no request of {cell} has finished: there are no answers to be as long as")
    lost = {"not_finished": len(came) - len(rows)}
    return replace(
        take(dataset, rows, answered={"num_rows": len(rows), "of": len(dataset)}),
        output_len=done["output_len"].to_numpy(np.int64),
        censored=(done["reason"] == "length").to_numpy(),
        samples=None,
        dropped={**dataset.dropped, **{reason: n for reason, n in lost.items() if n}},
    )
