"""Predictions in service: off the step loop, in batches, with a deadline; what is no length falls back and is counted."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest
import torch
from serving import Gate, read, run, until

from lengthwise.engine.native.clock import WallClock
from lengthwise.engine.server.predicting import Predicting, fault
from lengthwise.engine.server.prompts import Prompts
from lengthwise.engine.server.protocol import Turn
from lengthwise.sched import EDGES, LengthDistribution, Request
from lengthwise.sched.policies import FCFS, SJF, SRPT

torch.set_num_threads(1)

NAN, INF = float("nan"), float("inf")


class Says:
    """A predictor that says `row(request)`, once `go` is set."""

    def __init__(self, row, held=False):
        self.row, self.go, self.batches, self.threads = row, threading.Event(), [], set()
        if not held:
            self.go.set()

    def predict(self, requests):
        self.batches.append(len(requests))
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(60)
        return [self.row(r) for r in requests]


def by_prompt(request):
    return LengthDistribution.point(10.0 * request.prompt_len)


async def order_of(service, lens, **fields):
    """Hand in a request for each prompt length while one slot is taken; returns the order in which they are first scheduled."""
    gate = Gate(service)
    first = await service.submit("first", [1], 200, predicted_len=1)
    await gate.shut()
    streams = [await service.submit(str(n), [1] * n, 3, **{k: v[i] for k, v in fields.items()}) for i, n in enumerate(lens)]
    if service._predicting is not None:
        await until(lambda: all(s.request.prediction is not None for s in streams))
    gate.open()
    await asyncio.gather(read(first), *map(read, streams))
    return [s.request.prompt_len for s in sorted(streams, key=lambda s: s.request._first_scheduled)]


def test_a_policy_that_needs_predictions_goes_by_them():
    says = Says(by_prompt)

    def main(service):
        return order_of(service, [30, 10, 40, 20])

    order = run(main, policy=SRPT(), max_num_seqs=1, predictor=says, fallback_len=1.0, prediction_deadline=50.0)
    assert order == [10, 20, 30, 40] and says.threads == {"lengthwise-predict"}


def test_what_the_client_says_stands_instead_of_a_prediction():
    says = Says(by_prompt)

    async def main(service):
        return await order_of(service, [30, 10, 40, 20], predicted_len=[2, 4, 1, 3])

    assert run(main, policy=SRPT(), max_num_seqs=1, predictor=says, fallback_len=1.0) == [40, 30, 20, 10]
    assert not says.batches
    assert run(main, policy=SRPT(), max_num_seqs=1) == [40, 30, 20, 10]


def test_without_a_predictor_a_policy_that_needs_predictions_is_told_them_by_clients_or_refuses():
    async def main(service):
        with pytest.raises(ValueError, match="'x' has no predicted_len"):
            await service.submit("x", [1], 5)
        return await read(await service.submit("x", [1], 5, predicted_len=5))

    assert run(main, policy=SJF()).reason == "length"

    async def plain(service):
        return await read(await service.submit("x", [1], 5))

    assert run(plain, policy=FCFS()).reason == "length"


def test_who_waits_is_predicted_in_one_batch():
    says = Says(by_prompt, held=True)

    async def main(service):
        first = await service.submit("first", [1], 5)
        await until(lambda: says.batches)
        streams = [first, *[await service.submit(str(i), [1, 2], 5) for i in range(7)]]
        says.go.set()
        await asyncio.gather(*map(read, streams))
        return service._predicting.counts

    counts = run(main, policy=SJF(), predictor=says, fallback_len=1.0, prediction_deadline=1000.0)
    assert says.batches == [1, 7] and not any(counts.values())


def test_a_late_prediction_is_replaced_at_the_deadline_and_stays_so():
    says = Says(by_prompt, held=True)

    async def main(service):
        stream = await service.submit("x", [1, 2], 5)
        answer = await read(stream)  # though the predictor still thinks
        assert service._inbox.num_late == 1 and stream.request.prediction.mean() == 77.0
        assert not says.go.is_set()
        says.go.set()
        await until(lambda: service._predicting.seconds.num == 1)
        assert stream.request.prediction.mean() == 77.0 and not any(service._predicting.counts.values())
        again = await service.submit("y", [1, 2], 5)
        await read(again)
        return answer, again.request.prediction

    answer, prediction = run(main, policy=SJF(), predictor=says, fallback_len=77.0, prediction_deadline=0.02)
    assert answer.reason == "length" and prediction.mean() in (20.0, 77.0)


def test_a_policy_that_needs_no_prediction_waits_for_none():
    says = Says(by_prompt, held=True)

    async def main(service):
        answer = await read(await service.submit("x", [1, 2], 5))
        assert says.batches == [1] and service._inbox.num_late == 0
        says.go.set()
        return answer

    assert run(main, predictor=says, fallback_len=1.0, prediction_deadline=1000.0).reason == "length"


def raising(request):
    raise KeyError("a prompt that nobody may see")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (raising, "raised"),
        (lambda r: LengthDistribution(NAN, NAN), "nan"),
        (lambda r: LengthDistribution(INF, INF), "infinite"),
        (lambda r: LengthDistribution(-1.0, -5.0), "negative"),
        (lambda r: LengthDistribution(NAN), "nan"),
        (lambda r: 5.0, "invalid"),
        (lambda r: None, "invalid"),
    ],
)
@pytest.mark.parametrize("policy", [FCFS, SRPT])
def test_what_is_no_length_falls_back_and_is_counted(row, kind, policy, caplog):
    async def main(service):
        streams = [await service.submit(str(i), [1, 2], 5) for i in range(6)]
        answers = await asyncio.gather(*map(read, streams))
        assert {a.reason for a in answers} == {"length"}
        await until(lambda: sum(service._predicting.counts.values()) == 6 or policy is FCFS)
        return service._predicting.counts, [s.request.prediction for s in streams]

    counts, predictions = run(main, policy=policy(), predictor=Says(row), fallback_len=33.0, prediction_deadline=1000.0)
    if policy is SRPT:
        assert counts == {**dict.fromkeys(counts, 0), kind: 6}
        assert [p.mean() for p in predictions] == [33.0] * 6
    assert "nobody may see" not in caplog.text
    assert caplog.text.count("KeyError") == (kind == "raised")  # once, not for each


@pytest.mark.parametrize(("change", "kind"), [(lambda rows: rows[1:], "invalid"), (lambda rows: None, "raised")])
def test_a_predictor_that_forgets_one_is_not_believed(change, kind):
    class Short(Says):
        def predict(self, requests):
            return change(super().predict(requests))

    async def main(service):
        stream = await service.submit("x", [1, 2], 5)
        await read(stream)
        return service._predicting.counts[kind], stream.request.prediction.mean()

    assert run(main, policy=SJF(), predictor=Short(by_prompt), fallback_len=5.0, prediction_deadline=1000.0) == (1, 5.0)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (LengthDistribution.point(0.0), ""),
        (LengthDistribution.rank_only(-3.0), ""),
        (LengthDistribution.from_quantiles([0.1, 0.5, 0.9], [1, 5, 9]), ""),
        (LengthDistribution(1.0, None, EDGES * NAN), "nan"),
        (LengthDistribution(INF, 5.0), "infinite"),
        (LengthDistribution(-1.0, 5.0), "negative"),
        (LengthDistribution(1.0, None, EDGES[:3]), "invalid"),
        ("5", "invalid"),
    ],
)
def test_faults(row, kind):
    assert fault(row) == kind


def test_among_ranks_the_middle_one_stands_in():
    """A point would stand anywhere among numbers that are no lengths."""
    got = {}
    said = {3: LengthDistribution(NAN), 4: LengthDistribution.rank_only(50.0)}

    def row(request):
        return said.get(request.rid, LengthDistribution.rank_only(request.rid - 1.0))

    predicting = Predicting(Says(row), 500.0, lambda r, p: got.setdefault(r.rid, p) is p)
    assert predicting.stand_in.mean() == 500.0
    predicting._predict([Request(i, 0.0, 1) for i in range(5)])
    assert [got[i].score for i in range(5)] == [-1.0, 0.0, 1.0, 0.5, 50.0] and got[3].is_rank_only
    assert predicting.counts["nan"] == 1 and predicting.stand_in.score == 0.5


def test_a_prediction_that_nobody_wants_any_more_counts_for_nothing():
    says = Says(raising, held=True)

    async def main(service):
        stream = await service.submit("x", [1, 2], 5)
        await until(lambda: says.batches)
        service.abort(stream)
        assert (await read(stream)).reason == "aborted"
        says.go.set()
        await until(lambda: service._predicting.seconds.num == 1)
        await asyncio.sleep(0.01)
        return service._predicting.counts

    assert not any(run(main, policy=SJF(), predictor=says, fallback_len=5.0, prediction_deadline=1000.0).values())


def test_a_predictor_that_hangs_does_not_keep_a_service_from_closing(monkeypatch):
    monkeypatch.setattr("lengthwise.engine.server.service.GRACE", 0.01)
    says, begun = Says(by_prompt, held=True), WallClock()

    async def main(service):
        await service.submit("x", [1, 2], 5)
        await until(lambda: says.batches)
        threading.Timer(0.5, says.go.set).start()

    with pytest.raises(AssertionError):  # a thread is left
        run(main, policy=SJF(), predictor=says, fallback_len=5.0, prediction_deadline=1000.0)
    says.go.set()
    assert begun.now < 30
    for thread in threading.enumerate():
        if thread.name.startswith("lengthwise-"):
            thread.join(10)


class Words:
    """A tokenizer of words, with a chat template of no weight."""

    chat_template = "any"

    def __call__(self, text, add_special_tokens):
        return SimpleNamespace(input_ids=text.split())

    def apply_chat_template(self, turns, **_):
        return list(range(len(turns)))


def test_of_a_chat_the_last_question_and_the_answers_before_it_are_told():
    talk = [("system", "Be brief"), ("user", "Who?"), ("assistant", "An answer of five words"), ("user", "Why?")]
    read_by = Prompts(SimpleNamespace(tokenizer=Words(), vocab_size=9))
    given = asyncio.run(read_by.chat([Turn(role=role, content=text) for role, text in talk]))
    assert (given.text, given.answers_before, len(given.ids)) == ("Why?", [5], 4)
    seen = []

    def note(request):
        seen.append((request.prompt, request.answers_before))
        return by_prompt(request)

    async def main(service):
        await read(await service.submit("a", [1], 2, prompt=given.text, answers_before=given.answers_before))

    run(main, policy=SRPT(), predictor=Says(note), fallback_len=1.0, prediction_deadline=50.0)
    assert seen == [("Why?", [5])]


# --- refining -----------------------------------------------------------------------------------------------------------


class Anew:
    """Refines every two steps: `say(request, generated)` for each; one that is an exception is raised."""

    every, layer = 2, None

    def __init__(self, say):
        self.say, self.asked = say, []

    def refiner(self, rows, output_len, seed):
        return self

    def refine(self, requests, generated, probes=None):
        self.asked += [(r.prompt_len, g) for r, g in zip(requests, generated, strict=True)]
        rows = [self.say(r, g) for r, g in zip(requests, generated, strict=True)]
        for row in rows:
            if isinstance(row, Exception):
                raise row
        return rows


def test_a_refined_prediction_gives_up_its_slot_in_service():
    """One slot, one long answer predicted as short: told the truth while it decodes, it yields to a shorter one."""
    anew = Anew(lambda request, generated: LengthDistribution.point(400.0 if request.prompt_len == 1 else 5.0))

    async def main(service):
        long = await service.submit("long", [1], 60, predicted_len=2)
        await until(lambda: anew.asked)
        short = await service.submit("short", [1] * 7, 4, predicted_len=5)
        await asyncio.gather(read(long), read(short))
        assert long.request._num_preemptions == 1 and len(service.metrics._refining.counts) == 5
        return service.metrics._refining

    refining = run(main, policy=SRPT(), max_num_seqs=1, refine=anew)
    assert not any(refining.counts.values()) and sum(refining.seconds.counts) > 10
    assert all(generated >= 2 for _, generated in anew.asked)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (RuntimeError("no"), "raised"), (LengthDistribution(NAN, NAN), "nan"), (LengthDistribution(INF, INF), "infinite"),
        (LengthDistribution(-4.0, -4.0), "negative"), ("five", "invalid"),
    ],
)  # fmt: skip
def test_refining_that_fails_changes_nothing_and_is_counted(row, kind):
    async def main(service):
        stream = await service.submit("a", [1, 2], 30, predicted_len=20)
        answer = await read(stream)
        assert len(answer.token_ids) == 30 and stream.request.prediction.mean() == 20.0
        assert service.health().error is None
        return service.metrics._refining.counts

    counts = run(main, policy=SRPT(), refine=Anew(lambda request, generated: row))
    assert counts[kind] > 5 and sum(counts.values()) == counts[kind]


def test_a_refiner_that_says_too_little_changes_nothing():
    anew = Anew(lambda request, generated: LengthDistribution.point(9.0))
    whole = anew.refine
    anew.refine = lambda requests, generated, probes=None: whole(requests, generated)[1:]

    async def main(service):
        stream = await service.submit("a", [1, 2], 20, predicted_len=20)
        await read(stream)
        assert stream.request.prediction.mean() == 20.0
        return service.metrics._refining.counts

    assert run(main, policy=SRPT(), refine=anew)["invalid"] > 2
