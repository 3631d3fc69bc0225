"""Workload loaders: each module's `load` returns a Dataset, and `_target_` in conf/workload names it."""
