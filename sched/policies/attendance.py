"""Attendance: who is on the batch, for policies whose keys or structures hang on it.

A policy is told who comes on the batch (`admit` is asked last of all) and who ends, not who is preempted. Who left is looked
for only when the numbers differ, so that a step without preemption costs nothing.
"""

from __future__ import annotations

from ..ports import View
from ..request import Phase, Request

PREFILLING, DECODING = Phase.PREFILLING, Phase.DECODING


class Attendance:
    """Call `joins` from `admit`, `gone` from `on_steps`, `ends` from `on_finish`."""

    def __init__(self) -> None:
        self._on: dict[int, Request] = {}

    def __contains__(self, rid: int) -> bool:
        return rid in self._on

    def joins(self, req: Request) -> None:
        self._on[req.rid] = req

    def ends(self, req: Request) -> None:
        self._on.pop(req.rid, None)

    def gone(self, view: View) -> list[Request]:
        """Those who have left the batch unfinished, each told once, in the order in which they joined."""
        if len(self._on) == view.num_running:
            return []
        gone = [req for req in self._on.values() if req.phase not in (PREFILLING, DECODING)]
        for req in gone:
            del self._on[req.rid]
        return gone
