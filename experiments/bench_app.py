"""`lengthwise bench`: the Hydra application around one cell of a server that runs already; a short form of `lengthwise run`."""

from __future__ import annotations

import json

import hydra
from omegaconf import DictConfig

from .app import cell, tell
from .hints import run_app
from .paths import root

CONFIG = "bench"


@hydra.main(version_base="1.3", config_path="pkg://lengthwise.conf", config_name=CONFIG)
def app(config: DictConfig) -> None:
    """One cell, as in `lengthwise run`. Leaves by SystemExit when it was measured before: what answers at a URL may be another
    server by now, and an old result would pass for its own."""
    if (row := cell(config, "lengthwise bench")) is None:
        return
    folder = root(config.out) / config.name / row["folder"]
    if row["cached"]:
        raise SystemExit(
            f"lengthwise bench: nothing was sent, this was measured before: {folder}\n"
            "another name=NAME, seed, or +executor.server.KEY=VALUE (what is different about the server) measures anew"
        )
    summary = json.loads((folder / "summary.json").read_text())
    metrics, provenance = summary["metrics"], summary["provenance"]
    for name, what in (("arrival", "due"), ("sent", "sent")):
        print(f"{what:<19}{_number(metrics[f'{name}_rps'])}/s, CV of the gaps {_number(metrics[f'{name}_cv'])}")
    late = ", ".join(f"{key} {_number(metrics[f'lateness_{key}'])}" for key in ("mean", "p50", "p99"))
    print(f"{'lateness':<19}{late}, most {_number(metrics['max_lateness'])} s")
    counting = provenance["counting"]
    print(f"{'tokens counted':<19}by usage for {counting['by_usage']} answers, {counting['miscounted']} miscounted")
    print(f"{'num_failed':<19}{metrics['num_failed']}, {metrics['num_timeout']} timed out, {metrics['num_retries']} sent again")
    for mark in provenance["marks"]:
        print(f"note: {mark}")
    tell(row, folder)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def main() -> None:
    """Run the application on sys.argv; after a refusal by Hydra add the nearest name."""
    try:
        run_app(app, CONFIG)
    except KeyboardInterrupt:  # what there is to say has been said
        raise SystemExit(130) from None
