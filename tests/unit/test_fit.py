"""Fitting: steps composed from kernels, the three forms, the command; on made-up tables, and the real ones where installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.engine.simulated import fit as command
from lengthwise.engine.simulated.fit import MODELS, fit_forms, main
from lengthwise.engine.simulated.kernels import Batch, KernelTables, ModelShape, StepComposer, read_tables
from lengthwise.engine.simulated.steps import Draw, kind_of

SHAPE = ModelShape("toy", 2, 64, 4, 2, 16, 128, 1000, 1e6)
PER_ROW, LAUNCH, PEAK, BANDWIDTH = 3e-6, 1e-5, 1e12, 1e11


def roof(n: float, k: float, m: float) -> float:
    return LAUNCH + (2 * m * n * k) / PEAK + 2 * n * k / BANDWIDTH


def toy_tables() -> KernelTables:
    """Kernels whose times are exact straight lines (and attention a power law), so that a composition is known by hand."""
    ms = [1.0, 16.0, 256.0, 4096.0]
    products = {(n, k): (ms, [roof(n, k, m) for m in ms]) for n in (32, 64, 128, 512) for k in (64, 128)}
    contexts, lengths = [1.0, 100.0, 10_000.0], [1.0, 100.0, 10_000.0]
    return KernelTables(
        products=products,
        decode={b: (contexts, [1e-5 + PER_ROW * b + 1e-9 * b * c for c in contexts]) for b in (1, 4, 64)},
        prefill={b: (lengths, [1e-9 * b * x**1.5 for x in lengths]) for b in (1, 4)},
        elementwise=(1e-11, 1e-6),
        peak_flops=PEAK,
        bandwidth=BANDWIDTH,
        source={"package": "none", "engine": "toy 1", "device": "toy", "tables": ["a", "b"]},
    )


def linear(tokens: int, emitting: int) -> float:
    layer = sum(roof(n, k, tokens) for n, k in ((128, 64), (64, 64), (256, 64), (64, 128)))
    head = roof(512, 64, emitting) * 1000 / 512  # wider than any table: in proportion
    return 2 * layer + head + 2 * (SHAPE.elementwise_bytes * 1e-11 * tokens + 4e-6)


def test_a_step_is_composed_kernel_by_kernel():
    composer = StepComposer(toy_tables(), SHAPE)
    assert SHAPE.products == [(128, 64), (64, 64), (256, 64), (64, 128)]
    decode = 2 * (1e-5 + PER_ROW * 10 + 1e-9 * 2000)
    assert composer.step(Batch(10, 2000, ())) == pytest.approx(linear(10, 10) + decode, rel=1e-9)
    prompt = 2 * 1e-9 * 300**1.5
    assert composer.step(Batch(0, 0, ((0, 300),))) == pytest.approx(linear(300, 1) + prompt, rel=1e-9)
    later = 2 * 1e-9 * 6000**1.5 * (1 - 0.25)  # the second half of a prompt of 6,000: three quarters of the score matrix
    assert composer.step(Batch(0, 0, ((3000, 3000),))) == pytest.approx(linear(3000, 1) + later, rel=1e-9)
    both = composer.step(Batch(10, 2000, ((0, 300),)))
    assert both == pytest.approx(linear(310, 11) + decode + prompt, rel=1e-9)
    last = 2 * (1e-5 + PER_ROW + 1e-9 * 5001)  # one token after 5,000: it cannot be cheaper than reading them
    assert composer.step(Batch(0, 0, ((5000, 1),))) == pytest.approx(linear(1, 1) + last, rel=1e-9)


def test_llama_has_the_size_it_is_known_by():
    shape = MODELS["llama31_8b"]
    assert shape.kv_bytes_per_token == 131072
    matrices = shape.layer_params + 2 * shape.head_params  # and the embedding
    assert matrices == pytest.approx(shape.num_params, rel=1e-3)


def test_random_steps_follow_the_seed_and_stay_in_range():
    draw = Draw(600)
    batches = draw.batches()
    assert batches == Draw(600).batches() != Draw(600, seed=1).batches()
    kinds = [kind_of(b) for b in batches]
    assert all(kinds.count(kind) == 200 for kind in ("decode", "prefill", "hybrid"))
    assert all(0 <= b.num_rows <= b.context <= 450_000 or b.num_rows == 0 for b in batches)
    assert all(1 <= sum(n for _, n in b.chunks) <= 8192 for b in batches if b.chunks)
    assert all(n >= 1 and s >= 0 and s + n <= 8192 for b in batches for s, n in b.chunks)
    assert draw.held_out().sum() == 120


def test_every_form_fits_toy_steps_and_repeats_itself():
    fits, again = (fit_forms(toy_tables(), SHAPE, Draw(900)) for _ in range(2))
    assert {form: fit.arguments for form, fit in fits.items()} == {form: fit.arguments for form, fit in again.items()}
    for form, limit in (("affine", 0.08), ("roofline", 0.08), ("table", 0.05)):
        assert 0 < fits[form].errors["all"]["mean"] < limit, form
        assert fits[form].errors["decode"]["mean"] < limit, form
        assert set(fits[form].errors) == {"decode", "prefill", "hybrid", "all"}
    grid = np.array(fits["table"].arguments["attention"])
    assert (np.diff(grid, axis=0) >= 0).all() and (np.diff(grid, axis=1) >= 0).all()
    assert (np.diff(fits["table"].arguments["linear"]) >= 0).all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ([], "model="),
        (["model=llama31_8b", "device=abacus"], "abacus"),
        (["modle=llama31_8b"], "modle"),
        (["model=llama31_8b", "device=h100_sxm", "steps=ten"], "steps=ten"),
        (["model=llama31_8b", "device=h100_sxm", "steps=10"], "300"),
    ],
)
def test_the_command_names_what_is_wrong(settings, match, capsys):
    assert main(settings) == 2
    assert match in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["model=llama31_8b", "device=h100_sxm"]) == 2
    assert "lengthwise[fit]" in capsys.readouterr().err


def test_the_command_writes_the_same_node_twice(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "read_tables", lambda *_: toy_tables())
    monkeypatch.setitem(command.MODELS, "toy", SHAPE)
    texts = []
    for form in ("roofline", "roofline", "table", "affine"):
        out = tmp_path / "toy.yaml"
        assert main(["model=toy", "device=h100_sxm", f"form={form}", "steps=600", "seed=3", f"out={out}"]) == 0
        texts.append(out.read_text())
        hardware = instantiate(OmegaConf.load(out))
        assert hardware.provenance["form"] == form and hardware.name == "toy"
        assert type(hardware.cost).__name__.lower() == form
        assert "seed=3" in texts[-1] and str(tmp_path) not in texts[-1]
    assert texts[0] == texts[1] != texts[2]
    assert capsys.readouterr().out.count("held-out") == 4


@pytest.mark.data
@pytest.mark.parametrize(("device", "name"), [("h100_sxm", "llama31_8b_h100"), ("a100_sxm", "llama31_8b_a100")])
def test_the_shipped_node_is_what_the_command_writes(device, name):
    pytest.importorskip("aiconfigurator_core", reason="needs the extra `fit` (aiconfigurator-core)")
    shape = MODELS["llama31_8b"]
    fits = fit_forms(read_tables(shape, device), shape, Draw(), ["roofline", "table"])
    shipped = OmegaConf.to_container(OmegaConf.load(Path(__file__).parents[2] / "conf" / "hardware" / f"{name}.yaml"))
    for key, value in fits["roofline"].arguments.items():
        assert shipped["cost"][key] == (value if key == "fitted_range" else pytest.approx(value, rel=1e-3)), key
    for kind, error in fits["roofline"].errors.items():
        assert shipped["provenance"]["held_out_error"][kind] == pytest.approx(error, abs=1e-3)
        assert error["mean"] < 0.035 and error["p95"] < 0.08
        assert fits["table"].errors[kind]["mean"] < error["mean"]


@pytest.mark.data
def test_the_reader_names_what_the_package_lacks():
    pytest.importorskip("aiconfigurator_core", reason="needs the extra `fit` (aiconfigurator-core)")
    shape = MODELS["llama31_8b"]
    with pytest.raises(ValueError, match=r"abacus.*h100_sxm"):
        read_tables(shape, "abacus")
    with pytest.raises(ValueError, match=r"vllm 9\.9"):
        read_tables(shape, "h100_sxm", version="9.9")
    with pytest.raises(ValueError, match="heads of toy"):
        read_tables(SHAPE, "h100_sxm")
