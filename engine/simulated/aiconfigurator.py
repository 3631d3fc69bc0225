"""Reads the kernel tables of the PyPI package aiconfigurator-core: what one rank of a model runs, on one device.

Heads that the attention tables lack are priced from those they have: query heads between two numbers of them are interpolated,
and rows of many KV heads are read as more rows of fewer (heads are independent, so 1 row of 32 KV heads is 4 rows of 8).
`source` says which was done.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .kernels import Curve, KernelTables, bracket
from .shapes import ModelShape
from .table import interpolate

PACKAGE = "aiconfigurator-core"
Rows = Mapping[int, Curve]  # rows -> curve
Heads = Mapping[tuple[int, int], Rows]  # (query heads, KV heads) -> rows -> curve


def read_tables(shape: ModelShape, device: str, framework: str = "vllm", version: str | None = None) -> KernelTables:
    """The bf16 tables of `device` from the installed package, for the heads of one rank; `version` None takes the newest.

    Raises ModuleNotFoundError without the package, ValueError for a device, framework, version or heads it does not hold.
    """
    from importlib import metadata

    import pandas as pd
    import yaml  # type: ignore[import-untyped]

    systems = _systems()
    data = systems / "data"
    devices = sorted(p.name for p in data.iterdir() if (systems / f"{p.name}.yaml").is_file())
    if device not in devices:
        raise ValueError(f"device={device} is not in {PACKAGE}; it has {', '.join(devices)}")
    found = {kind: _versions(data / device / kind / framework) for kind in ("gemm", "attention")}
    both = sorted(set(found["gemm"]) & set(found["attention"]), key=lambda v: [int(x) for x in v.split(".") if x.isdigit()])
    if not both or (version is not None and version not in both):
        raise ValueError(f"{device} has no gemm and attention tables for {framework} {version or ''}; versions: {both}")
    version = version or both[-1]

    def table(kind: str, name: str) -> Any:
        return pd.read_parquet(data / device / kind / framework / version / f"{name}_perf.parquet")

    gemm = table("gemm", "gemm")
    gemm = gemm[gemm.gemm_dtype == "bfloat16"]
    products = {(n, k): curve for (n, k), curve in _curves(gemm, ["n", "k"], "m").items()}
    attention: dict[str, Rows] = {}
    notes = []
    for name, x, offset in (("generation", "step", 1), ("context", "isl", 0)):
        heads = _heads(table("attention", f"{name}_attention"), shape.head_dim, x, offset)
        attention[name], note = for_heads(heads, *shape.rank_heads)
        if not attention[name]:
            raise ValueError(f"{device} {framework} {version} has no {name} attention for the heads of {shape.name}{note}")
        notes += [f"{name} attention: {note}"] if note else []
    names = ["gemm_perf", "generation_attention_perf", "context_attention_perf"]
    if shape.tp > 1:
        names.append("custom_allreduce_perf")
    gpu = yaml.safe_load((systems / f"{device}.yaml").read_text())["gpu"]
    bandwidth = float(gpu["mem_bw"])
    return KernelTables(
        products=products,
        decode=attention["generation"],
        prefill=attention["context"],
        elementwise=(1 / (bandwidth * gpu["mem_bw_empirical_scaling_factor"]), gpu["mem_empirical_constant_latency"]),
        peak_flops=float(gpu["bfloat16_tc_flops"]),
        bandwidth=bandwidth,
        source={
            "package": f"{PACKAGE} {metadata.version(PACKAGE)}",
            "engine": f"{framework} {version}",
            "device": str(gemm.device.iloc[0]),
            "tables": names,
            "notes": notes,
        },
        all_reduce=_all_reduce(data / device / "comm" / framework / version, shape.tp) if shape.tp > 1 else None,
    )


def for_heads(heads: Heads, num_heads: int, num_kv_heads: int) -> tuple[Rows, str]:
    """(rows -> curve, what was done to get it) for heads a table may lack; no rows when it cannot be told."""
    fold = 1
    while num_kv_heads % fold == 0 and num_heads % fold == 0:
        kv, asked = num_kv_heads // fold, num_heads // fold
        known = sorted(h for h, k in heads if k == kv)
        if known and known[0] <= asked <= known[-1]:
            parts = bracket(known, asked)
            note = [] if len(parts) == 1 else [f"{asked} query heads between {parts[0][0]} and {parts[1][0]}"]
            rows = _blend([(heads[h, kv], w) for h, w in parts])
            if fold > 1:
                note.append(f"a row of {num_kv_heads} KV heads as {fold} rows of {kv}")
                rows = {b // fold: curve for b, curve in rows.items() if b % fold == 0}
            return rows, ", ".join(note)
        fold *= 2
    return {}, f": {num_heads} query and {num_kv_heads} KV heads of one rank"


def _blend(parts: list[tuple[Rows, float]]) -> Rows:
    """The weighted sum of curves, at the rows and knots that all have."""
    if len(parts) == 1:
        return parts[0][0]
    rows = sorted(set.intersection(*(set(part) for part, _ in parts)))
    out = {}
    for b in rows:
        curves = [(part[b], w) for part, w in parts]
        knots = sorted(set.intersection(*(set(curve[0]) for curve, _ in curves)))
        out[b] = (knots, [sum(w * interpolate(x, *curve) for curve, w in curves) for x in knots])
    return out


def _heads(rows: Any, head_dim: int, x: str, offset: int) -> Heads:
    """The bf16 curves over `x` of an attention table, without a sliding window, by heads and rows."""
    keep = (rows.head_dim == head_dim) & (rows.attn_dtype == "bfloat16") & (rows.kv_cache_dtype == "bfloat16")
    if "window_size" in rows:
        keep &= rows.window_size == 0
    out: dict[tuple[int, int], dict[int, Curve]] = {}
    for (h, kv, b), curve in _curves(rows[keep], ["num_heads", "num_key_value_heads", "batch_size"], x, offset).items():
        out.setdefault((h, kv), {})[b] = curve
    return out


def _all_reduce(folder: Path, num_gpus: int) -> Curve:
    """The engine's own all-reduce inside CUDA graphs, over 2-byte numbers: the package counts elements, not bytes (its 2^29
    take 8.3 ms on eight A100s, which as bytes would be half of what NVLink gives)."""
    import pandas as pd

    path = folder / "custom_allreduce_perf.parquet"
    if not path.is_file():
        raise ValueError(f"{PACKAGE} has no all-reduces of {folder.parent.name} {folder.name} on {folder.parents[2].name}")
    rows = pd.read_parquet(path)
    keep = (rows.num_gpus == num_gpus) & (rows.allreduce_dtype == "bfloat16")
    if "backend" in rows:
        keep &= ~rows.backend.str.endswith("_eager")  # those hold the launch, which is host time here
    if not keep.any():
        raise ValueError(
            f"{path.name} has no all-reduce over {num_gpus} devices, but over {sorted(map(int, rows.num_gpus.unique()))}"
        )
    return _curves(rows[keep], ["num_gpus"], "message_size")[(num_gpus,)]


def _systems() -> Path:
    from importlib import util

    spec = util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            f"kernel tables need the package {PACKAGE}: install the extra `fit` (pip install 'lengthwise[fit]')"
        )
    return Path(spec.origin).parent / "systems"


def _versions(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


def _curves(frame: Any, keys: list[str], x: str, offset: int = 0) -> dict[tuple[int, ...], Curve]:
    """Curves over `x` by keys, of medians: duplicates are repeats. Milliseconds become seconds."""
    out: dict[tuple[int, ...], Curve] = {}
    for (*key, knot), latency in frame.groupby([*keys, x]).latency.median().items():
        xs, ys = out.setdefault(tuple(int(k) for k in key), ([], []))
        xs.append(float(knot) + offset)
        ys.append(float(latency) * 1e-3)
    return out
