"""Paged attention backends against a naive softmax over what each token may see, written here."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from lengthwise.engine.native.attention.backend import Attention
from lengthwise.engine.native.attention.choose import choose
from lengthwise.engine.native.batch import Batch, Placed
from lengthwise.engine.native.pool import KV_DTYPES, LayerSpec

torch.set_num_threads(1)
CPU = torch.device("cpu")


@cache
def backend(name: str) -> Attention:
    return choose(name)


@pytest.fixture(params=["torch", "cpu"])
def attention(request: pytest.FixtureRequest) -> Attention:
    return backend(request.param)


@dataclass
class Shape:
    """(query tokens, context) of each row, decoding rows first; the rest as in LayerSpec and Attention."""

    rows: list[tuple[int, int]]
    num_decode: int
    num_heads: int = 4
    num_kv_heads: int = 2
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None


class Scene:
    """Random keys and values of every row, stored in shuffled blocks of one pool; a batch over them; what should come out."""

    def __init__(
        self, attention: Attention, shape: Shape, dtype: str = "fp32", query_dtype: str = "fp32", seed: int = 0
    ) -> None:
        rng = np.random.default_rng(seed)
        draw = torch.Generator().manual_seed(seed)
        self.shape, self.attention = shape, attention
        spec = LayerSpec(shape.num_kv_heads, shape.k_dim, shape.v_dim, shape.window)
        size = shape.block_size
        self.lens = [context for _, context in shape.rows]
        needs = [-(-context // size) for context in self.lens]
        num_blocks = sum(needs) + 3
        self.pool = attention.new_pool(spec, num_blocks, size, dtype, CPU)
        order, width = rng.permutation(num_blocks), max([*needs, 1])
        tables = np.full((len(needs), width), -(2**30), dtype=np.int32)  # never read past the end
        self.keys, self.values, slots, used = [], [], [], 0
        for row, (context, need) in enumerate(zip(self.lens, needs, strict=True)):
            blocks = order[used : used + need]
            used += need
            tables[row, :need] = blocks
            at = np.arange(context)
            slots.append(blocks[at // size] * size + at % size if context else at)
            self.keys.append(torch.randn(context, shape.num_kv_heads, shape.k_dim, generator=draw))
            self.values.append(torch.randn(context, shape.num_kv_heads, shape.v_dim, generator=draw))
        kept = KV_DTYPES[query_dtype]
        poison = torch.full((num_blocks * size, shape.num_kv_heads, 1), torch.nan)
        everywhere = torch.arange(num_blocks * size)
        attention.store(
            self.pool,
            poison.expand(-1, -1, shape.k_dim).to(kept),
            poison.expand(-1, -1, shape.v_dim).to(kept),
            everywhere,
        )
        if self.keys:
            flat = torch.from_numpy(np.concatenate(slots))
            attention.store(self.pool, torch.cat(self.keys).to(kept), torch.cat(self.values).to(kept), flat)
        if shape.window is not None:  # blocks that the window has passed are someone else's by now
            for row, (queries, context) in enumerate(shape.rows):
                tables[row, : max(0, context - queries - shape.window + 1) // size] = -(2**30)
        self.tables, self.slots = torch.from_numpy(tables), slots
        counts = [queries for queries, _ in shape.rows]
        self.query = torch.randn(sum(counts), shape.num_heads, shape.k_dim, generator=draw).to(kept)
        self.starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        self.scale = shape.k_dim**-0.5
        self.batch = Batch(
            token_ids=torch.zeros(sum(counts), dtype=torch.int64),
            positions=torch.zeros(sum(counts), dtype=torch.int64),
            query_start=torch.from_numpy(self.starts),
            context_len=torch.tensor(self.lens, dtype=torch.int32),
            num_decode=shape.num_decode,
            max_query=max([*counts, 0]),
            max_context=max([*self.lens, 0]),
            emit=torch.zeros(0, dtype=torch.int64),
            groups=[Placed(torch.zeros(sum(counts), dtype=torch.int64), self.tables)],
        )

    def attend(self) -> Tensor:
        shape = self.shape
        return self.attention.attend(self.pool, self.query, self.batch, 0, self.scale, shape.window, shape.softcap)

    def expected(self, query_dtype: str = "fp32") -> Tensor:
        """Token by token, head by head, in fp64."""
        shape, out = self.shape, torch.zeros(self.query.shape[0], self.shape.num_heads, self.shape.v_dim, dtype=torch.float64)
        kept = KV_DTYPES[query_dtype]
        for row, (queries, context) in enumerate(shape.rows):
            if not context:
                continue
            keys, values = self.keys[row].to(kept).double(), self.values[row].to(kept).double()
            for i in range(queries):
                token, position = int(self.starts[row]) + i, context - queries + i
                low = 0 if shape.window is None else max(0, position - shape.window + 1)
                for head in range(shape.num_heads):
                    kv = head // (shape.num_heads // shape.num_kv_heads)
                    scores = keys[low : position + 1, kv] @ self.query[token, head].double() * self.scale
                    if shape.softcap is not None:
                        scores = shape.softcap * torch.tanh(scores / shape.softcap)
                    out[token, head] = torch.softmax(scores, 0) @ values[low : position + 1, kv]
        return out

    def error(self, query_dtype: str = "fp32") -> float:
        found = self.attend()
        assert found.dtype == self.query.dtype
        return float((found.double() - self.expected(query_dtype)).abs().max()) if found.numel() else 0.0


DECODE = [(1, 40), (1, 1), (1, 17), (1, 16)]
CHUNKS = [(5, 5), (1, 33), (20, 47), (16, 16)]
SHAPES = {
    "decode": Shape(DECODE, 4),
    "one": Shape([(1, 1)], 1),
    "chunks": Shape(CHUNKS, 0),
    "mixed": Shape(DECODE + CHUNKS, 4),
    "decode rows as chunks": Shape(DECODE, 1),
    "padding": Shape([(1, 9), (1, 0), (1, 0), (3, 8), (2, 0)], 3),
    "only padding": Shape([(1, 0), (1, 0)], 2),
    "no rows": Shape([], 0),
    "window": Shape([*DECODE, (30, 60), (8, 8)], 4, window=7),
    "window of one": Shape([(1, 20), (4, 20)], 1, window=1),
    "wide window": Shape([(1, 20), (4, 20)], 1, window=1000),
    "softcap": Shape([*DECODE, *CHUNKS], 4, softcap=1.5),
    "window and softcap": Shape([*DECODE, *CHUNKS], 4, window=20, softcap=2.0),
    "long": Shape([(1, 3000), (1, 5)], 2),
    "long window": Shape([(1, 3000), (6, 2500)], 1, window=700),
    "long chunk": Shape([(1, 10), (150, 400)], 1),
}


@pytest.mark.parametrize("name", list(SHAPES))
def test_schedules(attention: Attention, name: str) -> None:
    assert Scene(attention, SHAPES[name]).error() < 1e-5


@pytest.mark.parametrize("block_size", [1, 7, 16, 24, 32, 64])
@pytest.mark.parametrize("window", [None, 9])
def test_block_sizes(attention: Attention, block_size: int, window: int | None) -> None:
    assert Scene(attention, Shape([*DECODE, *CHUNKS], 4, block_size=block_size, window=window)).error() < 1e-5


@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 1), (8, 1), (9, 3), (14, 2)])
@pytest.mark.parametrize("block_size", [7, 16])
def test_groups_of_heads(attention: Attention, heads: tuple[int, int], block_size: int) -> None:
    rows = [*DECODE, (5, 20), (13, 40)]
    assert Scene(attention, Shape(rows, 4, num_heads=heads[0], num_kv_heads=heads[1], block_size=block_size)).error() < 1e-5


@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (24, 16), (48, 128), (5, 3)])
def test_head_dims(attention: Attention, dims: tuple[int, int]) -> None:
    rows = [*DECODE, (5, 20), (18, 40)]
    for block_size in (16, 5):
        assert Scene(attention, Shape(rows, 4, k_dim=dims[0], v_dim=dims[1], block_size=block_size)).error() < 1e-5


TOLERANCE = {"bf16": 0.02, "fp16": 0.003, "fp32": 0.02, "int8": 0.05, "fp8": 0.2}  # absolute, of outputs of about 1


@pytest.mark.parametrize("query_dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", list(KV_DTYPES))
@pytest.mark.parametrize("block_size", [16, 32, 7])
def test_dtypes(attention: Attention, dtype: str, query_dtype: str, block_size: int) -> None:
    shape = Shape([(1, 300), *DECODE, (9, 70)], 5, num_heads=8, k_dim=32, v_dim=64, block_size=block_size)
    error = Scene(attention, shape, dtype, query_dtype).error(query_dtype)
    exact = dtype == query_dtype == "fp32"
    assert error < (1e-5 if exact else max(TOLERANCE[dtype], TOLERANCE[query_dtype] if query_dtype != "fp32" else 0.0))


@pytest.mark.parametrize(
    ("dtype", "least", "most"), [("bf16", 1e-3, 4e-3), ("fp16", 1e-4, 5e-4), ("int8", 5e-3, 0.013), ("fp8", 0.02, 0.05)]
)
def test_what_a_dtype_costs(attention: Attention, dtype: str, least: float, most: float) -> None:
    """Mean error of the outputs over their own mean size, with N(0, 1) keys and values, and with large and small values."""
    for factor in (1.0, 1000.0, 0.001) if dtype in ("int8", "fp8") else (1.0,):
        scene = Scene(attention, Shape([(1, 400)] * 4, 4, num_heads=8, k_dim=64, v_dim=64))
        spec = LayerSpec(2, 64, 64)
        pool = attention.new_pool(spec, scene.pool.num_blocks, 16, dtype, CPU)
        attention.store(
            pool, torch.cat(scene.keys), torch.cat(scene.values) * factor, torch.from_numpy(np.concatenate(scene.slots))
        )
        exact, scene.pool = scene.attend() * factor, pool
        cost = float((scene.attend() - exact).abs().mean() / exact.abs().mean())
        assert least < cost < most


def test_a_scale_for_each_vector(attention: Attention) -> None:
    """An all-zero vector and one of huge numbers both come back."""
    pool = attention.new_pool(LayerSpec(1, 16, 16), 1, 16, "int8", CPU)
    key, value = torch.zeros(2, 1, 16), torch.stack([torch.zeros(1, 16), torch.full((1, 16), 1e6)])
    attention.store(pool, key, value, torch.arange(2))
    batch = Batch(
        *[torch.zeros(1, dtype=torch.int64)] * 2,
        torch.tensor([0, 1]).int(),
        torch.tensor([2]).int(),
        1,
        1,
        2,
        torch.zeros(0),
        [],
    )
    batch.groups = [Placed(torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32))]
    out = attention.attend(pool, torch.zeros(1, 1, 16), batch, 0, 1.0, None, None)
    assert torch.allclose(out, torch.full_like(out, 5e5), rtol=1e-3)


def random_shape(rng: np.random.Generator) -> Shape:
    num_decode = int(rng.integers(0, 6))
    rows = [(1, int(rng.integers(0, 90))) for _ in range(num_decode)]
    for _ in range(int(rng.integers(0, 4))):
        queries = int(rng.integers(1, 40))
        rows.append((queries, queries + int(rng.integers(0, 60))))
    kv = int(rng.choice([1, 2, 3]))
    dims = [8, 16, 20, 32, 64, 80]
    return Shape(
        rows,
        num_decode,
        num_heads=kv * int(rng.choice([1, 2, 3, 4, 7, 8])),
        num_kv_heads=kv,
        k_dim=int(rng.choice(dims)),
        v_dim=int(rng.choice(dims)),
        block_size=int(rng.choice([1, 2, 7, 8, 16, 32, 48])),
        window=None if rng.random() < 0.5 else int(rng.integers(1, 60)),
        softcap=None if rng.random() < 0.7 else float(rng.choice([0.5, 5.0, 50.0])),
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(attention: Attention, seed: int) -> None:
    shape = random_shape(np.random.default_rng(seed))
    assert Scene(attention, shape, seed=seed).error() < 1e-5, shape


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("block_size", [16, 5])
def test_a_result_depends_on_its_own_row_only(dtype: str, block_size: int) -> None:
    """Bit for bit: other rows, chunking's neighbours and the number of threads change nothing."""
    rows = [(1, 700), (1, 40), (1, 16), (7, 300), (30, 33)]
    query_dtype = "bf16" if dtype == "bf16" else "fp32"
    scene = Scene(backend("cpu"), Shape(rows, 3, num_heads=6, block_size=block_size), dtype, query_dtype)
    whole, batch, query = scene.attend(), scene.batch, scene.query
    try:
        torch.set_num_threads(3)
        assert torch.equal(scene.attend(), whole)
    finally:
        torch.set_num_threads(1)
    for row, (count, context) in enumerate(rows):
        start = int(scene.starts[row])
        scene.query = query[start : start + count]
        scene.batch = Batch(
            batch.token_ids,
            batch.positions,
            torch.tensor([0, count], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            int(count == 1),
            count,
            context,
            batch.emit,
            [Placed(batch.groups[0].slots, scene.tables[row : row + 1])],
        )
        assert torch.equal(scene.attend(), whole[start : start + count])


def test_strided_inputs(attention: Attention) -> None:
    """Heads before tokens, as a model's projections come."""
    scene = Scene(attention, SHAPES["mixed"])
    whole = scene.attend()
    scene.query = scene.query.transpose(0, 1).contiguous().transpose(0, 1)
    assert not scene.query.is_contiguous() and torch.equal(scene.attend(), whole)
    scene.query = torch.stack([scene.query, scene.query], -1)[..., 0]  # not even a head in one piece
    assert torch.equal(scene.attend(), whole)
    first, second = (attention.new_pool(LayerSpec(2, 16, 16), 2, 16, "fp32", CPU) for _ in range(2))
    key = torch.randn(2, 20, 16).transpose(0, 1)
    attention.store(first, key, key, torch.arange(20))
    attention.store(second, key.contiguous(), key.contiguous(), torch.arange(20))
    assert all(torch.equal(a, b) for a, b in zip(first.tensors, second.tensors, strict=True))


@pytest.mark.parametrize("dtype", list(KV_DTYPES))
@pytest.mark.parametrize("block_size", [16, 5])
def test_slots_that_keep_nothing(attention: Attention, dtype: str, block_size: int) -> None:
    pool, same, before = (attention.new_pool(LayerSpec(2, 16, 16), 4, block_size, dtype, CPU) for _ in range(3))
    key, value = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    for target in (pool, same, before):
        attention.store(target, key.flip(0), value.flip(0), torch.tensor([0, 3, 9, 11, 12, 4]))
    attention.store(pool, key, value, torch.tensor([-1, 7, -1, 0, 5, -1]))
    attention.store(same, key[[1, 3, 4]], value[[1, 3, 4]], torch.tensor([7, 0, 5]))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(pool.tensors, same.tensors, strict=True))
    assert not all(torch.equal(a.float(), b.float()) for a, b in zip(pool.tensors, before.tensors, strict=True))
    attention.store(same, key, value, torch.full((6,), -1))
    attention.store(same, key[:0], value[:0], torch.zeros(0, dtype=torch.int64))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(pool.tensors, same.tensors, strict=True))


