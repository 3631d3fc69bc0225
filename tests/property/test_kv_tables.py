"""Block tables: through them every row reads its own prefix and nothing else, whatever happens; and they change no plan."""

from __future__ import annotations

import pytest
from harness import Case, play
from hypothesis import given, settings
from shadow import shadow
from strategies import cases, crowded, reusing


def own_prefix(case: Case) -> None:
    """The shadow memory's assertions at every step, and the run of the counts alone, fast-forwarded."""
    kept, counted = shadow(case), play(case)
    assert kept.log == counted.log
    for a, b in zip(kept.requests, counted.requests, strict=True):
        assert (a._num_preemptions, a._recomputed, a._cached, a._resumes) == (
            b._num_preemptions, b._recomputed, b._cached, b._resumes,
        )  # fmt: skip
    tables = kept.scheduler.kv.tables
    indexed = kept.scheduler.kv.evictable
    assert len(set(tables.free)) == len(tables.free) == tables.num_blocks - indexed


@given(case=reusing())
@settings(max_examples=250)
def test_every_row_reads_its_own_prefix_with_reuse_and_swapping(case):
    own_prefix(case)


@given(case=cases())
@settings(max_examples=120)
def test_every_row_reads_its_own_prefix(case):
    own_prefix(case)


@given(case=crowded())
@settings(max_examples=60)
def test_every_row_reads_its_own_prefix_where_requests_yield(case):
    own_prefix(case)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", [cases, crowded, reusing], ids=lambda f: f.__name__)
def test_every_row_reads_its_own_prefix_at_length(drawn):
    settings(max_examples=4000)(given(case=drawn())(own_prefix))()
