"""Scheduling policies, one idea a file."""

from .aging import Aging
from .bounded import OvertakingGuard
from .deadline import DeadlineGuard
from .fcfs import FCFS
from .idle import IdleGuard
from .priority import Priority
from .sjf import PSJF, SJF
from .srpt import SRPT
from .work import WorkGuard

__all__ = ["FCFS", "PSJF", "SJF", "SRPT", "Aging", "DeadlineGuard", "IdleGuard", "OvertakingGuard", "Priority", "WorkGuard"]
