"""Arena-Hard: hard prompts of real users and how long four models' answers to each were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..dataset import Dataset
from .answers import checked, dataset, records
from .origin import File, Origin, github, open_origin

PROJECT = "lmarena/arena-hard-auto"
COMMIT = "196f6b826783b3da7310e361a805fa36f0be83f3"
LENGTHS = File(
    "arena_hard_prompts_lengths.jsonl", "eee617962b3d21d40da6a721a6f6cec7febf27917a6548aae10fb234259dcbfb", 1_297_064
)
ANSWERS = {  # model -> (version of the prompts, sha256, size) of its file of answers
    "gpt-3.5-turbo-0125": ("v0.1", "5cfec14570206ec251c3506d36951db87ca869757be75d6075a20120c3cbb616", 1_070_610),
    "gpt-4-0314": ("v0.1", "0f6abc84de4600fde987d9db70f838f4ecdbd27a2f1f4058c12aa322a6f791b2", 1_270_631),
    "gpt-4-0613": ("v0.1", "055c37c6b230c87413f080c916deba18c6cace3d44b3d456009f1a3d3834a04b", 1_116_462),
    "o3-mini-2025-01-31": ("v2.0", "c23a7c255eead99f7f86ad48aa1d8ccdb5b3334f2097e0e1e09184df87265e03", 4_184_593),
}


def _origin(model: str) -> Origin:
    version, sha, size = ANSWERS[model]
    answers = github(PROJECT, COMMIT, f"data/arena-hard-{version}/model_answer/{model}.jsonl", sha, size)
    what = f"Arena-Hard {version} prompts with the answers of {model}"
    return Origin(what, PROJECT, f"https://github.com/{PROJECT}", "Apache-2.0", (answers, LENGTHS))


ORIGINS = {model: _origin(model) for model in ANSWERS}


def load(
    model: str = "gpt-4-0314", path: str | None = None, *, max_prompt_len: int | None = None, max_new_tokens: int = 2048
) -> Dataset:
    """One model's answers as a Dataset with prompts; lengths in cl100k tokens of the texts, whatever the model counted.

    o3-mini's are those of the visible answer: what it thought before is not in the file. model: one of ANSWERS. path:
    another file, of answers (`messages` of a user and an assistant, `model`), or of lengths (`prompt`, and by model
    `output_tokens_cl100k`). Raises FileNotFoundError, or ValueError on another model or a row of another form.
    """
    if model not in ANSWERS:
        raise ValueError(f"model {model!r} is not one of {', '.join(ANSWERS)}")
    file = open_origin(ORIGINS[model], path)
    rows = [row for number, record in enumerate(records(file)) if (row := _row(record, model, file, number)) is not None]
    if not rows:
        raise ValueError(f"{file.name} has no answers of {model}")
    return dataset("arena_hard", ORIGINS[model], file, rows, max_prompt_len, max_new_tokens, model)


def _row(record: dict[str, Any], model: str, file: Path, number: int) -> tuple[str, str | int] | None:
    """(prompt, answer or its length) of a line of either form; None when it is about other models."""
    if "messages" in record:
        if record.get("model") != model:
            return None
        said = {m.get("role"): m.get("content") for m in record["messages"]}
        prompt, answer = said.get("user"), said.get("assistant")
        answer = answer.get("answer") if isinstance(answer, dict) else answer
    else:
        by_model = record.get("output_tokens_cl100k") or {}
        if model not in by_model:
            return None
        prompt, answer = record.get("prompt"), by_model[model]
    if not isinstance(prompt, str):
        raise ValueError(f"{file.name}: row {number} has no text of a prompt")
    return prompt, checked(answer, file, number)
