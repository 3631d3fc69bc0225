"""Lengthwise: LLM request scheduling with learned output-length prediction."""

__version__ = "0.1.0"
