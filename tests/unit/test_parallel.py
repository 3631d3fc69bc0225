"""Tensor parallelism: slices add up to the whole, and two processes give the logits of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import Ask, Case
from native import assert_greedy, play_native
from torch import nn

from lengthwise.engine.native import shards
from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.loading import load_model
from lengthwise.engine.native.parallel import ParallelModel, SharedPool, refuse
from lengthwise.engine.native.tiny import tiny, tiny_model
from lengthwise.engine.native.verify import packed_logits

torch.set_num_threads(1)


def texts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 128, (n,), generator=generator) for n in (19, 10)]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_slices_add_up_to_the_whole(bias, size, alone, monkeypatch):
    """Columns side by side and rows summed, whatever the number of ranks; a bias of rows is added once, by each rank."""
    torch.manual_seed(0)
    first, second = nn.Linear(12, 16, bias=bias), nn.Linear(16, 6, bias=bias)
    x = torch.randn(5, 12)
    parts = [shards.columns(first, rank, size)(x) for rank in range(size)]
    torch.testing.assert_close(torch.cat(parts, -1), first(x))
    sums = []
    for rank, part in enumerate(parts):
        row = shards.shared(second, shards.ROWS, "second", rank, size, alone)
        assert (row.bias is not None) == bias and row.linear.bias is None
        sums.append(row.linear(part))
    total = sum(sums)
    monkeypatch.setattr(dist, "all_reduce", lambda out, group: out.copy_(total))
    torch.testing.assert_close(row(parts[-1]), second(first(x)))


def test_what_cannot_be_shared_is_refused(alone):
    with pytest.raises(ValueError, match="its plan asks for colwise_gather_output, rowwise_split_input"):
        refuse(tiny("phi3"), 2)
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no plan"):
        refuse(tiny("gpt2"), 2)
    with pytest.raises(ValueError, match="has 2 KV heads, which 4 ranks cannot share evenly"):
        refuse(tiny("llama"), 4)
    with pytest.raises(ValueError, match="q_proj is 65 wide, which 2 ranks cannot share evenly"):
        shards.shared(nn.Linear(3, 65), shards.COLUMNS, "q_proj", 0, 2, alone)


def test_a_group_of_one(alone):
    """All that rank 0 does besides a ServedModel's work: announcing, a gathered head, pools whose blocks are everyone's."""
    whole = packed_logits(tiny("llama"), texts())
    model = ParallelModel(tiny("llama"), alone)
    assert isinstance(model.model.lm_head, shards.GatheredColumns) and model.head_shared and model.vocab_size == 128
    torch.testing.assert_close(packed_logits(model, texts()), whole)
    pool, *others = model.new_pools(TorchPaged(), 4, 4, "fp32")
    assert isinstance(pool, SharedPool)
    with pytest.raises(ValueError, match="shared by 1 ranks: pools come from new_pools only"):
        model.attach(TorchPaged(), [pool, *others])
    pool.tensors[0].copy_(torch.arange(4.0)[:, None, None, None].expand_as(pool.tensors[0]))
    kept = pool.export(torch.tensor([1, 3]))
    pool.copy_blocks([2], [1])
    assert pool.tensors[0][:, 0, 0, 0].tolist() == [0, 2, 2, 3]
    pool.restore(torch.tensor([2, 0]), kept)
    assert pool.tensors[0][:, 0, 0, 0].tolist() == [3, 2, 1, 3]
    model.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_two_processes_give_the_logits_of_one(family):
    """With half of the KV heads each; blocks move between pools and host memory on both."""
    whole = packed_logits(tiny(family), texts())
    model = tiny(family, tensor_parallel=2)
    try:
        assert [spec.num_kv_heads for spec in model.layers] == [1, 1] and model.head_shared
        assert model.weight_bytes < 0.7 * tiny(family).weight_bytes
        torch.testing.assert_close(packed_logits(model, texts()), whole, atol=1e-4, rtol=1e-4)
        pool, *_ = model.new_pools(TorchPaged(), 4, 4, "fp32")
        parts = pool.export(torch.tensor([0, 1]))
        assert [tuple(part.shape) for part in parts] == [(2, 4, 1, 16)] * 4
        moved = tuple(part + rank for rank, part in zip((1, 1, 2, 2), parts, strict=True))
        pool.restore(torch.tensor([2, 3]), moved)
        pool.copy_blocks([2], [0])
        back = pool.export(torch.tensor([0, 3]))
        assert all(torch.equal(one, other) for one, other in zip(back, moved, strict=True))
    finally:
        model.close()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_two_processes_copy_what_is_written():
    """A prompt that is cached whole, in pieces of two blocks: copied on both, or the heads of one would read nothing."""
    asks = tuple(Ask(t, 64, 10, 10, block_hashes=[1, 2]) for t in (0.0, 1.0))
    case = Case(asks, prefix=True, copy_on_write=True, hash_tokens=32, pool=640)
    model = tiny("llama", tensor_parallel=2)
    try:
        result = play_native(case, model)
    finally:
        model.close()
    assert [r._cached for r in result.requests] == [0, 63] and len(result.log.moves) == 1
    assert_greedy("llama", result.log)


@pytest.mark.slow
def test_a_model_that_cannot_be_shared_leaves_no_process():
    with pytest.raises(ValueError, match="has no plan"):
        tiny("gpt2", tensor_parallel=2)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_saved_model_is_shared(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "mine")
    model = load_model(str(tmp_path / "mine"), dtype="fp32", tokenizer=False, tensor_parallel=2)
    try:
        torch.testing.assert_close(packed_logits(model, texts()), packed_logits(tiny("llama"), texts()), atol=1e-4, rtol=1e-4)
    finally:
        model.close()
