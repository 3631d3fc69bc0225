"""Arrival processes: `times(n, rate, rng)` gives n sorted times in seconds, `describe()` says which process it was."""
