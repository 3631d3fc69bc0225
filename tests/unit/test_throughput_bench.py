"""The throughput benchmark's own arithmetic, with children that only pretend: limits, ratios, medians, going on after a cut."""

from __future__ import annotations

import importlib
import io
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FAKE = """
import json, sys
asked = json.load(sys.stdin)
with open(sys.argv[0] + ".calls", "a") as file:
    file.write(json.dumps([asked.get("system", "machine"), [p["name"] for p in asked.get("points", [])]]) + "\\n")
if "points" not in asked:
    print(json.dumps({"bandwidth": 1e9, "flops": 1e9}))
rates = json.load(open(sys.argv[0] + ".rates"))
for point in asked.get("points", []):
    rate = rates[asked["system"]]
    line = {"point": point["name"]}
    if rate is None:
        print(json.dumps({**line, "error": "RuntimeError: no"}))
        sys.exit(1)
    line |= {"tokens_per_s": rate, "tokens": 1, "wall_s": 1.0, "load_s": 2.0, "warm_s": 0.5, "rss_mib": 100.0}
    print(json.dumps({**line, "others_cores": 0.0, "weight_bytes": 1000}), flush=True)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("engine_throughput")


class Fake:
    """The benchmark on a model that is only a config, with children that say what `rates` says."""

    def __init__(self, bench: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench, self.folder = bench, folder
        self.script = folder / "fake.py"
        self.script.write_text(FAKE)
        monkeypatch.setattr(sys.modules["peers.run"], "SCRIPTS", dict.fromkeys(sys.modules["peers.run"].SCRIPTS, self.script))
        model = folder / "models" / "tiny"
        model.mkdir(parents=True)
        config = {
            "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 8, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 512,
        }  # fmt: skip
        (model / "config.json").write_text(json.dumps(config))
        for kind in ("q8_0", "q4_k_m"):
            (folder / "models" / f"tiny-{kind}.gguf").write_bytes(b"0" * 1000)
        everyone = dict.fromkeys(("vllm", "llamacpp"), sys.executable)
        (folder / "peers.json").write_text(json.dumps(everyone))

    def run(self, rates: dict[str, float | None], *options: str) -> int:
        Path(f"{self.script}.rates").write_text(json.dumps(rates))
        places = ["--log", f"{self.folder}/log.jsonl", "--peers", str(self.folder), "--models-folder", f"{self.folder}/models"]
        return int(
            self.bench.main(
                [
                    *places,
                    "--json",
                    f"{self.folder}/out.json",
                    "--models",
                    "tiny",
                    "--systems",
                    *rates,
                    "--repeat",
                    "1",
                    *options,
                ]
            )
        )

    def calls(self) -> list[list[Any]]:
        path = Path(f"{self.script}.calls")
        made = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        return [call for call in made if call[0] != "machine"]

    @property
    def figures(self) -> dict[str, float]:
        return json.loads((self.folder / "out.json").read_text())["figures"]  # type: ignore[no-any-return]


@pytest.fixture
def fake(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(bench, tmp_path, monkeypatch)


def test_the_limit_of_one_request_by_hand(bench: Any) -> None:
    from peers.job import Point
    from peers.limit import Shape, least_rate, least_seconds

    shape, point = Shape(body=100, head=10, kv_numbers=6), Point("1", 1, [[5, 5, 5, 5]], [3])
    # memory-bound: weights three times, and the KV of 5 and of 6 tokens, the new one included
    assert least_seconds(point, shape, 220, 10.0, 1e9) == pytest.approx((3 * 220 + (5 + 6) * 6 * 2) / 10)
    # compute-bound: four tokens through the body and one through the head, then two through both
    assert least_seconds(point, shape, 220, 1e9, 10.0) == pytest.approx(2 * (4 * 100 + 10 + 2 * 110) / 10)
    assert least_rate(point, shape, 220, 1e9, 10.0) == pytest.approx(3 / 126)


def test_the_limit_shares_weights_and_keeps_to_the_concurrency(bench: Any) -> None:
    from peers.job import Point
    from peers.limit import Shape, least_seconds

    shape, prompts, lens = Shape(100, 10, 0), [[1] * 4] * 3, [3, 1, 3]
    alone = [least_seconds(Point("", 1, [p], [n]), shape, 220, 10.0, 1e9) for p, n in zip(prompts, lens, strict=True)]
    by_concurrency = [least_seconds(Point("", c, prompts, lens), shape, 220, 10.0, 1e9) for c in (1, 2, 3)]
    assert by_concurrency[0] == pytest.approx(sum(alone))  # weights alone, one after the other: 7 steps
    assert by_concurrency[1] == pytest.approx(4 * 22)  # the second leaves at once, the third enters in step 2
    assert by_concurrency[2] == pytest.approx(3 * 22)


def test_the_known_llama_has_the_known_limit(bench: Any) -> None:
    from peers.limit import Shape, least_rate
    from peers.models import LLAMA
    from peers.points import make_points

    shape = Shape.of(LLAMA["llama198m"])
    assert shape.num_weights == pytest.approx(197.9e6, rel=1e-3)
    rates = [least_rate(p, shape, 2 * shape.num_weights, 26.9e9, 421e9) for p in make_points(["1", "8", "32"], 32_000, 4096)]
    assert rates == pytest.approx([65, 354, 581], rel=0.02)  # worked out by another script


def test_points_are_the_same_for_everyone(bench: Any) -> None:
    from peers.points import POINTS, make_points

    made = {p.name: p for p in make_points(list(POINTS), 1000, 8192)}
    assert list(made) == list(POINTS) and made == {p.name: p for p in make_points(list(POINTS), 1000, 8192)}
    for c in (1, 8, 32):
        assert [len(p) for p in made[str(c)].prompts] == made[str(c)].output_lens == [128] * c
    assert made["mixed8"].prompts == made["mixed32"].prompts and made["mixed8"].output_lens == made["mixed32"].output_lens
    assert len(made["mixed8"].prompts) == 64 and len(set(made["mixed8"].output_lens)) > 20
    assert len({tuple(p[:8]) for p in made["32"].prompts}) == 32  # nothing for a prefix cache
    assert all(100 <= token < 900 for p in made["mixed8"].prompts for token in p)
    for point in make_points(list(POINTS), 128, 96):  # a model that takes less
        assert point.longest <= 96 and min(point.output_lens) >= 1
    with pytest.raises(ValueError, match="point '64': one of 1, 8"):
        make_points(["64"], 1000, 100)


def test_a_warm_up_is_two_rounds_cut_short(bench: Any) -> None:
    from peers.points import make_points

    warm = make_points(["mixed8"], 1000, 8192)[0].warm()
    assert len(warm.prompts) == 16 and set(warm.output_lens) <= {2, 3, 4}


def test_a_ratio_wants_all_sides(fake: Fake) -> None:
    fake.run({"transformers_static": 10.0, "ours_eager": 30.0}, "--points", "8")
    assert "ratio_tiny_8" not in fake.figures and "llamacpp_ratio_tiny_8" not in fake.figures
    assert fake.figures["transformers_static_tiny_8_tokens_per_s"] == 10.0
    fake.run({"transformers_static": 10.0, "ours_eager": 30.0, "vllm_eager": 20.0, "llamacpp_q8_0": 15.0}, "--points", "8")
    assert fake.figures["ratio_tiny_8"] == pytest.approx(1.5)
    assert "llamacpp_ratio_tiny_8" not in fake.figures  # no int8 of ours
    fake.run({"vllm_eager": 20.0, "llamacpp_q4_k_m": 1.0, "ours_int8": 45.0}, "--points", "8")
    assert fake.figures["llamacpp_ratio_tiny_8"] == pytest.approx(3.0)
    assert fake.figures["ratio_tiny_8"] == pytest.approx(1.5)


def test_each_side_has_its_faster_variant(fake: Fake) -> None:
    rates = {"transformers_static": 10.0, "transformers_batch": 12.0, "vllm_compiled": 24.0, "vllm_eager": 20.0}
    fake.run({**rates, "ours_eager": 30.0, "ours_compiled": 48.0}, "--points", "1")
    assert fake.figures["ratio_tiny_1"] == pytest.approx(2.0)
    share = fake.figures["limit_share_tiny_1"]
    assert share == pytest.approx(48.0 / fake.figures["limit_tiny_1_tokens_per_s"])


def test_medians_and_ratios_within_a_repetition(bench: Any, tmp_path: Path) -> None:
    from peers.limit import Shape
    from peers.points import make_points
    from peers.results import Log, digests, figures

    points = {"m": make_points(["1"], 1000, 512)}
    log = Log(tmp_path / "log", digests(points, 2))
    for system, rates in {
        "transformers_static": (10.0, 20.0, 40.0),  # the machine gets faster: the ratio does not
        "vllm_compiled": (9.0, 18.0, 39.0),
        "ours_eager": (20.0, 40.0, 80.0),
    }.items():
        for repetition, rate in enumerate(rates):
            log.add({"system": system, "model": "m", "point": "1", "repetition": repetition, "tokens_per_s": rate})
    made = figures(log, points, {"m": Shape(1, 1, 1)})
    assert made["ratio_m_1"] == pytest.approx([2.0, 2.0, 2.0])
    assert statistics.median(made["vllm_compiled_m_1_tokens_per_s"]) == 18.0
    assert "limit_share_m_1" not in made  # the machine was not measured


def test_a_run_goes_on_where_it_was(fake: Fake) -> None:
    fake.run({"ours_eager": 30.0}, "--points", "1", "8")
    assert fake.calls() == [["ours_eager", ["1", "8"]]]
    log = fake.folder / "log.jsonl"
    lines = log.read_text().splitlines()
    log.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:20])  # cut off while point 8 was written
    assert fake.run({"ours_eager": 31.0}, "--points", "1", "8") == 0
    assert fake.calls() == [["ours_eager", ["8"]]]
    fake.run({"ours_eager": 32.0}, "--points", "1", "8")
    assert fake.calls() == []
    assert fake.figures["ours_eager_tiny_1_tokens_per_s"] == 30.0
    fake.run({"ours_eager": 33.0}, "--points", "1", "8", "--quick")  # other lengths: nothing of before counts
    assert fake.calls() == [["ours_eager", ["1", "8"]]]
    fake.run({"ours_eager": 34.0}, "--points", "1", "--threads", "7")
    assert fake.calls() == [["ours_eager", ["1"]]]


def test_a_peers_slow_variant_is_not_repeated(fake: Fake) -> None:
    rates = {"transformers_static": 10.0, "transformers_batch": 20.0, "ours_eager": 5.0, "ours_compiled": 30.0}
    fake.run(rates, "--points", "8", "--repeat", "3")
    called = [system for system, _ in fake.calls()]
    assert called.count("transformers_static") == 1 and called.count("transformers_batch") == 3
    assert called.count("ours_eager") == called.count("ours_compiled") == 3
    fake.run(rates, "--points", "8", "--repeat", "3", "--give-up", "0")
    assert [system for system, _ in fake.calls()] == ["transformers_static"] * 2


def test_systems_take_turns(fake: Fake) -> None:
    fake.run({"ours_eager": 1.0, "ours_compiled": 1.0, "ours_int8": 1.0}, "--points", "1", "--repeat", "3")
    called = [system for system, _ in fake.calls()]
    assert [set(called[i : i + 3]) for i in (0, 3, 6)] == [{"ours_eager", "ours_compiled", "ours_int8"}] * 3
    assert len({called[i] for i in (0, 3, 6)}) == 3


def test_what_fails_is_said_and_the_rest_goes_on(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run({"transformers_static": None, "ours_eager": 30.0}, "--points", "1", "8") == 1
    assert "failed: transformers_static tiny 1: RuntimeError: no" in capsys.readouterr().out
    assert fake.figures["ours_eager_tiny_8_tokens_per_s"] == 30.0
    fake.calls()
    assert fake.run({"transformers_static": 10.0, "ours_eager": 30.0}, "--points", "1", "8") == 0  # tried again
    assert fake.calls() == [["transformers_static", ["1", "8"]]]


def test_a_peer_that_is_not_installed_is_left_out(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    (fake.folder / "peers.json").unlink()
    assert fake.run({"vllm_eager": 10.0, "ours_eager": 30.0}, "--points", "1") == 0
    assert "vllm: left out" in capsys.readouterr().out
    assert [system for system, _ in fake.calls()] == ["ours_eager"]


def test_the_time_left_is_estimated(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert fake.run({"ours_eager": 30.0}, "--points", "1", "--dry-run") == 0
    assert "minutes are left" in capsys.readouterr().out and fake.calls() == []


@pytest.mark.parametrize(("short", "code"), [(0, 0), (1, 1)])
def test_a_child_counts_every_token(
    bench: Any, short: int, code: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from peers import job
    from peers.points import make_points

    class Echo:
        weight_bytes = 7

        def __init__(self, asked: dict[str, Any]) -> None:
            print("a library says something")

        def prepare(self, point: job.Point) -> None: ...
        def generate(self, point: job.Point) -> list[int]:
            return [n - short for n in point.output_lens]

        def close(self) -> None: ...

    ended = []
    points = make_points(["1", "8"], 1000, 512, quick=True)
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"points": [asdict(p) for p in points]})))
    monkeypatch.setattr(job.os, "_exit", ended.append)
    saved = [job.os.dup(fd) for fd in (1, 2)]
    job.run(Echo)
    for fd, kept in enumerate(saved, start=1):
        job.os.dup2(kept, fd)
        job.os.close(kept)
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith("{")]
    assert ended == [code] and [line["point"] for line in lines] == ["1", "8"]
    if short:
        assert "asked for 128 tokens, got 120" in lines[1]["error"] and "tokens_per_s" not in lines[1]
    else:
        assert lines[1]["tokens"] == 128 and lines[1]["weight_bytes"] == 7 and lines[1]["rss_mib"] > 1


def test_quantised_types_follow_the_rule(bench: Any) -> None:
    pytest.importorskip("gguf", reason="runs where llama.cpp's environment is: pip install gguf xllamacpp")
    pytest.importorskip("xllamacpp")
    from peers.quantise import Type, type_of

    assert [type_of("blk.0.ffn_down.weight", i, 8, 512, "q4_k_m") == Type.Q6_K for i in range(8)].count(True) == 4
    assert type_of("token_embd.weight", 0, 8, 576, "q4_k_m") == Type.Q8_0
