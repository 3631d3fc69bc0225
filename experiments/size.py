"""Size: `study.size=small` runs any study in seconds to a minute with its shape kept: fewer requests, two seeds at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

SHARES = {"standard": 1, "small": 10}  # of num_requests: one in so many
LEAST = 100  # requests that are left of more
SEEDS = 2  # differences between schedules are paired by seed: one would leave no interval
SUFFIX = "-small"


def sized(config: DictConfig, params: Mapping[str, str], arguments: Sequence[str]) -> dict[str, str]:
    """`params` (key -> comma-separated values) of the study at `config.study.size`; what `arguments` say is left alone.

    A small study has a tenth of each num_requests, at least 100, its first two seeds, and another name, since its table is not
    the study's; the name is set in `config` too. Raises ValueError on an unknown size, or on num_requests that are no numbers.
    """
    size = config.study.size
    if size not in SHARES:
        raise ValueError(f"study.size={size!r}: choose {', '.join(SHARES)}")
    found = dict(params)
    if size == "standard":
        return found
    said = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(arguments))}
    if "num_requests" not in said:
        counts = [_fewer(text, SHARES[size]) for text in _values("num_requests", found, config.num_requests)]
        found["num_requests"] = ",".join(dict.fromkeys(counts))
    if "seed" not in said and "seed" in found:
        found["seed"] = ",".join(_values("seed", found, None)[:SEEDS])
    if "name" not in said:
        config.name = f"{config.name}{SUFFIX}"
        found["name"] = config.name
    return found


def _values(key: str, params: Mapping[str, str], default: object) -> list[str]:
    (override,) = OverridesParser.create().parse_overrides([f"{key}={params.get(key, default)}"])
    if not override.is_sweep_override():
        return [str(override.value())]
    return [str(value) for value in override.sweep_string_iterator()]


def _fewer(text: str, share: int) -> str:
    if not text.isdigit():
        raise ValueError(f"num_requests={text!r} must be a whole number >= 1")
    return str(min(int(text), max(LEAST, int(text) // share)))
