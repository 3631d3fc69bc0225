"""Scheduling policies, one idea a file."""

from .a_min import AMin
from .aging import Aging
from .andes import Andes
from .bounded import OvertakingGuard
from .deadline import DeadlineGuard
from .edf import EDF
from .fcfs import FCFS
from .gittins import Gittins
from .hrrn import HRRN
from .idle import IdleGuard
from .isrtf import ISRTF
from .jitserve import JITServe
from .las import LAS
from .llf import LLF
from .ltr import LTR
from .mc_sf import MCSF
from .priority import Priority
from .scorpio import Scorpio
from .sjf import PSJF, SJF
from .soft_boost import SoftBoost
from .srpt import SRPT
from .tie import TIE
from .trail import TRAIL
from .wait import Wait
from .work import WorkGuard

__all__ = [
    "EDF", "FCFS", "HRRN", "ISRTF", "LAS", "LLF", "LTR", "MCSF", "PSJF", "SJF", "SRPT", "TIE", "TRAIL", "AMin", "Aging",
    "Andes", "DeadlineGuard", "Gittins", "IdleGuard", "JITServe", "OvertakingGuard", "Priority", "Scorpio", "SoftBoost",
    "Wait", "WorkGuard",
]  # fmt: skip
