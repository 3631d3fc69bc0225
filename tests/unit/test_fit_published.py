"""Nodes from published whole steps (splitwise-sim) and coefficients (DistServe): hand-made files, and the real ones."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lengthwise.engine.simulated import distserve, splitwise
from lengthwise.engine.simulated.shapes import MODELS
from lengthwise.sched import Chunk, Request

CONF = Path(__file__).parents[2] / "conf" / "hardware"
COLUMNS = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,e2e_time,tensor_parallel"
BASE, ROW, CONTEXT = 20.0, 0.1, 4e-4  # ms


def prefill_ms(tokens: int) -> float:
    return 40.0 if tokens <= 512 else 40.0 + 0.05 * (tokens - 512)


def csv(path: Path) -> Path:
    """A made-up file: decoding exactly linear, prefill exactly a floor and a slope, one batch that did not fit, other rows."""
    lines = [COLUMNS]
    for prompt, batch in ((128, 1), (512, 1), (1024, 1), (8192, 1), (512, 4), (512, 16), (512, 64)):
        decode = BASE + ROW * batch + CONTEXT * batch * (prompt + 64)
        start = prefill_ms(prompt * batch)
        whole = start + 127 * decode
        for noise in (-0.1, 0.0, 0.3):  # the median is exact
            times = f"{start + noise},{decode},{whole}"
            lines.append(f"llama2-70b,a100-80gb,{prompt},{batch},128,{times},8")
        lines.append(f"llama2-70b,a100-80gb,{prompt},{batch},4096,{start},1.0,{whole},8")
        lines.append(f"llama2-70b,h100-80gb,{prompt},{batch},128,1.0,1.0,128.0,8")
    lines.append("llama2-70b,a100-80gb,512,128,128,1.0,1.0,99999.0,8")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_whole_steps_are_priced_as_they_were_measured(tmp_path):
    configs = splitwise.read_configs(csv(tmp_path / "perf_model.csv"), "llama2_70b", "a100_sxm", 8)
    assert len(configs.batch) == 7 and configs.num_dropped == 1
    assert splitwise.fit_decode(configs) * 1e3 == pytest.approx([BASE, ROW, CONTEXT], rel=1e-6)
    errors = splitwise.left_out_errors(configs)
    assert errors["decode"]["max"] < 1e-3 and errors["prefill"]["mean"] > 0  # the floor's knee is not in the rest
    out = tmp_path / "made_up.yaml"
    arguments = ["model=llama2_70b", "device=a100_sxm", "tp=8", f"path={tmp_path / 'perf_model.csv'}", f"out={out}"]
    assert splitwise.main(arguments) == 0
    hardware = instantiate(OmegaConf.load(out))
    assert hardware.name == "made_up" and str(tmp_path) not in out.read_text()
    for rows, mean in ((1, 192), (16, 576), (64, 576)):
        a, c, limit = hardware.cost.decode_line(rows, rows * mean)
        assert limit == float("inf")
        assert (a + c * rows * mean) * 1e3 == pytest.approx(BASE + ROW * rows + CONTEXT * rows * mean, rel=1e-4)
    for tokens in (128, 512, 1024, 2048, 4000, 8192, 32768):
        chunk = Chunk(Request(0, 0.0, tokens), 0, tokens, True)
        assert hardware.cost.step(0, 0, [chunk]) * 1e3 == pytest.approx(prefill_ms(tokens), rel=1e-4)
    assert hardware.cost.fitted_range == {"rows": 64, "context": 64 * 576, "prefill_tokens": 32768}
    first = out.read_text()
    assert splitwise.main(arguments) == 0 and out.read_text() == first


def test_a_falling_curve_is_made_monotone(tmp_path):
    configs = splitwise.read_configs(csv(tmp_path / "perf_model.csv"), "llama2_70b", "a100_sxm", 8)
    dented = replace(configs, prefill=np.where(configs.tokens == 512, 0.5, 1.0) * configs.prefill)
    _, seconds = splitwise.fit_prefill(dented)
    assert (np.diff(seconds) >= 0).all()
    linear = splitwise.fit_table(replace(configs, decode=configs.decode * 10))["linear"]
    assert linear == sorted(linear)  # decoding of 64 rows above the prefill of 128 tokens


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["model=llama2_70b", "device=a100_sxm", "tp=4"], "no llama2-70b on a100-80gb x 4"),
        (["model=llama2_70b", "device=h200_sxm"], "device=h200_sxm"),
        (["model=gpt5", "device=h100_sxm"], "model=gpt5"),
        (["model=llama2_70b", "device=a100_sxm", "tp=8", "path=absent.csv"], "absent.csv"),
    ],
)
def test_the_splitwise_command_names_what_is_wrong(settings, match, tmp_path, capsys):
    path = csv(tmp_path / "perf_model.csv")
    assert splitwise.main([f"path={path}", *settings]) == 2
    assert match in capsys.readouterr().err


def test_a_file_of_other_columns_is_refused(tmp_path):
    (tmp_path / "x.csv").write_text("model,hardware\na,b\n")
    with pytest.raises(ValueError, match=r"lacks the columns.*tensor_parallel"):
        splitwise.read_configs(tmp_path / "x.csv", "llama2_70b", "a100_sxm", 8)


def test_without_the_data_folder_the_variable_is_named(monkeypatch, capsys):
    monkeypatch.delenv("LENGTHWISE_DATA", raising=False)
    assert splitwise.main(["model=llama2_70b", "device=a100_sxm"]) == 2
    assert "LENGTHWISE_DATA is not set" in capsys.readouterr().err
    assert distserve.main(["all=true"]) == 2
    assert "left out" in capsys.readouterr().err


PROFILE = {
    "facebook/opt-13b": {
        "1": {
            "decoding_large_small_bs_threshold": 90,
            "prefill": [18.0, 0.1, 7e-6],
            "decoding_smallbs": [20.0, 6e-4, 0.04],
            "decoding_largebs": [7.0, 5e-4, 0.16],
        },
        "2": {
            "decoding_large_small_bs_threshold": 90,
            "prefill": [18.0, 0.1, -7e-6],
            "decoding_smallbs": [20.0, 6e-4, 0.04],
            "decoding_largebs": [7.0, 5e-4, 0.16],
        },
        "4": {"prefill": [1.0, 1.0, 1.0]},
    }
}


def test_coefficients_become_seconds_and_keep_their_meaning(tmp_path):
    path, out = tmp_path / "profile.json", tmp_path / "made_up.yaml"
    path.write_text(json.dumps(PROFILE))
    assert distserve.main(["model=opt_13b", "engine=vllm", f"path={path}", f"out={out}"]) == 0
    cost = instantiate(OmegaConf.load(out)).cost
    for rows, context in ((1, 500), (89, 40_000)):
        a, c, _ = cost.decode_line(rows, context)
        assert (a + c * context) * 1e3 == pytest.approx(20.0 + 6e-4 * context + 0.04 * rows, rel=1e-9)
    a, c, _ = cost.decode_line(160, 40_000)
    few, many = 20.0 + 6e-4 * 40_000 + 0.04 * 89, 7.0 + 5e-4 * 40_000 + 0.16 * 160
    assert (a + c * 40_000) * 1e3 == pytest.approx(max(few, many), rel=1e-9)
    chunks = [Chunk(Request(0, 0.0, n), 0, n, True) for n in (300, 700)]
    assert cost.step(0, 0, chunks) * 1e3 == pytest.approx(18.0 + 0.1 * 1000 + 7e-6 * (300**2 + 700**2), rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["model=opt_13b", "tp=2"], "prefill has square=-7e-06"),
        (["model=opt_13b", "tp=4"], "decoding_large_small_bs_threshold"),
        (["model=opt_13b", "tp=8"], r"no facebook/opt-13b on 8 ranks; it has ['1', '2', '4']"),
        (["model=opt_66b"], "no facebook/opt-66b on 1 ranks; it has []"),
        (["model=opt_13b", "engine=orca"], "engine=orca"),
    ],
)
def test_the_distserve_command_names_what_is_wrong(settings, match, tmp_path, capsys):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(PROFILE))
    assert distserve.main([f"path={path}", *settings]) == 2
    assert match in capsys.readouterr().err


def data() -> None:
    if not (Path(os.environ.get("LENGTHWISE_DATA", "absent")) / "cost").is_dir():
        pytest.skip("needs LENGTHWISE_DATA with cost/splitwise-sim and cost/distserve")


@pytest.mark.data
def test_the_shipped_nodes_are_what_the_commands_write(tmp_path):
    data()
    assert splitwise.main(["all=true", f"out={tmp_path}"]) == distserve.main(["all=true", f"out={tmp_path}"]) == 0
    written = {path.stem: path for path in tmp_path.iterdir()}
    listed = {
        path.stem for path in CONF.glob("*.yaml") if "splitwise model" in (t := path.read_text()) or "distserve model" in t
    }
    assert set(written) == listed and len(written) == len(splitwise.SHIPPED) + len(distserve.SHIPPED)
    for name, path in written.items():
        assert path.read_text() == (CONF / f"{name}.yaml").read_text(), name


@pytest.mark.data
def test_decoding_left_out_is_priced_within_5_percent_on_average():
    data()
    for model, device, tp in splitwise.SHIPPED:
        ranks = OmegaConf.load(CONF / f"{model}_{device.split('_')[0]}_tp{tp}_measured.yaml")
        errors = ranks.provenance.held_out_error
        assert errors.decode.mean < 0.05 and errors.prefill.mean < 0.18
        assert MODELS[model].num_params * 2 == ranks.weights
