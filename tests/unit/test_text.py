"""Text as tokens come: pieces add up to the whole, no character is split, and no stop string leaks or is missed."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from lengthwise.engine.native.text import Detokeniser, StopStrings, Text

WORDS = ["the cat's hat, naive: naïve café", "你好世界 こんにちは", "😀😀 👩‍👩‍👧 🇫🇷 é", "привет\n\n  мир\t42"]


def byte_level() -> Tokenizer:
    """Byte-level BPE: characters of several bytes come apart into tokens; two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words carry the space before them, the first space of a text is left out, unknown characters are
    bytes, one token each."""
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁the", "▁cat", "s", "'", "▁▁", "c", "at", "é"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """Spaces between words come from the decoder, which takes some of them away again."""
    pieces = ["[UNK]", "the", "cat", "##s", "##ing", ".", ",", "n't", "'", "do", "!", "a"]
    tokenizer = Tokenizer(models.WordPiece(vocab={p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK, WORD_PIECE = byte_level(), byte_fallback(), word_piece()


def pieces_of(tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokeniser = Detokeniser(tokenizer, skip_special)
    return [*(detokeniser.feed(i) for i in ids), detokeniser.flush()]


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60), skip=st.booleans())
def test_pieces_of_any_tokens_add_up_to_their_text(ids, skip):
    """Any bytes in any order, invalid ones included."""
    assert "".join(pieces_of(BYTE_LEVEL, ids, skip)) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


def byte_ids() -> list[int]:
    """The token of each byte; byte-level tokenizers write bytes that do not print as the characters from 256 on."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    chars = {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [BYTE_LEVEL.token_to_id(chars[byte]) for byte in range(256)]


BYTE_IDS = byte_ids()


@settings(max_examples=200)
@given(data=st.lists(st.sampled_from(b"\xf0\x9f\xe4\xbd\xc3\xff"), min_size=30, max_size=200))
def test_pieces_of_long_runs_of_broken_characters_add_up(data):
    """Hardly ever a whole character, so that the window has to be cut, and not within one that is unfinished."""
    ids = [BYTE_IDS[byte] for byte in data]
    assert BYTE_LEVEL.decode(ids) == bytes(data).decode(errors="replace")
    assert "".join(pieces_of(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@settings(max_examples=100)
@given(text=st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30))
def test_no_piece_of_a_valid_text_holds_half_a_character(text):
    ids = BYTE_LEVEL.encode(text).ids
    pieces = pieces_of(BYTE_LEVEL, ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""  # nothing is held back when a text ends with a whole character


@settings(max_examples=200)
@given(ids=st.lists(st.integers(258, 266) | st.sampled_from([1, 258, 260]), max_size=40), skip=st.booleans())
def test_pieces_add_up_where_the_first_space_is_left_out(ids, skip):
    assert "".join(pieces_of(BYTE_FALLBACK, ids, skip)) == BYTE_FALLBACK.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200)
@given(words=st.lists(st.sampled_from(["▁the", "▁cat", "s", "é", "你", "😀", "ß", "▁"]), max_size=20))
def test_pieces_add_up_where_unknown_characters_are_bytes(words):
    ids = []
    for word in words:
        known = BYTE_FALLBACK.token_to_id(word)
        ids += [known] if known is not None else [2 + byte for byte in word.encode()]
    pieces = pieces_of(BYTE_FALLBACK, ids)
    assert "".join(pieces) == BYTE_FALLBACK.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_stays_when_bytes_after_it_are_none():
    """Byte fallback decodes a run of bytes as a whole; what has been given out cannot be taken back."""
    ids = [2 + byte for byte in "é".encode()] + [2 + 0xFF, BYTE_FALLBACK.token_to_id("c")]
    assert BYTE_FALLBACK.decode(ids) == "\ufffd\ufffd\ufffdc"
    assert pieces_of(BYTE_FALLBACK, ids) == ["", "é", "", "\ufffdc", ""]


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 11), max_size=30))
def test_pieces_add_up_where_the_decoder_sets_the_spaces(ids):
    assert "".join(pieces_of(WORD_PIECE, ids)) == WORD_PIECE.decode(ids)