@pytest.mark.parametrize("dtype", list(KV_DTYPES))
def test_blocks_may_move(attention: Attention, dtype: str) -> None:
    """Exported, overwritten, restored elsewhere: the same bits come out; and so from a copied block."""
    scene = Scene(attention, Shape([(1, 40), (6, 20)], 1), dtype)
    before, pool = scene.attend(), scene.pool
    used = torch.unique(scene.tables[scene.tables >= 0]).long()
    data = pool.export(used)
    assert sum(part.numel() * part.element_size() for part in data) == pool.num_bytes * len(used) // pool.num_blocks
    moved = used.flip(0)
    pool.restore(moved, data)
    places = {int(old): int(new) for old, new in zip(used, moved, strict=True)}
    scene.tables.apply_(lambda block: places.get(block, block))
    assert torch.equal(scene.attend(), before)
    spare = next(block for block in range(pool.num_blocks) if block not in used)
    pool.copy_blocks([int(scene.tables[0, 0])], [spare])
    scene.tables[0, 0] = spare
    assert torch.equal(scene.attend(), before)
    one, other = (int(block) for block in scene.tables[0, 1:3])
    pool.copy_blocks([one, other], [other, one])  # read before they are written
    scene.tables[0, 1], scene.tables[0, 2] = other, one
    assert torch.equal(scene.attend(), before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_operators_as_torch_wants_them(dtype: str) -> None:
    """Schemas tell what is mutated, fakes tell the shape: torch.compile may hold them."""
    scene = Scene(backend("cpu"), SHAPES["mixed"], dtype)
    tensors = (*scene.pool.tensors, None, None)[:4]
    batch = scene.batch
    rows = (batch.query_start, batch.context_len, scene.tables)
    torch.library.opcheck(torch.ops.lengthwise.paged_attend, (scene.query, *tensors, *rows, scene.scale, 0, 0.0))
    key = torch.randn(3, 2, 16)
    torch.library.opcheck(torch.ops.lengthwise.paged_store, (key, key, torch.tensor([0, -1, 5]), *tensors))


def test_doors(attention: Attention) -> None:
    spec = LayerSpec(2, 16, 16)
    with pytest.raises(ValueError, match="fp4"):
        attention.new_pool(spec, 4, 16, "fp4", CPU)
    with pytest.raises(ValueError, match="blocks of 0"):
        attention.new_pool(spec, 4, 0, "fp32", CPU)


def test_the_kernel_refuses_what_does_not_fit() -> None:
    scene = Scene(backend("cpu"), SHAPES["decode"])
    with pytest.raises(RuntimeError, match="slot 10000 of a pool of"):
        key = torch.zeros(1, 2, 16)
        scene.attention.store(scene.pool, key, key, torch.tensor([10_000]))
    scene.query = scene.query[:, :3].contiguous()
    with pytest.raises(RuntimeError, match="3 query heads for 2 KV heads"):
        scene.attend()
    scene.query = torch.zeros(4, 4, 8)
    with pytest.raises(RuntimeError, match="queries of 8 numbers for keys of 16"):
        scene.attend()


def test_choose(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert choose().name == "cpu" and choose("torch").name == "torch"
    with pytest.raises(ValueError, match="'flash' is not one of"):
        choose("flash")
    with pytest.raises(ValueError, match="'triton' does not run on cpu"):
        choose("triton", "cpu")

    def refuse(name: str, isa: str | None = None) -> str:
        raise RuntimeError("no compiler today")

    monkeypatch.setattr("lengthwise.engine.native.cpp.build.load", refuse)
    with caplog.at_level(logging.WARNING):
        assert choose().name == "torch"
    assert [record.getMessage() for record in caplog.records if "no compiler today" in record.getMessage()]
    with pytest.raises(RuntimeError, match="no compiler today"):
        choose("cpu")
