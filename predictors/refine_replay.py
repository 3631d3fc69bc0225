"""RefineReplay: what a probe said on the engine, told again in simulation at the same tokens of the same answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import LengthDistribution, Request

from .artefact import data_hash
from .prompts import Prompts

Trace = tuple[NDArray[np.int64], NDArray[np.float64]]  # generated tokens, rising, and the whole length expected at each
COLUMNS = ("row", "generated", "expected")
OF = b"data_hash"  # of the file's metadata: which rows the traces are of


class RefineReplay:
    """path: a Parquet file of `lengthwise probe`, rows (row, generated, expected): at `generated` tokens of the answer to the
    workload's row, the whole length that was expected, by a probe that had not seen that row's group. every: decode steps from
    one telling to the next. Between two readings the last one before counts. Raises ValueError for a file of another form."""

    reads_truth: ClassVar[bool] = False
    serves: ClassVar[bool] = False  # what was said is of the rows of a workload
    layer: ClassVar[int | None] = None

    def __init__(self, path: str | None, every: int = 8) -> None:
        if path is None:
            raise ValueError("refine.path names no traces: `lengthwise probe` writes them and prints the file")
        if every < 1:
            raise ValueError(f"refine.every={every} decode steps: at least 1")
        self.every, self.path = every, Path(path).expanduser()
        self._traces: Mapping[int, Trace] | None = None

    def check(self, name: str, unit: str, prompts: Prompts, output_len: ArrayLike) -> None:
        """Raises ValueError for a workload whose rows are not those that the traces are of."""
        import pyarrow.parquet as pq

        known = {} if not self.path.is_file() else pq.read_schema(self.path).metadata or {}
        if (of := known.get(OF)) is not None and of.decode() != data_hash(prompts, output_len):
            raise ValueError(
                f"{self.path.name} is of other rows than those of {name}, counted in {unit}: replay what was recorded"
            )

    def refiner(self, rows: ArrayLike, output_len: ArrayLike, seed: int) -> Told:
        """The Refiner of one run. Raises ValueError for a dataset row that has no trace."""
        if self._traces is None:
            self._traces = read_traces(self.path)
        asked = np.asarray(rows, dtype=np.int64)
        without = [int(row) for row in asked if int(row) not in self._traces]
        if without:
            raise ValueError(f"{self.path.name} has no trace of row {without[0]} and {len(without) - 1} others of the workload")
        return Told([self._traces[int(row)] for row in asked])


class Told:
    """traces: of requests 0 .. N - 1; see Refiner in sched/ports.py."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces

    def refine(
        self, requests: Sequence[Request], generated: Sequence[int], probes: Any | None = None
    ) -> list[LengthDistribution | None]:
        return [self._at(request.rid, done) for request, done in zip(requests, generated, strict=True)]

    def _at(self, rid: int, generated: int) -> LengthDistribution | None:
        at, expected = self._traces[rid]
        i = int(np.searchsorted(at, generated, side="right")) - 1
        return None if i < 0 else LengthDistribution.point(max(float(expected[i]), generated + 1.0))


def read_traces(path: Path) -> dict[int, Trace]:
    """row -> its trace. Raises ValueError where the file is missing or of another form."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        raise ValueError(f"there are no traces {path}: `lengthwise probe` writes them")
    try:
        table = pq.read_table(path, columns=list(COLUMNS))
    except (pa.ArrowInvalid, pa.ArrowKeyError) as error:
        raise ValueError(f"{path.name} holds no columns {', '.join(COLUMNS)}: {error}") from error
    row, at, expected = (table[name].to_numpy() for name in COLUMNS)
    order = np.lexsort((at, row))
    row, at, expected = row[order], at[order].astype(np.int64), expected[order].astype(np.float64)
    starts = np.flatnonzero(np.diff(row, prepend=row[:1] - 1)) if len(row) else np.zeros(0, dtype=np.int64)
    ends = [*starts[1:].tolist(), len(row)]
    return {int(row[a]): (at[a:b], expected[a:b]) for a, b in zip(starts.tolist(), ends, strict=True)}
