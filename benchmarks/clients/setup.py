"""Make the virtual environments of the load clients: `setup.py FOLDER [--only openai guidellm aiperf genai_bench]`.

One for each, because they ask for what the others refuse: openai 60 MB, guidellm 1.5 GB, aiperf 1.2 GB, genai-bench 2.1 GB.
Each is made once (a second call only looks; one that was broken off is made anew) and tried: the client has to start. One that
does not is reported, and the others are made all the same. LENGTHWISE_CLIENTS=FOLDER tells the tests where they are.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

TORCH = "torch>=2.6,<2.14"  # later ones drag in gigabytes of CUDA
PACKAGES = {
    "openai": ["openai==3.57.0"],
    "guidellm": ["guidellm==0.8.1", TORCH],
    "aiperf": ["aiperf==0.13.0"],
    "genai_bench": ["genai-bench==0.0.5", TORCH],
}
TRIED = {
    "openai": ["python", "-c", "import openai"],
    "guidellm": ["guidellm", "run", "--help"],
    "aiperf": ["aiperf", "profile", "--help"],
    "genai_bench": ["genai-bench", "benchmark", "--help"],
}


def install(name: str, folder: Path) -> str:
    """What was done. Raises CalledProcessError, with what pip said in `output`."""
    here = folder / name
    done = here / "installed"
    wanted = "\n".join(PACKAGES[name]) + "\n"
    if done.exists() and done.read_text() == wanted:
        return "is there"
    print(f"{name}: installing {' '.join(PACKAGES[name])}; this takes minutes", flush=True)
    began = time.monotonic()
    shutil.rmtree(here, ignore_errors=True)
    venv.create(here, with_pip=True)
    said(here / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name])
    said(here / "bin" / TRIED[name][0], *TRIED[name][1:])
    done.write_text(wanted)
    size = sum(path.lstat().st_size for path in here.rglob("*"))
    return f"installed in {time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB"


def said(*command: str | Path) -> str:
    """Output and errors of `command`. Raises CalledProcessError."""
    return subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the environments are made")
    parser.add_argument("--only", nargs="+", choices=sorted(PACKAGES), default=list(PACKAGES))
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.only:
        try:
            print(f"{name}: {install(name, folder)}", flush=True)
        except subprocess.CalledProcessError as error:
            print(f"{name}: left out. {error}\n{error.output[-2000:]}", flush=True)
            failed.append(name)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