def test_a_character_comes_out_with_its_last_token():
    ids = BYTE_LEVEL.encode("🦊", add_special_tokens=False).ids
    assert len(ids) > 1
    assert pieces_of(BYTE_LEVEL, ids) == [""] * (len(ids) - 1) + ["🦊", ""]


def test_half_a_character_at_the_end_is_flushed_as_the_tokenizer_has_it():
    ids = BYTE_LEVEL.encode("a🦊").ids[:-1]
    assert pieces_of(BYTE_LEVEL, ids)[-1] == BYTE_LEVEL.decode(ids)[1:] != ""


def test_special_tokens_leave_no_trace_or_are_shown():
    a, b = BYTE_LEVEL.encode("a").ids, BYTE_LEVEL.encode("b").ids
    assert pieces_of(BYTE_LEVEL, [0, *a, 1, 1, *b]) == ["", "a", "", "", "b", ""]
    assert "".join(pieces_of(BYTE_LEVEL, [0, *a, 1, *b], skip_special=False)) == "<s>a</s>b"
    half = BYTE_LEVEL.encode("🦊").ids
    assert "".join(pieces_of(BYTE_LEVEL, [half[0], 1, *half[1:]])) == "🦊"


def test_transformers_tokenizers_work():
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL, eos_token="</s>")
    ids = [*BYTE_LEVEL.encode("naïve café , 😀 .").ids, 1]
    assert "".join(pieces_of(wrapped, ids)) == wrapped.decode(ids, skip_special_tokens=True)


class Counting:
    """A tokenizer that counts the tokens it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.num_tokens, self.longest = tokenizer, 0, 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self.num_tokens += len(ids)
        self.longest = max(self.longest, len(ids))
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    "unit",
    [
        BYTE_LEVEL.encode("the cat's hat").ids,
        BYTE_LEVEL.encode("😀").ids,
        [1],
        BYTE_LEVEL.encode("a").ids + [1] * 40,
        BYTE_LEVEL.encode("🦊").ids[:1],
        BYTE_LEVEL.encode("🦊").ids[1:2],
    ],
    ids=["words", "emoji", "special", "mostly special", "first bytes", "middle bytes"],
)
def test_a_token_costs_the_same_however_long_the_text(unit):
    counting = Counting(BYTE_LEVEL)
    ids = (unit * 2000)[:2000]
    assert "".join(pieces_of(counting, ids)) == BYTE_LEVEL.decode(ids)
    assert counting.longest <= 40
    assert counting.num_tokens <= 45 * len(ids)


def test_smollm2s_tokens_add_up():
    from lengthwise.engine.native.gguf import converted
    from lengthwise.engine.native.loading import read_tokenizer, smollm2_file

    try:
        folder = converted(smollm2_file())
    except ValueError as error:
        pytest.skip(str(error))
    tokenizer = read_tokenizer(str(folder), True)

    @settings(max_examples=100)
    @given(ids=st.lists(st.integers(0, len(tokenizer) - 1), max_size=80), text=st.text(max_size=40))
    def add_up(ids, text):
        for tokens in (ids, tokenizer.encode(text)):
            assert "".join(pieces_of(tokenizer, tokens)) == tokenizer.decode(tokens, skip_special_tokens=True)

    add_up()


# --- stop strings -----------------------------------------------------------------------------------------------------


def search(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first, of several the longest, and the text before it."""
    for end in range(1, len(text) + 1):
        here = [stop for stop in stops if text[:end].endswith(stop)]
        if here:
            stop = max(here, key=len)
            return text[: end - len(stop)], stop
    return text, None


