"""CASTILLO: ten answers of one model to each prompt, so that a length is a distribution, not a number (arXiv 2505.16881).

Thirteen open models, seven prompt sets; lengths in each model's own tokens, so that one model is taken at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from ..dataset import Dataset
from .columns import at_cap, kept
from .files import find_file
from .origin import File, Origin, found, open_origin, stated
from .reading import read_columns

NUM_SAMPLES = 10
OUTPUTS = [f"out_{i}" for i in range(NUM_SAMPLES)]
SETS = ("Alpaca", "Apps", "BigCodeBench", "DS1000", "DollyDataset", "Mbpp", "ShareGPT")
PROJECT = "DanielFPerez/castillo_code"
PAGE = f"https://github.com/{PROJECT}/tree/main/data/preprocessed"
LENGTHS_SHA = "df08b976d4226f89d05ba76925fcb79822076018892304b2337a9ca45988177d"
PERMISSIVE_SHA = "d0451aa66e3a8a1e99dcd5192566c39d0c1812b43d9cfe2c1bb7528f7cefaed2"
SHAREALIKE_SHA = "3058c9f18b473c1f4751e8138ccfd160d307c832625e66257e48280e52806db6"
HOW = "made of the project's data/preprocessed/*/*.json: "

ORIGINS = {
    "lengths": Origin(
        "CASTILLO, ten output lengths per prompt and model",
        PROJECT,
        PAGE,
        "CC-BY-4.0",
        (File("castillo_lengths.parquet", LENGTHS_SHA, 1_371_252),),
        how=HOW + "prompt_id, dataset, model, split, input_tokens, out_0 .. out_9, prompt_sha1",
    ),
    "prompts": Origin(
        "CASTILLO prompts of MBPP, APPS, BigCodeBench",
        PROJECT,
        PAGE,
        "MBPP CC-BY-4.0, APPS MIT, BigCodeBench Apache-2.0",
        (File("castillo_prompts_code_permissive.parquet", PERMISSIVE_SHA, 1_180_912),),
        how=HOW + "dataset, prompt_id, prompt_text",
    ),
    "prompts_sharealike": Origin(
        "CASTILLO prompts of Dolly-15k, DS-1000",
        PROJECT,
        PAGE,
        "Dolly-15k CC-BY-SA-3.0, DS-1000 CC-BY-SA-4.0",
        (File("castillo_prompts_sharealike.parquet", SHAREALIKE_SHA, 359_774),),
        how=HOW + "dataset, prompt_id, prompt_text",
    ),
}


def load(
    model: str = "Qwen--Qwen2.5-7B-Instruct-1M",
    path: str | None = None,
    *,
    dataset: str | Sequence[str] | None = None,
    sample: int = 0,
    prompts: Sequence[str] | None = None,
    max_output: int | None = 15_001,
    max_prompt_len: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """One model's prompts as a Dataset: output_len is answer number `sample`, samples (N, 10) are all of them.

    dataset: one or several of SETS, None for all. A prompt that lies in two splits was asked twice; its first ten answers are
    kept, the rest counted. max_output: answers of this length are cut off, censored. prompts: files of prompt texts (dataset,
    prompt_id, prompt_text); None takes those of ORIGINS that are there. Rows carry `prompts` when every one has its text.

    Raises FileNotFoundError, or ValueError naming what there is when model, dataset or sample is none of it.
    """
    if not 0 <= sample < NUM_SAMPLES:
        raise ValueError(f"sample {sample} is not within 0 and {NUM_SAMPLES - 1}")
    origin = ORIGINS["lengths"]
    file = open_origin(origin, path)
    table = read_columns(file, ["prompt_id", "dataset", "model", "input_tokens", *OUTPUTS], None)
    table = _chosen(table, "model", [model])
    if dataset is not None:
        table = _chosen(table, "dataset", [dataset] if isinstance(dataset, str) else list(dataset))
    again = table.duplicated(["dataset", "prompt_id"]).to_numpy()
    table = table[~again].reset_index(drop=True)
    prompt_len = table["input_tokens"].to_numpy(dtype=np.int64)
    samples = table[OUTPUTS].to_numpy(dtype=np.int64)
    keep, dropped = kept({"input_tokens": prompt_len}, "error", "input_tokens", max_prompt_len)
    table, prompt_len, samples = table[keep].reset_index(drop=True), prompt_len[keep], samples[keep]
    texts, files = _texts(table, _prompt_files(prompts))
    censored = at_cap(samples[:, sample], max_output)
    num_cut = None if max_output is None else int((samples >= max_output).sum())
    return Dataset(
        name="castillo",
        prompt_len=prompt_len,
        output_len=samples[:, sample].copy(),
        unit=f"{model} tokens",
        censored=censored,
        group=np.arange(len(table), dtype=np.int64),
        prompts=texts,
        max_new_tokens=max_new_tokens,
        dropped={**dropped, "rows_prompt_asked_again": int(again.sum())},
        notes={
            "file": file.name,
            "model": model,
            "sets": {name: int(n) for name, n in table["dataset"].astype(str).value_counts().sort_index().items()},
            "sample": sample,
            "max_output": max_output,
            "num_samples_censored": num_cut,
            "prompt_files": [f.name for f in files],
        },
        samples=samples,
        **stated(origin, file),
    )


def _chosen(table: pd.DataFrame, column: str, names: list[str]) -> pd.DataFrame:
    have = sorted(table[column].astype(str).unique())
    unknown = [name for name in names if name not in have]
    if unknown:
        raise ValueError(f"{column} {unknown[0]!r} is not one of {', '.join(have)}")
    return table[table[column].isin(names)]


def _prompt_files(asked: Sequence[str] | None) -> list[Path]:
    if asked is not None:
        return [find_file(name) for name in asked]
    there = (found(ORIGINS[name]) for name in ("prompts", "prompts_sharealike"))
    return [pair[1] for pair in there if pair is not None]


def _texts(table: pd.DataFrame, files: list[Path]) -> tuple[list[str] | None, list[Path]]:
    """(the prompt of each row, or None when one has no text; the files that gave any)."""
    texts: dict[tuple[str, str], str] = {}
    used = []
    wanted = list(zip(table["dataset"].astype(str), table["prompt_id"].astype(str), strict=True))
    for file in files:
        rows = read_columns(file, ["dataset", "prompt_id", "prompt_text"], None)
        new = dict(
            zip(zip(rows["dataset"].astype(str), rows["prompt_id"].astype(str), strict=True), rows["prompt_text"], strict=True)
        )
        if any(key in new for key in wanted):
            used.append(file)
        texts.update(new)
    prompts = [texts.get(key) for key in wanted]
    whole = [prompt for prompt in prompts if prompt is not None]
    return (whole, used) if len(whole) == len(prompts) else (None, [])
