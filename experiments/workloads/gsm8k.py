"""GSM8K: grade-school problems and how long four GPT-3 models' solutions of each were; short, alike, hard to tell apart."""

from __future__ import annotations

from typing import Any

from ..dataset import Dataset
from .answers import checked, dataset, records
from .origin import File, Origin, github, open_origin

MODELS = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
PROJECT = "openai/grade-school-math"
COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
SOLUTIONS = "grade_school_math/data/example_model_solutions.jsonl"
OWN_SHA = "4bc62db838f8418365d51c627bd66294cbdca9fb7f01519cb13f0dce8c51580b"
LENGTHS_SHA = "9bc09dc28a5432e1e3e999fd209ba94f30eda3160e9d65ef29b3a11e4b333def"

ORIGINS = {
    "gsm8k": Origin(
        "GSM8K problems with the solutions of four models",
        PROJECT,
        f"https://github.com/{PROJECT}",
        "MIT",
        (
            github(PROJECT, COMMIT, SOLUTIONS, OWN_SHA, 2_563_513),
            File("gsm8k_4models_lengths.jsonl", LENGTHS_SHA, 462_977),
        ),
    )
}


def load(
    model: str = "175b_verification", path: str | None = None, *, max_prompt_len: int | None = None, max_new_tokens: int = 2048
) -> Dataset:
    """One model's solutions as a Dataset with prompts; lengths in cl100k tokens of the texts, which the models did not use.

    model: one of MODELS. path: another file, with per line `question` and, by model, the solution's text or its length. Raises
    FileNotFoundError, or ValueError on another model or a row of another form.
    """
    if model not in MODELS:
        raise ValueError(f"model {model!r} is not one of {', '.join(MODELS)}")
    file = open_origin(ORIGINS["gsm8k"], path)
    rows = []
    for number, record in enumerate(records(file)):
        question: Any = record.get("question")
        if not isinstance(question, str):
            raise ValueError(f"{file.name}: row {number} has no text 'question'")
        answer = record.get(model)
        rows.append((question, checked(answer.get("solution") if isinstance(answer, dict) else answer, file, number)))
    return dataset("gsm8k", ORIGINS["gsm8k"], file, rows, max_prompt_len, max_new_tokens, model)
