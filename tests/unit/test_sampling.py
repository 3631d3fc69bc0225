"""Sampling: the distributions it must follow, independence of the batch, and each feature against numbers made by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lengthwise.engine.native.draw import draw_cut, draw_whole
from lengthwise.engine.native.philox import philox, uniforms
from lengthwise.engine.native.sampling import Sampled, Sampler, SamplingParams

torch.set_num_threads(1)
V = 12
LOGITS = [2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, 0.25, 1.5, -3.0, -6.0]


@dataclass
class Generation:
    params: SamplingParams
    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    seed: int = 0

    @property
    def num_output(self) -> int:
        return len(self.output_ids)


def sample(logits: list[list[float]], rows: list[Generation], **kwargs: object) -> Sampled:
    return Sampler(len(logits[0]), **kwargs).sample(torch.tensor(logits), rows)


def greedy(logits: list[float], **kwargs: object) -> int:
    params = SamplingParams(**{k: v for k, v in kwargs.items() if k not in ("prompt_ids", "output_ids")})
    row = Generation(params, kwargs.get("prompt_ids", []), kwargs.get("output_ids", []))
    return sample([logits], [row]).token_ids[0]


def exact(params: SamplingParams) -> np.ndarray:
    """Probabilities by the definition, one step at a time."""
    x = np.array(LOGITS) / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    order = sorted(range(V), key=lambda i: (-p[i], i))
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        mass = 0.0
        for rank, i in enumerate(order):
            mass += p[i]
            if mass >= params.top_p:
                p[order[rank + 1 :]] = 0
                break
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(temperature=1.0, top_k=4),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.12),
        SamplingParams(temperature=0.8, top_k=6, top_p=0.97),
    ],
    ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}",
)
def test_draws_follow_the_exact_distribution(params: SamplingParams):
    """20,000 draws over seeds."""
    hold_to_distribution(params, [Generation(params, seed=i) for i in range(20_000)])


def test_the_draws_of_one_request_follow_the_exact_distribution():
    """20,000 draws over the places of one seed."""
    params = SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.12)
    hold_to_distribution(params, [Generation(params, output_ids=range(i), seed=7) for i in range(20_000)])


def hold_to_distribution(params: SamplingParams, rows: list[Generation]) -> None:
    n, p, counts, sampler = len(rows), exact(params), np.zeros(V), Sampler(V)
    for start in range(0, n, 5000):
        tokens = sampler.sample(torch.tensor([LOGITS] * 5000), rows[start : start + 5000]).token_ids
        counts += np.bincount(tokens, minlength=V)
    assert counts[p == 0].sum() == 0
    kept = p > 0
    assert kept.sum() > 1
    assert stats.chisquare(counts[kept], p[kept] * n).pvalue > 1e-3


def test_a_large_vocabulary_is_drawn_from_by_its_probabilities():
    """Over block borders: the vocabulary is a prime, and what a draw falls on is compared with a plain cumulative sum."""
    width = 5003
    logits = torch.randn(64, width, generator=torch.Generator().manual_seed(0)) * 2
    rows = [Generation(SamplingParams(temperature=1.0), seed=i) for i in range(64)]
    tokens = Sampler(width).sample(logits, rows).token_ids
    p = logits.double().softmax(-1).numpy().cumsum(-1)
    u = uniforms(range(64), [0] * 64)
    for r, token in enumerate(tokens):
        low = p[r, token - 1] if token else 0.0
        assert low - 1e-6 <= u[r] <= p[r, token] + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    width=st.integers(1, 700),
    k=st.integers(0, 6) | st.integers(0, 800),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0, 0.5),
    levels=st.sampled_from([2, 5, 1000]),
)
def test_the_cut_is_that_of_a_full_sort(seed: int, width: int, k: int, top_p: float, min_p: float, levels: int):
    """Candidates by a bound, and then ranked, are what ranking the whole vocabulary would keep, ties included."""
    rng = np.random.default_rng(seed)
    w = (rng.integers(0, levels + 1, width) / levels).astype(np.float32) ** 3
    w[rng.integers(width)] = 1.0
    order = np.lexsort((np.arange(width), -w))
    kept = w[order][: k or width].astype(np.float64)
    mass = kept.cumsum()
    gap = np.abs(mass - top_p * mass[-1]).min()
    n = len(kept) if top_p == 1 else min(int((mass < top_p * mass[-1]).sum()) + 1, len(kept))
    n = min(n, int((kept >= min_p * kept[0]).sum()))
    n = min(n, int((kept > 0).sum()))
    # from nearly 0, the first; from nearly 1, the last that is kept
    u = np.array([0.0, np.nextafter(1.0, 0.0), rng.random()])
    tokens = draw_cut(torch.from_numpy(np.tile(w, (3, 1))), [k] * 3, [top_p] * 3, [min_p] * 3, u)
    assert tokens[0] == order[0]
    if gap > 1e-4 or top_p == 1:
        assert tokens[1] == order[n - 1]
        at = order[:n].tolist().index(tokens[2])
        below, upto = kept[:at].sum() / kept[:n].sum(), kept[: at + 1].sum() / kept[:n].sum()
        assert below - 1e-6 <= u[2] <= upto + 1e-6


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), width=st.integers(1, 900), zeros=st.integers(0, 600))
def test_the_ends_of_the_unit_interval_are_the_first_and_the_last_token_with_weight(seed: int, width: int, zeros: int):
    """Rounding carries no number past the end, into weights of 0 or padding."""
    rng = np.random.default_rng(seed)
    w = np.zeros(width + 2 * zeros, dtype=np.float32)
    w[zeros : zeros + width] = rng.random(width) ** 8
    w[zeros + rng.integers(width)] = 1.0
    some = np.flatnonzero(w)
    u = np.array([0.0, np.nextafter(1.0, 0.0)])
    first, last = draw_whole(torch.from_numpy(np.tile(w, (2, 1))), u)
    assert first == some[0]
    # the last ones can be less than what a number next to 1 leaves over
    assert w[last] > 0 and w[last + 1 :].sum(dtype=np.float64) <= 1e-6 * w.sum(dtype=np.float64)


def test_a_number_on_a_border_belongs_to_the_token_above_it():
    w, u = torch.tensor([[1.0, 1.0]] * 2), np.array([0.5, np.nextafter(0.5, 0.0)])
    assert draw_whole(w, u) == [1, 0]
    assert draw_cut(w, [0, 0], [1.0, 1.0], [0.0, 0.0], u) == [1, 0]


@pytest.mark.parametrize("width", [1000, 1003, 20])
def test_top_k_keeps_k(width: int):
    """The least likely token kept is the k-th, wherever in the vocabulary the k lie."""
    rng = np.random.default_rng(0)
    u = np.array([np.nextafter(1.0, 0.0)])
    for k in [*range(1, 9), width - 1]:
        w = rng.permutation(np.linspace(1.0, 0.5, width, dtype=np.float32))
        assert draw_cut(torch.from_numpy(w[None]), [k], [1.0], [0.0], u) == [int(np.argsort(-w)[k - 1])]


def test_a_nucleus_smaller_than_the_likeliest_token_is_that_token():
    rows = [Generation(SamplingParams(temperature=1.0, top_p=0.01), seed=i) for i in range(200)]
    assert set(sample([LOGITS] * 200, rows).token_ids) == {0}


def test_equal_tokens_are_cut_by_id():
    """Of eight equal tokens top_p 0.5 keeps the first four, top_k 3 the first three, and min_p all that are left."""
    for params, kept in (
        (SamplingParams(temperature=1.0, top_p=0.5), 4),
        (SamplingParams(temperature=1.0, top_k=3), 3),
        (SamplingParams(temperature=1.0, min_p=1.0), 8),
        (SamplingParams(temperature=1.0, top_k=5, min_p=1.0), 5),
    ):
        rows = [Generation(params, seed=i) for i in range(400)]
        assert set(sample([[1.5] * 8] * 400, rows).token_ids) == set(range(kept))


def test_a_cut_that_keeps_all_is_no_cut_of_the_distribution():
    """top_k at or above the vocabulary is off, to the last token drawn."""
    plain = [Generation(SamplingParams(temperature=1.0), seed=i) for i in range(100)]
    wide = [Generation(SamplingParams(temperature=1.0, top_k=V + 5), seed=i) for i in range(100)]
    assert sample([LOGITS] * 100, plain).token_ids == sample([LOGITS] * 100, wide).token_ids


def test_philox_is_the_published_one():
    """The known answers that its authors publish with Random123."""
    full = 0xFFFFFFFF
    for words, key, answer in (
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([full] * 4, [full] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        out = philox([np.array([w], dtype=np.uint64) for w in words], [np.array([k], dtype=np.uint64) for k in key])
        assert [int(w[0]) for w in out] == answer


def test_uniforms_are_uniform_and_tell_seeds_and_places_apart():
    for u in (uniforms(range(20_000), [3] * 20_000), uniforms([11] * 20_000, range(20_000))):
        assert u.min() >= 0 and u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
        assert len(set(u.tolist())) == 20_000
    assert uniforms([-1], [0]) == uniforms([2**64 - 1], [0]) != uniforms([1], [0])


def some_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 1, 3, 300]),
        top_p=st.sampled_from([1.0, 0.9, 0.3]),
        min_p=st.sampled_from([0.0, 0.1]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, -0.7]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        min_new_tokens=st.sampled_from([0, 4]),
        logprobs=st.sampled_from([None, 0, 3, 20]),
    )


@st.composite
def some_rows(draw: st.DrawFn, width: int) -> list[tuple[Generation, np.ndarray]]:
    rows = []
    ids = st.lists(st.integers(0, width - 1), max_size=8)
    for _ in range(draw(st.integers(1, 7))):
        row = Generation(draw(some_params()), draw(ids), draw(ids), draw(st.integers(0, 2**64 - 1)))
        rng = np.random.default_rng(draw(st.integers(0, 2**16)))
        # few levels, so that there are ties
        rows.append((row, (rng.integers(-20, 20, width) / 4).astype(np.float32)))
    return rows


@settings(max_examples=80, deadline=None)
@given(data=st.data(), width=st.sampled_from([5, 64, 700]))
def test_a_row_gets_the_same_whatever_batch_it_is_in(data: st.DataObject, width: int):
    batch = data.draw(some_rows(width))
    sampler = Sampler(width, eos_ids=(1,))
    together = sampler.sample(torch.from_numpy(np.stack([x for _, x in batch])), [row for row, _ in batch])
    for i, (row, x) in enumerate(batch):
        alone = sampler.sample(torch.from_numpy(x[None]), [row])
        assert alone.token_ids[0] == together.token_ids[i]
        one, other = alone.logprobs[0], together.logprobs[i]
        assert (one is None) == (other is None) == (row.params.logprobs is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id == alone.token_ids[0]
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
    back = data.draw(st.permutations(range(len(batch))))
    moved = sampler.sample(torch.from_numpy(np.stack([batch[i][1] for i in back])), [batch[i][0] for i in back])
    assert moved.token_ids == [together.token_ids[i] for i in back]


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_logits_are_left_alone_and_greedy_is_argmax(data: st.DataObject):
    batch = data.draw(some_rows(40))
    logits = torch.from_numpy(np.stack([x for _, x in batch]))
    before = logits.clone()
    tokens = Sampler(40).sample(logits, [row for row, _ in batch]).token_ids
    assert torch.equal(logits, before)
    for (row, x), token in zip(batch, tokens, strict=True):
        if row.params.greedy and not row.params.penalised:
            assert token == int(np.flatnonzero(x == x.max())[0])


@pytest.mark.parametrize("temperature", [0.0, 1e-60, 1e-6, 1e-5, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float):
    rows = [Generation(SamplingParams(temperature=temperature), seed=i) for i in range(50)]
    assert set(sample([LOGITS] * 50, rows).token_ids) == {0}


def test_top_k_of_one_is_greedy():
    rows = [Generation(SamplingParams(temperature=5.0, top_k=1), seed=i) for i in range(50)]
    assert set(sample([LOGITS] * 50, rows).token_ids) == {0}


# --- penalties, by hand -----------------------------------------------------------------------------------------------


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output():
    # 3.0 / 2 = 1.5 < 1.6
    assert greedy([3.0, 1.6, 0.0], repetition_penalty=2.0) == 0
    assert greedy([3.0, 1.6, 0.0], repetition_penalty=2.0, prompt_ids=[0]) == 1
    assert greedy([3.0, 1.6, 0.0], repetition_penalty=2.0, output_ids=[0, 0, 0]) == 1
    assert greedy([3.0, 1.4, 0.0], repetition_penalty=2.0, prompt_ids=[0], output_ids=[0]) == 0  # once, not twice
    # -1.0 * 2 = -2.0 < -1.5
    assert greedy([-1.0, -1.5], repetition_penalty=2.0, prompt_ids=[0]) == 1


def test_presence_and_frequency_penalty_count_the_output_only():
    x = [2.0, 1.0, 0.5]
    assert greedy(x, presence_penalty=1.1, prompt_ids=[0, 0, 0]) == 0
    assert greedy(x, presence_penalty=1.1, output_ids=[0]) == 1
    assert greedy(x, presence_penalty=0.9, output_ids=[0, 0, 0, 0]) == 0  # however often
    assert greedy(x, frequency_penalty=0.4, output_ids=[0, 0]) == 0  # 2 - 0.8
    assert greedy(x, frequency_penalty=0.4, output_ids=[0, 0, 0]) == 1  # 2 - 1.2
    assert greedy(x, frequency_penalty=-0.8, output_ids=[1, 1]) == 1  # 1 + 1.6
    # 2 - 0.5 - 2 * 0.3 = 0.9
    assert greedy(x, presence_penalty=0.5, frequency_penalty=0.3, output_ids=[0, 0]) == 1
    # repetition first: 2 / 2 - 0.45 = 0.55 > 0.5; the other way round it would be (2 - 0.45) / 2 = 0.775
    assert greedy([2.0, 0.6], repetition_penalty=2.0, presence_penalty=0.45, output_ids=[0]) == 1


def test_penalties_come_before_the_temperature():
    """The odds of two tokens after penalty 1 at temperature 0.5: exp((1 - 1 - 0) / 0.5) = 1; 1/2 each."""
    params = SamplingParams(temperature=0.5, presence_penalty=1.0)
    rows = [Generation(params, output_ids=[0], seed=i) for i in range(4000)]
    tokens = np.array(sample([[1.0, 0.0]] * 4000, rows).token_ids)
    assert stats.binomtest(int(tokens.sum()), 4000, 0.5).pvalue > 1e-3


def test_penalties_touch_their_own_row_only():
    plain = Generation(SamplingParams(), output_ids=[0])
    hit = Generation(SamplingParams(presence_penalty=2.0), output_ids=[0])
    assert sample([[1.0, 0.0]] * 3, [plain, hit, plain]).token_ids == [0, 1, 0]


def test_no_ending_token_before_min_new_tokens():
    x = [0.0, 5.0, 4.0, 3.0]  # EOS 1, stop token 2
    for outputs, eos, want in (([3], (1,), 3), ([3, 3], (1,), 1), ([3], (), 1)):
        params = SamplingParams(min_new_tokens=2, stop_token_ids=(2,))
        assert sample([x], [Generation(params, output_ids=outputs)], eos_ids=eos).token_ids == [want]
    ignoring = SamplingParams(min_new_tokens=2, stop_token_ids=(2,), ignore_eos=True)
    assert sample([x], [Generation(ignoring)], eos_ids=(1,)).token_ids == [1]  # it ends nothing
    beyond = SamplingParams(min_new_tokens=2, stop_token_ids=(99,))
    assert sample([x], [Generation(beyond)]).token_ids == [1]
    drawn = SamplingParams(temperature=1.0, min_new_tokens=1)
    tokens = sample([x] * 200, [Generation(drawn, seed=i) for i in range(200)], eos_ids=(1, 2)).token_ids
    assert set(tokens) == {0, 3}


# --- log probabilities ------------------------------------------------------------------------------------------------


def test_logprobs_are_of_the_unmodified_logits():
    params = SamplingParams(temperature=0.5, top_k=2, presence_penalty=2.0, logprobs=3)
    exact_logprobs = torch.tensor(LOGITS).double().log_softmax(-1).tolist()
    for seed in range(20):
        entry = sample([LOGITS], [Generation(params, output_ids=[0], seed=seed)]).logprobs[0]
        assert entry is not None
        assert entry.logprob == pytest.approx(exact_logprobs[entry.token_id], abs=1e-5)
        assert [token for token, _ in entry.top] == [0, 9, 1]
        assert [value for _, value in entry.top] == pytest.approx([exact_logprobs[i] for i in (0, 9, 1)], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), width=st.sampled_from([3, 20, 21, 1280, 1345, 5003]), levels=st.sampled_from([3, 10**6]))
def test_top_logprobs_are_the_greatest_in_order_and_sum_to_one(seed: int, width: int, levels: int):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy((rng.integers(0, levels, (2, width)) / levels * 8).astype(np.float32))
    rows = [Generation(SamplingParams(logprobs=20)), Generation(SamplingParams(logprobs=2))]
    out = Sampler(width).sample(logits, rows)
    for r, n in ((0, min(20, width)), (1, 2)):
        entry = out.logprobs[r]
        assert entry is not None
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and len(values) == n
        want = logits[r].log_softmax(-1).sort(descending=True).values[:n].tolist()
        assert values == pytest.approx(want, abs=1e-5)
        assert [logits[r].log_softmax(-1)[token].item() for token, _ in entry.top] == pytest.approx(values, abs=1e-5)
        assert len({token for token, _ in entry.top}) == n
        for (a, x), (b, y) in zip(entry.top, entry.top[1:], strict=False):
            assert x > y or a < b
        if width <= 20 and r == 0:
            assert sum(math.exp(v) for v in values) == pytest.approx(1.0, abs=1e-5)


def test_logprobs_of_zero_report_the_chosen_token_alone():
    out = sample([LOGITS] * 2, [Generation(SamplingParams(logprobs=0)), Generation(SamplingParams())])
    assert out.logprobs[0] is not None and out.logprobs[0].top == () and out.logprobs[1] is None
    assert out.logprobs[0].logprob == pytest.approx(float(torch.tensor(LOGITS).log_softmax(-1)[0]), abs=1e-5)


# --- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.9, logprobs=2)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("bad", ["nan", "inf", "none"])
def test_a_row_without_a_finite_greatest_logit_fails_alone(params: SamplingParams, bad: str):
    x = torch.tensor([LOGITS] * 4)
    if bad == "nan":
        x[2, 5] = math.nan
    elif bad == "inf":
        x[2, 5] = math.inf
    else:
        x[2] = -math.inf
    rows = [Generation(params, seed=i) for i in range(4)]
    out = Sampler(V).sample(x, rows)
    assert list(out.failures) == [2] and out.token_ids[2] == -1 and out.logprobs[2] is None
    assert {"nan": "nan", "inf": "inf", "none": "-inf"}[bad] in out.failures[2]
    fine = Sampler(V).sample(torch.tensor([LOGITS] * 4), rows)
    assert [out.token_ids[i] for i in (0, 1, 3)] == [fine.token_ids[i] for i in (0, 1, 3)]


def test_a_row_whose_every_token_is_barred_fails_alone():
    x = [[0.0, -math.inf], [0.0, 1.0]]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_new_tokens=1, logprobs=1)
        out = sample(x, [Generation(params), Generation(params)], eos_ids=(0,))
        assert out.token_ids == [-1, 1] and list(out.failures) == [0] and "barred" in out.failures[0]


def test_tokens_at_minus_infinity_are_never_drawn_nor_reported():
    x = [0.0, -math.inf, -1.0, -math.inf, -math.inf]
    for extra in ({}, {"top_p": 0.999}, {"top_k": 4}, {"min_p": 1e-6}, {"presence_penalty": 0.1}):
        params = SamplingParams(temperature=3.0, logprobs=5, **extra)
        out = sample([x] * 300, [Generation(params, output_ids=[0], seed=i) for i in range(300)])
        assert set(out.token_ids) == {0, 2}
        assert out.logprobs[0] is not None and [token for token, _ in out.logprobs[0].top] == [0, 2]


def test_wider_logits_are_padding():
    x = torch.tensor([[*LOGITS, 50.0, 60.0]] * 3)
    kinds = (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5, logprobs=20))
    out = Sampler(V).sample(x, [Generation(params) for params in kinds])
    assert out.token_ids == sample([LOGITS] * 3, [Generation(params) for params in kinds]).token_ids
    assert out.logprobs[2] is not None and max(token for token, _ in out.logprobs[2].top) < V


def test_a_sampler_works_in_and_out_of_inference_mode():
    sampler, row = Sampler(V), Generation(SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.1, logprobs=2))
    with torch.inference_mode():
        inside = sampler.sample(torch.tensor([LOGITS]), [row])
        made_inside = torch.tensor([LOGITS])
    outside = sampler.sample(torch.tensor([LOGITS], requires_grad=True), [row])
    assert inside == outside == sampler.sample(made_inside, [row])


def test_what_is_done_on_a_device_gives_the_same_as_on_the_host(monkeypatch):
    """The branches for other devices, run on the CPU."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy((rng.integers(-40, 40, (40, 3000)) / 5).astype(np.float32))
    logits[7, 9] = math.nan
    kinds = (
        SamplingParams(),
        SamplingParams(temperature=0.8, top_k=5),
        SamplingParams(temperature=1.0, top_p=0.9, logprobs=3),
        SamplingParams(temperature=1.5, min_p=0.01, frequency_penalty=0.5),
    )
    rows = [Generation(kinds[i % 4], output_ids=[1, 2], seed=i) for i in range(40)]
    host = Sampler(3000).sample(logits, rows)
    for module in ("draw", "greatest", "sampling"):
        monkeypatch.setattr(f"lengthwise.engine.native.{module}.on_host", lambda tensor: False)
    assert Sampler(3000).sample(logits, rows) == host and list(host.failures) == [7]


