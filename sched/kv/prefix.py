"""Paged KV with a prefix cache: what a request has computed stays until room is needed (SGLang, NeurIPS 2024; vLLM).

Requests that begin alike share blocks, each counted once. Prompts come with the names of their pieces (Request.block_hashes),
so that nothing is hashed here; only whole pieces are shared, and at least one token of a request is always computed, into a
block of its own: of a prompt that is cached whole the last piece is computed anew, or copied (`copy_on_write`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..plan import Copy
from ..request import Request, covers_answers
from .leases import Lease, Leases
from .paged import Paged
from .radix import Node, RadixIndex, Run


class Path:
    """The indexed part of what a request holds: `pieces` pieces, ending in `node`. The rest of its blocks are its own."""

    __slots__ = ("node", "pieces")

    def __init__(self, node: Node, pieces: int) -> None:
        self.node = node
        self.pieces = pieces


class Match(NamedTuple):
    """What admission finds: `pieces` to be shared, in the nodes of `trail` with how many in each, and `tokens` that need not be
    computed. Those behind the shared pieces are copied; sources: from these blocks, where ids are kept."""

    pieces: int
    trail: list[tuple[Node, int]]
    tokens: int
    sources: Sequence[int] = ()


class Prefix(Paged):
    """Paged with a radix index over pieces. `free` is what is truly free; whatever asks for room counts `evictable` too.

    A piece enters the index once all its tokens are computed (`enter`): prompts as their chunks are booked; answers, which
    only names by place in a conversation cover (`covers_answers`), when the request gives up its KV. Of two requests that
    computed one piece at once, the first to book it has it indexed; the second gives its own blocks back and shares those.
    Eviction takes whole pieces, least recently used first, from the ends of prefixes that nobody references or has pinned.

    copy_on_write: who finds all its tokens cached (prompt + generated, where names cover them) shares all pieces but the last,
    has that one copied, all of its blocks, and computes one token, in the copy. So n requests with one prompt are forks of it
    once the first has computed it (parallel sampling in vLLM, SOSP 2023). The copy lies in the blocks that the piece would
    be computed in without the option, so that nobody needs more room; and what it is made from is not held: evicted by the
    same plan, it is read before anybody writes there (Plan.moves). Once the token is booked the copy goes back, as whatever
    two have computed, or is indexed, if what it was made from is gone. Who is swapped in while it decodes computes nothing and
    keeps its copy.
    """

    def __init__(self, num_tokens: int, block_size: int = 16, watermark: float = 0.01, copy_on_write: bool = False) -> None:
        super().__init__(num_tokens, block_size, watermark)
        self.copy_on_write = copy_on_write
        self.indexes = True
        self.index = RadixIndex()
        self.hash_tokens = 0
        self._span = 0  # blocks a piece
        self._paths: dict[Request, Path] = {}
        self._leases = Leases()
        self._matched: tuple[Any, ...] = ()  # the last match: (request, tokens, changes), Match

    def use_hashes(self, tokens: int) -> None:
        """Raises ValueError unless a piece is a whole number of blocks, the same from the first request on."""
        if tokens < 1 or tokens % self.block_size:
            raise ValueError(f"pieces of {tokens} tokens are no whole number of blocks of {self.block_size}; set kv.block_size")
        if self.hash_tokens not in (0, tokens) and (self._paths or self.index.num_nodes):
            raise ValueError(f"pieces of {self.hash_tokens} tokens are in use; {tokens} cannot take their place")
        self.hash_tokens = tokens
        self._span = self.index.span = tokens // self.block_size

    # --- what is there --------------------------------------------------------------------------------------------------

    @property
    def evictable(self) -> int:
        return self.index.evictable * self._span

    @property
    def pinned(self) -> int:
        return self.index.pinned * self._span

    @property
    def free_tokens(self) -> int:
        return (self.free + self.evictable) * self.block_size

    def lookup(self, req: Request) -> int:
        return self.cached(req, req.prompt_len)

    def cached(self, req: Request, tokens: int) -> int:
        return 0 if req.block_hashes is None else self._match(req, tokens).tokens

    def _match(self, req: Request, tokens: int) -> Match:
        """What admission of `req` with `tokens` finds; one token is left to compute."""
        key = req, tokens, self.index.changes
        if self._matched and self._matched[0] == key:
            return self._matched[1]  # type: ignore[no-any-return]
        pieces, trail = self.index.match(self._names(req, 0, tokens if self.copy_on_write else tokens - 1))
        match = Match(pieces, trail, pieces * self.hash_tokens)
        if match.tokens == tokens:
            node, num = trail.pop()
            if num > 1:
                trail.append((node, num - 1))
            match = Match(pieces - 1, trail, tokens - 1, node.blocks[(num - 1) * self._span : num * self._span])
        self._matched = key, match
        return match

    def _names(self, req: Request, start: int, tokens: int) -> Run:
        """Names of the whole pieces of the first `tokens` tokens of `req`, from piece `start` on."""
        hashes = req.block_hashes
        if hashes is None:
            return []
        if not self._span:
            raise ValueError(f"request {req.rid} has block_hashes; say by use_hashes how many tokens a piece has")
        if not covers_answers(hashes):
            tokens = min(tokens, req.prompt_len)
        part: Any = hashes[start : tokens // self.hash_tokens]
        return part if isinstance(part, range) else part.tolist() if hasattr(part, "tolist") else list(part)

    # --- room -----------------------------------------------------------------------------------------------------------

    def short_of(self, blocks: int) -> int:
        return blocks + self.growth() - self.free - self.evictable

    def room(self, blocks: int | None = None) -> int:
        return super().room(self.free + self.evictable if blocks is None else blocks)

    def blocks_to_admit(self, req: Request, tokens: int) -> int:
        """All but those in use already: an evictable block that it takes is one less for others."""
        blocks = -(-tokens // self.block_size)
        if req.block_hashes is None:
            return blocks
        trail = self._match(req, tokens).trail
        return blocks - self._span * sum(num for node, num in trail if node.refs or node.leases)

    def brings(
        self, req: Request, tokens: int, others: Sequence[Request] = (), incoming: tuple[Request, int] | None = None
    ) -> int:
        """Its own blocks, and those shared with `others` alone; not those that `incoming` counts on finding in use."""
        path = self._paths.get(req)
        if path is None:
            return self.held(req, tokens)
        gone: dict[Node, int] = {}
        for other in others:
            if there := self._paths.get(other):
                for node in self.index.up(there.node):
                    gone[node] = gone.get(node, 0) + 1
        wanted = dict(self._match(*incoming).trail) if incoming and incoming[0].block_hashes is not None else {}
        pieces = 0
        for node in self.index.up(path.node):
            if node.refs - gone.get(node, 0) == 1 and not node.leases:
                pieces += len(node.keys) - wanted.get(node, 0)
        return self.held(req, tokens) + self._span * (pieces - path.pieces)

    # --- taking and giving ------------------------------------------------------------------------------------------------

    def allocate(self, req: Request, tokens: int) -> int:
        shared: list[int] = []
        sources: Sequence[int] = ()
        pieces = found = 0
        if req.block_hashes is not None:
            pieces, trail, found, sources = self._match(req, tokens)
            shared = self._blocks(trail)
            self._paths[req] = Path(self.index.take(trail), pieces)
        at = pieces * self._span
        own = -(-tokens // self.block_size) - at
        self.free -= own
        self._make_room()
        if self.tables is not None:
            self.tables.admit(req, shared, own)
        if num := self.blocks(found) - at:  # a block that the one token is alone in is not copied
            targets = () if self.tables is None else self.tables.of(req)[at : at + num]
            self.copies[req] = Copy(req, num, sources[:num], targets)
        return found

    def enter(self, req: Request, computed: int) -> int:
        path = self._paths.get(req)
        if path is None:
            return 0
        names = self._names(req, path.pieces, computed)
        if not names:
            return 0
        before = self.free + self.evictable
        at, span = path.pieces * self._span, self._span
        path.pieces += len(names)
        shared, trail = self.index.match(names, path.node)
        if self.tables is not None and shared:
            self.tables.share(req, at, self._blocks(trail))
        path.node = self.index.take(trail, path.node)
        self.free += shared * span  # somebody was first: its own go back
        if shared < len(names):
            blocks = () if self.tables is None else self.tables.of(req)[at + shared * span : at + len(names) * span]
            path.node = self.index.append(path.node, names[shared:], blocks)
            self.epoch += 1
        return self.free + self.evictable - before

    def release(self, req: Request, tokens: int) -> int:
        path = self._paths.pop(req, None)
        if path is None:
            return super().release(req, tokens)
        self.copies.pop(req, None)
        before = self.free + self.evictable
        self.free += self.held(req, tokens) - path.pieces * self._span
        if self.tables is not None:
            self.tables.release(req, path.pieces * self._span)
        self.index.drop(path.node)
        return self.free + self.evictable - before

    def advance(self, num_steps: int) -> None:
        super().advance(num_steps)
        self._make_room()

    def ready(self) -> bool:
        epoch = self.epoch
        self._make_room(self.growth())
        return self.epoch != epoch

    def _make_room(self, blocks: int = 0) -> None:
        """Evict until `blocks` are free."""
        short = blocks - self.free
        if short > 0 and self._span:  # else nothing is indexed, and the checker finds what the books lack
            pieces = -(-short // self._span)
            dropped = self.index.evict(pieces)
            if self.tables is not None:
                self.tables.give(dropped)
            self.free += pieces * self._span
            self.epoch += 1

    def _blocks(self, trail: list[tuple[Node, int]]) -> list[int]:
        """The blocks behind what a match found, before it is taken; none where ids are not kept."""
        return [] if self.tables is None else [block for node, num in trail for block in node.blocks[: num * self._span]]

    # --- leases -----------------------------------------------------------------------------------------------------------

    def pin(self, what: Request | Sequence[int], until: float) -> Lease:
        """Keep from eviction, until `until` (s) or `unpin`, what is indexed of the names in `what`; of a request, the indexed
        part of what it holds, or of its prompt. Blocks that are not indexed (an answer, the end of a prompt) are kept by who
        holds them. Mutates `next_expiry`."""
        if isinstance(what, Request):
            path, names = self._paths.get(what), self._names(what, 0, what.prompt_len)
        else:  # of a range that goes on for ever, as many as there can be
            path, names = None, what[: self.num_blocks] if isinstance(what, range) else [int(name) for name in what]
        if path is None:
            pieces, trail = self.index.match(names)
            path = Path(self.index.end(trail), pieces)
        self.index.pin(path.node, 1)
        lease = Lease(path.node, path.pieces * self.hash_tokens, until)
        self._leases.add(lease)
        self.next_expiry = self._leases.next_expiry
        return lease

    def unpin(self, lease: Lease) -> bool:
        """End a lease. False if it had ended already: what it kept may be gone. Mutates `next_expiry`."""
        if not lease.live:
            return False
        lease.live = False
        self.index.pin(lease.node, -1)
        self.next_expiry = self._leases.next_expiry
        return True

    def expire(self, now: float) -> None:
        if self.next_expiry > now:
            return
        while (lease := self._leases.first()) is not None and lease.until <= now:
            self.unpin(lease)

    # --- the checker ------------------------------------------------------------------------------------------------------

    def check(self, holders: Iterable[tuple[Request, int]]) -> None:
        """Assert that free + evictable + held + pinned = total, with every block counted anew."""
        own, ends, tables = 0, [], []
        for req, tokens in holders:
            held = self.held(req, tokens)
            own += held
            path = self._paths.get(req)
            above = [] if path is None else [*self.index.up(path.node)][::-1]
            tables.append((req, held, [block for node in above for block in node.blocks]))
            if path is not None:
                own -= path.pieces * self._span
                ends.append(path.node)
                if path.pieces != sum(len(node.keys) for node in above):
                    raise AssertionError(f"request {req.rid} holds {path.pieces} indexed pieces, its path is another length")
        if len(ends) != len(self._paths):
            raise AssertionError(f"{len(self._paths)} requests hold prefixes, {len(ends)} of them hold KV")
        self.index.check(ends, [lease.node for lease in self._leases])
        held = self.index.held * self._span + own
        if self.free < 0 or own < 0 or self.free + self.evictable + held + self.pinned != self.num_blocks:
            raise AssertionError(
                f"KV blocks: free {self.free} + evictable {self.evictable} + held {held} + pinned {self.pinned} != total "
                f"{self.num_blocks}"
            )
        if self.tables is not None:
            self.tables.check(self.free, self.index.blocks(), tables)
