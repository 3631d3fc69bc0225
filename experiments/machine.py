"""What machine this is, in words: measured times hold for no other."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine(device: Any) -> dict[str, Any]:
    """What the speed of a torch device hangs on: its name, and on a CPU cores and threads."""
    import torch

    if device.type == "cuda":
        return {"machine": torch.cuda.get_device_name(device)}
    return {"machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores", "threads": torch.get_num_threads()}


def processor() -> str:
    """The CPU's name where the system tells it, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
