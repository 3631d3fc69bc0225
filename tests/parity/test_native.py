"""Parity: told the same step times, a case is planned alike on the native engine and in simulation; its tokens are greedy."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native import both, only_prompts
from strategies import cases, crowded, reusing

from lengthwise.engine.native.tiny import FAMILIES

FEW = settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
BACKENDS = st.sampled_from(("torch", "auto"))
runs = st.one_of(cases(), crowded(), reusing().map(only_prompts))


@given(cases(), BACKENDS)
@FEW
def test_any_run(case, attention):
    assert len(both(case, attention=attention).log.ended_at) == len(case.asks)


@given(crowded(), BACKENDS)
@FEW
def test_runs_with_preemption(case, attention):
    assert len(both(case, attention=attention).log.ended_at) == len(case.asks)


@given(reusing().map(only_prompts), BACKENDS)
@FEW
def test_runs_with_shared_prefixes_and_swaps(case, attention):
    assert len(both(case, attention=attention).log.ended_at) == len(case.asks)


@pytest.mark.slow
@given(runs, BACKENDS, st.sampled_from(tuple(FAMILIES)))
@MANY
def test_any_run_of_any_architecture(case, attention, family):
    assert len(both(case, family, attention=attention).log.ended_at) == len(case.asks)
