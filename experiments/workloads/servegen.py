"""ServeGen: days of requests to a production service, generated client by client (Xiang et al., arXiv 2505.09999).

Each client has its own rate and unevenness in every 10 min and its own lengths in every 6 h; together they are the day curve,
the bursts and the shares of few large clients. What is not published is not made up: prompt and output lengths of a client are
drawn independently of each other, for the data have their marginal distributions only.
"""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pandas as pd

from ..arrivals.summary import describe_arrivals
from ..dataset import Dataset, Floats, Ints
from ..draw import stream
from .files import find_file
from .origin import File, Origin
from .servegen_arrivals import WINDOW, Window, client_arrivals
from .servegen_lengths import Lengths, draw_lengths, read_lengths

WORKLOADS = ("m-large", "m-mid", "m-small", "deepseek-r1", "mm-image")
HOW = "made of the project's data/*/*/chunk-*: see the columns in servegen_"
PAGE = "https://github.com/alibaba/ServeGen"
ORIGINS = {
    "windows": Origin(
        "ServeGen's clients, rate and unevenness in windows of 10 min",
        "alibaba/ServeGen",
        PAGE,
        "Apache-2.0 (arXiv 2505.09999)",
        (
            File(
                "servegen_client_windows.parquet", "16d6b3c3a2d3293dc7d7a6adb24e16ac25b5811132a90c9745fbb7ebed9491ae", 5_158_832
            ),
        ),
        how=HOW + "arrivals.py",
    ),
    "lengths": Origin(
        "ServeGen's clients, quantiles of lengths in windows of 6 h",
        "alibaba/ServeGen",
        PAGE,
        "Apache-2.0 (arXiv 2505.09999)",
        (
            File(
                "servegen_length_quantiles.parquet",
                "cb812e14169895dbdeecf562b069ed5d3a5f1bd529fa035318f3c323b9db2ad8",
                1_899_661,
            ),
        ),
        how=HOW + "lengths.py",
    ),
}
MOST_ROWS = 50_000_000  # beyond it a Dataset fills the memory of most machines
SOURCE = "alibaba/ServeGen @ f891d11, client traces and length distributions; generated rows, no row of the trace"


def load(
    *,
    workload: str = "m-large",
    start: float = 0.0,
    duration: float = 86400.0,
    num_rows: int | None = None,
    rate: float | None = None,
    scale: float | None = None,
    max_clients: int | None = None,
    without_lengths: str = "drop",
    max_prompt_len: int | None = None,
    max_new_tokens: int = 2048,
    seed: int = 0,
    windows: str = "servegen_client_windows.parquet",
    lengths: str = "servegen_length_quantiles.parquet",
) -> Dataset:
    """Requests of one workload between `start` and `start + duration` (s of the trace), sorted, the first at 0.

    Every client's rate is multiplied by one factor, which keeps the day curve, the clients' shares and the CVs of the gaps:
    num_rows: so that about as many rows come out; rate: so that their mean is as many requests/s; scale: the factor itself;
    at most one of them, none is scale 1. max_clients: only those with the most requests. without_lengths: what to do with
    clients whose lengths are not in the data: "drop", or "borrow" those of the client nearest in rate. max_prompt_len: leave
    out longer prompts, counted. seed: of the rows; every client has random numbers of its own. windows, lengths: the two
    files, as in `find_file`. mm-image: a prompt is its text and the tokens of all its images.

    `notes` state the factor, rate, CV, clients and the share of the largest; `dropped` clients and rows left out. Raises
    FileNotFoundError, or ValueError naming the value and the limit.
    """
    given: dict[str, float | None] = {"num_rows": num_rows, "rate": rate, "scale": scale}
    _check(workload, start, duration, {**given, "max_clients": max_clients}, without_lengths)
    table = _read_windows(windows, workload, start, start + duration)
    lens = read_lengths(find_file(lengths), workload)
    sizes = table.groupby("client").size_expected.sum().sort_index()
    lengthless = [client for client in sizes.index if client not in lens]
    source_of = _sources(sizes, lengthless, borrow=without_lengths == "borrow")
    if not source_of:
        raise ValueError(f"none of the {len(sizes)} clients of {workload} in that time has lengths: without_lengths=borrow")
    largest = sizes[list(source_of)].sort_values(ascending=False, kind="stable").index[:max_clients]
    kept = sorted(int(client) for client in largest)
    total = float(sizes[kept].sum())
    factor = _factor(total, duration, **given)
    if total * factor > MOST_ROWS:
        raise ValueError(f"{total * factor:.3g} rows would come out, the most are {MOST_ROWS:g}: give num_rows, rate or scale")

    windows_of = _windows(table, factor, start, start + duration)
    lens_of = {client: lens[source_of[client]] for client in kept}
    who, arrival, prompt_len, output_len = _generate(workload, lens_of, windows_of, start, seed)
    dropped = {"clients_without_lengths": len(sizes) - len(source_of), "clients_beyond_max_clients": len(source_of) - len(kept)}
    if max_prompt_len is not None:
        short = prompt_len <= max_prompt_len
        dropped[f"rows_prompt_over_{max_prompt_len}"] = int((~short).sum())
        who, arrival, prompt_len, output_len = who[short], arrival[short], prompt_len[short], output_len[short]
    if not len(arrival):
        raise ValueError(f"no rows came out of {total * factor:.3g} expected ones; left out: {dropped}")
    counts = np.bincount(who, minlength=len(kept))
    names = np.array([f"{workload}/{client}" for client in kept], dtype=object)
    seconds = arrival - arrival[0]
    return Dataset(
        name=f"servegen_{workload}",
        prompt_len=prompt_len,
        output_len=output_len,
        unit=f"tokens of {workload}",
        source=SOURCE,
        licence="Apache-2.0",
        arrival=seconds,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        columns={"client": names[who]},  # one string a client, however many rows it has
        notes={
            "dataset_seed": seed,
            "start": start,
            "duration": duration,
            "arrival_offset": float(arrival[0]),
            "rate_factor": factor,
            "rate": len(seconds) / duration,
            "gap_cv": describe_arrivals(seconds)["gap_cv"],
            "num_clients": int((counts > 0).sum()),
            "client_shares": {f"top_{k}": _share(counts, k) for k in (1, 5, 10)},
            "rate_share_without_lengths": float(sizes[lengthless].sum() / sizes.sum()),
            "without_lengths": without_lengths,
            "rate_share_kept": total / float(sizes.sum()),
            "gaps": "family and shape of each window, carried over borders; the mean gap is one over the window's rate",
            "lengths": "prompt and output drawn independently within a client; the data have marginals only",
        },
    )