def could_begin(stops: list[str], text: str) -> int:
    """Characters at the end of `text` that begin a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


some_stops = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500)
@given(stops=some_stops, pieces=st.lists(st.text("abc", max_size=6), max_size=8))
def test_s19_a_stop_is_found_across_any_split_and_no_more_is_held_than_could_become_one(stops, pieces):
    # S19
    finder = StopStrings(stops)
    out, seen = "", ""
    for piece in pieces:
        emitted, stop = finder.feed(piece)
        out, seen = out + emitted, seen + piece
        before, want = search(stops, seen)
        assert stop == want
        if stop is not None:
            assert out == before and finder.flush() == "" and finder.feed("more") == ("", stop)
            return
        assert len(seen) - len(out) == could_begin(stops, seen)
    assert out + finder.flush() == seen


def fed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    finder = StopStrings(stops)
    return [finder.feed(piece)[0] for piece in pieces], finder.found


def test_s19_nothing_of_a_stop_string_is_emitted():
    # S19
    assert fed(["DEFGHIJ"], ["DEF", "G", "HI", "J"]) == ([""] * 4, "DEFGHIJ")
    assert fed(["stop"], ["please ", "stop!"]) == (["please ", ""], "stop")
    assert fed(["stop"], ["st", "op!"]) == (["", ""], "stop")
    assert fed(["stop"], ["st", "art"]) == (["", "start"], None)


def test_overlapping_candidates():
    assert fed(["aab"], ["aa", "a", "b"]) == (["", "a", ""], "aab")
    assert fed(["abcd", "bc"], ["a", "b", "c", "d"]) == (["", "", "a", ""], "bc")  # complete first
    assert fed(["abcd", "bc"], ["abcd"]) == (["a"], "bc")  # the same when it comes at once
    assert fed(["b", "ab"], ["ab"]) == ([""], "ab")  # complete together: the longest
    assert fed(["abab", "abc"], ["ab", "ab"]) == (["", ""], "abab")


def test_what_is_held_is_flushed():
    finder = StopStrings(["</end>"])
    assert finder.feed("x </en") == ("x ", None)
    assert finder.held == "</en" and finder.flush() == "</en" and finder.held == ""
    assert finder.feed("d>") == ("d>", None)  # a new text


def test_without_stops_all_goes_through():
    assert fed([], ["a", "", "b"]) == (["a", "", "b"], None)
    for wrong in ([""], "text"):
        with pytest.raises(ValueError, match="at least one character"):
            StopStrings(wrong)


def test_the_length_of_a_stop_string_does_not_matter():
    """The worst case of comparing ends one by one: a stop string that nearly matches all the time."""

    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(5):
            finder = StopStrings(["a" * length + "b"])
            finder.feed("a" * length)
            start = time.perf_counter()
            for _ in range(1000):
                finder.feed("aaaaa")
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(10_000) < 30 * seconds(10)


# --- both together ----------------------------------------------------------------------------------------------------


def tokens(*texts: str) -> list[int]:
    return [i for text in texts for i in BYTE_LEVEL.encode(text).ids]


def test_text_ends_before_a_stop_string():
    text = Text(BYTE_LEVEL, ["END"])
    told = [text.take(i) for i in tokens("🦊 is ", "EN", "D", " more")]
    assert told.index(True) == len(tokens("🦊 is ", "END")) - 1
    assert text.whole == "🦊 is " and text.stop == "END"
    assert text.new() == "🦊 is " and text.new() == "" and text.last() == ""


def test_text_without_a_stop_has_all_of_it_at_any_time():
    text = Text(BYTE_LEVEL, ["END"])
    ids = tokens("a EN")
    assert not any(text.take(i) for i in ids)
    assert text.new() == "a " and text.whole == "a EN"
    assert text.last() == "EN"
    half = BYTE_LEVEL.encode("🦊").ids[:-1]
    for i in half:
        text.take(i)
    assert text.whole == BYTE_LEVEL.decode(ids + half)


def test_a_token_that_ends_the_answer_is_no_part_of_its_text():
    text = Text(BYTE_LEVEL)
    for i in tokens("yes"):
        text.take(i)
    assert text.take(tokens("!")[0], ends=True) is False
    assert text.whole == "yes" and text.stop is None


def test_no_stop_string_before_min_new_tokens():
    ids = tokens("x", "x", "x", "x")
    assert len(ids) == 4
    text = Text(BYTE_LEVEL, ["x"], min_new_tokens=2)
    assert [text.take(i) for i in ids[:3]] == [False, False, True]
    assert text.whole == "xx"
