"""load: build a C++ file of this folder once for this machine, keep the library in the cache, register its torch operators.

One compiler call a file, by hand: torch.utils.cpp_extension wants setuptools and ninja at run time, and leaves a lock behind
when it is killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Lock

import torch

from ..cache import cache_dir

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
ISAS = {
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "portable": [],
}
EXTRAS = {
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "avx512vbmi": "-mavx512vbmi",
}  # by the name in /proc/cpuinfo, with avx512 only
COMMON = ["-O3", "-std=c++20", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
_lock = Lock()
_loaded: dict[str, str] = {}  # name -> isa, in this process


def load(name: str = "attention", isa: str | None = None) -> str:
    """Make the operators of NAME.cpp known to torch; returns the isa they were built for, the best one here unless `isa` forces
    one. The first call on a machine compiles for a minute. Safe in several processes at once.

    Raises ValueError for an unknown name or isa, or if another isa is loaded; RuntimeError without a compiler, or with its last
    lines if it fails."""
    source = FOLDER / f"{name}.cpp"
    if not source.is_file():
        raise ValueError(f"no C++ source {name!r}: there are {', '.join(sorted(p.stem for p in FOLDER.glob('*.cpp')))}")
    if isa is not None and isa not in ISAS:
        raise ValueError(f"isa {isa!r} is not one of {', '.join(ISAS)}")
    with _lock:
        if name in _loaded:
            if isa not in (None, _loaded[name]):
                raise ValueError(f"{name} is loaded for {_loaded[name]}: a process cannot change it to {isa}")
            return _loaded[name]
        isa = isa or best_isa()
        torch.ops.load_library(str(_built(source, isa)))  # type: ignore[no-untyped-call]
        _loaded[name] = isa
        return isa


def best_isa() -> str:
    """What torch itself chose here: ATEN_CPU_CAPABILITY lowers both."""
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "portable")


def _built(source: Path, isa: str) -> Path:
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    flags = [*COMMON, *ISAS[isa], *(_extras() if isa == "avx512" else [])]
    text = source.read_bytes()
    key = hashlib.sha256(repr((text, flags, compiler, torch.__version__)).encode()).hexdigest()[:16]
    folder = cache_dir("kernels", f"{source.stem}-{key}")
    library = folder / f"{source.stem}.so"
    if library.exists():
        return library
    if compiler is None or shutil.which(compiler) is None:
        raise RuntimeError(
            f"no C++ compiler to build {source.name}: looked for {compiler or 'g++, c++ and clang++'} (CXX names one)"
        )
    with open(folder / "lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # let go by the system, however this process ends
        if not library.exists():
            log.info("building %s for %s, once: about a minute", source.name, isa)
            _compile(compiler, flags, source, library)
    return library


def _compile(compiler: str, flags: list[str], source: Path, library: Path) -> None:
    home = Path(torch.__file__).parent
    include = [f"-isystem{home / 'include'}", f"-isystem{home / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    system = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-fopenmp"]
    link = [f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu"]
    part = library.with_suffix(f".{os.getpid()}")
    command = [compiler, *flags, abi, *include, *system, str(source), "-o", str(part), *link]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        part.unlink(missing_ok=True)
        lines = "\n".join(done.stderr.splitlines()[-12:])
        raise RuntimeError(f"{compiler} could not build {source.name} (exit {done.returncode}):\n{lines}")
    part.replace(library)


def _extras() -> list[str]:
    """Flags of those EXTRAS that every processor here has; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    found = next((set(line.split()) for line in lines if line.startswith("flags")), set[str]())
    return [flag for name, flag in EXTRAS.items() if name in found]