def test_logits_that_fit_neither_rows_nor_vocabulary_are_refused():
    with pytest.raises(ValueError, match="2 rows and a vocabulary of 12"):
        Sampler(V).sample(torch.zeros(3, V), [Generation(SamplingParams())] * 2)
    with pytest.raises(ValueError, match="vocabulary of 12"):
        Sampler(V).sample(torch.zeros(1, V - 1), [Generation(SamplingParams())])
    assert Sampler(V).sample(torch.zeros(0, V), []).token_ids == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": -1}, "top_k is -1: the least is 0"),
        ({"top_k": 2.5}, "top_k is 2.5: not a whole number"),
        ({"presence_penalty": 2.1}, "presence_penalty is 2.1: from -2 to 2"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"logprobs": 21}, "logprobs is 21: from 0 to 20"),
        ({"logprobs": True}, "logprobs is True"),
        ({"seed": 2**64}, "seed is 18446744073709551616"),
        ({"stop": ("",)}, "stop has ''"),
        ({"stop": "text"}, "stop is 'text': a tuple"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids is -1"),
        ({"min_new_tokens": -1}, "min_new_tokens is -1"),
    ],
)
def test_params_out_of_range_are_refused_with_value_and_limit(wrong: dict[str, object], said: str):
    with pytest.raises(ValueError) as error:
        SamplingParams(**wrong)
    assert said in str(error.value)


def test_params_compare_by_value():
    assert SamplingParams(stop=["a"]) == SamplingParams(stop=("a",))
    assert hash(SamplingParams(seed=3)) == hash(SamplingParams(seed=3))
