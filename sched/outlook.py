"""Outlook: how much KV the running set will come to hold, if each request ends where it is expected to.

Decoding requests grow together by a token a step, and memory drops only where one of them ends. So the greatest need is at an
end: with k requests that last `left` steps or more, it is what these hold now + k x left. Two numbers per request, its end and
its tokens at decode step 0, do not change as steps pass; they are kept in columns, where only who came, went or turned since is
looked at anew, and a question is one pass over them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .request import Request
    from .standing import Standing

Total = Callable[["Request", int], float]  # (request, tokens generated) -> output tokens that it is expected to end with


class Outlook:
    """Kept in step with the running set of `ledger`, from question to question.

    total: capped by max_new_tokens here; asked when a request joins the decode set or is predicted anew and, where it `renews`,
    once outlived. Who has outlived it is taken to have one token to come. Counts tokens, and for each request the part of a
    block that it may leave empty: so what fits by this count fits in blocks. A prompt is taken to be prefilled within one step.
    """

    def __init__(self, ledger: Standing, total: Total, renews: bool = False) -> None:
        self._ledger = ledger
        self._total = total
        self._renews = renews
        self._spare = ledger.kv.block_size - 1  # tokens that the last block may have room for
        self._requests: list[Request] = []  # row by row
        self._rows: dict[Request, tuple[int, int, object]] = {}  # (row, decode step at which it joined, its prediction then)
        self._ends = np.empty(64)  # decode steps
        self._bases = np.empty(64)  # tokens at decode step 0: held now, less the steps so far
        self._born: dict[Request, int] = {}  # when each got its row, counted
        self._num_born = 0
        self._told = dict.fromkeys(ledger.running.members)
        ledger.running.watchers.append((self._told, self._rows))

    def peak(self, incoming: Request | None = None, without: Sequence[Request] = ()) -> float:
        """The greatest KV (tokens) that the batch, with `incoming` and without those, will hold (Past-Future, ASPLOS 2025,
        section 4; MC-SF, arXiv 2502.07115, section 4)."""
        left, held = self._columns(incoming, without)
        order = np.argsort(-left)  # equals in any order: with the last of them the need is greatest
        need = np.cumsum(held[order]) + left[order] * np.arange(1, len(left) + 1)
        return float(need.max(initial=0.0))

    def at_ends(self, incoming: Request | None = None, without: Sequence[Request] = ()) -> float:
        """KV (tokens) if each held at once what it holds at its own end: what a reservation counts."""
        left, held = self._columns(incoming, without)
        return float(left.sum() + held.sum())

    def _columns(self, incoming: Request | None, without: Sequence[Request]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(steps left, tokens held) of everybody counted."""
        ledger = self._ledger
        self._keep_up()
        n, step = len(self._requests), ledger.running.step
        left, held = np.maximum(self._ends[:n] - step, 1.0), self._bases[:n] + step
        if without:
            stays = np.ones(n, dtype=bool)
            stays[[self._rows[r][0] for r in without if r in self._rows]] = False
            left, held = left[stays], held[stays]
        fresh = [r for r in ledger.prefilling if r not in without]
        if incoming is not None:
            fresh.append(incoming)
        if fresh:
            rows = [(self._left(r, g := ledger.generated(r)), r.prompt_len + g + self._spare) for r in fresh]
            more_left, more_held = np.array(rows, dtype=np.float64).T
            left, held = np.concatenate((left, more_left)), np.concatenate((held, more_held))
        return left, held

    def _left(self, req: Request, generated: int) -> float:
        return max(min(self._total(req, generated), float(req.max_new_tokens)) - generated, 1.0)

    def _keep_up(self) -> None:
        running, rows = self._ledger.running, self._rows
        if self._told:
            for req in sorted((r for r in self._told if r in rows and r not in running.members), key=self._born.__getitem__):
                self._drop(req)
            for req in self._told:
                if req in rows:
                    if rows[req][1:] != (req._decode_from, req.prediction):  # it left and came back, or is predicted anew
                        self._put(rows[req][0], req)
                elif req in running.members:
                    self._add(req)
            self._told.clear()
        if self._renews:
            for row in np.flatnonzero(self._ends[: len(self._requests)] <= running.step).tolist():
                self._put(row, self._requests[row])

    def _add(self, req: Request) -> None:
        row = len(self._requests)
        if row == len(self._ends):
            self._ends, self._bases = np.resize(self._ends, 2 * row), np.resize(self._bases, 2 * row)
        self._requests.append(req)
        self._born[req] = self._num_born
        self._num_born += 1
        self._put(row, req)

    def _put(self, row: int, req: Request) -> None:
        generated = self._ledger.generated(req)
        step = self._ledger.running.step
        self._ends[row] = step + self._left(req, generated)
        self._bases[row] = req.prompt_len + generated + self._spare - step
        self._rows[req] = row, req._decode_from, req.prediction

    def _drop(self, req: Request) -> None:
        """The last row moves into its place."""
        row, last = self._rows.pop(req)[0], self._requests.pop()
        del self._born[req]
        if last is not req:
            end = len(self._requests)
            self._requests[row] = last
            self._ends[row], self._bases[row] = self._ends[end], self._bases[end]
            self._rows[last] = row, *self._rows[last][1:]
