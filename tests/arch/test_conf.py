"""Config nodes: every `_target_` is there and takes the arguments its node gives; a node is named after what it stands for."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from lengthwise.experiments.cellhash import digest
from lengthwise.experiments.nodes import _load_dataset
from lengthwise.experiments.size import sized
from lengthwise.experiments.sweep import sweep_cells
from lengthwise.predictors.prompt_length import PromptLength
from lengthwise.predictors.prompts import Prompts

CONF = Path(__file__).parents[2] / "conf"
NODES = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
EXTRAS = {"optuna": "tune"}
CHOSEN = {  # keys that a study leaves open in the nodes that it chooses
    "study/served.yaml": {"workload.path", "hardware.path", "artefact"},
    "study/closed_loop.yaml": {"hardware.path"},
}
SPECIAL = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_", "defaults"}


def targets(node, path=""):
    """(path, mapping) of every mapping with a `_target_`, nested ones too."""
    if isinstance(node, Mapping):
        if node.get("_target_"):  # null: nothing stands behind predictor=none
            yield path, node
        for key, value in node.items():
            yield from targets(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for k, value in enumerate(node):
            yield from targets(value, f"{path}[{k}]")


def read(name):
    return OmegaConf.to_container(OmegaConf.load(CONF / name), resolve=False)


def bind(node):
    """Raise TypeError unless the target takes these arguments. Skips where the target's package is an extra's and not there."""
    package = node["_target_"].split(".")[0]
    if package in EXTRAS and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (extra `{EXTRAS[package]}`)")
    target = get_object(node["_target_"])
    assert callable(target), f"{node['_target_']} cannot be called"
    arguments = {key: value for key, value in node.items() if key not in SPECIAL}
    positional = node.get("_args_", ())
    signature = inspect.signature(target)
    (signature.bind_partial if node.get("_partial_") else signature.bind)(*positional, **arguments)


@pytest.mark.parametrize("name", NODES)
def test_node_binds(name):
    for path, node in targets(read(name)):
        try:
            bind(node)
        except TypeError as error:
            pytest.fail(f"conf/{name} {path}: {node['_target_']}: {error}")


@pytest.mark.parametrize(
    "name", [name for name in NODES if name.split("/")[0] in ("policy", "figure", "arrivals", "predictor")]
)
def test_nodes_bear_the_name_of_their_module(name):
    """Where a group has a node per module: `srpt.yaml`, or `aging_srpt.yaml` for one way of using aging.py. `lengthwise.yaml`
    is a policy in its guard."""
    group, file = name.split("/")
    node = read(name) or {}
    if file == "lengthwise.yaml":
        node = node["policy"]
    target = node.get("_target_")
    if target is None:  # predictor=none
        return
    module, stem = target.split(".")[-2], file.removesuffix(".yaml")
    there = (CONF / group / f"{module}.yaml").exists()
    assert there or stem.startswith(f"{module}_"), f"conf/{name} stands for {target}; there is no conf/{group}/{module}.yaml"


def composed(*overrides, config="run", mode=RunMode.RUN):
    with initialize_config_module("lengthwise.conf", version_base="1.3"):
        return GlobalHydra.instance().hydra.compose_config(config, list(overrides), run_mode=mode)


def overridden(node):
    """Groups that a node's own defaults override."""
    entries = (str(key) for entry in node.get("defaults", []) if isinstance(entry, DictConfig) for key in entry)
    return {entry.removeprefix("override /").split("@")[0] for entry in entries if entry.startswith("override /")}


GROUPS = sorted({name.split("/")[0] for name in NODES if "/" in name} - {"hydra", "study"})


