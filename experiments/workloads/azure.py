"""Azure: arrival times and lengths of Microsoft's LLM inference services, of one hour in 2023 and one week in 2024.

The two services differ as much as traces can: code completion comes in bursts with long silences, chat almost evenly. No
text, no sessions, and the tokenizers are not named.
"""

from __future__ import annotations

import numpy as np

from ..dataset import Dataset
from .columns import at_cap, cap_notes, in_time_order, kept, lengths, times
from .origin import File, Origin, github, open_origin, origin_of, stated
from .reading import read_columns

TIME, PROMPT, OUTPUT = "TIMESTAMP", "ContextTokens", "GeneratedTokens"
PROJECT = "Azure/AzurePublicDataset"
COMMIT = "b469a113cedca53ddc3bdea71a143dc4b7d8700c"
PAGE = f"https://github.com/{PROJECT}/blob/master/AzureLLMInferenceDataset{{}}.md"
BLOBS = "https://azurepublicdatasettraces.blob.core.windows.net/azurellminfererencetrace/"  # spelt like this
CODE_SHA = "54e9a6d2a4bd06ba1e060304b900abbc74cbea53de96506e60fe5bb4f2277fb6"
CONV_SHA = "2f1e5b666d4e3055fdbba98598ce2ec307767b9064e03e2fa46676dbcc7d0bf8"


def _week(service: str) -> Origin:
    name = f"AzureLLMInferenceTrace_{service}_1week.csv"
    what = f"the Azure 2024 {service} trace, one week"
    return Origin(what, PROJECT, PAGE.format(2024), "CC-BY-4.0 (cite DynamoLLM)", (File(name, url=BLOBS + name),))


def _hour(service: str, sha: str, size: int) -> Origin:
    own = github(PROJECT, COMMIT, f"data/AzureLLMInferenceTrace_{service}.csv", sha, size)
    files = (own, File(f"azure_llm_2023_{service}.csv", sha, size))
    what = f"the Azure 2023 {service} trace, one hour"
    return Origin(what, PROJECT, PAGE.format(2023), "CC-BY-4.0 (cite Splitwise, ISCA 2024)", files)


ORIGINS = {
    "azure_code": _hour("code", CODE_SHA, 320_117),
    "azure_conv": _hour("conv", CONV_SHA, 719_188),
    "azure2024_code": _week("code"),
    "azure2024_conv": _week("conv"),
}


def load(
    trace: str,
    path: str | None = None,
    *,
    max_output: int | None = None,
    zero_len: str = "error",
    max_prompt_len: int | None = None,
    limit: int | None = None,
    max_new_tokens: int = 2048,
) -> Dataset:
    """A trace of ORIGINS as a Dataset with arrivals, in order of time, ties in file order. Nothing is downloaded.

    path: another file with the columns TIMESTAMP, ContextTokens, GeneratedTokens (see `find_file`). Times have seven digits
    after the second or none, with or without a zone (UTC is meant without). max_output: the service's limit, rows at it are
    censored: their answer was cut, how long it would have been is not known. zero_len: rows of length 0, "error" or "drop".
    max_prompt_len: leave out longer prompts, counted. limit: only the first rows of the file. Raises FileNotFoundError, or
    ValueError naming the row and the value.
    """
    origin = origin_of(ORIGINS, trace)
    file = open_origin(origin, path)
    table = read_columns(file, [TIME, PROMPT, OUTPUT], limit)
    lens = {name: lengths(table[name]) for name in (PROMPT, OUTPUT)}
    keep, dropped = kept(lens, zero_len, PROMPT, max_prompt_len)
    rows, arrival, notes = in_time_order(*times(table[TIME], "datetime"), np.flatnonzero(keep), "datetime")
    output_len = lens[OUTPUT][rows]
    censored = at_cap(output_len, max_output)
    return Dataset(
        name=trace,
        prompt_len=lens[PROMPT][rows],
        output_len=output_len,
        unit="tokens of the served model (not named)",
        censored=censored,
        arrival=arrival,
        max_new_tokens=max_new_tokens,
        dropped=dropped,
        notes={
            "file": file.name,
            **notes,
            **cap_notes(max_output, censored),
        },
        **stated(origin, file),
    )
