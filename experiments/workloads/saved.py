"""A workload saved by an earlier run (`keep_workload=true`) or by `save_workload`: replay it with arrivals=replay load=null."""

from __future__ import annotations

from pathlib import Path

from ..dataset import Dataset
from ..saved import load_workload


def load(path: str) -> Dataset:
    """The requests saved in the folder `path`: relative to LENGTHWISE_DATA (where set), else to the current folder."""
    from .files import find_file

    return load_workload(find_file(Path(path).expanduser() / "workload.json").parent)
