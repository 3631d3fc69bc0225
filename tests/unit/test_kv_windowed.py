"""Layers with a sliding window free what they have passed: the counts against counting every token, and whole runs."""

from __future__ import annotations

import math

import pytest
from harness import Ask, Case, play
from hypothesis import given, settings
from hypothesis import strategies as st
from shadow import shadow
from windowed import MODELS, Windowed, windowed

from lengthwise.experiments.cell import _swapped
from lengthwise.sched import FOREVER, Outcome, Plan, Request, Scheduler, swap
from lengthwise.sched.batching import Chunked
from lengthwise.sched.kv import Grouped, Paged
from lengthwise.sched.policies import FCFS

GEMMA3 = ((4, None), (20, 512))  # 5 of 6 layers attend 512 tokens


class Counted:
    """One set of live blocks per request and slice, token by token: what Grouped must be equal to."""

    def __init__(self, kv: Grouped, chunk_len: int) -> None:
        self.size, self.num_blocks, self.windows = kv.block_size, kv.num_blocks, kv.windows
        self.most = {w: max(self.span(c, w, chunk_len) for c in range(3 * self.size + w)) for w in set(self.windows) if w}
        self.tokens: dict[int, int] = {}  # resident tokens by request
        self.target: dict[int, int] = {}  # what a prefill has room for
        self.decoding: set[int] = set()

    def blocks(self, tokens: int) -> int:
        return math.ceil(tokens / self.size)

    def live(self, computed: int, window: int | None, end: int) -> int:
        """Blocks with a token before `end` that a token from `computed` on attends."""
        first = 0 if window is None else max(computed - window + 1, 0)
        return len({at // self.size for at in range(end) if (at // self.size + 1) * self.size > first})

    def span(self, computed: int, window: int, chunk_len: int) -> int:
        return self.live(computed, window, computed + chunk_len)

    def held(self, rid: int, more: int = 0) -> int:
        computed = self.tokens[rid] + more
        end = max(self.target[rid], computed)
        return sum(min(self.live(computed, w, end), self.most[w] if w else end) for w in self.windows)

    @property
    def free(self) -> int:
        return self.num_blocks - sum(map(self.held, self.tokens))

    def growth(self, k: int = 0) -> int:
        return sum((self.tokens[r] + k) % self.size == 0 for r in self.decoding) * len(self.windows)

    def steps(self) -> tuple[int, int]:
        """(decode steps that fit, steps to the first that frees), both at most 100."""
        held = sum(self.held(r) for r in self.tokens if r not in self.decoding)
        frees, k = 100, 0
        while k < 100:
            before = self.num_blocks - held - sum(self.held(r, k) for r in self.decoding)
            if self.growth(k) > before:
                break
            after = self.num_blocks - held - sum(self.held(r, k + 1) for r in self.decoding)
            k += 1
            if after > before - self.growth(k - 1):
                frees = min(frees, k)
        return k, frees


actions = st.lists(
    st.tuples(st.sampled_from(("admit", "chunk", "chunk", "leave", "release", "advance", "advance")), st.integers(0, 90)),
    max_size=50,
)


@given(model=st.sampled_from(MODELS), size=st.integers(1, 9), tokens=st.integers(40, 400), script=actions, data=st.data())
@settings(max_examples=300)
def test_counts_equal_counting_every_token(model, size, tokens, script, data):
    chunk_len = data.draw(st.integers(1, 40))
    kv = Grouped(tokens, model, size, 0.0)
    kv.use_chunks(chunk_len)
    plain = Counted(kv, chunk_len)
    requests = [Request(i, 0.0, 1 + 7 * i % 50, 60) for i in range(8)]
    for action, number in script:
        rid = number % 8
        req = requests[rid]
        if action == "admit" and rid not in plain.tokens:
            plain.tokens[rid], plain.target[rid] = 0, req.prompt_len
            need = plain.held(rid)
            assert need == kv.blocks_to_admit(req, req.prompt_len) <= kv.blocks_at_end(req)
            del plain.tokens[rid], plain.target[rid]
            if kv.fits(need):
                kv.allocate(req, req.prompt_len)
                plain.tokens[rid], plain.target[rid] = 0, req.prompt_len
        elif action == "chunk" and rid in plain.tokens and not req._prefilled:
            plain.tokens[rid] += min(1 + number % chunk_len, req.prompt_len - plain.tokens[rid])
            kv.enter(req, plain.tokens[rid])
            req._computed = plain.tokens[rid]
            if req._computed == req.prompt_len:
                req._prefilled = True
                opens = kv.opens(req, req._computed)
                assert opens == (len(kv.windows) if req.prompt_len % size == 0 else 0)
                if plain.growth() + opens <= plain.free:
                    kv.join(req.prompt_len)
                    plain.decoding.add(rid)
        elif action == "leave" and rid in plain.decoding:
            kv.leave(plain.tokens[rid])
            plain.decoding.discard(rid)
        elif action == "release" and rid in plain.tokens and rid not in plain.decoding:
            room = plain.tokens[rid] if req._prefilled else req.prompt_len
            assert kv.release(req, room) == plain.held(rid)
            del plain.tokens[rid], plain.target[rid]
            req._computed, req._prefilled = 0, False
        elif action == "advance" and plain.decoding:
            steps = min(number, kv.room())
            free, growth = plain.free, plain.growth()
            kv.advance(steps)
            for r in plain.decoding:
                plain.tokens[r] += steps
            if steps == 1:
                assert kv.passed == plain.free - (free - growth)
        assert kv.free == plain.free >= 0
        assert kv.growth() == plain.growth()
        if plain.decoding:
            fit, frees = plain.steps()
            start = kv._next_start() - kv._step
            room = min(kv.room(), 100)
            assert room == fit or start < room < fit
            assert kv.steps_to_free() <= frees or frees == 100
            assert kv.steps_to_free() in (frees, start) or frees >= fit
        else:
            assert kv.room() == FOREVER <= kv.steps_to_free()
        rooms = [(requests[r], t if requests[r]._prefilled else requests[r].prompt_len) for r, t in plain.tokens.items()]
        assert [kv.held(*holder) for holder in rooms] == [plain.held(holder[0].rid) for holder in rooms]
        kv.check(rooms)


def test_several_times_more_long_requests_than_paged_in_the_same_memory():
    """5 of 6 layers with a window of 512, prompts of 6,000 tokens and answers of 2,000: what runs at once."""
    asks = tuple(Ask(0.0, 6000, 2000, 2000) for _ in range(40))
    case = Windowed(asks, pool=40_000, cost="tick", groups=GEMMA3)
    paged = Windowed(asks, pool=40_000, cost="tick", groups=((24, None),))  # the same, nothing freed

    def most_decoding(some: Windowed) -> tuple[int, float]:
        result = play(some)
        return max(step[5] for step in result.log.steps), max(result.finish)

    (many, soon), (few, late) = most_decoding(case), most_decoding(paged)
    assert few == 6 and many >= 4 * few and soon < late / 2
    kv, plain = case.kv(), Paged(40_000)
    kv.use_chunks(2048)
    long = Request(0, 0.0, 6000, 2000)
    assert plain.num_blocks // plain.blocks_at_end(long) == 5 and kv.num_blocks // kv.blocks_at_end(long) >= 11


def test_a_prompt_longer_than_the_pool_of_a_window_is_served_in_chunks():
    """Only windows: 4,000 tokens go through 400, and a chunk longer than that is refused at the door."""
    ask = Ask(0.0, 4000, 50, 50)
    case = Windowed((ask,), pool=400, groups=((3, 100),), token_budget=128, max_num_seqs=8)
    result = play(case)
    assert result.log.ended_at[0][:2] == (50, "stop") and len(result.log.steps) == 32 + 49
    assert shadow(case).log == result.log
    refused = play(Windowed((ask,), pool=400, groups=((3, 100),), token_budget=512)).log.ended_at[0][1]
    assert refused.startswith("rejected") and "40 KV blocks, the pool has 25" in refused


def test_layers_of_different_slices_share_a_pool():
    windows = [512, 512, 512, 512, 512, None] * 4
    kv = Grouped.of_layers(windows, 1600, block_size=16, watermark=0.0)
    assert (kv.layers_per_block, kv.slices, kv.num_blocks) == (4, 6, 600)
    places = kv.place(windows)
    assert sorted(places) == [(g, j) for g in range(6) for j in range(4)]
    assert all(kv.windows[g] == w for (g, _), w in zip(places, windows, strict=True))
    padded = Grouped(1600, [(4, None), (22, 512)], layers_per_block=4)
    assert padded.slices == 7 and padded.num_blocks == 1600 * 26 // 4 // 16
    with pytest.raises(ValueError, match="5 layers with the window None do not fit 1 slices of 4"):
        padded.place([None] * 5 + [512] * 22)
    with pytest.raises(ValueError, match="window 128"):
        padded.place([None] * 4 + [128] * 22)


def test_without_windows_it_is_paged():
    asks = tuple(Ask(0.01 * i, 40 + i, 30, 60, priority=-i % 3) for i in range(20))
    grouped = play(Windowed(asks, "priority", pool=500, groups=((24, None),), cpu=100))
    plain = play(Case(asks, "priority", pool=500, cpu=100))
    assert grouped.log == plain.log and grouped.scheduler.num_swaps == plain.scheduler.num_swaps > 0


def test_swap_tiers_are_filled_by_what_windows_still_attend():
    """24 layers' worth of memory for 64 tokens takes 4 blocks of a slice of 4 layers each; 200 tokens lie in 13 + 5 x 3."""
    kv = Grouped(4000, ((4, None), (20, 32)), 16, 0.0)
    assert kv.blocks(200) == 13 + 5 * 3
    engine = Scheduler(FCFS(), Chunked(), kv, swap(cpu=64))
    assert engine.swapping.tiers.sizes["cpu"] == 64 // 16 * 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": []}, "at least one"),
        ({"groups": [(2, 8), (3, 8)]}, "one for each window"),
        ({"groups": [(0, None)]}, "0 layers"),
        ({"groups": [(2, 0)]}, "window 0"),
        ({"groups": [(2, 8)], "layers_per_block": -1}, "layers_per_block -1"),
    ],
)
def test_impossible_groups_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Grouped(1000, **arguments)


