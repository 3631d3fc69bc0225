"""Kernels are built once, whatever goes wrong is said, and every instruction set comes from the one source."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lengthwise.engine.native.cpp import build

HERE = Path(__file__).parent


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, nothing loaded yet."""
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_loaded", {})
    return tmp_path


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="no C\\+\\+ source 'nothing': there are attention"):
        build.load("nothing")
    with pytest.raises(ValueError, match="'sse9' is not one of avx512, avx2, portable"):
        build.load("attention", "sse9")


def test_one_isa_in_a_process() -> None:
    isa = build.load("attention")
    assert build.load("attention", isa) == isa
    with pytest.raises(ValueError, match=f"loaded for {isa}"):
        build.load("attention", next(other for other in build.ISAS if other != isa))


def test_no_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler to build attention\.cpp: looked for no-such-compiler"):
        build.load("attention")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.raises(RuntimeError, match="looked for g\\+\\+"):
        build.load("attention")


def test_a_build_that_fails_shows_why(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", fresh)
    (fresh / "broken.cpp").write_text("int here_is_the_mistake(")
    with pytest.raises(RuntimeError, match=r"could not build broken\.cpp") as failed:
        build.load("broken")
    assert "here_is_the_mistake" in str(failed.value)
    assert not list(fresh.rglob("*.so")) and "broken" not in build._loaded


def test_built_once_and_again_when_the_source_changes(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FOLDER", fresh)
    source = fresh / "tiny.cpp"
    source.write_text("int lengthwise_one() { return 1; }")
    built = build._built(source, "portable")
    made = built.stat().st_mtime_ns
    assert build._built(source, "portable") == built and built.stat().st_mtime_ns == made
    source.write_text("int lengthwise_one() { return 2; }")
    assert build._built(source, "portable") != built
    assert build._built(source, "avx2").parent != build._built(source, "portable").parent


def test_several_processes_at_once(fresh: Path) -> None:
    (fresh / "tiny.cpp").write_text("int lengthwise_one() { return 1; }")
    code = (
        "import sys; from pathlib import Path; from lengthwise.engine.native.cpp import build\n"
        "build.FOLDER = Path(sys.argv[1]); print(build.load('tiny', 'portable'))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(fresh)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and out.strip() == "portable", err
    assert len(list((fresh / "cache").rglob("*.so"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "isa"), [("avx2", "avx2"), ("default", "portable")])
def test_every_isa_attends_alike(capability: str, isa: str) -> None:
    """The whole of test_attention.py on the other builds of the kernel."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"}
    code = "from lengthwise.engine.native.cpp import build; print(build.load('attention'))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert loaded.stdout.strip() == isa, loaded.stderr
    command = [sys.executable, "-m", "pytest", "-q", "-k", "not torch", "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [*command, str(HERE / "test_attention.py")], capture_output=True, text=True, env=environment, cwd=HERE.parents[1]
    )
    assert done.returncode == 0, done.stdout[-3000:]
