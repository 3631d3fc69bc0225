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
