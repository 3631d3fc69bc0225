"""Size: `study.size=small` runs any study in seconds to a minute with its shape kept: fewer requests, two seeds at most.

A study whose shape alone is too much says in `study.small` which of its values are left of a key.
"""

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
    the study's; the name is set in `config` too. study.small (key -> values, as in `params`) goes before: fewer of the study's
    own values, and num_requests up to the study's. Raises ValueError on an unknown size, on num_requests that are no numbers,
    and on a value in study.small that is none of the study's.
    """
    size = config.study.size
    if size not in SHARES:
        raise ValueError(f"study.size={size!r}: choose {', '.join(SHARES)}")
    found = dict(params)
    if size == "standard":
        return found
    said = {override.key_or_group for override in OverridesParser.create().parse_overrides(list(arguments))}
    own = {str(key): str(value) for key, value in (config.study.get("small") or {}).items()}
    counts = _values("num_requests", found, config.num_requests)
    fewer = [_fewer(text, SHARES[size]) for text in counts]
    for key, text in own.items():
        _refuse_others(key, _values(key, own, None), counts if key == "num_requests" else _values(key, found, None))
        if key not in said:
            found[key] = text
    if "num_requests" not in said and "num_requests" not in own:
        found["num_requests"] = ",".join(dict.fromkeys(fewer))
    if "seed" not in said and "seed" not in own and "seed" in found:
        found["seed"] = ",".join(_values("seed", found, None)[:SEEDS])
    if "name" not in said:
        config.name = f"{config.name}{SUFFIX}"
        found["name"] = config.name
    return found


def _refuse_others(key: str, wanted: Sequence[str], there: Sequence[str]) -> None:
    """Raise ValueError on a small study that would show what the study does not."""
    if key == "num_requests":
        most = max(int(text) for text in there)
        bad = [text for text in wanted if not text.isdigit() or not 0 < int(text) <= most]
    else:
        bad = [text for text in wanted if text not in there]
    if bad:
        raise ValueError(f"study.small.{key}: {bad[0]} is none of the study's own: {', '.join(there)}")


def _values(key: str, params: Mapping[str, str], default: object) -> list[str]:
    (override,) = OverridesParser.create().parse_overrides([f"{key}={params.get(key, default)}"])
    if not override.is_sweep_override():
        return [str(override.value())]
    return [str(value) for value in override.sweep_string_iterator()]


def _fewer(text: str, share: int) -> str:
    if not text.isdigit():
        raise ValueError(f"num_requests={text!r} must be a whole number >= 1")
    return str(min(int(text), max(LEAST, int(text) // share)))
