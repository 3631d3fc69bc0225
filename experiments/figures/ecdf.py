"""The whole distribution of one latency: the share of requests that waited longer, on log axes, a panel per setting and load.

Seeds are pooled request by request, those that the metrics count. Requests that have not ended stay in the denominator: they
are above every time shown.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from ..comparison import SETTING, VARIANT, with_setting_names
from ..latencies import OPEN
from . import curves, style
from .sources.points import schedules_of, with_variants

SOURCE = "requests"
POINT = ("setting_name", "load", "rate", "policy", "predictor", "variant")
LEVELS = np.concatenate(([1.0], np.logspace(np.log10(0.98), -3, 120)))  # shares at which a curve is read


def size(requests: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants for these requests."""
    found = _points(requests)
    points = len(curves.points_of(found, curves.axis_of(found)))
    width = 0.65 + style.label_width(style.looks(schedules_of(found))) + 2.3 * points
    return width, 1.1 + 2.0 * found["setting_name"].nunique()


def draw(requests: pd.DataFrame, ax: Axes, *, latency: str = "e2e") -> pd.DataFrame:
    """requests: as `load_requests` returns them. latency: e2e | ttft | tpot | wait | normalised_latency.

    Returns one row per setting x load x schedule x share: the latency (s) that this share exceeds, num_requests, num_seeds.
    """
    if latency not in style.TITLES:
        raise ValueError(f"latency {latency!r}: choose from {', '.join(style.TITLES)}")
    frame = requests[requests["counted"]]
    found = _points(frame)
    at, looks = curves.axis_of(found), style.looks(schedules_of(found))
    settings, points = list(dict.fromkeys(found["setting_name"])), curves.points_of(found, at)
    width, height = size(requests)
    panels = style.grid(
        ax, len(settings), len(points),
        left=0.55 / width, right=(0.1 + style.label_width(looks)) / width, top=0.92 / height, bottom=0.28 / height,
        gap=(0.14 / width, 0.48 / height),
    )  # fmt: skip
    rows = []
    for point in found.to_dict("records"):
        times, shares = exceedance(frame.iloc[point.pop("index")], latency)
        rows.append(pd.DataFrame({"share_above": shares, latency: times}).assign(**point))
        panel = panels[settings.index(point["setting_name"])][0 if np.isnan(points[0]) else points.index(point[at])]
        look = looks[point["policy"], point["predictor"], point["variant"]]
        panel.plot(times, shares, color=look.colour, linewidth=1.2, dashes=look.dashes)
    table = pd.concat(rows, ignore_index=True)[[*POINT, "share_above", latency, "num_requests", "num_seeds"]]
    span = table[latency].replace(0.0, np.nan).min(), table[latency].max()
    most = len(looks) * int(found["num_seeds"].max())
    for r, setting in enumerate(settings):
        for c, at_one in enumerate(points):
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
            block = found[(found["setting_name"] == setting) & curves.at_point(found, at, at_one)]
            there = int(block["num_seeds"].sum())
            alarm = f"{there} of {most} cells" if there < most else ""
            style.panel_head(panel, setting if c == 0 else "", curves.name_of(at_one, at), alarm)
    style.key(panels[0][-1], looks, dots=False)
    note = f"requests of all seeds pooled, {style.span(found['num_requests'])} a line; log axes"
    style.headline(ax, height, f"Requests with a longer {style.TITLES[latency]}", note)
    return table


def _points(requests: pd.DataFrame) -> pd.DataFrame:
    """A row per line: POINT, num_requests, num_seeds and `index`, the positions in `requests` of its rows."""
    fields = [key for key in (*SETTING, "load", "policy", "predictor", *VARIANT) if key in requests]
    rates = requests["rate"].where(requests["load"].isna()) if "rate" in requests else pd.Series(np.nan, requests.index)
    rows = []
    for _, group in requests.reset_index(drop=True).groupby([*fields, rates.to_numpy()], sort=False, dropna=False):
        first = {key: group[key].iloc[0] for key in (*fields, "rate") if key in group}
        rows.append(
            {**first, "num_requests": len(group), "num_seeds": group["seed"].nunique(), "index": group.index.to_numpy()}
        )
    frame = with_variants(with_setting_names(pd.DataFrame(rows)))
    return frame.reindex(columns=[*POINT, "num_requests", "num_seeds", "index"])


def exceedance(requests: pd.DataFrame, latency: str) -> tuple[np.ndarray, np.ndarray]:
    """(times (m,), shares (m,)): shares of the requests take longer than times. What never ended is longer than all."""
    values = requests[latency].to_numpy()
    cut = int((np.isnan(values) & requests["status"].isin(OPEN).to_numpy()).sum())
    known = np.sort(values[~np.isnan(values)])
    n = known.size + cut
    shares = LEVELS[(LEVELS * n >= max(cut, 1)) & (known.size > 0)]
    index = np.clip(np.ceil((1 - shares) * n).astype(np.int64) - 1, 0, max(known.size - 1, 0))
    return known[index] if known.size else known, shares
