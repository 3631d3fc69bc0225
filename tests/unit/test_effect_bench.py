"""The benchmarks of KV dtypes and of the host's work on a tiny model: the reference finds itself, fewer bits are further away,
and a step's parts make the whole."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench() -> Any:
    return importlib.import_module("kv_dtypes")


def figures(bench: Any, folder: Path, *options: str) -> dict[str, float]:
    bench.main(["--threads", "1", "--json", f"{folder}/out.json", *options])
    made = json.loads((folder / "out.json").read_text())
    assert all(math.isfinite(value) for value in made["figures"].values())
    return made["figures"]


def test_fewer_bits_are_further_from_the_reference(bench: Any, tmp_path: Path) -> None:
    found = figures(bench, tmp_path, "--tiny", "--num-prompts", "6", "--tokens", "24")
    kl = {kind: found[f"kl_tiny_{kind}"] for kind in bench.KINDS}
    assert abs(kl["fp32"]) < 1e-9
    assert found["same_tiny_fp32"] == found["equal_tiny_fp32"] == 1 and found["agreed_tiny_fp32"] == 24
    assert abs(found["nll_tiny_fp32"]) < 1e-5 and abs(found["answer_nll_tiny_fp32"]) < 1e-5
    for less, more in [("fp32", "fp16"), ("fp16", "bf16"), ("bf16", "int8"), ("int8", "fp8"), ("bf16_model", "int8_model")]:
        assert 2 * kl[less] < kl[more], (less, more)
    assert kl["fp8"] < 0.5 and found["same_tiny_fp16"] > found["same_tiny_fp8"]  # all still the same model
    assert abs(kl["int8_torch"] / kl["int8"] - 1) < 0.05  # another backend, the same rounding
    assert found["kl_ratio_tiny_int8"] == pytest.approx(kl["int8"] / kl["bf16"])
    assert found["kv_bytes_tiny_fp32"] == 2 * found["kv_bytes_tiny_bf16"] == 4 * 4 * 2 * 2 * 16


def test_a_row_says_what_it_is_told_and_is_compared_there(bench: Any) -> None:
    """Teacher-forced logits are those of the library's own forward over prompt and told tokens."""
    model = bench.loader("tiny")[1]("fp32")
    prompts = [[5, 6, 7], list(range(40))]
    told = [[1, 2, 3, 4], [9, 8]]
    seen: list[list[torch.Tensor]] = [[], []]
    asks = [bench.Ask(p, told=t, see=lambda place, x, s=s: s.append(x)) for p, t, s in zip(prompts, told, seen, strict=True)]
    engine = bench.NativeEngine(model, attention="torch")
    (first, second) = bench.answers(engine, [asks, [bench.Ask(prompts[1], 5)]])
    assert first == told
    plain = importlib.import_module("lengthwise.engine.native.tiny").tiny_model(num_hidden_layers=4)
    with torch.no_grad():
        for prompt, tokens, logprobs in zip(prompts, told, seen, strict=True):
            own = plain(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0, -len(tokens) :].log_softmax(-1)
            torch.testing.assert_close(torch.stack(logprobs), own, atol=1e-4, rtol=1e-4)
        out = list(prompts[1])
        for _ in range(5):  # found in the prefix cache, and not what was told there before
            out.append(int(plain(torch.tensor([out]), use_cache=False).logits[0, -1].argmax()))
    assert second == [out[40:]]


def test_divergence_is_that_of_its_definition(bench: Any) -> None:
    kept, p, q = bench.Kept(), torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.5, 0.25])
    kept(0, p.log())
    seen = bench.Compared(kept, [0])
    seen(0, q.log())
    assert seen.kl == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2)) and seen.same == 0
    assert seen.likelihood.mean - kept.total == pytest.approx(math.log(2))


def test_first_difference(bench: Any) -> None:
    assert [bench.agreed(a, b) for a, b in [([1, 2], [1, 2]), ([1, 2], [1, 3]), ([1], [1, 2]), ([2], [1])]] == [2, 1, 1, 0]


def test_texts_come_from_a_file_whole_or_cut(bench: Any, tmp_path: Path) -> None:
    class Letters:
        tokenizer, eos_ids = True, frozenset(b"~")

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

        def encode_chat(self, text: str) -> list[int]:
            return [0, *self.encode(text)]

    lines = [
        {"prompt": "first", "answer": "abcdefg"},
        {"prompt": "much too long", "answer": ""},
        {"prompt": "third"},
        {"prompt": "4", "answer": "a~b"},
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    asked = ["--prompts", f"{tmp_path}/texts.jsonl", "--max-prompt", "8", "--tokens", "4"]
    texts = bench.read_texts(bench.parse(asked), Letters())
    assert texts == [([0, *b"first"], [*b"abcd"]), ([0, *b"third"], []), ([0, *b"4"], [*b"a"])]
    assert bench.read_texts(bench.parse([*asked, "--skip", "1"]), Letters()) == texts[1:]
    with pytest.raises(ValueError, match="no prompt of at most 8 tokens after the first 3"):
        bench.read_texts(bench.parse([*asked, "--skip", "3"]), Letters())
    own = [json.loads(line) for line in (BENCHMARKS / "texts.jsonl").read_text().splitlines()]
    assert len(own) >= 8 and all(entry["prompt"] and entry["answer"] for entry in own)


def test_a_step_is_told_apart(tmp_path: Path) -> None:
    options = ["--model", "tiny", "--modes", "eager", "--parts", "steps", "--concurrency", "1", "3", "--steps", "3"]
    host = importlib.import_module("engine_host")
    found = figures(host, tmp_path, *options, "--repeats", "1", "--models-folder", f"{tmp_path}/models")
    assert {name.removeprefix("host_share_tiny_") for name in found if name.startswith("host_share")} == {"1", "3"}
    for c in (1, 3):
        assert all(found[f"{part}_us_tiny_{c}"] > 0 for part in ("plan", "executor", "book"))
        assert 0 < found[f"host_share_tiny_{c}"] < 1 and found[f"forward_ms_tiny_{c}"] < found[f"step_ms_tiny_{c}"]
