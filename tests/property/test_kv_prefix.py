"""S14: the prefix cache under long random scripts, against a dictionary with an entry for every indexed prefix."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lengthwise.sched import Request
from lengthwise.sched.kv import Prefix

ACTIONS = ("allocate", "enter", "release", "pin", "unpin", "lookup", "expire")
SHARES = (0.3, 0.28, 0.2, 0.05, 0.03, 0.1, 0.04)


class Naive:
    """Every indexed piece under the whole prefix that it ends: who uses it, which leases, when it was last used."""

    def __init__(self, num_blocks: int, size: int, span: int) -> None:
        self.num_blocks, self.size, self.span = num_blocks, size, span
        self.free = num_blocks
        self.pieces: dict[tuple[int, ...], list] = {}  # prefix -> [users, leases, last use]
        self.tokens: dict[int, int] = {}  # rid -> tokens it has room for
        self.paths: dict[int, tuple[int, ...]] = {}
        self.clock = 0

    def match(self, names: tuple[int, ...]) -> tuple[int, ...]:
        while names and names not in self.pieces:
            names = names[:-1]
        return names

    def prefixes(self, path: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [path[:i] for i in range(1, len(path) + 1)]

    def mark(self, path: tuple[int, ...], kind: int, who: int, on: bool, behind: int = 0) -> None:
        self.clock += 1
        for prefix in self.prefixes(path)[behind:]:
            entry = self.pieces[prefix]
            entry[kind].add(who) if on else entry[kind].remove(who)
            entry[2] = self.clock

    def blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.size)

    def make_room(self) -> None:
        while self.free < 0:
            inner = {prefix[:-1] for prefix in self.pieces}
            leaves = [
                (entry[2], prefix) for prefix, entry in self.pieces.items() if not (entry[0] or entry[1] or prefix in inner)
            ]
            del self.pieces[min(leaves)[1]]
            self.free += self.span

    def allocate(self, rid: int, names: tuple[int, ...], tokens: int) -> int:
        path = self.match(names)
        self.mark(path, 0, rid, True)
        self.paths[rid], self.tokens[rid] = path, tokens
        self.free -= self.blocks(tokens) - len(path) * self.span
        self.make_room()
        return len(path)

    def enter(self, rid: int, names: tuple[int, ...]) -> None:
        path = self.paths[rid]
        if len(names) <= len(path):
            return
        shared = self.match(names)
        self.free += (len(shared) - len(path)) * self.span
        for prefix in self.prefixes(names)[len(shared) :]:
            self.pieces[prefix] = [set(), set(), 0]
        self.mark(names, 0, rid, True, behind=len(path))
        self.paths[rid] = names

    def release(self, rid: int) -> None:
        path, tokens = self.paths.pop(rid), self.tokens.pop(rid)
        self.free += self.blocks(tokens) - len(path) * self.span
        self.mark(path, 0, rid, False)

    def counts(self, without: frozenset[int] = frozenset()) -> tuple[int, int, int, int]:
        """(free, evictable, held, pinned) blocks if `without` gave up what they hold."""
        own = {rid: self.blocks(t) - len(self.paths[rid]) * self.span for rid, t in self.tokens.items()}
        pinned = sum(bool(e[1]) for e in self.pieces.values()) * self.span
        held = sum(not e[1] and bool(e[0] - without) for e in self.pieces.values()) * self.span
        evictable = len(self.pieces) * self.span - pinned - held
        free = self.free + sum(own[rid] for rid in without)
        return free, evictable, held + sum(own[rid] for rid in own if rid not in without), pinned

    def takes(self, names: tuple[int, ...], tokens: int, without: frozenset[int] = frozenset()) -> int:
        used = [p for p in self.prefixes(self.match(names)) if self.pieces[p][1] or self.pieces[p][0] - without]
        return self.blocks(tokens) - len(used) * self.span


def indexed(kv: Prefix) -> set[tuple[int, ...]]:
    out, stack = set(), [(node, ()) for node in kv.index.root.children.values()]
    while stack:
        node, above = stack.pop()
        path = above + tuple(node.keys)
        out.update(path[:i] for i in range(len(above) + 1, len(path) + 1))
        stack.extend((child, path) for child in node.children.values())
    return out


def names(req: Request, tokens: int, piece: int) -> tuple[int, ...]:
    hashes = req.block_hashes
    return tuple(hashes[: (tokens if isinstance(hashes, range) else min(tokens, req.prompt_len)) // piece])


def draw(rng: np.random.Generator, rid: int, piece: int, whole: bool) -> Request:
    """A prompt of up to 12 pieces (whole: often of whole ones): a turn of a conversation, or names that part from others' at
    random places."""
    prompt = int(rng.integers(1, 12 * piece))
    if whole and rng.random() < 0.5:
        prompt = -(-prompt // piece) * piece
    if rng.random() < 0.4:
        k = int(rng.integers(3))
        return Request(rid, 0.0, prompt, block_hashes=range(1000 * k, 1000 * k + (1 << 80)))
    hashes, branch = [], 0
    for place in range(prompt // piece):
        if rng.random() < 0.25:
            branch = branch * 3 + int(rng.integers(1, 3))
        hashes.append(-1 - place - 100 * (branch % 1000))
    return Request(rid, 0.0, prompt, block_hashes=np.array(hashes) if rng.random() < 0.3 else hashes)


@pytest.mark.parametrize(("size", "span", "num_blocks"), [(1, 1, 40), (4, 1, 33), (4, 2, 61), (16, 3, 100), (2, 5, 160)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("copies", [False, True])
def test_s14_a_thousand_operations_balance(copies, seed, size, span, num_blocks):
    rng = np.random.default_rng([seed, size, span])
    piece = size * span
    kv, naive = Prefix(num_blocks * size, size, 0.0, copies), Naive(num_blocks, size, span)
    kv.use_hashes(piece)
    holders: dict[int, tuple[Request, int]] = {}  # rid -> request, tokens computed
    leases: dict[int, tuple] = {}
    seen = dict.fromkeys(("hit", "evicted", "duplicate", "pinned", "expired", "refused"), 0)
    if copies and piece > 1:
        seen["copied"] = 0
    now = 0.0

    def tokens_found(req: Request) -> int:
        whole = names(req, req.prompt_len, piece)
        found = len(naive.match(whole)) * piece
        return req.prompt_len - 1 if found == req.prompt_len and copies else min(found, (req.prompt_len - 1) // piece * piece)

    for k in range(1000):
        action = rng.choice(ACTIONS, p=SHARES)
        req = draw(rng, k, piece, copies)
        some = int(rng.choice(list(holders))) if holders else -1
        before = len(naive.pieces)
        if action == "allocate":
            target, limit = req.prompt_len, names(req, req.prompt_len - 1, piece)
            takes = kv.blocks_to_admit(req, target)
            assert takes == naive.takes(limit, target)
            room = naive.counts()[0] + naive.counts()[1]
            assert kv.short_of(takes) == takes - room
            if takes > room:
                seen["refused"] += 1
                continue
            found = tokens_found(req)
            assert kv.allocate(req, target) == found <= req.prompt_len - 1
            pieces = naive.allocate(k, limit, target)
            copy = kv.copies.pop(req, None)
            assert (copy.num_blocks if copy else 0) == naive.blocks(found) - pieces * span  # nothing that it shares
            if copy:
                seen["copied"] += 1
            holders[k] = req, found
            seen["hit"] += found > 0
            seen["evicted"] += len(naive.pieces) < before
        elif action == "enter" and some >= 0:
            req, computed = holders[some]
            computed = min(computed + int(rng.integers(1, 4 * piece)), req.prompt_len)
            free = kv.free
            kv.enter(req, computed)
            naive.enter(some, names(req, computed, piece))
            holders[some] = req, computed
            seen["duplicate"] += kv.free > free
        elif action == "release" and some >= 0:
            req, computed = holders.pop(some)
            in_use = kv.in_use
            assert in_use - kv.release(req, req.prompt_len) == kv.in_use
            naive.release(some)
        elif action == "pin":
            pinned = holders[some][0] if some >= 0 and rng.random() < 0.5 else req
            path = naive.paths[some] if pinned is not req else naive.match(names(req, req.prompt_len, piece))
            what = names(req, req.prompt_len, piece) if pinned is req and rng.random() < 0.5 else pinned
            lease = kv.pin(what, now + float(rng.exponential(20)))
            assert lease.num_tokens == len(path) * piece
            naive.mark(path, 1, k, True)
            leases[k] = lease, path
            seen["pinned"] += 1
        elif action == "unpin" and leases:
            number = int(rng.choice(list(leases)))
            lease, path = leases.pop(number)
            assert kv.unpin(lease) and not kv.unpin(lease)
            naive.mark(path, 1, number, False)
        elif action == "expire":
            now += float(rng.exponential(30))
            ended = sorted((lease.until, number) for number, (lease, _) in leases.items() if lease.until <= now)
            assert (kv.next_expiry <= now) == bool(ended)
            kv.expire(now)
            for _, number in ended:
                lease, path = leases.pop(number)
                assert not lease.live
                naive.mark(path, 1, number, False)
                seen["expired"] += 1
        elif action == "lookup":
            assert kv.lookup(req) == tokens_found(req) <= req.prompt_len - 1
            yielding = [int(r) for r in rng.permutation(list(holders))[:4]]
            brought, gone = 0, frozenset()
            start, limit = naive.counts(), names(req, req.prompt_len - 1, piece)
            for rid in yielding:
                others = [holders[other][0] for other in sorted(gone)]
                brought += kv.brings(holders[rid][0], naive.tokens[rid], others, (req, req.prompt_len))
                gone |= {rid}
                more = sum(naive.counts(gone)[:2]) - sum(start[:2])
                assert brought == more - naive.takes(limit, req.prompt_len, gone) + naive.takes(limit, req.prompt_len)
        assert (kv.free, kv.evictable, kv.in_use - kv.pinned, kv.pinned) == naive.counts()
        assert min(naive.counts()) >= 0 and sum(naive.counts()) == num_blocks
        assert indexed(kv) == set(naive.pieces)  # the same pieces, so the same were evicted
        kv.check((req, req.prompt_len) for req, _ in holders.values())
    assert all(seen.values()), seen
    for req, _ in holders.values():
        kv.release(req, req.prompt_len)
    for lease, _ in leases.values():
        kv.unpin(lease)
    assert kv.in_use == kv.pinned == 0 and kv.free + kv.evictable == num_blocks
    kv.check([])


@pytest.mark.parametrize("seed", range(4))
def test_growing_answers_evict_what_nobody_uses(seed):
    """Decoders take blocks one by one or many at a time, with the same blocks left in the end."""
    rng = np.random.default_rng(seed)
    caches = [Prefix(640, 4, 0.0) for _ in range(2)]
    rows = [Request(i, 0.0, 40, 1000, block_hashes=list(range(100 * i, 100 * i + 10))) for i in range(12)]
    steps = int(rng.integers(100, 200))
    for kv in caches:
        kv.use_hashes(8)
        for req in rows:
            kv.allocate(req, 40)
            kv.enter(req, 40)
        for req in rows[2:]:
            kv.release(req, 40)
        kv.join(40)
        kv.join(40)
        assert kv.room() == 280 and kv.room(kv.free) == 80  # 160 blocks, 20 in use, 40 free; two take one every 4 steps
    caches[0].advance(steps)
    for _ in range(steps):
        caches[1].advance(1)
    assert indexed(caches[0]) == indexed(caches[1]) and caches[0].free == caches[1].free
    assert caches[0].room() == 280 - steps
    caches[0].check((req, 40 + steps) for req in rows[:2])
