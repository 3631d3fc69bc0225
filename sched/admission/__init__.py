"""Admission: what must be left in the pool before a request may enter, one rule a file."""

from .admission import Admission
from .estimates import Asked, History, Predicted
from .future_peak import FuturePeak
from .max_tokens import MaxTokens
from .quantile import Quantile

__all__ = ["Admission", "Asked", "FuturePeak", "History", "MaxTokens", "Predicted", "Quantile"]
