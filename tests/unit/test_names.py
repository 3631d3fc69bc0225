"""Names of pieces, and tokens made from names: equal exactly where the prompts are."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lengthwise.engine.native.names import name_pieces, synthetic_ids

NAMES = [6051289116976100548, 4494011819999877692]
IDS = [3548, 5763, 13923, 33381, 28903]

ids = st.lists(st.integers(0, 2), max_size=14)


def shared_len(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(a=ids, b=ids, piece=st.integers(1, 5))
def test_prompts_share_names_exactly_as_far_as_they_share_whole_pieces(a, b, piece):
    one, other = name_pieces(a, piece), name_pieces(b, piece)
    assert len(one) == len(a) // piece and len(other) == len(b) // piece
    assert shared_len(one, other) == shared_len(a, b) // piece
    # and nowhere after that, though single pieces are alike
    assert not set(one[shared_len(one, other) :]) & set(other)
    assert len(set(one)) == len(one)


def test_names_depend_on_salt_and_size_and_not_on_the_container():
    tokens = list(range(100, 164))
    names = name_pieces(tokens, 16)
    assert names == name_pieces(np.array(tokens, dtype=np.int32), 16) == name_pieces(tuple(tokens), 16)
    assert not set(names) & set(name_pieces(tokens, 16, salt=1))
    assert not set(names) & set(name_pieces(tokens, 32))
    assert name_pieces([*tokens, 5], 16) == names and name_pieces(tokens[:-1], 16) == names[:-1]
    assert all(-(2**63) <= name < 2**63 for name in names)  # what a saved workload keeps
    assert name_pieces([], 16) == []


def test_large_ids_are_told_apart_and_others_refused():
    assert name_pieces([2**31 - 1], 1) != name_pieces([2**16 - 1], 1)
    for wrong in (-1, 2**31):
        with pytest.raises(ValueError, match=str(wrong)):
            name_pieces([5, wrong], 1)
    with pytest.raises(ValueError, match="hash_tokens is 0"):
        name_pieces([5], 0)


@given(
    common=st.integers(0, 4),
    a=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4, unique=True),
    tails=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    piece=st.integers(1, 9),
)
def test_ids_of_equal_names_are_equal_and_all_else_is_the_requests_own(common, a, tails, piece):
    first, second = a[:common], a
    n, m = len(first) * piece + tails[0] % piece, len(second) * piece + tails[1] % piece
    one = synthetic_ids(first, piece, n, vocab_size=50_000, rid=1, seed=3)
    other = synthetic_ids(second, piece, m, vocab_size=50_000, rid=2, seed=4)
    assert one.shape == (n,) and other.shape == (m,) and one.dtype == np.int64
    both = len(first) * piece
    assert np.array_equal(one[:both], other[:both])


def test_names_and_ids_are_inverse_in_what_they_share():
    """Ids made from names are named anew: shared as far as before."""
    a, b = [10, 11, 12, 13], [10, 11, 99, 13]
    one, other = (name_pieces(synthetic_ids(names, 16, 70, 49152, rid, 0), 16) for rid, names in enumerate((a, b)))
    assert shared_len(one, other) == 2
    assert one[3] != other[3]  # the chain tells what came before; the ids of one piece are its name's alone
    x, y = (synthetic_ids(names, 16, 70, 49152, rid, 0) for rid, names in enumerate((a, b)))
    assert np.array_equal(x[48:64], y[48:64]) and not np.array_equal(x[32:48], y[32:48])
    assert not np.array_equal(x[64:], y[64:])


def test_what_has_no_name_comes_from_seed_and_rid():
    def made(rid: int, seed: int, names=()) -> list[int]:
        return synthetic_ids(names, 16 if len(names) else 0, 40, 49152, rid, seed).tolist()

    assert made(1, 2) == made(1, 2)
    assert len({tuple(made(rid, seed)) for rid in range(20) for seed in range(20)}) == 400
    assert made(1, 2, [5])[16:] != made(2, 2, [5])[16:] and made(1, 2, [5])[:16] == made(2, 2, [5])[:16]
    # fewer names than whole pieces: the others are its own
    assert made(1, 2, [5])[16:32] != made(2, 2, [5])[16:32]


def test_a_range_that_goes_on_for_ever_names_what_the_prompt_has():
    names = range(7 << 32, 8 << 32)
    short, long = (synthetic_ids(names, 16, n, 49152, rid, 0) for rid, n in enumerate((40, 90)))
    assert len(short) == 40 and np.array_equal(short[:32], long[:32])
    assert np.array_equal(long[:80], synthetic_ids([*names[:5]], 16, 80, 49152, 9, 9))


def test_ids_are_uniform_from_first_id_on():
    made = synthetic_ids(range(2000), 16, 32_000 + 8000, vocab_size=50, rid=0, seed=1, first_id=3)
    assert made.min() == 3 and made.max() == 49
    for part in (made[:32_000], made[32_000:]):
        assert stats.chisquare(np.bincount(part - 3, minlength=47)).pvalue > 1e-3
    for wrong in (-1, 50):
        with pytest.raises(ValueError, match=f"first_id is {wrong}"):
            synthetic_ids([], 0, 4, 50, 0, 0, first_id=wrong)
    with pytest.raises(ValueError, match="hash_tokens is 0 with 1 names"):
        synthetic_ids([1], 0, 4, 50, 0, 0)


def test_another_process_makes_the_same():
    code = (
        "from lengthwise.engine.native.names import *;"
        "print(name_pieces(range(64), 16, 5), synthetic_ids([3, -4], 16, 40, 49152, 2, 1).tolist())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    want = f"{name_pieces(range(64), 16, 5)} {synthetic_ids([3, -4], 16, 40, 49152, 2, 1).tolist()}"
    assert out.stdout.strip() == want


def test_names_and_ids_stay_what_they_are():
    """What a cache on disk was filled under must be found again: a change here is a change of results."""
    assert name_pieces(range(4), 2) == NAMES
    assert synthetic_ids([1], 3, 5, 49152, rid=2, seed=3).tolist() == IDS


@pytest.mark.slow
def test_ten_thousand_tokens_take_less_than_a_millisecond():
    best = float("inf")
    for _ in range(200):
        start = time.perf_counter()
        synthetic_ids(range(1000, 2000), 16, 10_000, 49152, 1, 1)
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3
