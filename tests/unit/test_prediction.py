"""Laws of LengthDistribution: its mean, quantiles, remaining time and Gittins rank are those of one survival function."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from lengthwise.sched import EDGES, LengthDistribution
from lengthwise.sched.prediction import TAIL_MEAN, mean_lengths, quantile_lengths, survival_at, survival_from_quantiles

LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


@st.composite
def survivals(draw: st.DrawFn) -> np.ndarray:
    """Survival functions on EDGES: smooth, with jumps, with flats, with and without a tail beyond the grid."""
    falls = draw(st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.5, 1.0, 3.0]), min_size=EDGES.size, max_size=EDGES.size))
    return np.exp(-np.cumsum(falls))


@st.composite
def quantile_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    levels = np.array(sorted(draw(st.sets(st.sampled_from([0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95]), min_size=2))))
    steps = draw(st.lists(st.floats(0.0, 2000.0), min_size=levels.size, max_size=levels.size))
    return levels, 1.0 + np.cumsum(steps)


def exponential(mean: float) -> LengthDistribution:
    return LengthDistribution.from_survival(np.exp(-EDGES / mean))


def integral(d: LengthDistribution, start: float = 0.0) -> float:
    """The integral of P(L > x) from `start`, by the trapezoid rule on a grid that holds every edge, then the tail."""
    x = np.unique(np.concatenate(([start], EDGES[start < EDGES], np.linspace(start, max(EDGES[-1], start), 2001))))
    s = np.array([d.survival(v) for v in x])
    return float(np.sum(np.diff(x) * (s[1:] + s[:-1])) / 2.0 + s[-1] * TAIL_MEAN)


@given(survivals())
def test_mean_is_the_integral_of_the_survival_function(s: np.ndarray) -> None:
    d = LengthDistribution.from_survival(s)
    assert_allclose(d.mean(), integral(d), rtol=1e-9)
    assert d.score == d.mean()


@given(survivals(), st.lists(st.floats(0.001, 0.999), min_size=1, max_size=8))
def test_quantiles_are_ordered_and_invert_the_survival_function(s: np.ndarray, levels: list[float]) -> None:
    d = LengthDistribution.from_survival(s)
    values = [d.quantile(q) for q in sorted(levels)]
    assert values == sorted(values)
    for q, v in zip(sorted(levels), values, strict=True):
        assert_allclose(d.survival(v), 1.0 - q, atol=1e-9)
        assert d.survival(v * (1 - 1e-6)) >= 1.0 - q - 1e-9  # the smallest such length


@given(survivals(), st.floats(0.0, 50_000.0))
def test_survival_never_rises_and_starts_at_one(s: np.ndarray, x: float) -> None:
    d = LengthDistribution.from_survival(s)
    assert d.survival(0.0) == d.survival(-3.0) == 1.0
    assert 0.0 <= d.survival(x + 1.0) <= d.survival(x) <= 1.0


@given(survivals())
def test_remaining_of_nothing_is_the_distribution_itself(s: np.ndarray) -> None:
    d = LengthDistribution.from_survival(s)
    again = d.remaining(0)
    assert [again.survival(e) for e in EDGES] == s.tolist()
    assert_allclose(d.expected_remaining(0), max(d.mean(), 1.0), rtol=1e-12)


@given(survivals(), st.floats(0.0, 40_000.0))
def test_expected_remaining_is_the_mean_of_what_is_left(s: np.ndarray, g: float) -> None:
    d = LengthDistribution.from_survival(s)
    alive = d.survival(g)
    if alive <= 1e-9:
        return
    assert_allclose(d.expected_remaining(g), max(integral(d, g) / alive, 1.0), rtol=1e-6)
    left = d.remaining(g)
    for x in (1.0, 10.0, 1000.0):  # conditional survival, to the grid's resolution
        low, high = EDGES[x >= EDGES].max(), EDGES[x <= EDGES].min()
        assert d.survival(g + high) / alive - 1e-6 <= left.survival(x) <= d.survival(g + low) / alive + 1e-6


@given(st.floats(20.0, 4000.0), st.floats(0.1, 3.0))
def test_smooth_distributions_agree_with_their_remaining_mean(mean: float, ages: float) -> None:
    d, g = exponential(mean), ages * mean
    assert_allclose(d.remaining(g).mean(), d.expected_remaining(g), rtol=0.05)


@given(survivals(), st.floats(0.0, 60_000.0))
def test_nothing_is_ever_nan_or_below_one_token(s: np.ndarray, g: float) -> None:
    d = LengthDistribution.from_survival(s)
    for value in (d.expected_remaining(g), d.gittins(g)):
        assert np.isfinite(value) and value >= 1.0
    assert np.isfinite(d.remaining(g).mean())


@given(survivals(), st.floats(0.0, 30_000.0))
def test_gittins_is_at_most_the_expected_remaining_and_a_true_minimum(s: np.ndarray, g: float) -> None:
    d = LengthDistribution.from_survival(s)
    alive = d.survival(g)
    rank = d.gittins(g)
    assert rank <= d.expected_remaining(g) * (1 + 1e-9)
    if alive <= 1e-9:
        return
    whole = integral(d, g)
    for end in (g + 1.0, g + 7.0, g * 1.3 + 1.0, g * 3 + 50.0, EDGES[-1] + g):  # quanta off the grid do no better
        done = alive - d.survival(end)
        if done > 1e-6:
            assert max((whole - integral(d, end)) / done, 1.0) >= rank * (1 - 1e-6)


@pytest.mark.parametrize("mean", [50.0, 300.0, 2000.0])
def test_gittins_is_about_constant_for_an_exponential_length(mean: float) -> None:
    d = exponential(mean)
    ranks = [d.gittins(g) for g in np.linspace(0.0, 3.0 * mean, 13)]
    assert_allclose(ranks, mean, rtol=0.25)  # between edges the mass is uniform, so the hazard rises a little


def test_gittins_grows_with_age_where_the_hazard_falls() -> None:
    pareto = LengthDistribution.from_survival((1.0 + EDGES / 50.0) ** -1.5)
    ranks = [pareto.gittins(g) for g in (0.0, 10.0, 50.0, 200.0, 1000.0, 5000.0)]
    assert np.all(np.diff(ranks) > 0)


def test_gittins_falls_with_age_where_the_hazard_rises() -> None:
    narrow = LengthDistribution.from_survival(np.clip((400.0 - EDGES) / 200.0, 0.0, 1.0))
    ranks = [narrow.gittins(g) for g in (0.0, 100.0, 190.0, 300.0)]
    assert np.all(np.diff(ranks) < 0)


@given(st.floats(0.0, 30_000.0), st.floats(0.0, 30_000.0), st.floats(0.01, 0.99))
def test_a_point_mass_knows_what_is_left(c: float, g: float, q: float) -> None:
    d = LengthDistribution.point(c)
    left = max(c - g, 1.0)
    assert d.mean() == d.score == d.quantile(q) == c
    assert d.expected_remaining(g) == d.gittins(g) == d.remaining(g).mean() == left
    assert d.survival(c) == 0.0 and (c < 1e-3 or d.survival(c * 0.999) == 1.0)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_point_must_be_finite_and_not_negative(bad: float) -> None:
    with pytest.raises(ValueError, match="not a finite number"):
        LengthDistribution.point(bad)


def test_a_rank_has_an_order_and_nothing_else() -> None:
    d = LengthDistribution.rank_only(-3.5)
    assert d.score == -3.5 and d.is_rank_only and not d.is_point
    for ask in (d.mean, lambda: d.quantile(0.5), lambda: d.remaining(1), lambda: d.gittins(1), lambda: d.expected_remaining(1),
                lambda: d.survival(3)):  # fmt: skip
        with pytest.raises(ValueError, match="order, no lengths"):
            ask()
    with pytest.raises(ValueError, match="not finite"):
        LengthDistribution.rank_only(float("nan"))


@given(quantile_rows())
def test_from_quantiles_hits_its_quantiles_to_the_grids_resolution(row: tuple[np.ndarray, np.ndarray]) -> None:
    levels, values = row
    d = LengthDistribution.from_quantiles(levels, values)
    knots = np.concatenate(([0.0], EDGES))
    for i, (q, v) in enumerate(zip(levels, values, strict=True)):
        low, high = knots[knots < v].max(), knots[knots >= v].min()
        assert d.survival(high) <= 1.0 - q + 1e-9
        assert d.quantile(q) <= high + 1e-6
        if i == 0 or values[i - 1] < v:  # of equal quantiles only the first bounds the mass below
            assert d.survival(low) >= 1.0 - q - 1e-9
            assert d.quantile(q) >= low - 1e-6


def test_from_quantiles_on_edges_is_exact() -> None:
    values = EDGES[[10, 20, 25, 30]]
    d = LengthDistribution.from_quantiles([0.1, 0.5, 0.8, 0.9], values)
    assert_allclose([d.quantile(q) for q in (0.1, 0.5, 0.8, 0.9)], values, rtol=1e-12)
    excess = d.expected_remaining(values[-1])  # declared: the last interval's hazard goes on
    assert_allclose(excess, (values[3] - values[2]) / np.log(0.2 / 0.1), rtol=0.05)


@given(st.lists(quantile_rows().filter(lambda r: len(r[0]) == 3), min_size=1, max_size=1))
def test_many_rows_at_once_are_the_single_rows(rows: list[tuple[np.ndarray, np.ndarray]]) -> None:
    levels, values = rows[0]
    many = np.stack([values, values * 2.0, values + 17.0])
    s = survival_from_quantiles(levels, many)
    assert s.min() >= 0.0 and s.max() <= 1.0 and np.all(np.diff(s, axis=1) <= 1e-12)
    single = [LengthDistribution.from_quantiles(levels, v) for v in many]
    assert_allclose(mean_lengths(s), [d.mean() for d in single], rtol=1e-12)
    assert_allclose(quantile_lengths(s, LEVELS), [[d.quantile(q) for q in LEVELS] for d in single], rtol=1e-12)
    x = np.array([0.0, 0.5, 1.0, 33.3, 700.0, 32768.0, 50_000.0])
    assert_allclose(survival_at(s, x), [[d.survival(v) for v in x] for d in single], rtol=1e-9, atol=1e-300)


def test_equal_quantiles_are_a_jump() -> None:
    d = LengthDistribution.from_quantiles([0.1, 0.5, 0.9], [EDGES[20]] * 3)
    assert d.survival(EDGES[20]) == pytest.approx(0.1)
    assert d.survival(EDGES[19]) > 0.9


@pytest.mark.parametrize(
    ("levels", "values", "message"),
    [
        ([0.5], [3.0], "2 or more"),
        ([0.5, 0.4], [3.0, 4.0], "levels must increase"),
        ([0.0, 0.5], [3.0, 4.0], "within"),
        ([0.1, 0.5], [4.0, 3.0], "not decreasing"),
        ([0.1, 0.5], [-4.0, 3.0], "not negative"),
        ([0.1, 0.5], [4.0, float("nan")], "finite"),
    ],
)
def test_bad_quantiles_are_refused(levels: list[float], values: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthDistribution.from_quantiles(levels, values)


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, float("nan")])
def test_a_quantile_level_must_be_inside(q: float) -> None:
    with pytest.raises(ValueError, match="within"):
        exponential(100.0).quantile(q)
