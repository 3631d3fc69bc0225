"""The inbox alone: what its door refuses, what it tells a clock that waits, and what it forgets."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.native.inbox import Inbox, StandIn
from lengthwise.engine.native.sampling import SamplingParams
from lengthwise.sched import INF, EventKind, LengthDistribution


def inbox(**options):
    wake = threading.Event()
    clock = WallClock(wake)
    return Inbox(clock, 100, wake=wake, **options), clock


def kept(box):
    return len(box._live) + len(box._keys) + len(box._params) + len(box._events) + len(box._timed) + len(box.answer_lens)


@pytest.mark.parametrize(
    ("prompt", "params", "fields", "message"),
    [
        ([1.5], {}, {}, "no whole numbers"),
        ([1, None], {}, {}, "no whole numbers"),
        ([1], {"stop": ("end",)}, {}, "'x' has stop strings, and the model has no tokenizer"),
        ([1], {}, {"priority": float("nan")}, "'x' has the priority nan"),
        ([1], {}, {"weight": INF}, "'x' has the weight inf"),
        ([1], {}, {"timeout": 0.0}, "'x' has the timeout 0.0: seconds above 0"),
        ([1], {}, {"timeout": float("nan")}, "'x' has the timeout nan"),
        ([1], {}, {"answer_len": 0}, "'x' asks for 0 tokens as its answer"),
        ([1], {}, {"answer_len": True}, "'x' asks for True tokens as its answer"),
    ],
)
def test_what_would_fail_later_is_refused_now(prompt, params, fields, message):
    box, _ = inbox()
    with pytest.raises(ValueError, match=message):
        box.submit("x", prompt, 5, SamplingParams(**params), **fields)
    assert not kept(box)
    with pytest.raises(TypeError):
        box.submit("x", [1], 5, colour="red")
    assert not kept(box)


def test_stop_strings_are_taken_where_there_is_a_tokenizer():
    box, _ = inbox(has_text=True)
    assert box.sampling(box.submit("x", [1], 5, SamplingParams(stop=("end",)))).stop == ("end",)


def test_a_key_names_one_live_request():  # S17
    box, clock = inbox()
    first = box.submit("x", [1], 5)
    with pytest.raises(ValueError, match="'x' is in use"):
        box.submit("x", [2], 5)
    box.on_finish(first, clock.now)
    assert box.submit("x", [2], 5).rid == 1


def test_a_prompt_is_the_engines_own():
    box, _ = inbox()
    ids = np.array([1, 2, 3])
    request = box.submit("x", ids, 5)
    ids[:] = 77
    assert request.prompt_ids == [1, 2, 3] and all(type(i) is int for i in request.prompt_ids)


def test_an_abort_comes_after_its_arrival_and_never_meets_a_later_request_of_that_key():
    box, clock = inbox()
    first = box.submit("x", [1], 5)
    assert box.abort(first) and box.abort(first)
    assert [(e.kind, e.request) for e in box.pop(clock.now)] == [
        (EventKind.ARRIVAL, first), (EventKind.ABORT, first), (EventKind.ABORT, first),
    ]  # fmt: skip
    assert box.abort(first)
    box.on_finish(first, clock.now)
    second = box.submit("x", [1], 5)
    assert not box.abort(first)  # its key is another's by now
    late, arrival = box.pop(clock.now)
    assert late.request is first and arrival.request is second
    box.on_finish(second, clock.now)
    assert not kept(box)


def test_a_clock_waits_unless_something_has_come_in():
    """An abort of who has ended wakes nobody, and what has woken the clock once does not do so again."""
    box, clock = inbox()

    def waits():
        begun = clock.now
        clock.wait(begun + 0.05)
        return clock.now - begun >= 0.05

    gone = box.submit("x", [1], 5)
    assert not waits() and waits()
    box.on_finish(gone, clock.now)
    assert not box.abort(gone) and waits()
    box.close()
    assert not waits() and waits()


def test_who_waits_is_woken():
    box, clock = inbox()
    threading.Timer(0.05, lambda: box.submit("x", [1], 5)).start()
    clock.wait(clock.now + 20.0)
    assert clock.now < 10.0 and box.peek() <= clock.now


def test_nothing_is_lost_between_the_last_request_and_the_close():
    """Whoever is told that nothing more comes has been told of everything before, from however many threads it came."""
    for _ in range(60):
        box, clock = inbox()
        sent = []

        def send(number, box=box, sent=sent):
            for i in range(20):
                key = f"{number} {i}"
                sent.append(box.submit(key, [1], 5))
                box.abort(sent[-1])

        def run(box=box, sent=sent, send=send):
            threads = [threading.Thread(target=send, args=(number,)) for number in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            box.close()

        thread = threading.Thread(target=run)
        thread.start()
        arrived, limit = [], time.monotonic() + 20
        while (at := box.peek()) < INF:
            assert time.monotonic() < limit
            if at <= clock.now:
                arrived += [e.request for e in box.pop(clock.now) if e.kind == EventKind.ARRIVAL]
        thread.join()
        assert len(arrived) == 60 and [r.rid for r in arrived] == sorted(r.rid for r in sent)
        assert not box.pop(clock.now)


def test_a_door_that_closes_while_somebody_looks():
    """The last request comes in and the inbox is closed just after the look at the events has found none."""
    box, clock = inbox()

    class Events(type(box._events)):
        def __bool__(self):
            empty = len(self) == 0
            if empty and not looked:
                looked.append(True)
                thread = threading.Thread(target=lambda: (box.submit("x", [1], 5), box.close()))
                thread.start()
                thread.join(0.1)  # held at the door until the look is over, or through it
            return not empty

    looked = []
    box._events = Events()
    assert box.peek() < INF and looked
    while len(box._events) == 0 or box._open:
        time.sleep(0.001)
    assert box.peek() <= clock.now and len(box.pop(clock.now)) == 1 and box.peek() == INF


def test_a_closed_inbox_takes_nothing_more():
    box, _ = inbox()
    box.close()
    with pytest.raises(ValueError, match="'x' comes after the inbox was closed"):
        box.submit("x", [1], 5)
    assert box.peek() == INF and not kept(box)


# --- what happens by itself -----------------------------------------------------------------------------------------------


class Hand:
    """A clock that is set by hand."""

    now = 0.0


POINT = LengthDistribution.point(7.0)


def by_hand(**options):
    clock = Hand()
    return Inbox(clock, 100, **options), clock


def popped(box, clock):
    return [(e.kind, e.request.rid, e.time) for e in box.pop(clock.now)]


def test_a_timeout_comes_when_its_time_is_over_and_after_the_arrival():
    box, clock = by_hand()
    for timeout in (5.0, 2.0, INF):
        box.submit(str(timeout), [1], 5, timeout=timeout)
    clock.now = 3.0
    assert popped(box, clock) == [*((EventKind.ARRIVAL, i, 0.0) for i in range(3)), (EventKind.TIMEOUT, 1, 2.0)]
    box, clock = by_hand()
    late, soon = box.submit("late", [1], 5, timeout=5.0), box.submit("soon", [1], 5, timeout=2.0)
    assert len(box.pop(0.0)) == 2
    clock.now = 1.99
    assert box.peek() == 2.0 and not popped(box, clock)  # earlier than the next look
    clock.now = 5.0
    assert popped(box, clock) == [(EventKind.TIMEOUT, soon.rid, 2.0), (EventKind.TIMEOUT, late.rid, 5.0)]
    for request in (late, soon):
        box.on_finish(request, 5.0)
    assert not kept(box)


def test_a_timeout_of_somebody_who_has_ended_wakes_nobody():
    box, clock = by_hand()
    first = box.submit("x", [1], 5, timeout=1.0, answer_len=3)
    assert box.answer_lens == {0: 3}
    box.pop(0.0)
    box.on_finish(first, 0.0)
    box.submit("x", [1], 5)  # of the same key
    box.pop(0.0)
    clock.now = 9.0
    assert not popped(box, clock)
    box.close()
    assert box.peek() == INF and not box._timed


def test_timeouts_that_are_far_away_keep_nobody():
    box, _ = by_hand()
    for i in range(1000):
        box.on_finish(box.submit(str(i), [1], 5, timeout=1e6, stand_in=StandIn(1e6, POINT)), 0.0)
        box.pop(0.0)
    assert len(box._timed) < 80


def test_a_closed_inbox_still_has_timeouts():
    box, clock = by_hand()
    box.submit("x", [1], 5, timeout=4.0)
    box.pop(0.0)
    box.close()
    assert box.peek() == 4.0
    clock.now = 4.0
    assert popped(box, clock) == [(EventKind.TIMEOUT, 0, 4.0)]


def test_a_prediction_comes_or_its_stand_in():
    box, clock = by_hand()
    quick, slow, gone = (box.submit(key, [1], 5, stand_in=StandIn(1.0, POINT)) for key in "abc")
    box.pop(0.0)
    said = LengthDistribution.point(3.0)
    assert box.predicted(quick, said) and not box.predicted(quick, POINT) and quick.prediction is said
    assert popped(box, clock) == [(EventKind.PREDICTION_READY, quick.rid, 0.0)]
    box.on_finish(gone, 0.0)
    assert not box.predicted(gone, said) and gone.prediction is None
    clock.now = 1.0
    assert popped(box, clock) == [(EventKind.PREDICTION_READY, slow.rid, 1.0)]
    assert slow.prediction is POINT and box.num_late == 1 and not box.predicted(slow, said)


def test_what_the_door_refuses_leaves_nothing():
    box, _ = by_hand(door=lambda request: f"{request.prompt_len} is too much" if request.prompt_len > 2 else None)
    with pytest.raises(ValueError, match="'x': 3 is too much"):
        box.submit("x", [1, 2, 3], 5, timeout=1.0, answer_len=3, stand_in=StandIn(1.0, POINT))
    assert not kept(box) and not box.num_live
    assert box.submit("x", [1, 2], 5).rid == 0 and box.num_live == 1


def test_who_is_told_of_an_end_may_use_the_key():
    box, _ = by_hand(freed=lambda request: again.append(box.submit("x", [1], 5)))
    again = []
    box.on_finish(box.submit("x", [1], 5), 0.0)
    assert again[0].rid == 1