@pytest.mark.parametrize("group", GROUPS)
def test_every_node_of_a_group_composes(group):
    """Alone in its place in each application that has the group, and those that the node overrides: chosen, and without a
    broken interpolation."""
    apps = [name.removesuffix(".yaml") for name in NODES if "/" not in name]
    having = {app: OmegaConf.to_container(composed(config=app).hydra.runtime.choices) for app in apps}
    apps = [app for app, choices in having.items() if group in choices]
    assert apps, f"no application has the group {group}"
    for name in NODES:
        if name.startswith(f"{group}/"):
            node = name.removeprefix(f"{group}/").removesuffix(".yaml")
            wanted = overridden(OmegaConf.load(CONF / name))
            for app in (app for app in apps if wanted <= having[app].keys()):
                config = composed(f"{group}={node}", config=app)
                assert config.hydra.runtime.choices[group] == node
                own = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
                OmegaConf.to_container(own, resolve=True)


@pytest.mark.parametrize("name", [name for name in NODES if name.startswith("study/")])
def test_every_study_composes_and_its_cells_are_valid(name, tmp_path, monkeypatch):
    """Every cell of it, at both sizes: the same schedules and settings or, where `study.small` says so, some of them; fewer
    requests and seeds."""
    monkeypatch.setenv("LENGTHWISE_DATA", str(tmp_path))
    stem = name.removeprefix("study/").removesuffix(".yaml")
    found = {}
    for size in ("standard", "small"):
        arguments = [f"study={stem}", f"study.size={size}", *given(name, tmp_path)]
        with initialize_config_module("lengthwise.conf", version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            config = hydra.compose_config("run", arguments, run_mode=RunMode.MULTIRUN)
            assert config.hydra.mode is RunMode.MULTIRUN and config.name == stem
            params = sized(config, config.hydra.sweeper.params or {}, arguments)
            overrides = [*(f"{key}={value}" for key, value in params.items()), *arguments]
            found[size] = [cfg for _, cfg in sweep_cells(config, overrides, hydra.config_loader)]
            assert config.name == (stem if size == "standard" else f"{stem}-small")
    shapes = {size: {digest([cfg["choices"], cfg["load"], cfg["rate"]]) for cfg in cells} for size, cells in found.items()}
    assert shapes["small"] < shapes["standard"] if config.study.small else shapes["small"] == shapes["standard"]
    assert len({cfg["seed"] for cfg in found["small"]}) <= 2
    assert max(cfg["num_requests"] for cfg in found["small"]) <= max(cfg["num_requests"] for cfg in found["standard"])
    assert sum(cfg["num_requests"] for cfg in found["small"]) <= 150_000  # three minutes


# a trace that is had apart
AZURE = "".join(f"2023-11-16 18:15:{second}.0000000,10,10\n" for second in (10, 11, 13))


@pytest.fixture(autouse=True)
def nothing_kept():
    """What these tests put in place of a trace is not kept for others."""
    yield
    _load_dataset.cache_clear()


def given(name, folder):
    """What a study wants from its user: those keys that it leaves open."""
    if "glob(" in (CONF / name).read_text():  # every policy takes minutes to compose: one that reads predictions, one not
        (folder / "azure_llm_2023_conv.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + AZURE)
        return ["policy=fcfs,mc_sf"]
    if not (wanted := OmegaConf.missing_keys(OmegaConf.load(CONF / name)) | CHOSEN.get(name, set())):
        return []
    profile = {**OmegaConf.to_container(OmegaConf.load(CONF / "hardware/unit.yaml")), "provenance": {"profile": {"model": "m"}}}
    (folder / "profile.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(profile)))
    predictor, (asked, lens) = PromptLength(num_rounds=2), np.random.default_rng(0).integers(1, 99, (2, 40))
    predictor.fit(Prompts(asked), lens, np.zeros(40, dtype=bool))
    predictor.unit = "tokens"
    predictor.save(folder)
    values = {"hardware.path": folder / "profile.yaml", "saturation": 2}
    return [f"{key}={values.get(key, folder)}" for key in sorted(wanted)]


def test_there_are_nodes():
    groups = {name.split("/")[0] for name in NODES if "/" in name}
    assert {"figure", "policy", "predictor", "workload", "arrivals", "hardware", "study"} <= groups


def test_a_planted_misspelling_is_caught():
    node = read("figure/ecdf.yaml")
    bind(node)
    with pytest.raises(TypeError):
        bind({**node, "latencyy": "e2e"})
