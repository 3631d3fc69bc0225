"""What a client reads out of a stream: events cut anywhere, tokens of any channel, counts by usage and by events."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.experiments.bench import sse
from lengthwise.experiments.bench.answer import Answer, StreamError
from lengthwise.experiments.bench.sse import Events


@given(st.lists(st.integers(1, 7), max_size=30), st.booleans())
def test_events_are_the_same_however_the_bytes_are_cut(cuts, crlf):
    text = 'data: {"a": "\u00e9"}\n\n: a comment\n\nid: 3\ndata: one\ndata:two\n\ndata: [DONE]\n\ndata: not whole\n'
    whole = (text.replace("\n", "\r\n") if crlf else text).encode()
    events, found, at = Events(), [], 0
    for cut in cuts:
        found += events.feed(whole[at : at + cut])
        at += cut
    found += events.feed(whole[at:])
    assert [data.decode() for data in found] == ['{"a": "\u00e9"}', "one\ntwo", "[DONE]"]


def test_a_line_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "LIMIT", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        list(Events().feed(b"data: " + b"x" * 200))


def text(said="", finish=None, usage=None, **more):
    return {"choices": [{"text": said, "finish_reason": finish, **more}], "usage": usage}


def delta(finish=None, usage=None, **said):
    return {"choices": [{"delta": said, "finish_reason": finish}], "usage": usage}


def count(n, **more):
    return {"choices": [], "usage": {"completion_tokens": n, **more}}


def answer_of(*events):
    """Events come one second apart, from 1 s on."""
    answer = Answer()
    for at, event in enumerate(events, 1):
        answer.take(event, float(at))
    return answer


def tokens(answer):
    times, sizes = answer.tokens()
    assert int(sizes.sum()) == answer.num_tokens and (sizes > 0).all() and (times[1:] > times[:-1]).all()
    return times.tolist(), sizes.tolist()


def test_the_first_token_is_of_any_channel_and_never_a_role():  # M6
    answer = answer_of(
        delta(role="assistant", content=""), delta(reasoning_content="hm"), delta(reasoning="so"), delta(content="yes"),
        delta(finish="stop"), count(4),
    )  # fmt: skip
    assert tokens(answer)[0][0] == 2.0 and answer.first_content == 4.0
    assert answer_of(delta(tool_calls=[{"index": 0}])).tokens()[0].tolist() == [1.0]
    assert math.isnan(answer_of(delta(reasoning="x"), delta(finish="stop")).first_content)


def test_tokens_that_are_spaces_count():  # M7
    answer = answer_of(*[text(" ")] * 14, text(" ", "length"), count(15, prompt_tokens=3))
    assert answer.num_tokens == 15 == answer.num_seen and answer.miscount == 0 and answer.prompt_count == 3


def test_without_usage_events_are_counted_and_with_it_usage():  # M7
    assert answer_of(text("a"), text("b", "length")).num_tokens == 2
    assert answer_of(text("a"), text("b", "length")).count is None
    short = answer_of(text("ab"), text("cd"), text("ef", "length"), count(6))
    assert short.num_tokens == 6 and short.miscount == 3 and tokens(short) == ([1.0, 2.0, 3.0], [2, 2, 2])
    long = answer_of(*[text("x")] * 5, text("x", "length"), count(2))
    assert long.num_tokens == 2 and long.miscount == -4 and sum(tokens(long)[1]) == 2 and tokens(long)[0][0] == 1.0


@given(st.integers(1, 40), st.integers(1, 120))
def test_whatever_the_counts_tokens_add_up_and_the_first_time_stays(num_events, n):
    answer = answer_of(*[text("x")] * num_events, text("x", "length"), count(n))
    times, _ = tokens(answer)
    assert times[0] == 1.0


def test_an_end_token_has_no_text_and_comes_with_the_reason():
    answer = answer_of(text("a"), text("b"), text("", "stop"), count(3))
    assert tokens(answer) == ([1.0, 2.0, 3.0], [1, 1, 1]) and answer.miscount == 0
    assert tokens(answer_of(text("", "stop"), count(1))) == ([1.0], [1])
    assert tokens(answer_of(text("", "stop"), count(0))) == ([], [])


def test_events_without_text_are_tokens_where_the_count_says_so():
    silent = [text(), text("a"), text(), text("", "length")]
    assert tokens(answer_of(*silent, count(4))) == ([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1])
    assert tokens(answer_of(*silent, count(3))) == ([1.0, 2.0, 3.0], [1, 1, 1])
    assert tokens(answer_of(*silent)) == ([2.0], [1]) == tokens(answer_of(*silent, count(1)))
    role = answer_of(delta(role="assistant", content=""), delta(content="a"), delta(content="", finish="stop"), count(2))
    assert tokens(role) == ([2.0, 3.0], [1, 1]) and role.miscount == 0


def test_where_no_event_tells_when_tokens_came_the_first_is_not_made_up():
    answer = answer_of(text("", "length"), count(5))
    assert math.isnan(answer.first_token) and answer.num_tokens == 5 == answer.miscount and tokens(answer) == ([1.0], [5])
    assert math.isnan(answer_of(text("", "stop"), count(0)).first_token)
    assert answer_of(text("a")).first_token == 1.0


def test_a_count_with_every_event_says_how_many_tokens_each_holds():  # M5
    usage = [{"completion_tokens": n} for n in (0, 3, 3, 5, 9)]
    said = [text("", usage=usage[0]), text("abc", usage=usage[1]), text("", usage=usage[2]), text("de", usage=usage[3])]
    answer = answer_of(*said, text("fghi", "length", usage=usage[4]), count(9))
    assert tokens(answer) == ([2.0, 4.0, 5.0], [3, 2, 4]) and answer.miscount == 0


def test_a_count_with_the_last_event_alone_is_not_all_its_own():
    answer = answer_of(text("a"), text("b"), text("c", "length", usage={"completion_tokens": 3}))
    assert tokens(answer) == ([1.0, 2.0, 3.0], [1, 1, 1])
    assert tokens(answer_of(text("all at once", "stop", usage={"completion_tokens": 5}))) == ([1.0], [5])


def test_ids_say_how_many_tokens_an_event_holds():
    assert tokens(answer_of(text("ab", token_ids=[1, 2]), text("c", "length", token_ids=[3]))) == ([1.0, 2.0], [2, 1])


def test_cached_tokens_are_taken_from_usage():
    assert answer_of(count(1, prompt_tokens_details={"cached_tokens": 16})).cached == 16
    assert answer_of(count(1, prompt_tokens_details=None)).cached is None


def test_an_error_in_the_stream_is_raised():
    with pytest.raises(StreamError, match="out of memory"):
        answer_of(text("a"), json.loads('{"error": {"message": "out of memory"}}'))
