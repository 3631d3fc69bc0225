"""Least counter first: VTC without its lift, the baseline that shows what the lift is for (VTC, OSDI 2024)."""

from __future__ import annotations

from .sharing import Client
from .vtc import VTC


class LCF(VTC):
    """The client that has been served least since the run began goes first, so that who was idle for long has credit, and
    shuts the others out until it is used up: no bound holds between two clients when the load shifts."""

    def joining(self, client: Client, arrives: bool) -> None:
        """No lift."""
