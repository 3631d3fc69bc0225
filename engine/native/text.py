"""Text: from tokens to text as they come. What has been given out is final: no split characters, nothing of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_MARK = "\ufffd"  # what tokenizers write for bytes that are no character (yet)
_MOST_HELD = 3  # marks at the end that later tokens can still turn into one character: it has at most 4 bytes
_LONG = 32  # tokens in the window from which on a run of marks is cut


class Detokeniser:
    """Text of one request's tokens, token by token, at a cost that does not grow with the text.

    Only a window of the last tokens is decoded: those that are not yet all given out, after the chunk before them, because many
    tokenizers write a first token without the space before it. A window begins and ends between two characters. Whatever the
    tokens, the pieces add up to the text of all of them; only where a byte-fallback tokenizer unmakes a finished character
    because bytes after it are none, the character stays.

    tokenizer: of transformers, or anything with decode(ids, skip_special_tokens=...); spaces are never cleaned up.
    """

    def __init__(self, tokenizer: Any, skip_special: bool = True) -> None:
        # the wrapper around it takes several times as long
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._skip_special = skip_special
        self._ids: list[int] = []  # the window
        self._done = 0  # tokens of it whose text had been given out, all of it, when the next one came
        self._before = ""  # their text
        self._text = ""  # its text
        self._sent = 0  # characters of that given out

    def feed(self, token_id: int) -> str:
        """The text that is final now and was not before."""
        ids = [*self._ids, token_id]
        text = self._decode(ids)
        if not text.startswith(self._before):  # bytes after a character unmade it; it has been given out and stays
            ids, self._sent = ids[self._done :], self._sent - len(self._before)
            self._done, self._before, text = 0, "", self._decode(ids)
        marked = text.endswith(_MARK)
        if text == self._text and text and not marked:
            return ""  # a special token, or one that means nothing: it need not be kept
        self._ids, self._text = ids, text
        end = len(text)
        if marked:
            end = max(len(text.rstrip(_MARK)), end - _MOST_HELD)
        new = text[self._sent : end]
        self._sent = max(self._sent, end)
        if not marked and text:
            if self._done:
                self._ids = ids[self._done :]
                self._text = self._decode(self._ids)
                self._sent = len(self._text)
            self._done, self._before = len(self._ids), self._text
        elif len(ids) >= _LONG:
            self._cut()
        return new

    @property
    def held(self) -> str:
        """The text of tokens fed that is not final."""
        return self._text[self._sent :]

    def flush(self) -> str:
        """What is held, as it stands; the next token begins a new text."""
        held = self.held
        self._ids, self._done, self._before, self._text, self._sent = [], 0, "", "", 0
        return held

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text

    def _cut(self) -> None:
        """Cut a long window in its middle, where its text comes apart without changing: of four places in a run of single bytes
        one does. Tokens without any text go altogether."""
        if not self._text:
            self._ids = []
            return
        for at in range(len(self._ids) // 2, len(self._ids) // 2 + 4):
            first, second = self._decode(self._ids[:at]), self._decode(self._ids[at:])
            if len(first) <= self._sent and first + second == self._text:
                self._ids, self._text, self._sent = self._ids[at:], second, self._sent - len(first)
                self._done, self._before = 0, ""
                return


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back what may become one, no more.

    First is whichever is complete first; of those complete at one character, the longest. However the text is split, the same
    one is found. One pass over the characters (Aho and Corasick, CACM 1975). Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(stops):
            raise ValueError(f"stops are {stops!r}: strings of at least one character are wanted")
        self.held = ""  # the longest end of the text that begins a stop string
        self.found: str | None = None
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._fail = [0]
        self._match: list[str | None] = [None]  # the longest stop string that ends here
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._fail.append(0)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = stop

    def _link(self) -> None:
        """Where to go on when a character does not fit: the longest end of what was read that begins a stop string."""
        queue = list(self._next[0].values())
        for state in queue:
            for char, child in self._next[state].items():
                queue.append(child)
                self._fail[child] = self._step(self._fail[state], char)
            if self._match[state] is None:
                self._match[state] = self._match[self._fail[state]]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that no stop string can claim any more, and the one found, if any: the text ends before it, and whatever is
        fed after it is dropped."""
        if self.found is not None:
            return "", self.found
        state, first = self._state, self._next[0]
        if not first:
            return text, None
        for at, char in enumerate(text):
            state = self._step(state, char) if state else first.get(char, 0)
            if state and (match := self._match[state]) is not None:
                whole = self.held + text[: at + 1]
                self.held, self._state, self.found = "", 0, match
                return whole[: len(whole) - len(match)], match
        whole = self.held + text
        end = len(whole) - self._depth[state]
        self.held, self._state = whole[end:], state
        return whole[:end], None

    def flush(self) -> str:
        """What is held, when the text ends here."""
        held, self.held, self._state = self.held, "", 0
        return held


class Text:
    """The text of one answer. tokenizer as for Detokeniser. Stop strings are looked for in the text after the first
    min_new_tokens tokens; they, and a token that ends the answer, are not part of it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), min_new_tokens: int = 0, skip_special: bool = True) -> None:
        self._detokeniser = Detokeniser(tokenizer, skip_special)
        self._stops = StopStrings(stops)
        self._unsearched = min_new_tokens
        self._parts: list[str] = []
        self._read = 0

    def take(self, token_id: int, ends: bool = False) -> bool:
        """One more token; `ends`: it ends the answer. Returns whether a stop string does. Nothing may come after either."""
        if not ends:
            new = self._detokeniser.feed(token_id)
            if self._unsearched > 0:
                self._unsearched -= 1
            else:
                new, _ = self._stops.feed(new)
            if new:
                self._parts.append(new)
        return self._stops.found is not None

    @property
    def whole(self) -> str:
        """All of it, were it to end here: with what is held back, unless a stop string ended it."""
        return "".join(self._parts) + self._tail()

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._stops.found

    def new(self) -> str:
        """What has become final since the last call, to be sent on."""
        parts, self._read = self._parts[self._read :], len(self._parts)
        return "".join(parts)

    def last(self) -> str:
        """The rest, once the answer has ended: `new` and what was held back."""
        return self.new() + self._tail()

    def _tail(self) -> str:
        return "" if self.stop is not None else self._stops.held + self._detokeniser.held
