"""Vidur's length pairs: prompt and output lengths of paper summaries, long prompts and short answers, without arrivals.

From the published traces of Vidur (MLSys 2024), counted with Llama-2's tokenizer and cut to prompt + output <= 4,096.
"""

from __future__ import annotations

import numpy as np

from ..dataset import Dataset
from .columns import kept, lengths
from .origin import File, Origin, github, open_origin, stated
from .reading import read_columns

PROMPT, OUTPUT = "num_prefill_tokens", "num_decode_tokens"
PROJECT = "microsoft/vidur"
COMMIT = "7d47513363ec447a741ac5e47241580b47724fbf"
TRACES = "data/processed_traces"
OWN_SHA = "9d3580538d915ca75e4aaaa54590b42dbb17abc6d74c8913310cf07c232adcdc"
PAIRS_SHA = "316149a38527e8f3dead4081c4eff3ccda5d3ec9d7381c8c9303726df70b2d8e"

ORIGINS = {
    "vidur_lengths": Origin(
        "vidur's arxiv summarization lengths",
        PROJECT,
        f"https://github.com/{PROJECT}/tree/main/{TRACES}",
        "MIT (cite Vidur, MLSys 2024)",
        (
            github(PROJECT, COMMIT, f"{TRACES}/arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv", OWN_SHA, 884_932),
            File("vidur_arxiv_summarization_lengths.csv", PAIRS_SHA, 248_016),
        ),
    )
}


def load(
    path: str | None = None,
    *,
    zero_len: str = "error",
    max_prompt_len: int | None = None,
    limit: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """The length pairs as a Dataset, in file order; further columns of the file are derived ones and are not read.

    path: another file with the columns num_prefill_tokens and num_decode_tokens (see `find_file`). zero_len: rows of length
    0, "error" or "drop". max_prompt_len: leave out longer prompts, counted. limit: only the first rows. Raises
    FileNotFoundError, or ValueError naming the row and the value.
    """
    origin = ORIGINS["vidur_lengths"]
    file = open_origin(origin, path)
    table = read_columns(file, [PROMPT, OUTPUT], limit)
    lens = {name: lengths(table[name]) for name in (PROMPT, OUTPUT)}
    keep, dropped = kept(lens, zero_len, PROMPT, max_prompt_len)
    rows = np.flatnonzero(keep)
    return Dataset(
        name="vidur_lengths",
        prompt_len=lens[PROMPT][rows],
        output_len=lens[OUTPUT][rows],
        unit="llama-2 tokens",
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        notes={"file": file.name},
        **stated(origin, file),
    )
