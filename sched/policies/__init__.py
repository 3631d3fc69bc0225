"""Scheduling policies, one idea a file."""

from .a_min import AMin
from .aging import Aging
from .andes import Andes
from .bounded import OvertakingGuard
from .colocation import Colocation
from .deadline import DeadlineGuard
from .dfs_weight import DFSWeight
from .drr import DRR
from .edf import EDF
from .fcfs import FCFS
from .gittins import Gittins
from .hrrn import HRRN
from .idle import IdleGuard
from .isrtf import ISRTF
from .jitserve import JITServe
from .las import LAS
from .lcf import LCF
from .lengthwise import Lengthwise
from .llf import LLF
from .lpm import LPM
from .ltr import LTR
from .mc_sf import MCSF
from .mlfq import MLFQ
from .priority import Priority
from .response_ratio import ResponseRatio
from .scorpio import Scorpio
from .sjf import PSJF, SJF
from .soft_boost import SoftBoost
from .srpt import SRPT
from .tie import TIE
from .trail import TRAIL
from .vtc import VTC
from .vtc_predicted import VTCPredicted
from .wait import Wait
from .work import WorkGuard
from .wrr import WRR

__all__ = [
    "DRR", "EDF", "FCFS", "HRRN", "ISRTF", "LAS", "LCF", "LLF", "LPM", "LTR", "MCSF", "MLFQ", "PSJF", "SJF", "SRPT", "TIE",
    "TRAIL", "VTC", "WRR", "AMin", "Aging", "Andes", "Colocation", "DFSWeight", "DeadlineGuard", "Gittins", "IdleGuard",
    "JITServe", "Lengthwise", "OvertakingGuard", "Priority", "ResponseRatio", "Scorpio", "SoftBoost", "VTCPredicted", "Wait",
    "WorkGuard",
]  # fmt: skip
