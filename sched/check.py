"""The checker: every count balances, at every step."""

from __future__ import annotations

from .ledger import DECODING, PAUSED, PENDING, PREFILLING, WAITING, Ledger


def check(ledger: Ledger, max_num_seqs: int) -> None:
    """Assert that requests by phase, KV blocks, context and rows add up, and that times are in order. Raises AssertionError
    naming what does not."""
    running = ledger.running.members
    groups = (
        (ledger.pending, PENDING), (ledger.prefilling, PREFILLING), (ledger.paused, PAUSED), (running, DECODING),
    )  # fmt: skip
    for group, phase in groups:
        wrong = [r for r in group if r._phase != phase]
        if wrong:
            raise AssertionError(f"{wrong[0]} stands among {phase.name}")
    in_order = list(ledger.waiting)
    waiting = sum(r._phase == WAITING for r in in_order)
    if len(in_order) != len(ledger.waiting) or waiting + len(ledger.paused) != len(in_order):
        raise AssertionError(
            f"{len(in_order)} entries wait, counted {len(ledger.waiting)}: {waiting} waiting and {len(ledger.paused)} paused"
        )
    counts = ledger.counts
    there = len(ledger.pending) + len(in_order) + ledger.num_running
    ended = counts["finished"] + counts["rejected"] + counts["aborted"] + counts["failed"]
    if counts["injected"] != there + ended:
        raise AssertionError(f"injected {counts['injected']} != present {there} + ended {ended}")
    for r in running:
        if not r.arrival <= r._first_scheduled <= r._first_token <= ledger.now:
            raise AssertionError(f"{r!r} was scheduled at {r._first_scheduled} s, its first token came at {r._first_token} s")
    holders = [r for group in (ledger.prefilling, ledger.paused, running) for r in group]
    ledger.kv.check((r, ledger.capacity(r)) for r in holders)
    context = sum(r.prompt_len + ledger.generated(r) for r in running)
    if context != ledger.running.context_tokens:
        raise AssertionError(f"context {ledger.running.context_tokens} booked, {context} counted")
    if ledger.num_running > max_num_seqs:
        raise AssertionError(f"{ledger.num_running} rows run, max_num_seqs is {max_num_seqs}")
