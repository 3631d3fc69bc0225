"""Hand features of a prompt: counts and key words that cost microseconds, named, so that an artefact can check their order.

Only a prompt's two ends are read: what is asked stands at the start or the end, and a pasted document in between would cost
milliseconds. A feature never sees the answer; `refuse_label_columns` catches a table that leaks it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

HEAD, TAIL = 3000, 1000  # characters read from the start and from the end of a longer prompt

# Any of these words is in the lower-case prompt (1) or not (0).
_WORDS = {
    "asks_code": "code function script program class api regex sql query",
    "names_language": "python javascript typescript java rust html css react bash node php swift kotlin golang cpp",
    "asks_list": "list ideas examples names titles tips ways topics keywords suggestions options headlines",
    "asks_table": "table column columns csv spreadsheet excel",
    "asks_prose": "essay article blog story chapter report proposal plan guide tutorial outline letter novel scene",
    "asks_verse": "poem song lyrics rap haiku rhyme",
    "asks_short": "short brief briefly concise single only simply tldr word",
    "asks_long": "detailed detail comprehensive long thorough complete full extensive elaborate",
    "asks_summary": "summarize summarise summary takeaways",
    "asks_rewrite": "rewrite rephrase paraphrase edit correct improve proofread grammar revise reword shorten",
    "asks_translation": "translate translation",
    "asks_explanation": "explain describe difference compare why",
    "asks_steps": "step steps instructions",
    "asks_choice": "classify true false choice sentiment",
    "asks_format": "json yaml xml markdown latex",
    "asks_mail": "email mail reply message tweet post linkedin caption",
    "sets_role": "act pretend roleplay role",
    "waits": "understand ready understood acknowledge wait ok",
    "says_please": "please could would",
    "says_more": "continue more another next",
    "says_following": "following below above attached",
    "first_person": "i my me we our",
    "has_error": "error exception traceback bug fix fails failed debug",
    "has_math": "calculate solve equation probability integral derivative prove theorem",
    "romance_words": "que los las una para por como les des une est pour uma não della che",
    "german_words": "und der die das ein eine nicht ist mit wie ich",
}
_WORD_SETS = {name: frozenset(words.split()) for name, words in _WORDS.items()}
# The first word is one of these.
_FIRST = {
    "starts_wh": "what who when where which whats what's whose whom",
    "starts_how": "how why explain describe",
    "starts_write": "write create generate make build design draft compose develop implement",
    "starts_give": "give list provide suggest show tell find name recommend",
    "starts_is": "is are do does did can could will should would was has have",
    "starts_social": "hi hello hey thanks thank ok good test yes no",
    "starts_role": "you act i imagine pretend as ignore assume suppose",
}
_FIRST_SETS = {name: frozenset(words.split()) for name, words in _FIRST.items()}
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?")
_NUMBER = re.compile(r"(\d[\d,]{0,6})[ -]*([a-z]+)?")
_TOKENS_PER = {
    "word": 1.3,
    "page": 500.0,
    "paragraph": 90.0,
    "sentence": 25.0,
    "character": 0.25,
    "minute": 180.0,
    "line": 12.0,
}

FEATURES: tuple[str, ...] = (
    "log_tokens", "log_chars", "log_words", "log_lines", "word_len", "upper_share", "digit_share", "space_share",
    "symbol_share", "non_ascii_share", "cjk_share", "tokens_per_char", "num_questions", "ends_question", "ends_colon",
    "ends_stop", "num_bullets", "num_quotes", "num_fences", "has_url", "has_placeholder", "log_first_line", "log_last_line",
    "log_amount", "log_items", *_FIRST, *_WORDS,
)  # fmt: skip

_CJK = ((0x3040, 0x9FFF), (0xAC00, 0xD7AF))  # kana and Chinese characters, Hangul
_CLASS = np.zeros(128, dtype=np.uint8)  # of an ASCII character: 0 symbol, 1 lower, 2 upper, 3 digit, 4 blank
for _i in range(128):
    _c = chr(_i)
    _CLASS[_i] = 1 if _c.islower() else 2 if _c.isupper() else 3 if _c.isdigit() else 4 if _c.isspace() else 0


def ends_of(prompt: str) -> str:
    """The part of a prompt that is read: all of it, or the first HEAD and the last TAIL characters."""
    return prompt if len(prompt) <= HEAD + TAIL else prompt[:HEAD] + "\n" + prompt[-TAIL:]


def _stated(low: str) -> tuple[float, float]:
    """The greatest amount of text asked for ("500 words", in rough tokens), and the first other number near the start."""
    amount, items = 0.0, 0.0
    for match in _NUMBER.finditer(low):
        number = float(match[1].replace(",", ""))
        per = _TOKENS_PER.get((match[2] or "").removesuffix("s"))
        if per is not None:
            amount = max(amount, number * per)
        elif not items and match.start() < 400 and number < 1000:
            items = number
    return min(amount, 20_000.0), items


def _row(prompt: str, prompt_len: float) -> list[float]:
    text = ends_of(prompt)
    low = text.lower()
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    n = max(codes.size, 1)
    plain = codes[codes < 128]
    symbols, _, upper, digits, blanks = np.bincount(_CLASS[plain], minlength=5).tolist()
    cjk = 0
    if plain.size < codes.size:
        cjk = int(sum(np.count_nonzero((codes >= low) & (codes <= high)) for low, high in _CJK))
    words = _WORD.findall(low)
    known = set(words)
    lines = text.strip().split("\n")
    last = lines[-1][-1:]
    amount, items = _stated(low)
    logs = np.log1p(
        [prompt_len, len(prompt), len(words), len(lines), len(lines[0]), len(lines[-1]), amount, items]
    ).tolist()  # fmt: skip
    return [
        *logs[:4], sum(map(len, words)) / max(len(words), 1),
        upper / n, digits / n, blanks / n, symbols / n, (codes.size - plain.size) / n, cjk / n,
        prompt_len / max(len(prompt), 1), min(text.count("?"), 10), last == "?", last == ":", last in (".", "!"),
        min(text.count("\n-") + text.count("\n*") + text.count("\n1"), 20), min(text.count('"'), 20), min(text.count("```"), 6),
        "http" in low or "www." in low, "[" in low or "{" in low, *logs[4:],
        *((words[0] if words else "") in group for group in _FIRST_SETS.values()),
        *(not group.isdisjoint(known) for group in _WORD_SETS.values()),
    ]  # fmt: skip


def hand_features(prompts: Sequence[str], prompt_len: ArrayLike) -> Floats:
    """(N,) prompts and their lengths in tokens -> (N, len(FEATURES)), columns in the order of FEATURES."""
    lens = np.asarray(prompt_len, dtype=np.float64)
    if lens.shape != (len(prompts),):
        raise ValueError(f"{len(prompts)} prompts and prompt_len of shape {lens.shape}")
    out = np.empty((len(prompts), len(FEATURES)))
    for i, (prompt, length) in enumerate(zip(prompts, lens.tolist(), strict=True)):
        out[i] = _row(prompt, length)
    return out


def refuse_label_columns(columns: Floats, names: Sequence[str], labels: ArrayLike, limit: float = 0.98) -> None:
    """Raise ValueError if a column of (N, F) is equal to the labels (N,) or orders the rows as they do, where it is known (not
    NaN).

    limit: the largest |Spearman correlation| that passes; no honest feature of a prompt comes near it. Fewer than 20 rows, or
    constant labels, cannot tell and pass.
    """
    y = np.asarray(labels, dtype=np.float64)
    from scipy.stats import rankdata

    for name, column in zip(names, columns.T, strict=True):
        known = ~np.isnan(column)
        x, labelled = column[known], y[known]
        if len(x) < 20 or np.ptp(x) == 0 or np.ptp(labelled) == 0:
            continue
        rho = float(np.corrcoef(rankdata(x), rankdata(labelled))[0, 1])
        if abs(rho) > limit:
            raise ValueError(f"feature {name!r} follows the label (Spearman {rho:.4f}, limit {limit}): it leaks the answer")


def refuse_other_features(found: Sequence[str], wanted: Sequence[str]) -> None:
    """Raise ValueError, naming them, when an artefact's columns are not those of this version, in their order."""
    if tuple(found) != tuple(wanted):
        odd = sorted(set(found) ^ set(wanted)) or ["their order"]
        raise ValueError(f"the artefact's features are not this version's: {', '.join(odd)}")
