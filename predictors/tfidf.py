"""TF-IDF over words and pairs of words, with a vocabulary that saves as plain text.

The same weights as the textbook: (1 + log tf) x (1 + log((1 + N) / (1 + df))), rows of unit length. It is written out here
because an artefact must load without pickle and under any version of another library.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .features import ends_of

_TOKEN = re.compile(r"\w+|[^\w\s]")


def terms(prompt: str) -> list[str]:
    """Lower-case words and marks of a prompt's ends, then its neighbouring pairs joined by a blank."""
    return _with_pairs(_words(prompt))


def placed_terms(prompt: str) -> list[str]:
    """`terms`, and with their place those that begin or end a prompt, where it says what it wants: each of the first three
    words, the first two, three and four together, the first twelve as being near the start, and the last three."""
    words = _words(prompt)
    starts = ["^ " + " ".join(words[:n]) for n in (2, 3, 4) if n <= len(words)]
    near = [f"/{word}" for word in words[:12]]
    return [*_with_pairs(words), *(f"^{word}" for word in words[:3]), *starts, *near, *(f"{word}$" for word in words[-3:])]


def _words(prompt: str) -> list[str]:
    return _TOKEN.findall(ends_of(prompt).lower())


def _with_pairs(words: list[str]) -> list[str]:
    return words + [f"{a} {b}" for a, b in pairwise(words)]


class Tfidf:
    """Term weights learned from training prompts. num_terms: the most frequent terms kept, each in 2 prompts or more. places:
    of `placed_terms` instead of `terms`."""

    def __init__(self, num_terms: int = 20_000, places: bool = False) -> None:
        if num_terms < 1:
            raise ValueError(f"num_terms={num_terms}: at least 1")
        self.num_terms, self._terms = num_terms, placed_terms if places else terms
        self.vocabulary: dict[str, int] = {}
        self.idf: NDArray[np.float64] = np.zeros(0)

    def fit(self, prompts: Sequence[str]) -> Any:
        """Learn the vocabulary from (N,) prompts; returns their rows as `transform` would, a scipy CSR matrix (N, terms)."""
        counted = [Counter(self._terms(p)) for p in prompts]
        df: Counter[str] = Counter()
        for row in counted:
            df.update(row.keys())
        kept = sorted((t for t, n in df.items() if n > 1), key=lambda t: (-df[t], t))[: self.num_terms]
        self.vocabulary = {t: i for i, t in enumerate(kept)}
        self.idf = 1.0 + np.log((1.0 + len(prompts)) / (1.0 + np.array([df[t] for t in kept], dtype=np.float64)))
        return self._rows(counted, len(counted))

    def transform(self, prompts: Sequence[str]) -> Any:
        """(N,) prompts -> scipy CSR matrix (N, terms)."""
        return self._rows((Counter(self._terms(p)) for p in prompts), len(prompts))

    @property
    def vocabulary_text(self) -> str:
        """The terms in column order, one a line; no term holds a line break."""
        return "\n".join(self.vocabulary)

    @classmethod
    def from_text(cls, text: str, idf: NDArray[np.float64], places: bool = False) -> Tfidf:
        """The inverse of `vocabulary_text` with its weights. Raises ValueError when their numbers differ."""
        kept = text.split("\n") if text else []
        if len(kept) != len(idf):
            raise ValueError(f"{len(kept)} terms and {len(idf)} weights")
        out = cls(max(len(kept), 1), places)
        out.vocabulary = {t: i for i, t in enumerate(kept)}
        out.idf = idf
        return out

    def _rows(self, counted: Sequence[Counter[str]] | Iterator[Counter[str]], num_rows: int) -> Any:
        from scipy.sparse import csr_matrix

        index, value, start = [], [], [0]
        known = self.vocabulary
        for row in counted:
            for term, n in row.items():
                i = known.get(term)
                if i is not None:
                    index.append(i)
                    value.append(n)
            start.append(len(index))
        columns = np.array(index, dtype=np.int32)
        weights = (1.0 + np.log(np.array(value, dtype=np.float64))) * self.idf[columns]
        sizes = np.diff(start)
        row_of = np.repeat(np.arange(num_rows), sizes)
        norm = np.sqrt(np.bincount(row_of, weights=weights**2, minlength=num_rows))  # row by row: no batch effect
        weights /= norm[row_of]
        return csr_matrix((weights, columns, np.array(start)), shape=(num_rows, len(known)))
