"""Decode graphs: choice of size, padding and static buffers, with steps that are repeated eagerly instead of captured."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.engine.native.attention.torch_paged import TorchPaged
from lengthwise.engine.native.batch import Batch, Placed
from lengthwise.engine.native.graphs import Buffers, DecodeGraphs, capture_sizes, decode_graphs
from lengthwise.engine.native.model import ServedModel
from lengthwise.engine.native.pool import Pool
from lengthwise.engine.native.tiny import tiny

torch.set_num_threads(1)
CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 8, 64


class Repeated(TorchPaged):
    """The reference, said to be capturable: a step that is run again stands in for one that is replayed."""

    captures = True


def again(step):  # type: ignore[no-untyped-def]
    return step


class Served:
    """A tiny model with its pools, and rows of given contexts that have been prefilled."""

    def __init__(self, family: str, lens: list[int], seed: int = 0) -> None:
        self.model: ServedModel = tiny(family)
        self.attention = Repeated()
        self.pools: list[Pool] = [
            self.attention.new_pool(spec, NUM_BLOCKS, BLOCK_SIZE, "fp32", CPU) for spec in self.model.layers
        ]
        self.model.attach(self.attention, self.pools)
        rng = np.random.default_rng(seed)
        self.lens = lens
        needs = [-(-(n + 4) // BLOCK_SIZE) for n in lens]
        order = rng.permutation(NUM_BLOCKS)
        self.tables = np.zeros((len(lens), max(needs)), np.int32)
        for row, need in enumerate(needs):
            start = sum(needs[:row])
            self.tables[row, :need] = order[start : start + need]
        self.num_groups = 1 + max(spec.group for spec in self.model.layers)
        self.texts = [rng.integers(0, self.model.vocab_size, n) for n in lens]
        self.model.forward(self._batch([np.arange(n) for n in lens], self.texts, 0, list(range(len(lens)))))

    def slots(self, row: int, at: np.ndarray) -> np.ndarray:
        return self.tables[row, at // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + at % BLOCK_SIZE

    def decode(self, rows: list[int], tokens: list[int], emit: list[int] | None = None) -> Batch:
        """The next token of `rows`."""
        batch = self._batch([np.array([self.lens[r]]) for r in rows], [np.array([t]) for t in tokens], len(rows), rows)
        if emit is not None:
            batch.emit = torch.tensor(emit, dtype=torch.int64)
        return batch

    def _batch(self, places: list[np.ndarray], texts: list[np.ndarray], num_decode: int, rows: list[int]) -> Batch:
        counts = [len(at) for at in places]
        width = max(int(at[-1]) // BLOCK_SIZE + 1 for at in places)
        slots = np.concatenate([self.slots(row, at) for row, at in zip(rows, places, strict=True)])
        placed = Placed(torch.from_numpy(slots), torch.from_numpy(self.tables[rows, :width]))
        return Batch(
            token_ids=torch.from_numpy(np.concatenate(texts)),
            positions=torch.from_numpy(np.concatenate(places)),
            query_start=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32),
            context_len=torch.tensor([int(at[-1]) + 1 for at in places], dtype=torch.int32),
            num_decode=num_decode,
            max_query=max(counts),
            max_context=max(int(at[-1]) + 1 for at in places),
            emit=torch.tensor(np.cumsum(counts) - 1),
            groups=[placed] * self.num_groups,
        )

    def graphs(self, **settings: object) -> DecodeGraphs:
        given = {"block_size": BLOCK_SIZE, "max_num_seqs": 8, "max_model_len": 64, "capture": again, **settings}
        return DecodeGraphs(self.model, self.attention, **given)  # type: ignore[arg-type]

    def contents(self) -> list[torch.Tensor]:
        return [tensor.clone() for pool in self.pools for tensor in pool.tensors]

    def put_back(self, contents: list[torch.Tensor]) -> None:
        for tensor, old in zip((t for pool in self.pools for t in pool.tensors), contents, strict=True):
            tensor.copy_(old)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    yield Served(request.param, [5, 30, 8, 1, 17, 23])


@pytest.mark.parametrize("rows", [[0], [1, 3], [4, 2, 0], [5, 1, 0, 3, 2], [0, 1, 2, 3, 4, 5]])
def test_replay_equals_the_unpadded_forward(served: Served, rows: list[int]) -> None:
    graphs, tokens = served.graphs(), [7 * r + 3 for r in rows]
    before = served.contents()
    wanted = served.model.forward(served.decode(rows, tokens))
    after = served.contents()
    served.put_back(before)
    found = graphs.run(served.decode(rows, tokens))
    assert (graphs.num_replayed, graphs.num_eager) == (1, 0)
    assert found.shape == wanted.shape and wanted.abs().max() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for ours, reference in zip(served.contents(), after, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)
    assert any((ours != old).any() for ours, old in zip(after, before, strict=True))
    served.put_back(before)


def test_rows_of_an_earlier_step_leave_nothing_behind(served: Served) -> None:
    """Padding rows would else go on to store and attend what a larger step had left in the buffers."""
    graphs, before = served.graphs(), served.contents()
    graphs.run(served.decode([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]))
    served.put_back(before)
    graphs.run(served.decode([2, 4], [9, 9]))
    kept = graphs.run(served.decode([2, 4, 5], [9, 9, 9]))  # padded to 4
    changed = [
        torch.nonzero((new != old).flatten(1).any(1)).flatten() for new, old in zip(served.contents(), before, strict=True)
    ]
    mine = {int(s) // BLOCK_SIZE for row in (2, 4, 5) for s in served.slots(row, np.array([served.lens[row]]))}
    assert all(set(blocks.tolist()) == mine for blocks in changed)
    kept_copy = kept.clone()
    graphs.run(served.decode([0], [1]))
    torch.testing.assert_close(kept, kept_copy, rtol=0, atol=0)  # a result is the caller's own
    served.put_back(before)


def test_capturing_changes_no_pool(served: Served) -> None:
    before = served.contents()
    served.graphs(capture=lambda step: (step(), step)[1])
    assert all(torch.equal(new, old) for new, old in zip(served.contents(), before, strict=True))


def test_emit_picks_rows(served: Served) -> None:
    graphs, before = served.graphs(), served.contents()
    everyone = graphs.run(served.decode([1, 2, 3], [4, 5, 6]))
    some = graphs.run(served.decode([1, 2, 3], [4, 5, 6], emit=[2, 0]))
    torch.testing.assert_close(some, everyone[[2, 0]], rtol=0, atol=0)
    assert graphs.run(served.decode([1, 2, 3], [4, 5, 6], emit=[])).shape[0] == 0
    served.put_back(before)


def test_what_does_not_fit_runs_eagerly(served: Served) -> None:
    before = served.contents()
    with_chunk = served.decode([0, 1], [1, 2])
    with_chunk.num_decode = 1
    long = served.decode([1], [3])
    small = served.graphs(max_num_seqs=2, max_model_len=20)
    assert not small.fits(with_chunk) and not small.fits(long) and not small.fits(served.decode([0, 3, 2], [1, 1, 1]))
    assert small.fits(served.decode([0, 3], [1, 1]))
    wanted = served.model.forward(long)
    torch.testing.assert_close(small.run(long), wanted, rtol=0, atol=0)
    small.run(with_chunk)
    assert (small.num_replayed, small.num_eager) == (0, 2)
    served.put_back(before)


def test_plans_are_kept_and_made_anew(served: Served) -> None:
    """A backend that plans on the host is told of each static batch before capture, and before each replay."""
    told: list[tuple[str, int]] = []

    class Planning(Repeated):
        def keep(self, batch: Batch) -> None:
            told.append(("keep", batch.num_rows))

        def replan(self, batch: Batch) -> None:
            told.append(("replan", batch.num_rows))
            assert int((batch.context_len > 0).sum()) == 3  # it has the step's contents by then

    before = served.contents()
    graphs = DecodeGraphs(
        served.model, Planning(), block_size=BLOCK_SIZE, max_num_seqs=4, max_model_len=64, sizes=[2, 4], capture=again
    )
    assert told == [("keep", 4), ("keep", 2)]
    graphs.run(served.decode([0, 1, 2], [1, 2, 3]))
    assert told[2:] == [("replan", 4)]
    served.put_back(before)


@given(st.integers(1, 1500), st.data())
def test_sizes_cover_every_number_of_rows(most: int, data: st.DataObject) -> None:
    sizes = capture_sizes(most)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == most
    rows = data.draw(st.integers(1, most))
    chosen = next(size for size in sizes if size >= rows)
    assert chosen < 2 * rows and chosen - rows < max(16, 64 if rows > 256 else 0)


def test_buffers_are_shared_by_all_sizes() -> None:
    buffers = Buffers(4, 3, 24, 2, CPU)
    small, large = buffers.batch(2), buffers.batch(4)
    assert buffers.batch(2) is small  # plans are kept by the object
    assert small.token_ids.data_ptr() == large.token_ids.data_ptr()
    assert large.query_start.tolist() == [0, 1, 2, 3, 4] and large.query_start.dtype == torch.int32
    assert (small.groups[1].slots == -1).all() and small.max_context == 24 and small.max_query == 1


def test_refusals(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"block_size": BLOCK_SIZE, "max_num_seqs": 4, "max_model_len": 64}
    with pytest.raises(ValueError, match="'torch' cannot be captured"):
        DecodeGraphs(served.model, TorchPaged(), **settings)
    with pytest.raises(ValueError, match=r"capture sizes \[0, 2\]"):
        served.graphs(sizes=[0, 2])
    with caplog.at_level("INFO"):
        assert decode_graphs(served.model, served.attention, **settings) is None
        shared = SimpleNamespace(device=torch.device("cuda"), num_ranks=2)
        assert decode_graphs(shared, served.attention, **settings) is None
    assert "need a GPU" in caplog.text and "what 2 ranks tell each other cannot be captured" in caplog.text
