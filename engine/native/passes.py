"""Rewrites of a traced decoder that its compiler does not find: linear layers of one input become one call, and what every
layer reads is computed once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch.fx import GraphModule, Node

LINEAR_ARGS = 4  # of lengthwise::linear that are lists in lengthwise::linears: weight, scale, bias, num_out


def merge_linears(module: GraphModule) -> int:
    """Packed linear layers that read the same tensor (query, key and value; gate and up) run in one parallel region; how many
    calls that saved. Mutates `module`."""
    graph, ops = module.graph, torch.ops.lengthwise
    same: dict[tuple[Node, bool], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is ops.linear.default:
            same.setdefault((node.args[0], node.args[5]), []).append(node)
    saved = 0
    for (source, wide), nodes in same.items():
        if len(nodes) == 1 or not all(is_input(arg) for node in nodes for arg in node.args[1:LINEAR_ARGS]):
            continue  # weights that are computed need not exist yet where the first layer stands
        with graph.inserting_before(nodes[0]):
            lists = [[node.args[i] for node in nodes] for i in range(1, LINEAR_ARGS + 1)]
            call = graph.call_function(ops.linears.default, (source, *lists, wide))
            call.meta["val"] = [node.meta["val"] for node in nodes]
            for i, node in enumerate(nodes):
                part = graph.call_function(operator.getitem, (call, i))
                part.meta = dict(node.meta)
                node.replace_all_uses_with(part)
        for node in nodes:
            graph.erase_node(node)
        saved += len(nodes) - 1
    graph.lint()
    module.recompile()
    return saved


def is_input(arg: object) -> bool:
    return isinstance(arg, Node) and arg.op in ("placeholder", "get_attr")


def hold_shared(module: GraphModule) -> int:
    """Sines and cosines that several places read are kept; a compiler would work them out again for every head of every layer.
    How many were. Mutates `module`."""
    graph, aten, held = module.graph, torch.ops.aten, 0
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (aten.cos.default, aten.sin.default):
            continue
        last = node
        while len(users := readers(last)) == 1 and users[0].op == "call_function":
            last = users[0]  # the scaling and the rounding that follow
        if not users or last.target is operator.getitem or not isinstance(last.meta.get("val"), torch.Tensor):
            continue
        with graph.inserting_after(last):
            copy = graph.call_function(torch.ops.lengthwise.hold.default, (last,))
        copy.meta = dict(last.meta)
        for user in users:
            user.replace_input_with(last, copy)
        held += 1
    graph.lint()
    module.recompile()
    return held


def readers(node: Node) -> list[Node]:
    """Users that compute with `node`; those that only assert something of it are left out."""
    users: Iterable[Node] = node.users
    return [user for user in users if user.target is not torch.ops.aten._assert_tensor_metadata.default]
