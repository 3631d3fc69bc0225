"""Written prompts: many, distinct, of every kind; known by template and topic; answers joined by text."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np
import pytest

import lengthwise
from lengthwise.experiments import cellhash, collected
from lengthwise.experiments.contract import check_workload
from lengthwise.experiments.dataset import UNANSWERED
from lengthwise.experiments.train import train
from lengthwise.experiments.workloads import prompts
from lengthwise.experiments.workloads.prompts import texts
from lengthwise.experiments.workloads.prompts.texts import NUM_TOPICS, filled, templates, topics, written
from lengthwise.predictors.constant import Constant
from lengthwise.predictors.splits import joint_groups, named_split

ALL = written()
KINDS = {
    "chat", "question", "list", "code", "summary", "translation", "classification", "story", "arithmetic", "reasoning",
    "languages", "writing",
}  # fmt: skip
LANGUAGES = {"es", "fr", "de", "pt", "it", "zh", "ja"}


def answered(dataset, file, **changes):
    """A file of two answers to each prompt of `dataset`: 1 + its number tokens, and one more, cut off."""
    n = len(dataset)
    lengths = np.stack([np.arange(1, n + 1), np.arange(2, n + 2)], axis=1)
    meta = {"model": "m", "unit": "m tokens", "max_new_tokens": 4000, "workload": {"name": "prompts"}}
    fields = {
        "meta": meta, "prompt_id": np.arange(n), "sha": [collected.prompt_sha(text) for text in dataset.prompts],
        "prompt_len": np.full(n, 9), "lengths": lengths, "stopped": np.tile([True, False], (n, 1)),
    }  # fmt: skip
    collected.write(collected.Collected(**fields | changes), file)
    return str(file)


# --- the texts ------------------------------------------------------------------------------------------------------


def test_many_and_distinct():
    assert len(ALL) == NUM_TOPICS * len(templates()) >= 3000
    assert len({prompt.text for prompt in ALL}) == len(ALL) == len({(prompt.template, prompt.topic) for prompt in ALL})
    assert all(1 <= len(prompt.text) <= 1500 for prompt in ALL)


def test_every_kind_field_and_language():
    per_kind = Counter(name.split("/")[0] for name in templates())
    assert set(per_kind) == {prompt.kind for prompt in ALL} == KINDS and min(per_kind.values()) >= 8
    assert all(prompt.kind == prompt.template.split("/")[0] for prompt in ALL)
    assert {name.split("/")[1][:2] for name in templates() if name.startswith("languages/")} == LANGUAGES
    assert len(topics()) >= 120 and len({name.split("/")[0] for name in topics()}) >= 12
    forms = {frozenset(forms) for forms in topics().values()}
    assert len(forms) == 1 and next(iter(forms)) > LANGUAGES


def test_every_topic_meets_several_templates_and_kinds():
    met, kinds = defaultdict(set), defaultdict(set)
    for prompt in ALL:
        met[prompt.topic].add(prompt.template)
        kinds[prompt.topic].add(prompt.kind)
    assert set(met) == set(topics())
    assert min(map(len, met.values())) >= 10 and min(map(len, kinds.values())) >= 6


def test_every_form_is_used_and_none_is_left_open():
    asked = {name.lower() for text in templates().values() for name in re.findall(r"\{(\w+)\}", text)}
    assert asked == set(next(iter(topics().values())))
    assert not [prompt for prompt in ALL if re.search(r"\{\w|\.\.\d", prompt.text)]
    assert not [prompt for prompt in ALL if prompt.text != prompt.text.strip() or "  ?" in prompt.text]


def test_numbers_are_of_their_range_and_differ_by_topic(monkeypatch):
    monkeypatch.setattr(texts, "templates", lambda: {"x/y": "{7..9}, {7..9} {items}"})
    found = [filled("x/y", topic) for topic in topics()]
    assert {number for text in found for number in re.findall(r"\b\d+\b", text)} == {"7", "8", "9"}
    assert len({text[:4] for text in found}) == 9  # the two are drawn apart


def test_a_template_added_later_changes_nothing(monkeypatch):
    more = {"chat/aaa": "Talk about {name}.", **templates(), "zzz/zzz": "{Name}, {2..9} times."}
    monkeypatch.setattr(texts, "templates", lambda: more)
    then = written()
    assert len(then) == len(ALL) + 2 * NUM_TOPICS
    assert [prompt for prompt in then if prompt.template not in ("chat/aaa", "zzz/zzz")] == ALL


def test_a_seed_chooses_other_topics_and_never_another_text():
    other = written(1)
    assert written(0) == ALL and {p.template for p in other} == {p.template for p in ALL}
    both = {(p.template, p.topic): p.text for p in ALL}
    shared = [p for p in other if (p.template, p.topic) in both]
    assert 0 < len(shared) < len(ALL) // 2
    assert all(both[p.template, p.topic] == p.text for p in shared)


def test_the_first_few_are_of_every_kind():
    assert {prompt.kind for prompt in ALL[:200]} == KINDS


# --- the workload ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "most"), [("template", 200), ("topic", 200), ("prompt", 5000)])
def test_near_duplicates_tie_no_two_groups(group, most):
    """A split by template leaves templates out, and by topic topics: no chain of equal beginnings makes one group of all."""
    data = prompts.load(None, group=group)
    key = data.prompts if group == "prompt" else data.columns[group]
    assert len(np.unique(joint_groups(data.group, data.prompts, len(data)))) == len(set(key)) <= most
    learn, test = named_split("0", joint_groups(data.group, data.prompts, len(data)))
    assert not {key[i] for i in learn} & {key[i] for i in test} and len(test) >= 0.19 * len(data)


def test_prompts_alone_are_no_labels():
    data = check_workload(lambda: prompts.load(None))
    assert data.unit == UNANSWERED and set(data.output_len) == {1} and len(data) == len(ALL)
    assert data.prompt_len.tolist() == [len(prompt.text) for prompt in ALL]
    with pytest.raises(ValueError, match="no answers: `lengthwise collect model=smollm2 workload=prompts"):
        train(data, Constant)
    with pytest.raises(ValueError, match="no answers: `lengthwise collect model=smollm2 workload=prompts"):
        lengthwise.simulate(workload=data, num_requests=10)


def test_answers_are_joined_by_text(tmp_path):
    alone = prompts.load(None)
    file = answered(alone, tmp_path / "a.parquet")
    data = check_workload(lambda: prompts.load(file, group="topic"))
    assert data.unit == "m tokens" and data.prompts == alone.prompts and not data.dropped
    assert data.output_len.tolist() == list(range(1, len(ALL) + 1)) and not data.censored.any()
    assert data.columns["template"].tolist() == [prompt.template for prompt in ALL]
    second = prompts.load(file, sample=1)
    assert second.output_len.tolist() == data.samples[:, 1].tolist() and second.censored.all()
    with pytest.raises(ValueError, match="sample 2"):
        prompts.load(file, sample=2)


def test_prompts_without_answers_are_left_out(tmp_path):
    alone = prompts.load(None)
    shas = [collected.prompt_sha(text) if i % 3 else f"{i:016x}" for i, text in enumerate(alone.prompts)]
    data = prompts.load(answered(alone, tmp_path / "a.parquet", sha=shas))
    assert data.prompts == [text for i, text in enumerate(alone.prompts) if i % 3]
    assert data.output_len.tolist() == [i + 1 for i in range(len(alone)) if i % 3]
    assert sum(data.dropped.values()) == len(alone) - len(data)


def test_refuses_another_group_and_a_file_that_is_not_there():
    with pytest.raises(ValueError, match=r"'kind' is not one of template, topic, prompt"):
        prompts.load(None, group="kind")
    with pytest.raises(FileNotFoundError):
        prompts.load("nowhere/answers.parquet")


def test_embedded_texts_are_part_of_what_a_cell_is(tmp_path, monkeypatch):
    monkeypatch.setattr(cellhash, "PACKAGE", tmp_path)
    (tmp_path / "x").mkdir()

    def code(name, text):
        (tmp_path / "x" / name).write_text(text)
        return cellhash.code.__wrapped__(("x", "absent"))

    before = code("a.py", "1")
    assert before != code("b.yaml", "1") != code("b.yaml", "2") == code("notes.txt", "3")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_held_out_prompts_share_no_template_and_no_topic_with_those_to_learn_from(monkeypatch):
    parts = {part: prompts.load(None, part=part) for part in prompts.PARTS}
    learn, apart = parts["learn"], parts["held_out"]
    for name in ("template", "topic"):
        assert not set(learn.columns[name]) & set(apart.columns[name])
    assert set(learn.columns["kind"]) == set(apart.columns["kind"]) == KINDS
    assert len(learn) > 900 and len(apart) > 600  # enough to learn from, and for a study of 500 requests
    whole = prompts.load(None)
    assert set(learn.prompts) | set(apart.prompts) < set(whole.prompts) and apart.notes["part"] == "held_out"
    before = texts.held_out(templates())
    later = texts.held_out([*templates(), "chat/another"])
    assert len(before ^ (later - {"chat/another"})) <= 1 and 0.4 < len(before) / len(templates()) < 0.5
    with pytest.raises(ValueError, match="part 'some' is not one of learn, held_out"):
        prompts.load(None, part="some")
