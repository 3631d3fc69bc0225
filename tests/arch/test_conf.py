"""Config nodes: every `_target_` is there and takes the arguments its node gives; a node is named after what it stands for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

CONF = Path(__file__).parents[2] / "conf"
NODES = sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*.yaml"))
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
    """Raise TypeError unless the target takes these arguments."""
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
    """Where a group has a node per module: `srpt.yaml`, or `aging_srpt.yaml` for one way of using aging.py."""
    group, file = name.split("/")
    target = (read(name) or {}).get("_target_")
    if target is None:  # predictor=none
        return
    module, stem = target.split(".")[-2], file.removesuffix(".yaml")
    there = (CONF / group / f"{module}.yaml").exists()
    assert there or stem.startswith(f"{module}_"), f"conf/{name} stands for {target}; there is no conf/{group}/{module}.yaml"


def test_there_are_nodes():
    groups = {name.split("/")[0] for name in NODES if "/" in name}
    assert {"figure", "policy", "predictor", "workload", "arrivals", "hardware", "study"} <= groups


def test_a_planted_misspelling_is_caught():
    node = read("figure/ecdf.yaml")
    bind(node)
    with pytest.raises(TypeError):
        bind({**node, "latencyy": "e2e"})
