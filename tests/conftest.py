"""Settings of the whole suite: Hypothesis is derandomised (same examples on every machine) and keeps no database; no test
leaves handlers of logs behind."""

import logging

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "lengthwise",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("lengthwise")


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """Hydra's own handlers write to a stream that the next test closes."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
