"""The checker: every count balances, at every step."""

from __future__ import annotations

from .standing import DECODING, PAUSED, PENDING, PREFILLING, SWAPPED, WAITING, Standing


def check(ledger: Standing, max_num_seqs: int) -> None:
    """Assert that requests by phase, KV blocks in every tier, context and rows add up, and that times are in order. Raises
    AssertionError naming what does not."""
    running, swapped = ledger.running.members, ledger.swapping.there
    groups = (
        (ledger.pending, PENDING), (ledger.prefilling, PREFILLING), (ledger.paused, PAUSED), (running, DECODING),
        (swapped, SWAPPED),
    )  # fmt: skip
    for group, phase in groups:
        wrong = [r for r in group if r._phase != phase]
        if wrong:
            raise AssertionError(f"{wrong[0]} stands among {phase.name}")
    in_order = list(ledger.waiting)
    waiting = sum(r._phase == WAITING for r in in_order)
    away = len(ledger.paused) + len(swapped)
    if len(in_order) != len(ledger.waiting) or waiting + away != len(in_order):
        raise AssertionError(
            f"{len(in_order)} entries wait, counted {len(ledger.waiting)}: {waiting} waiting, {len(ledger.paused)} paused and "
            f"{len(swapped)} swapped"
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
    ledger.swapping.check()
    if kept := [r for r, (_, blocks) in swapped.items() if blocks != ledger.kv.blocks(r._computed)]:
        raise AssertionError(f"{kept[0]!r} has {kept[0]._computed} tokens swapped out, in {swapped[kept[0]][1]} blocks")
    if wrong := [r for r in (*holders, *in_order) if not 0 <= r._cached < r.prompt_len]:
        raise AssertionError(f"{wrong[0]!r} found {wrong[0]._cached} tokens of its prompt cached")
    context = sum(r.prompt_len + ledger.generated(r) for r in running)
    if context != ledger.running.context_tokens:
        raise AssertionError(f"context {ledger.running.context_tokens} booked, {context} counted")
    if ledger.num_running > max_num_seqs:
        raise AssertionError(f"{ledger.num_running} rows run, max_num_seqs is {max_num_seqs}")
