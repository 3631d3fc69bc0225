"""Scheduling policies, one idea a file."""

from .aging import Aging
from .fcfs import FCFS
from .priority import Priority
from .sjf import PSJF, SJF
from .srpt import SRPT

__all__ = ["FCFS", "PSJF", "SJF", "SRPT", "Aging", "Priority"]
