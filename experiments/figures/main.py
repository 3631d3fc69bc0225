"""`lengthwise figure`: redraw a figure from stored results, simulating nothing."""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig

from ..load_runs import OK, Cell, load_requests, load_runs, read_cells
from . import style

log = logging.getLogger(__name__)

Draw = Callable[..., pd.DataFrame]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what `argv` asks for: `figure=NAME runs=PATH [out=PATH] [allow_missing=true]`. Returns 0.

    Raises SystemExit with a line to show: on missing cells unless allowed, on a folder without results.
    """
    arguments = sys.argv
    sys.argv = [arguments[0], *(arguments[1:] if argv is None else argv)]
    try:
        _hydra_main()
    finally:
        sys.argv = arguments
    return 0


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name="figure")
def _hydra_main(cfg: DictConfig) -> None:
    name = HydraConfig.get().runtime.choices["figure"]
    source = Path(cfg.runs).expanduser()
    try:
        cells = read_cells(source)
        out = Path(cfg.out).expanduser() if cfg.out else source / str(name)
        files = draw_figure(instantiate(cfg.figure), cells, out)
    except ValueError as error:
        raise SystemExit(f"lengthwise figure: {error}") from error
    print("\n".join(str(file) for file in files))
    absent = [cell for cell in cells if cell.status != OK]
    if absent:
        note = f"{len(cells) - len(absent)} of {len(cells)} cells; " + ", ".join(f"{c.name} is {c.status}" for c in absent[:5])
        if not cfg.allow_missing:
            raise SystemExit(f"lengthwise figure: {note}; gaps are marked. allow_missing=true accepts them")
        print(note)


def draw_figure(draw: Draw, cells: list[Cell], path: Path) -> list[Path]:
    """Draw `cells` with `draw` and write path.pdf, path.png and path.csv, which are returned.

    The module of `draw` may say SOURCE = "requests" (else one row per cell) and `size(frame)` in inches. Raises ValueError when
    there is nothing to draw.
    """
    runs = load_runs(cells)
    if not (runs["status"] == OK).any():
        raise ValueError("no complete cell to draw")
    module = inspect.getmodule(getattr(draw, "func", draw))
    frame = load_requests(cells) if getattr(module, "SOURCE", "runs") == "requests" else runs
    size = getattr(module, "size", None)
    figure, ax = style.page(size(frame) if size else (6.4, 4.4))
    table = draw(frame, ax)
    return style.save(figure, table, path, style.footer(runs, config_hash(cells)))


def config_hash(cells: Sequence[Cell]) -> str:
    """One hash for all configs of a study: of the cells' hashes, in any order."""
    return hashlib.sha256("\n".join(sorted(cell.hash for cell in cells)).encode()).hexdigest()[:12]


def default_draw(node: Any) -> tuple[str, Draw]:
    """(name, draw) of a config's figure node; the quickstart figure without one."""
    if node is None:
        from . import quickstart

        return "quickstart", quickstart.draw
    draw = instantiate(node)
    return str(getattr(draw, "func", draw).__module__).rsplit(".", 1)[-1], draw
