"""Reshape: clip, scale, cut and merge datasets; each says in `notes` what it changed, and prompt and output stay joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from lengthwise.sched import covers_answers

from .dataset import Dataset, Ints
from .prefixes import moved, names_end

TOLD = 20  # rows named in `notes`; all are counted


def take(dataset: Dataset, rows: ArrayLike, **notes: Any) -> Dataset:
    """The rows (n,) of `dataset` in that order, with all they carry; arrivals start at 0 again. Of a saved workload, a row
    whose predecessor is not taken waits for nobody and arrives at its time, counted in `notes`."""
    at = np.asarray(rows)
    at = np.flatnonzero(at) if at.dtype == bool else at.astype(np.int64)
    arrival = None if dataset.arrival is None else dataset.arrival[at]
    if arrival is not None and arrival.size:
        arrival = arrival - arrival[0]
    columns = {name: np.asarray(column)[at] for name, column in dataset.columns.items()}
    if "after" in columns:
        place = np.full(len(dataset), -1, dtype=np.int64)
        place[at] = np.arange(len(at))
        waited = columns["after"] >= 0
        columns["after"] = np.where(waited, place[columns["after"]], -1)
        notes["num_predecessors_left_out"] = int((waited & (columns["after"] < 0)).sum())
    return replace(
        dataset,
        prompt_len=dataset.prompt_len[at],
        output_len=dataset.output_len[at],
        censored=None if dataset.censored is None else dataset.censored[at],
        group=None if dataset.group is None else dataset.group[at],
        prompts=None if dataset.prompts is None else [dataset.prompts[i] for i in at.tolist()],
        arrival=arrival,
        columns=columns,
        block_hashes=None if dataset.block_hashes is None else [dataset.block_hashes[i] for i in at.tolist()],
        samples=None if dataset.samples is None else dataset.samples[at],
        answers_before=None if dataset.answers_before is None else [dataset.answers_before[i] for i in at.tolist()],
        notes={**dataset.notes, **notes},
    )


def head(dataset: Dataset, *, num_rows: int) -> Dataset:
    """The first rows. Raises ValueError when there are fewer."""
    if not 1 <= num_rows <= len(dataset):
        raise ValueError(f"num_rows {num_rows} must be from 1 to the {len(dataset)} rows of {dataset.name}")
    return take(dataset, np.arange(num_rows), head={"num_rows": num_rows, "of": len(dataset)})


def unseen(dataset: Dataset, *, artefact: str | None) -> Dataset:
    """The rows whose prompts the artefact (a folder of `lengthwise train`) has not learned from, nor from near-duplicates."""
    from lengthwise.predictors.artefact import load

    if dataset.prompts is None:
        raise ValueError(f"dataset {dataset.name} has no prompts that anybody could have learned from")
    keep = ~load(artefact, transfer=True).has_seen(dataset.prompts)
    if not keep.any():
        raise ValueError(f"the artefact in {artefact} has learned from every prompt of {dataset.name}")
    return take(dataset, keep, unseen={"num_rows": int(keep.sum()), "of": len(dataset)})


def between(dataset: Dataset, *, start: float, end: float) -> Dataset:
    """The rows that arrive in [start, end) s of the trace; arrivals start at 0 again."""
    if dataset.arrival is None:
        raise ValueError(f"dataset {dataset.name} has no arrival times to cut by")
    keep = (dataset.arrival >= start) & (dataset.arrival < end)
    if not keep.any():
        raise ValueError(f"no row of {dataset.name} arrives in [{start}, {end}) s; the last is at {dataset.arrival[-1]:g} s")
    note = {"start": start, "end": end, "num_rows": int(keep.sum()), "of": len(dataset)}
    return take(dataset, keep, between=note)


def split(dataset: Dataset, *, shares: Sequence[float], seed: int = 0) -> list[Dataset]:
    """Parts of about these shares of the rows, which add up to 1; rows of a group (without groups: of a session) stay together,
    each part in file order."""
    from .draw import stream

    if any(share <= 0 for share in shares) or abs(sum(shares) - 1) > 1e-9:
        raise ValueError(f"shares {list(shares)} must be above 0 and add up to 1")
    session = dataset.columns.get("session")
    group = dataset.group
    if group is None:
        group = np.arange(len(dataset)) if session is None else np.asarray(session).astype(str)
    names, of = np.unique(group, return_inverse=True)
    place = stream(seed, "split").permutation(len(names))[of]
    count = np.bincount(place, minlength=len(names))
    ends = np.cumsum(count)
    part = np.minimum(np.searchsorted(np.cumsum(shares) * len(dataset), (ends - count / 2)[place]), len(shares) - 1)
    out = []
    for i, share in enumerate(shares):
        rows = np.flatnonzero(part == i)
        if not rows.size:
            raise ValueError(f"part {i} of share {share} gets none of the {len(names)} groups of {dataset.name}")
        out.append(take(dataset, rows, split={"part": i, "share": share, "num_rows": rows.size, "seed": seed}))
    return out


def clip(
    dataset: Dataset, *, max_total: int | None = None, max_prompt_len: int | None = None, max_output_len: int | None = None
) -> Dataset:
    """Shorten lengths (tokens) to these limits: the prompt first, down to 1 if need be, then the output, never below 1.

    A shortened output is censored: the true answer is longer. A shortened prompt keeps the names of its whole pieces and no
    more: what follows it is no longer the conversation. `notes` count the changed rows and name the first of them.
    """
    for name, limit, least in (
        ("max_total", max_total, 2),
        ("max_prompt_len", max_prompt_len, 1),
        ("max_output_len", max_output_len, 1),
    ):
        if limit is not None and limit < least:
            raise ValueError(f"{name} {limit} must be at least {least}")
    prompt = dataset.prompt_len if max_prompt_len is None else np.minimum(dataset.prompt_len, max_prompt_len)
    output = dataset.output_len if max_output_len is None else np.minimum(dataset.output_len, max_output_len)
    if max_total is not None:
        output = np.minimum(output, max_total - 1)
        prompt = np.minimum(prompt, max_total - output)
    shorter_prompt, shorter_output = prompt < dataset.prompt_len, output < dataset.output_len
    return _relength(
        dataset, prompt, output, shorter_output,
        clip={
            "max_total": max_total, "max_prompt_len": max_prompt_len, "max_output_len": max_output_len,
            **_told(shorter_prompt, "prompts"), **_told(shorter_output, "outputs"),
        },
    )  # fmt: skip


def scale(dataset: Dataset, *, prompt: float = 1.0, output: float = 1.0) -> Dataset:
    """Lengths times these factors, rounded, at least 1 token. Raises ValueError where a prefix would no longer be the same:
    prompts with prefix hashes, and longer answers than the next prompt of a conversation holds."""
    for name, factor in (("prompt", prompt), ("output", output)):
        if not 0 < factor < float("inf"):
            raise ValueError(f"factor {name}={factor} must be a finite number above 0")
    if dataset.block_hashes is not None and prompt != 1.0:
        raise ValueError(f"prompts of {dataset.name} have prefix hashes, so their lengths cannot be scaled by {prompt}")
    if output > 1.0 and any(covers_answers(names) for names in dataset.block_hashes or ()):
        raise ValueError(f"the next prompts of {dataset.name} hold its answers, so these cannot grow by {output}")
    new_prompt, new_output = (np.maximum(np.rint(x * f), 1).astype(np.int64)
                              for x, f in ((dataset.prompt_len, prompt), (dataset.output_len, output)))  # fmt: skip
    raised = int(((np.rint(dataset.prompt_len * prompt) < 1) | (np.rint(dataset.output_len * output) < 1)).sum())
    return _relength(
        dataset, new_prompt, new_output, None, scale={"prompt": prompt, "output": output, "num_raised_to_1": raised}
    )


def merge(parts: Mapping[str, Dataset] | Sequence[Dataset], *, name: str = "merged") -> Dataset:
    """One dataset of the rows of all parts, in order of arrival where every part has arrivals (each from its own 0), else part
    after part; column `part` says whence. Groups, sessions and prefix hashes of different parts never meet.

    Raises ValueError on parts of different units, hash pieces or max_new_tokens, where only some have arrivals or hashes, and
    on a saved workload whose requests wait for answers.
    """
    named = dict(parts) if isinstance(parts, Mapping) else {f"{i}-{part.name}": part for i, part in enumerate(parts)}
    if len(named) < 2:
        raise ValueError(f"a merge needs two parts or more, there is {list(named)}")
    sets = list(named.values())
    first = sets[0]
    for field in ("unit", "hash_tokens", "max_new_tokens"):
        if len({getattr(part, field) for part in sets}) > 1:
            raise ValueError(f"parts differ in {field}: " + ", ".join(f"{k} {getattr(p, field)!r}" for k, p in named.items()))
    for key, part in named.items():
        if "after" in part.columns or part.notes.get("users") is not None:
            raise ValueError(f"requests of {key} wait for answers: merge what it was drawn from, and draw again")
    for field in ("arrival", "block_hashes", "prompts", "answers_before"):
        some = [key for key, part in named.items() if getattr(part, field) is None]
        if some and len(some) < len(sets):
            raise ValueError(f"only some parts have {field}: {', '.join(some)} has none")
    n = [len(part) for part in sets]
    whence = np.repeat(np.array(list(named), dtype=object), n)
    arrival = None if first.arrival is None else np.concatenate([part.arrival for part in sets if part.arrival is not None])
    columns = {key for part in sets for key in part.columns}
    hashes = None
    if first.block_hashes is not None:
        ends = [max(names_end(h) for h in part.block_hashes or ()) for part in sets]
        hashes = [moved(h, at) for part, at in zip(sets, _offsets(ends), strict=True) for h in part.block_hashes or ()]
    made = Dataset(
        name=name,
        prompt_len=np.concatenate([part.prompt_len for part in sets]),
        output_len=np.concatenate([part.output_len for part in sets]),
        unit=first.unit,
        source="; ".join(f"{key}: {part.source}" for key, part in named.items()),
        licence="; ".join(dict.fromkeys(part.licence for part in sets)),
        censored=np.concatenate([np.zeros(len(p), bool) if p.censored is None else p.censored for p in sets]),
        group=_groups(sets),
        prompts=None if first.prompts is None else [text for part in sets for text in (part.prompts or ())],
        arrival=arrival,
        max_new_tokens=first.max_new_tokens,
        dropped={f"{key}: {why}": count for key, part in named.items() for why, count in part.dropped.items()},
        columns={**{key: _column(key, named) for key in sorted(columns)}, "part": whence},
        notes={"merge": {key: {"num_rows": len(part), **part.notes} for key, part in named.items()}},
        block_hashes=hashes,
        hash_tokens=first.hash_tokens,
        answers_before=None if first.answers_before is None else [x for part in sets for x in part.answers_before or ()],
    )
    if arrival is None:
        return made
    in_time = take(made, np.argsort(arrival, kind="stable"))
    return replace(in_time, arrival=np.sort(arrival, kind="stable"))


def _relength(dataset: Dataset, prompt: Ints, output: Ints, cut: Any, **notes: Any) -> Dataset:
    """The same rows with other lengths; prefix hashes keep the pieces that are still whole. Where outputs change, `samples` and
    `answers_before` no longer hold."""
    hashes = dataset.block_hashes
    if hashes is not None and np.any(prompt < dataset.prompt_len):
        whole = (prompt // dataset.hash_tokens).tolist()
        shorter = (prompt < dataset.prompt_len).tolist()
        hashes = [list(h[:n]) if short else h for h, n, short in zip(hashes, whole, shorter, strict=True)]
    censored = dataset.censored
    if cut is not None and cut.any():
        censored = cut if censored is None else censored | cut
    same = bool(np.all(output == dataset.output_len))
    return replace(
        dataset, prompt_len=prompt, output_len=output, censored=censored, block_hashes=hashes,
        samples=dataset.samples if same else None, answers_before=dataset.answers_before if same else None,
        notes={**dataset.notes, **notes},
    )  # fmt: skip


def _told(changed: Any, what: str) -> dict[str, Any]:
    rows = np.flatnonzero(changed)
    return {f"num_{what}_changed": int(rows.size), f"{what}_changed": rows[:TOLD].tolist()}


def _column(key: str, named: Mapping[str, Dataset]) -> Any:
    """One column over all parts, None or NaN where a part has none; names of clients and sessions carry their part's."""
    parts = []
    for part_name, part in named.items():
        column = part.columns.get(key)
        if key in ("client", "session", "program"):
            have = (
                [None] * len(part) if column is None else [None if x is None or x != x else f"{part_name}/{x}" for x in column]
            )
            parts.append(np.array(have, dtype=object))
        else:
            missing = part.max_new_tokens if key == "max_new_tokens" else np.nan
            parts.append(np.full(len(part), missing) if column is None else np.asarray(column))
    if not all(part.dtype.kind in "biuf" for part in parts):  # numbers beside texts would become texts
        parts = [part.astype(object) for part in parts]
    return np.concatenate(parts)


def _groups(sets: Sequence[Dataset]) -> Ints | None:
    if all(part.group is None for part in sets):
        return None
    own = [np.arange(len(part)) if part.group is None else part.group for part in sets]
    return np.concatenate([g + o for g, o in zip(own, _offsets([int(g.max()) + 1 for g in own]), strict=True)]).astype(np.int64)


def _offsets(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:i]) for i in range(len(sizes))]
