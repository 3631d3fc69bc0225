"""`lengthwise figure`: redraw a figure from stored results, simulating nothing.

A figure of many schedules may show some only: `only` names fields of a cell and their values.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from ..load_runs import OK, Cell, load_requests, load_runs, read_cells
from ..nodes import named_node
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
    cells: list[Cell] = []
    try:
        draw = instantiate(cfg.figure)
        out = Path(cfg.out).expanduser() if cfg.out else source / str(name)
        if hasattr(_module(draw), "read"):
            files = draw_folder(draw, source, out)
        else:
            cells = only_cells(read_cells(source), OmegaConf.to_container(cfg)["only"])  # type: ignore[index, call-overload]
            files = draw_figure(draw, cells, out)
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

    The module of `draw` may hold SOURCE (see `frame_of`) and `size(frame)` in inches, which may take what `draw` is told.
    Raises ValueError when there is nothing to draw.
    """
    runs = load_runs(cells)
    if not (runs["status"] == OK).any():
        raise style.NothingToDraw("no complete cell to draw")
    frame = frame_of(draw, cells)
    figure, ax = style.page(size_of(draw, frame))
    table = draw(frame, ax)
    return style.save(figure, table, path, style.footer(runs, config_hash(cells)))


def only_cells(cells: Sequence[Cell], only: Any) -> list[Cell]:
    """The cells whose fields have one of the values that `only` gives for each. Raises NothingToDraw when none has."""
    wanted = {key: value if isinstance(value, list) else [value] for key, value in dict(only or {}).items()}
    kept = [cell for cell in cells if all(cell.fields.get(key) in values for key, values in wanted.items())]
    if not kept:
        raise style.NothingToDraw(f"only={wanted}: none of the {len(cells)} cells is like that")
    return kept


def further_figures(figures: Any) -> Iterator[tuple[str, Draw, Any]]:
    """(name, draw, only) of each entry of `figures`: the name of a node of conf/figure -> {only: as `only_cells` takes it, and
    what else the node is to be told}. Raises ValueError on a name that is none."""
    for name, said in dict(figures or {}).items():
        told = dict(said or {})
        only = told.pop("only", None)
        yield str(name), instantiate({**named_node("figure", str(name)), **told}), only


def draw_folder(draw: Draw, folder: Path, path: Path) -> list[Path]:
    """The same for a figure of something else than cells: its module's `read(folder)` is what it draws, `footer(frame)` its
    footer."""
    module = _module(draw)
    frame = module.read(folder)
    figure, ax = style.page(size_of(draw, frame))
    table = draw(frame, ax)
    return style.save(figure, table, path, module.footer(frame))


def frame_of(draw: Draw, cells: list[Cell]) -> pd.DataFrame:
    """What `draw` draws from: its module's SOURCE is "runs" (one row per cell, the default), "requests" (one row per request)
    or a function of the cells, which may take what `draw` is told."""
    source = getattr(_module(draw), "SOURCE", "runs")
    if callable(source):
        frame: pd.DataFrame = source(cells, **_told(draw, source))
        return frame
    return load_requests(cells) if source == "requests" else load_runs(cells)


def size_of(draw: Draw, frame: pd.DataFrame) -> tuple[float, float]:
    """Inches that the page wants."""
    size = getattr(_module(draw), "size", None)
    if size is None:
        return 6.4, 4.4
    width, height = size(frame, **_told(draw, size))
    return width, height


def _told(draw: Draw, other: Callable[..., Any]) -> dict[str, Any]:
    """Of the keywords that `draw` is told, those that `other` takes."""
    takes = inspect.signature(other).parameters
    return {key: value for key, value in getattr(draw, "keywords", {}).items() if key in takes}


def _module(draw: Draw) -> Any:
    return inspect.getmodule(getattr(draw, "func", draw))


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
