"""The whole distribution of one latency: the share of requests that waited longer, on log axes, a panel per setting and load.

Seeds are pooled request by request, those that the metrics count. Requests that have not ended stay in the denominator: they
are above every time shown.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ..comparison import SETTING, with_setting_names
from ..latencies import OPEN
from . import style

SOURCE = "requests"
TITLES = {
    "e2e": "E2E latency (s)", "ttft": "TTFT (s)", "tpot": "TPOT (s)", "wait": "queueing time (s)",
    "normalised_latency": "E2E latency per token (s)",
}  # fmt: skip
LEVELS = np.concatenate(([1.0], np.logspace(np.log10(0.98), -3, 120)))  # shares at which a curve is read


def size(requests: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these requests."""
    keys = [key for key in (*SETTING, "load") if key in requests]
    frame = with_setting_names(requests[keys].drop_duplicates())
    return 2.15 + 2.3 * frame["load"].nunique(), 0.9 + 2.0 * frame["setting_name"].nunique()


def draw(requests: pd.DataFrame, ax: Axes, *, latency: str = "e2e") -> pd.DataFrame:
    """requests: as `load_requests` returns them. latency: e2e | ttft | tpot | wait | normalised_latency.

    Returns one row per setting x load x schedule x share: the latency (s) that this share exceeds, and num_requests.
    """
    if latency not in TITLES:
        raise ValueError(f"latency {latency!r}: choose from {', '.join(TITLES)}")
    frame = with_setting_names(requests[requests["counted"]])
    settings, loads = list(dict.fromkeys(frame["setting_name"])), sorted(frame["load"].unique())
    schedules = list(dict.fromkeys(zip(frame["policy"], frame["predictor"], strict=True)))
    colours = style.colours(policy for policy, _ in schedules)
    width, height = size(requests)
    panels = style.grid(
        ax, len(settings), len(loads),
        left=0.55 / width, right=1.60 / width, top=0.45 / height, bottom=0.28 / height, gap=(0.14 / width, 0.32 / height),
    )  # fmt: skip
    rows = []
    for key, group in frame.groupby(["setting_name", "load", "policy", "predictor"], sort=False):
        setting, load, policy, predictor = cast(tuple[str, float, str, str], key)
        times, shares = exceedance(group, latency)
        rows.append(
            pd.DataFrame(
                {
                    "setting_name": setting, "load": load, "policy": policy, "predictor": predictor, "share_above": shares,
                    latency: times, "num_requests": len(group),
                }
            )
        )  # fmt: skip
        panel = panels[settings.index(setting)][loads.index(load)]
        panel.plot(times, shares, color=colours[policy], linewidth=1.2, dashes=style.dashes(policy, predictor, schedules))
    table = pd.concat(rows, ignore_index=True)
    span = table[latency].replace(0.0, np.nan).min(), table[latency].max()
    for r, setting in enumerate(settings):
        for c, load in enumerate(loads):
            panel = panels[r][c]
            style.quiet(panel, grid_axis="both")
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.set_xlim(span[0], span[1] * 1.1)
            panel.set_ylim(1e-3, 1.05)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_minor_locator(NullLocator())
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
            panel.tick_params(labelleft=c == 0, labelbottom=r == len(settings) - 1)
            head = f"{setting}   load {load:g}" if c == 0 else f"load {load:g}"
            panel.set_title(head, fontsize=style.FONT, loc="left", color=style.INK, pad=3)
    ax.text(0.012, 1 - 0.08 / height, f"Requests with a longer {TITLES[latency]}", fontsize=10, weight="bold", va="top")
    handles = [
        panels[0][-1].plot(
            [], [], color=colours[p], linewidth=1.4, dashes=style.dashes(p, q, schedules), label=style.label(p, q)
        )[0]
        for p, q in schedules
    ]
    panels[0][-1].legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.03, 1.0),
        frameon=False,
        fontsize=style.FONT - 0.5,
        handlelength=2.2,
    )
    return table


def exceedance(requests: pd.DataFrame, latency: str) -> tuple[np.ndarray, np.ndarray]:
    """(times (m,), shares (m,)): shares of the requests take longer than times. What never ended is longer than all."""
    values = requests[latency].to_numpy()
    cut = int((np.isnan(values) & requests["status"].isin(OPEN).to_numpy()).sum())
    known = np.sort(values[~np.isnan(values)])
    n = known.size + cut
    shares = LEVELS[(LEVELS * n >= max(cut, 1)) & (known.size > 0)]
    index = np.clip(np.ceil((1 - shares) * n).astype(np.int64) - 1, 0, max(known.size - 1, 0))
    return known[index] if known.size else known, shares
