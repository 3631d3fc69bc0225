"""Device: what one accelerator has, by its data sheet and by nvidia-smi; a group has `tp` times that."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """memory_mib: as nvidia-smi reports it; sold: as the shop does. peak_flops: dense bf16 per second; bandwidth: bytes/s."""

    name: str
    memory_mib: int
    sold: str
    peak_flops: float
    bandwidth: float

    @property
    def memory(self) -> int:
        return self.memory_mib * 2**20


DEVICES = {
    "a100_sxm": Device("NVIDIA A100-SXM4-80GB", 81920, "80 GB", 3.12e14, 2.039e12),
    "h100_sxm": Device("NVIDIA H100 80GB HBM3", 81559, "80 GB", 9.89e14, 3.35e12),
    "h200_sxm": Device("NVIDIA H200", 143771, "141 GB", 9.89e14, 4.8e12),
}
