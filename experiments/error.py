"""Error: what is said of a prediction that errs as it is told to; see conf/error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def error_names(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """predictor ("oracle_mae_25", or "oracle" without an error), error, strength and error_axis of a cell whose config has an
    `error` and whose policy is told something; else nothing."""
    node, chosen = cfg.get("error"), cfg.get("choices") or {}
    if not node or chosen.get("predictor") in (None, "none"):
        return {}
    kind, strength = str(chosen.get("error") or "error"), float(node["strength"])
    said = f"oracle_{kind}_{strength:g}" if strength else "oracle"
    return {"predictor": said, "error": kind, "strength": strength, "error_axis": str(node["axis"])}


def check_error(cfg: Mapping[str, Any]) -> None:
    """Raises ValueError on a strength other than that of its step, where the step sets more than the strength: it would name
    an error that the predictor does not make."""
    node = cfg.get("error") or {}
    if not any(isinstance(table, Mapping) for key, table in node.items() if key != "strengths"):
        return  # the predictor reads the strength
    strength, step = node["strength"], node["step"]
    if strength != (known := node["strengths"][step]):
        raise ValueError(f"error.strength={strength}: error.step={step} has {known}, and sets the error; choose a step")
