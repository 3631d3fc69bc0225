"""Percentiles name their method and n; comparisons name their seeds; nothing is made up for what is missing."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.experiments.histogram import Histogram
from lengthwise.experiments.statistics import (
    LEAST,
    QUANTILES,
    gap_closed,
    over_seeds,
    paired,
    percentile,
    pooled,
    quantile,
)

values = st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=300)


def test_m11_p99_of_five_values_is_refused_or_named():
    x = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert percentile(x, 0.99, "nearest_rank") == 100.0
    assert percentile(x, 0.99, "linear") == pytest.approx(96.16)
    q = quantile(x, "p99")
    assert q.value is None and q.n == 5 and q.flag == "n=5, p99 wants 100"
    assert quantile(x, "p50").value == 3.0


def test_p999_wants_twenty_thousand():
    x = np.arange(19_999.0)
    assert quantile(x, "p999").value is None
    assert quantile(np.arange(20_000.0), "p999").value == pytest.approx(0.999 * 19_999)


@given(values, st.floats(0, 1), st.sampled_from(["linear", "nearest_rank"]))
def test_percentile_stays_within_the_values(x, level, method):
    assert min(x) <= percentile(x, level, method) <= max(x)


@given(values)
def test_nearest_rank_is_one_of_the_values(x):
    assert percentile(x, 0.9, "nearest_rank") in x


@pytest.mark.parametrize("bad", [[], [1.0, math.nan]])
def test_percentile_refuses_nothing_and_nan(bad):
    with pytest.raises(ValueError, match="percentile of"):
        percentile(bad, 0.5)


def test_percentile_names_the_methods_there_are():
    with pytest.raises(ValueError, match="choose linear or nearest_rank"):
        percentile([1.0], 0.5, "higher")


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.floats(0, 100)), min_size=100, max_size=150))
def test_percentile_with_open_samples_is_a_lower_bound_and_says_when_it_is_exact(rows):
    bounds = np.array([v for v, _, _ in rows])
    is_open = np.array([o for _, o, _ in rows])
    truth = np.array([v + (more if o else 0.0) for v, o, more in rows])
    for label in ("p50", "p99"):
        q, true = quantile(bounds, label, is_open), percentile(truth, QUANTILES[label])
        assert q.value is not None and q.value <= true + 1e-9
        if not q.lower_bound:
            assert q.value == pytest.approx(true, abs=1e-9)


def test_n5_the_mean_hides_what_the_median_shows():
    one, two = [10, 0.1, 0.1], [10] + [0.2] * 20
    assert np.mean(one) == pytest.approx(3.4) and np.mean(two) == pytest.approx(0.667, abs=1e-3)
    assert (quantile(one, "p50").value, quantile(two, "p50").value) == (0.1, 0.2)
    assert (quantile(one, "p50").n, quantile(two, "p50").n) == (3, 21)


def test_n6_percentiles_are_of_the_pooled_sample():
    shards = [[1.0] * 99 + [100.0], [1.0] * 100]
    q = pooled(shards, "p99")
    assert q.n == 200 and q.value == 1.0
    assert np.mean([percentile(s, 0.99) for s in shards]) != q.value
    assert q.label == "p99" and QUANTILES[q.label] == 0.99
    assert set(QUANTILES) == set(LEAST) == {"p50", "p99", "p999"}


@given(st.lists(st.tuples(st.floats(1e-5, 1e3), st.integers(1, 50)), min_size=1, max_size=80))
def test_histogram_has_exact_mean_and_percentiles_within_a_bin(rows):
    v, w = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    h = Histogram()
    h.add(v, w)
    every = np.repeat(v, w)
    assert h.n == w.sum() and h.mean == pytest.approx(every.mean())
    q = h.quantile("p50").value
    assert q is not None and percentile(every, 0.5, "nearest_rank") == pytest.approx(q, rel=0.0101)


def test_n6_histograms_add_up_and_travel_as_json():
    parts = np.random.default_rng(0).lognormal(-4, 1, (2, 500))
    one, two, both = Histogram(), Histogram(), Histogram()
    one.add(parts[0], np.ones(500))
    two.add(parts[1], np.ones(500))
    both.add(parts.ravel(), np.ones(1000))
    one.merge(Histogram.from_json(two.to_json()))
    assert one.n == 1000 and one.quantile("p99") == both.quantile("p99")
    assert one.mean == pytest.approx(both.mean)
    assert Histogram.from_json(Histogram().to_json()).n == 0
    with pytest.raises(ValueError, match="histogram of bins"):
        Histogram.from_json({**two.to_json(), "ratio": 1.02})


def test_n4_a_failed_seed_is_listed_and_not_counted():
    got = over_seeds({0: 1.0, 1: None, 2: 3.0})
    assert (got.mean, got.n, got.missing) == (2.0, 2, (1,))
    assert got.low == pytest.approx(2 - 12.7062, abs=1e-3) and got.high == pytest.approx(2 + 12.7062, abs=1e-3)
    assert "t interval" in got.method


def test_n4_one_seed_has_no_interval():
    got = over_seeds({7: 5.0})
    assert (got.mean, got.low, got.high, got.n) == (5.0, None, None, 1)
    assert over_seeds({7: math.nan}).mean is None


def test_paired_differences_take_out_what_seeds_share():
    fcfs = {0: 10.0, 1: 20.0, 2: 30.0}
    srpt = {0: 9.0, 1: 19.0, 2: 29.0}
    got = paired(srpt, fcfs)
    assert (got.mean, got.low, got.high, got.n) == (-1.0, -1.0, -1.0, 3)
    assert got.relative == pytest.approx(-0.05) and not got.holds(0.0)


def test_n2_a_missing_cell_is_a_gap_in_the_pairing():
    got = paired({0: 9.0, 2: 29.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert got.n == 2 and got.missing == (1,) and got.mean == -1.0
    assert paired({}, {0: 1.0}).mean is None


def test_gap_closed_and_its_jackknife():
    fcfs, half, best = {0: 10.0, 1: 12.0, 2: 14.0}, {0: 8.0, 1: 9.0, 2: 10.0}, {0: 6.0, 1: 6.0, 2: 6.0}
    got = gap_closed(fcfs, half, best)
    assert got.share == pytest.approx(0.5) and got.n == 3
    assert got.low == pytest.approx(0.5) and got.high == pytest.approx(0.5)  # every seed closes one half
    assert gap_closed(fcfs, fcfs, best).share == 0.0 and gap_closed(fcfs, best, best).share == 1.0
    assert got.notes == ("3 seeds; 5 or more are wanted",)


def test_gap_jackknife_equals_leaving_seeds_out_by_hand():
    g = np.random.default_rng(3)
    base, mine, best = 10 + g.random(6), 7 + g.random(6), 4 + g.random(6)
    got = gap_closed(*({i: float(x) for i, x in enumerate(c)} for c in (base, mine, best)))
    keep = [np.arange(6) != i for i in range(6)]
    left_out = np.array([(base[k] - mine[k]).mean() / (base[k] - best[k]).mean() for k in keep])
    half = 2.5706 * math.sqrt(5 / 6 * ((left_out - left_out.mean()) ** 2).sum())
    assert got.share is not None and got.high == pytest.approx(got.share + half, rel=1e-4)
    assert got.notes == ()


def test_gap_is_not_applicable_where_none_is_shown():
    got = gap_closed({0: 10.0, 1: 9.0, 2: 10.5}, {0: 10.0, 1: 9.0, 2: 10.0}, {0: 10.0, 1: 9.1, 2: 10.2})
    assert got.share is None and got.reason is not None and got.reason.startswith("n/a: log(baseline / oracle)")
    assert got.n == 3
    alone = gap_closed({0: 10.0, 1: 11.0}, {0: 9.0}, {0: 5.0, 1: 5.0})
    assert alone.share is None and alone.n == 1 and alone.missing == (1,)


def test_no_gap_is_closed_where_the_oracle_is_worse():
    got = gap_closed({0: 10.0, 1: 10.1, 2: 9.9}, {0: 12.0, 1: 12.1, 2: 11.8}, {0: 12.1, 1: 12.0, 2: 11.9})
    assert got.share is None and got.reason is not None and got.reason.endswith("is below 0: the oracle is worse")
