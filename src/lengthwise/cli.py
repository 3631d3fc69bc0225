"""The `lengthwise` command: picks a command and hands it the rest of the line; nothing heavy is imported before that."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "run": "run one cell, or a sweep with -m, or a study: lengthwise run -m study=quickstart",
    "train": "train, calibrate and evaluate a length predictor: lengthwise train predictor=gbdt workload=sharegpt",
    "collect": "have a model answer prompts and keep how long it was: lengthwise collect model=smollm2 samples=4",
    "probe": "train a probe of hidden states that refines predictions while decoding: lengthwise probe model=smollm2",
    "capacity": "the greatest request rate at which SLOs hold, GPUs for a rate, cost per token: lengthwise capacity slo=chat",
    "profile": "measure an engine's step times and fit a cost model: lengthwise profile model=smollm2",
    "validate": "error of the simulation against an engine, by metric: lengthwise validate model=smollm2",
    "serve": "an OpenAI-compatible server: lengthwise serve model=smollm2 policy=srpt predictor=artefact predictor.path=PATH",
    "bench": "send a workload to any OpenAI-compatible server and measure: lengthwise bench target=URL rate=2",
    "data": "what data the workloads know, where each is had, what is found: lengthwise data [fetch=NAME | show=NODE]",
    "figure": "redraw a figure from stored results: lengthwise figure figure=NAME runs=PATH",
}
COMPLETION = ("-sc", "--shell-completion", "--shell_completion")


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch `argv` (default: the command line). Returns the exit code; commands may leave by SystemExit."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] == "--version":
        from lengthwise import __version__

        print(__version__)
        return 0
    if args[0] in COMPLETION:
        return _complete(args)
    if args[0] not in COMMANDS:
        print(_unknown(args[0]), file=sys.stderr)
        return 2
    try:
        code = _dispatch(args[0], args[1:])
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever read our lines has had enough, as `head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def usage() -> str:
    lines = ["usage: lengthwise COMMAND [KEY=VALUE ...]", "", "commands:"]
    lines += [f"  {name:<9}{what}" for name, what in COMMANDS.items()]
    lines += ["", "`lengthwise COMMAND --help` shows what a command can be told. Tab completion in bash:"]
    return "\n".join([*lines, '  eval "$(lengthwise -sc install=bash)"'])


def _unknown(command: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(command, COMMANDS, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"lengthwise: no command {command!r}; there are {', '.join(COMMANDS)}.{hint}"


def _dispatch(command: str, args: list[str]) -> int:
    sys.argv = [sys.argv[0], *args]  # Hydra reads the command line itself
    if command == "run":
        from lengthwise.experiments.app import main as run

        run()
        return 0
    if command == "train":
        from lengthwise.experiments.train_app import main as train

        train()
        return 0
    if command == "collect":
        from lengthwise.experiments.collect_app import main as collect

        collect()
        return 0
    if command == "probe":
        from lengthwise.experiments.probe_app import main as probe

        probe()
        return 0
    if command == "capacity":
        from lengthwise.experiments.capacity_app import main as capacity

        capacity()
        return 0
    if command == "serve":
        from lengthwise.experiments.serve_app import main as serve

        serve()
        return 0
    if command == "profile":
        from lengthwise.experiments.profile_app import main as profile

        profile()
        return 0
    if command == "validate":
        from lengthwise.experiments.validate_app import main as validate

        validate()
        return 0
    if command == "bench":
        from lengthwise.experiments.bench_app import main as bench

        bench()
        return 0
    if command == "data":
        from lengthwise.experiments.data import main as data

        return data(args)
    from lengthwise.experiments.figures.main import main as figure

    return int(figure(args) or 0)


def _complete(args: list[str]) -> int:
    """Answer the shell. Hydra takes the word after the program for an override, so the command is cut out of COMP_LINE."""
    line = os.environ.get("COMP_LINE", "")
    if not any(arg.startswith("query=") for arg in args[1:]):  # install and uninstall
        return _dispatch("run", args)
    words = line.split()
    if len(words) < 2 or (len(words) == 2 and not line.endswith(" ")):
        start = words[1] if len(words) == 2 else ""
        print(" ".join(name for name in COMMANDS if name.startswith(start)))
        return 0
    command = words[1]
    if command not in ("run", "train", "collect", "probe", "capacity", "serve", "profile", "validate", "bench"):
        return 0
    os.environ["COMP_LINE"] = line.replace(f" {command}", "", 1)
    return _dispatch(command, args)


if __name__ == "__main__":
    sys.exit(main())