def test_chunks_of_another_length_are_refused_while_something_is_held():
    kv = Grouped(1000, GEMMA3, 16, 0.0)
    kv.use_chunks(64)
    kv.allocate(Request(0, 0.0, 30), 30)
    kv.use_chunks(64)
    with pytest.raises(ValueError, match="chunks of 64 tokens are in use; 128"):
        kv.use_chunks(128)


# --- whole runs ---------------------------------------------------------------------------------------------------------


def own_prefix(case: Windowed) -> None:
    """Every row reads what it attends, of its own prefix, through its tables; they change no plan."""
    kept = shadow(case)
    assert kept.log == play(case).log
    kv = kept.scheduler.kv
    assert sorted(kv.tables.free) == list(range(kv.num_blocks))


def one_by_one(case: Windowed) -> None:
    """Fast-forward is single steps."""
    assert play(case).log == play(case, fast_forward=False).log


@pytest.mark.parametrize("law", [own_prefix, one_by_one], ids=lambda law: law.__name__)
@given(case=windowed())
@settings(max_examples=150)
def test_law(law, case):
    law(case)


@given(case=windowed())
@settings(max_examples=100)
def test_what_is_in_use_after_a_step_and_what_it_gave_back_was_in_use(case):
    class Weighing(Scheduler):
        def book(self, plan: Plan, outcome: Outcome) -> None:
            held = self.kv.in_use + (self.kv.growth() if plan.num_decode else 0)
            super().book(plan, outcome)
            assert self.kv.in_use + self.given_back == held

    play(case, fast_forward=False, scheduler=Weighing)


@pytest.mark.slow
@pytest.mark.parametrize("law", [own_prefix, one_by_one], ids=lambda law: law.__name__)
def test_laws_at_length(law):
    settings(max_examples=3000)(given(case=windowed())(law))()


def test_swapped_bytes_are_of_the_layers_that_a_block_holds():
    """Four slices of a layer each move four times the blocks that whole tokens do, and the same bytes."""
    asks = tuple(Ask(0.0, 30, 40, 40) for _ in range(3))
    options = {"pool": 160, "cost": "even", "cpu": 320, "block_size": 4}
    whole = play(Case(asks, **options)).scheduler
    sliced = play(Windowed(asks, groups=((4, None),), layers_per_block=1, **options)).scheduler
    assert sliced.swapping.blocks_out == 4 * whole.swapping.blocks_out > 0
    assert _swapped(sliced, 100.0) == _swapped(whole, 100.0)
