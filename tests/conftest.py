"""Settings of the whole suite: Hypothesis is derandomised (same examples on every machine) and keeps no database."""

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
