"""The composition root: the only place that knows everything."""
