"""Objectives: the deadlines of a request, from what it carries or else from what a policy is given for all."""

from __future__ import annotations

from ..policy import INF
from ..request import Request


class Objectives:
    """ttft, tpot, e2e (s): of requests that carry no objective of that kind; None: they have none. Raises ValueError for one
    that is not above 0."""

    def __init__(self, ttft: float | None, tpot: float | None, e2e: float | None) -> None:
        for name, value in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} s must be > 0, or null for none")
        self._ttft, self._tpot, self._e2e = (INF if value is None else value for value in (ttft, tpot, e2e))

    def ttft(self, req: Request) -> float:
        """Seconds from arrival to the first token; infinity: none asked."""
        return self._ttft if req.slo is None or req.slo.ttft is None else req.slo.ttft

    def tpot(self, req: Request) -> float:
        return self._tpot if req.slo is None or req.slo.tpot is None else req.slo.tpot

    def e2e(self, req: Request) -> float:
        return self._e2e if req.slo is None or req.slo.e2e is None else req.slo.e2e

    def end(self, req: Request, output_len: float) -> float:
        """Seconds from arrival to the last token: e2e; where there is none, what ttft and tpot leave to `output_len` tokens."""
        e2e = self.e2e(req)
        return e2e if e2e < INF else self.ttft(req) + self.tpot(req) * max(output_len, 1.0)
