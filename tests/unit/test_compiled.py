"""The compiled decoder gives what the model's own code gives; its passes keep what they rewrite; its library has no weight."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lengthwise.engine.native.attention.choose import choose
from lengthwise.engine.native.batch import Batch, Placed
from lengthwise.engine.native.compiled import CompiledDecoder, attention_modules, compile_model, inputs, traced
from lengthwise.engine.native.linear import pack_linears
from lengthwise.engine.native.model import ServedModel
from lengthwise.engine.native.quantise import quantise
from lengthwise.engine.native.tiny import tiny

torch.set_num_threads(1)
BLOCK = 16
SCHEDULES = [  # (query tokens, context) of each row
    [(7, 7)],
    [(1, 1)],
    [(1, 40)],  # one of everything: sizes that were never 1 when traced
    [(1, 17), (1, 5), (18, 18)],
    [(1, 0), (1, 3)],  # a padding row
    [(33, 33), (17, 70)],  # a first and a later chunk
]


def served(family: str = "llama", seed: int = 0, kv_dtype: str = "fp32", block: int = BLOCK, **options: object) -> ServedModel:
    model = tiny(family, seed=seed, **options)  # type: ignore[arg-type]
    model.new_pools(choose("cpu"), 40 * BLOCK // block, block, kv_dtype)
    return model


def batch_of(rows: list[tuple[int, int]], num_groups: int, block: int = BLOCK) -> Batch:
    width = -(-max(context for _, context in rows) // block) + 1  # wider than it must be
    tables = torch.arange(1, 1 + len(rows) * width, dtype=torch.int32).view(len(rows), width)
    positions, slots, starts = [], [], [0]
    for row, (queries, context) in enumerate(rows):
        for at in range(context - queries, context):
            positions.append(max(at, 0))
            slots.append(int(tables[row, at // block]) * block + at % block if at >= 0 else -1)
        starts.append(starts[-1] + queries)
    num = starts[-1]
    ids = torch.randint(0, 128, (num,), generator=torch.Generator().manual_seed(num))
    groups = [Placed(torch.tensor(slots), tables) for _ in range(num_groups)]
    lens = torch.tensor([context for _, context in rows], dtype=torch.int32)
    return Batch(
        ids, torch.tensor(positions), torch.tensor(starts, dtype=torch.int32), lens, sum(q == 1 for q, _ in rows),
        max(q for q, _ in rows), int(lens.max()), torch.arange(num), groups,
    )  # fmt: skip


def outputs(model: ServedModel, block: int = BLOCK) -> list[Tensor]:
    """Logits of every schedule from empty pools."""
    num_groups = 1 + max(spec.group for spec in model.layers)
    for module in attention_modules(model.model.get_decoder()):
        for tensor in module.lengthwise.pool.tensors:
            tensor.zero_()
    return [model.logits(model.forward(batch_of(rows, num_groups, block))) for rows in SCHEDULES]


def error(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_passes_keep_what_they_rewrite(weights: str) -> None:
    model = served(dtype="bf16", kv_dtype="bf16")
    if weights == "bf16":
        if pack_linears(model.model) == 0:
            pytest.skip("linear layers are packed with AVX-512 bf16 only")
    else:
        quantise(model.model)
    decoder = model.model.get_decoder()
    attached = [module.lengthwise for module in attention_modules(decoder)]
    program = traced(decoder, attached)
    ops = [str(node.target) for node in program.graph.nodes]
    assert (
        ops.count("lengthwise.linears.default") == 4 and ops.count("lengthwise.linear.default") == 4
    )  # q k v, gate up; o, down
    assert ops.count("lengthwise.hold.default") == 2  # cosines and sines, once for both layers
    assert [module.lengthwise for module in attention_modules(decoder)] == attached
    run, pools = program.module(), [list(a.pool.tensors) for a in attached]
    expected = outputs(model)
    for tensors in pools:
        for tensor in tensors:
            tensor.zero_()
    with torch.no_grad():
        for rows, logits in zip(SCHEDULES, expected, strict=True):
            assert torch.equal(model.logits(run(*inputs(batch_of(rows, 1)), pools)), logits)


def test_what_cannot_be_compiled_is_said() -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="attach pools"):
        compile_model(model)
    model.new_pools(choose("torch"), 8, 4, "fp32")
    with pytest.raises(ValueError, match="only attention backend 'cpu' is compiled, not 'torch'"):
        compile_model(model)
    assert model.inner is model.model.get_decoder()  # as it was


def test_code_that_cannot_be_traced_is_said() -> None:
    model = served()
    decoder = model.model.get_decoder()
    forward = decoder.forward

    def by_value(**kwargs: Tensor) -> object:
        return forward(**kwargs) if int(kwargs["input_ids"].sum()) < 0 else None

    decoder.forward = by_value
    with pytest.raises(RuntimeError, match="LlamaModel cannot be traced"):
        CompiledDecoder(model).prepare()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "llama-int8", "gemma2", "gemma3", "gpt2", "mixtral", "phi3", "qwen3"])
def test_compiled_is_eager(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choose("cpu")  # kernels stay in the user's cache
    family, _, weights = family.partition("-")
    model = served(family)
    if weights:
        quantise(model.model)
    expected = outputs(model)
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path))
    compiled = compile_model(model)
    assert model.inner is compiled and not compiled.loaded
    assert error(outputs(model), expected) < 1e-5

    other = served(family, seed=1)  # the same library with other weights
    if weights:
        quantise(other.model)
    expected = outputs(other)
    assert compile_model(other).loaded and error(outputs(other), expected) < 1e-5

    old = weakref.ref(attention_modules(other.model.get_decoder())[0].lengthwise.pool.tensors[0])
    other.new_pools(choose("cpu"), 30, BLOCK, "fp32")  # other pools of the same kind; the memory of the first is free
    assert old() is None
    assert error(outputs(other), expected) < 1e-5
    assert len(list((tmp_path / "compiled").iterdir())) == 1


@pytest.mark.slow
def test_another_way_to_keep_kv_is_another_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = served()
    monkeypatch.setenv("LENGTHWISE_CACHE", str(tmp_path))
    compiled = compile_model(model)
    model.new_pools(choose("cpu"), 160, 4, "int8")
    assert not compiled.loaded and len(outputs(model, 4)) == len(SCHEDULES)
    assert len(list((tmp_path / "compiled").iterdir())) == 2