def _check(workload: str, start: float, duration: float, numbers: dict[str, Any], without_lengths: str) -> None:
    if workload not in WORKLOADS:
        raise ValueError(f"workload {workload!r} must be one of {', '.join(WORKLOADS)}")
    if without_lengths not in ("drop", "borrow"):
        raise ValueError(f"without_lengths {without_lengths!r} must be drop or borrow")
    if not 0 <= start < float("inf"):
        raise ValueError(f"start {start} must be a finite number >= 0 (s)")
    if not 0 < duration < float("inf"):
        raise ValueError(f"duration {duration} must be a finite number above 0 (s)")
    for name, value in numbers.items():
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} {value} must be a finite number above 0")
    most = numbers["max_clients"]
    if most is not None and most != int(most):
        raise ValueError(f"max_clients {most} must be a whole number")
    scalings = {name: numbers[name] for name in ("num_rows", "rate", "scale") if numbers[name] is not None}
    if len(scalings) > 1:
        raise ValueError(f"give at most one of num_rows, rate and scale: {scalings}")


def _read_windows(path: str, workload: str, start: float, end: float) -> pd.DataFrame:
    """Windows of `workload` that meet [start, end), with `size_expected`: requests expected in the part that does."""
    file = find_file(path)
    table = pd.read_parquet(file, filters=[("workload", "==", workload)])
    table = table[table["rate"] > 0]
    if table.empty:
        raise ValueError(f"{file.name} has no windows of {workload}")
    last = float(table["t"].max()) + WINDOW
    last += -last % 86400.0  # whole days; a window in which nobody asks for anything is not in the file
    if end > last:
        raise ValueError(f"{workload} spans {last:.0f} s, start + duration is {end:.0f} s")
    table = table[(table["t"] < end) & (table["t"] + WINDOW > start)].sort_values(["client", "t"], kind="stable")
    if table.empty:
        raise ValueError(f"nobody asks for anything between {start:.0f} and {end:.0f} s of {workload}")
    wrong = table[~table["pattern"].isin(["Gamma", "Weibull"]) | ~(table["param0"] > 0)]
    if not wrong.empty:
        row = wrong.iloc[0]
        raise ValueError(f"{file.name}: client {row['client']} at {row['t']} s has gaps {row['pattern']} {row['param0']}")
    inside = np.minimum(table["t"] + WINDOW, end) - np.maximum(table["t"], start)
    return table.assign(size_expected=table["rate"].astype(np.float64) * inside)


def _sources(sizes: pd.Series, lengthless: list[int], borrow: bool) -> dict[int, int]:
    """Client -> the client whose lengths it has, in order of number: itself or, borrowed, the one nearest in log rate."""
    own = [client for client in sizes.index if client not in lengthless]
    found = {client: client for client in own}
    if borrow and own:
        near = {client: min(own, key=lambda other: abs(log(sizes[other] / sizes[client]))) for client in lengthless}
        found.update(near)
    return dict(sorted(found.items()))


def _factor(total: float, duration: float, num_rows: float | None, rate: float | None, scale: float | None) -> float:
    wanted = num_rows if rate is None else rate * duration
    if wanted is None:
        return 1.0 if scale is None else float(scale)
    return wanted / total


def _windows(table: pd.DataFrame, factor: float, start: float, end: float) -> dict[int, list[Window]]:
    """Client -> its windows, cut to [start, end), rates times `factor`; times from `start`."""
    out: dict[int, list[Window]] = {}
    columns = (table[name].tolist() for name in ("client", "t", "rate", "pattern", "param0"))
    for client, t, rate, pattern, shape in zip(*columns, strict=True):
        window = Window(max(t, start) - start, min(t + WINDOW, end) - start, rate * factor, pattern.lower(), shape)
        out.setdefault(client, []).append(window)
    return out


def _generate(
    workload: str, lens_of: dict[int, Lengths], windows_of: dict[int, list[Window]], start: float, seed: int
) -> tuple[Ints, Floats, Ints, Ints]:
    """(place of the client, arrival from `start` (s), prompt_len, output_len) of all rows, sorted by arrival."""
    parts = []
    for place, (client, lens) in enumerate(lens_of.items()):
        rng = stream(seed, f"servegen {workload} client {client}")
        arrival = client_arrivals(windows_of[client], rng)
        parts.append((np.full(len(arrival), place), arrival, *draw_lengths(lens, arrival + start, rng)))
    who, arrival, prompt_len, output_len = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(arrival, kind="stable")
    return who[order], arrival[order], prompt_len[order], output_len[order]


def _share(counts: Ints, k: int) -> float:
    return float(np.sort(counts)[::-1][:k].sum() / counts.sum())
