"""Token cost: GPU-seconds, and money where a dated price is given, per million tokens.

GPUs are paid for whether they compute or not, so idle time counts. Prices are the user's: none is known here, and one without
a date is refused, because it would be read as today's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

MILLION = 1e6
TOKENS = ("output", "total")  # total: each prompt once, and what was generated


@dataclass(frozen=True)
class Price:
    """What a GPU costs an hour, in `currency`, on the day `date` (ISO), according to `source`."""

    per_gpu_hour: float
    date: str
    currency: str = "USD"
    source: str | None = None


def read_price(node: Mapping[str, Any] | None) -> Price | None:
    """The price of a config node; None when it has neither a price nor a date. Raises ValueError on one without the other."""
    node = dict(node or {})
    amount, day = node.get("per_gpu_hour"), node.get("date")
    if amount is None and day is None:
        return None
    if amount is None:
        raise ValueError(f"price.date={day} without price.per_gpu_hour")
    if isinstance(amount, bool) or not isinstance(amount, (int, float)) or not 0 < amount < math.inf:
        raise ValueError(f"price.per_gpu_hour={amount!r} must be a finite number > 0")
    if day is None:
        raise ValueError(f"price.per_gpu_hour={amount} needs price.date=YYYY-MM-DD, the day it was valid: prices change")
    try:
        day = date.fromisoformat(str(day)).isoformat()
    except ValueError:
        raise ValueError(f"price.date={day!r} must be a day, YYYY-MM-DD") from None
    source = node.get("source")
    return Price(float(amount), day, str(node.get("currency") or "USD"), None if source is None else str(source))


def num_gpus(hardware: Any, given: int | None = None) -> int:
    """GPUs of one replica: as `given`, else as the hardware says (`num_gpus`: its tensor-parallel group).

    Raises ValueError on a count that is none.
    """
    count = hardware.num_gpus if given is None else given
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"gpus_per_replica={count!r} must be a whole number >= 1")
    return count


def token_cost(summaries: Iterable[Mapping[str, Any]], gpus: int, price: Price | None = None) -> dict[str, Any]:
    """Cost per million tokens of cells that ran the same system on `gpus` GPUs each; their tokens and seconds are added up.

    Keys gpu_seconds_per_million_{output,total}_tokens, None where nothing was generated; with a price also
    cost_per_million_{output,total}_tokens and `price`. Pure.
    """
    tokens, seconds = dict.fromkeys(TOKENS, 0.0), 0.0
    for summary in summaries:
        took = summary["window"]["seconds"]
        seconds += took
        for kind in TOKENS:
            tokens[kind] += (summary["metrics"].get(f"{kind}_tokens_per_s") or 0.0) * took
    out: dict[str, Any] = {
        f"gpu_seconds_per_million_{kind}_tokens": gpus * seconds / count * MILLION if count else None
        for kind, count in tokens.items()
    }
    if price is not None:
        for kind in TOKENS:
            spent = out[f"gpu_seconds_per_million_{kind}_tokens"]
            out[f"cost_per_million_{kind}_tokens"] = None if spent is None else spent / 3600 * price.per_gpu_hour
        out["price"] = {
            "per_gpu_hour": price.per_gpu_hour, "currency": price.currency, "date": price.date, "source": price.source,
        }  # fmt: skip
    return out
