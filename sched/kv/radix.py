"""Radix index: which prefixes are resident, who uses them, and which of them go first when room is needed.

Keys name pieces of prompts, chained: a key at a place stands for all tokens up to its end. Nodes hold runs of keys and are
split where prompts part. A node in use keeps all above it in use, so that what nobody uses can always go, leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import cast

Run = list[int] | range  # of a node; the index owns the lists


class Node:
    """A run of keys below `parent`. refs: requests whose path goes through it. leases: pins that do. used: when it was last
    locked or unlocked, by the index's own count. parent None: the root, or no longer in the index. blocks: those behind its
    keys, where ids are kept."""

    __slots__ = ("blocks", "children", "keys", "leases", "parent", "refs", "serial", "used")

    def __init__(self, keys: Run, parent: Node | None, serial: int) -> None:
        self.keys = keys
        self.blocks: list[int] = []
        self.parent = parent
        self.serial = serial  # order of making, the last tie-breaker
        self.children: dict[int, Node] = {}
        self.refs = 0
        self.leases = 0
        self.used = 0


class RadixIndex:
    """A tree of keys. `evictable`, `held`, `pinned` count its keys: pinned by any lease, else held by any reference, else
    evictable. `num_nodes`: without the root. `changes`: moves whenever the shape of the tree does. `span`: blocks behind a
    key."""

    def __init__(self) -> None:
        self.span = 0
        self.root = Node([], None, 0)
        self.evictable = self.held = self.pinned = 0
        self.num_nodes = 0
        self.changes = 0
        self._clock = 0  # counts uses: no wall clock
        self._serial = 0
        self._heap: list[tuple[int, int, Node]] = []  # (used, serial, node) of leaves nobody uses, stale ones among them

    # --- finding ------------------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[int], below: Node | None = None) -> tuple[int, list[tuple[Node, int]]]:
        """(number of leading `keys` that are there, the nodes they lie in with how many in each), from the root or `below`.

        Costs O(keys) at C speed, one comparison of slices a node; of ranges, O(1) a node. Mutates nothing."""
        at, node, trail = 0, below or self.root, []
        while at < len(keys):
            child = node.children.get(keys[at])
            if child is None:
                break
            num = common(child.keys, keys, at)
            trail.append((child, num))
            at += num
            if num < len(child.keys):
                break
            node = child
        return at, trail

    @staticmethod
    def up(node: Node) -> Iterator[Node]:
        """`node` and all above it, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    # --- using --------------------------------------------------------------------------------------------------------

    def take(self, trail: list[tuple[Node, int]], below: Node | None = None) -> Node:
        """Reference what a match found, from the root or `below` (which is not referenced anew); returns where it ends.
        Mutates references and last use."""
        top = below or self.root
        node = self.end(trail, top)
        self._count(node, 1, 0, top)
        return node

    def end(self, trail: list[tuple[Node, int]], below: Node | None = None) -> Node:
        """The node that ends where a match ended: the last of its `trail`, split if it goes on."""
        if not trail:
            return below or self.root
        node, used = trail[-1]
        return node if used == len(node.keys) else self._split(node, used)

    def append(self, node: Node, keys: Run, blocks: Sequence[int] = ()) -> Node:
        """Put `keys`, of which the first is not there, below `node`, referenced once, for a request whose path ends in `node`.
        blocks: those behind `keys`, where ids are kept. Returns the node that they end in."""
        self.changes += 1
        self.held += len(keys)
        if node.refs == 1 and not node.leases and not node.children and node is not self.root:
            longer = joined(node.keys, keys)  # only that request knows this node: its run goes on
            if longer is not None:
                node.keys = longer
                node.blocks += blocks
                return node
        child = self._make(keys, node)
        child.blocks += blocks
        child.refs = 1
        child.used = node.used
        node.children[keys[0]] = child
        return child

    def drop(self, node: Node) -> None:
        """Take back one reference to `node` and all above it. Mutates last use."""
        self._count(node, -1, 0, self.root)

    def pin(self, node: Node, num: int) -> None:
        """`num` leases more (or, negative, less) on `node` and all above it. Mutates last use."""
        self._count(node, 0, num, self.root)

    def _count(self, node: Node, refs: int, leases: int, top: Node) -> None:
        self._clock += 1
        last = node
        while node is not top:
            num = len(node.keys)
            self._move(node, -num)
            node.refs += refs
            node.leases += leases
            node.used = self._clock
            self._move(node, num)
            node = cast("Node", node.parent)
        self._offer(last)

    def _move(self, node: Node, num: int) -> None:
        if node.leases:
            self.pinned += num
        elif node.refs:
            self.held += num
        else:
            self.evictable += num

    # --- evicting -----------------------------------------------------------------------------------------------------

    def evict(self, num: int) -> list[int]:
        """Drop `num` evictable keys: always the last of the leaf that has been out of use for longest. Returns the blocks
        behind them. Raises AssertionError when there are not so many."""
        if num > self.evictable:
            raise AssertionError(f"{num} keys to evict, {self.evictable} evictable")
        self.changes += 1
        self.evictable -= num
        dropped: list[int] = []
        while num:
            used, _, node = self._heap[0]
            if used != node.used or not self._is_leaf(node):
                heappop(self._heap)
                continue
            parent, keys = cast("Node", node.parent), node.keys
            if num < len(keys):
                left = len(keys) - num
                node.keys = shortened(keys, left)
                dropped += node.blocks[left * self.span :]
                del node.blocks[left * self.span :]
                return dropped
            num -= len(keys)
            dropped += node.blocks
            heappop(self._heap)
            del parent.children[keys[0]]
            node.parent = None
            self.num_nodes -= 1
            self._offer(parent)
        return dropped

    @staticmethod
    def _is_leaf(node: Node) -> bool:
        """In the tree, used by nobody, with nothing below."""
        return not (node.refs or node.leases or node.children or node.parent is None)

    def _offer(self, node: Node) -> None:
        if not self._is_leaf(node):
            return
        heap = self._heap
        if len(heap) > 2 * self.num_nodes + 64:  # stale entries surface only when something is evicted
            live = {entry[1]: entry for entry in heap if entry[0] == entry[2].used and self._is_leaf(entry[2])}
            heap[:] = live.values()
            heapify(heap)
        heappush(heap, (node.used, node.serial, node))

    # --- shape --------------------------------------------------------------------------------------------------------

    def _make(self, keys: Run, parent: Node) -> Node:
        self._serial += 1
        self.num_nodes += 1
        return Node(keys, parent, self._serial)

    def _split(self, node: Node, at: int) -> Node:
        """Put the first `at` keys of `node` into a new node above it, and return that. Who ends in `node` still does."""
        self.changes += 1
        parent = cast("Node", node.parent)
        head = self._make(node.keys[:at], parent)
        head.refs, head.leases, head.used = node.refs, node.leases, node.used
        parent.children[head.keys[0]] = head
        node.keys = node.keys[at:]
        head.blocks, node.blocks = node.blocks[: at * self.span], node.blocks[at * self.span :]
        node.parent = head
        head.children[node.keys[0]] = node
        return head

    # --- the checker --------------------------------------------------------------------------------------------------

    def blocks(self) -> list[int]:
        """All blocks behind keys."""
        out, stack = [], [self.root]
        while stack:
            node = stack.pop()
            out += node.blocks
            stack.extend(node.children.values())
        return out

    def check(self, ends: Iterable[Node], leased: Iterable[Node]) -> None:
        """Assert that every node has the references of the paths to `ends`, and the leases of those to `leased`, through it,
        and that the counts are those of a walk through the tree."""
        users: dict[Node, list[int]] = {}
        for kind, nodes in enumerate((ends, leased)):
            for end in nodes:
                for node in self.up(end):
                    users.setdefault(node, [0, 0])[kind] += 1
        found = {"evictable": 0, "held": 0, "pinned": 0}
        stack, num_nodes = list(self.root.children.values()), 0
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            num_nodes += 1
            if [node.refs, node.leases] != users.pop(node, [0, 0]):
                raise AssertionError(f"a node of {len(node.keys)} keys counts {node.refs} users and {node.leases} leases")
            found["pinned" if node.leases else "held" if node.refs else "evictable"] += len(node.keys)
        counted = {"evictable": self.evictable, "held": self.held, "pinned": self.pinned}
        if found != counted or num_nodes != self.num_nodes:
            raise AssertionError(f"the prefix index counts {counted} in {self.num_nodes} nodes, has {found} in {num_nodes}")
        if users:
            raise AssertionError(f"{len(users)} nodes are in use and not in the prefix index")


def common(run: Run, keys: Sequence[int], at: int) -> int:
    """How many leading keys of `run` are those of `keys` from `at` on."""
    num = min(len(run), len(keys) - at)
    part, head = keys[at : at + num], run if len(run) == num else run[:num]
    if part == head:
        return num
    return next((i for i, (a, b) in enumerate(zip(part, head, strict=True)) if a != b), num)


def joined(run: Run, more: Run) -> Run | None:
    """`run` with `more` behind it, a list in place; None if they are of two kinds, or ranges that do not follow each other."""
    if isinstance(run, list) and isinstance(more, list):
        run.extend(more)
        return run
    if isinstance(run, range) and isinstance(more, range) and run.step == more.step and run[-1] + run.step == more[0]:
        return range(run[0], more[-1] + run.step, run.step)
    return None


def shortened(run: Run, num: int) -> Run:
    """The first `num` keys of `run`, a list in place."""
    if isinstance(run, list):
        del run[num:]
        return run
    return run[:num]
