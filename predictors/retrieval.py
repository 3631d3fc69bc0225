"""Retrieval: a new prompt's answer is as long as the answers to the most similar past prompts were, as a distribution.

SageSched (arXiv 2603.07917) predicts a length distribution from the history of semantically similar prompts. Departures: TF-IDF
cosine in place of a sentence embedding, which one sparse product answers; the history is what the predictor was fitted on and
does not grow while serving; few or distant neighbours are filled up with the distribution of all lengths.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lengthwise.sched import EDGES

from .buckets import marginal_survival
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts
from .tfidf import Tfidf


class Retrieval(LengthPredictor):
    """The num_neighbours nearest past prompts weigh similarity^sharpness each; prior: the weight of all lengths beside them.

    The distribution is the weighted Kaplan-Meier estimate: a censored neighbour says only that its answer is longer. Beyond
    the longest neighbour lengths go on as all training lengths do. The artefact keeps past prompts as TF-IDF rows, not as text.
    """

    name = "retrieval"
    needs_text = True

    def __init__(
        self,
        num_neighbours: int = 128,
        sharpness: float = 2.0,
        prior: float = 0.3,
        num_terms: int = 20_000,
        latency: LatencyModel | None = None,
    ) -> None:
        if num_neighbours < 1 or not 0.0 < sharpness < float("inf") or not 0.0 < prior < float("inf"):
            raise ValueError(f"num_neighbours={num_neighbours}: at least 1; {sharpness=}, {prior=}: finite and positive")
        self.num_neighbours, self.sharpness, self.prior, self.num_terms = num_neighbours, sharpness, prior, num_terms
        self.latency = latency
        self._tfidf = Tfidf(num_terms)
        self._past: Any = None  # scipy CSR (terms, N): the training rows, turned
        self._lengths: Floats = np.zeros(0)
        self._censored = np.zeros(0, dtype=bool)
        self._marginal: Floats = np.zeros(0)

    @property
    def fitted(self) -> bool:
        return self._past is not None

    def learn(self, rows: TrainingRows) -> None:
        self._marginal = marginal_survival(rows.lengths, rows.censored)
        self._past = self._tfidf.fit(rows.prompts.texts or ()).T.tocsr()
        self._lengths, self._censored = rows.lengths, rows.censored

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        near = self._tfidf.transform(prompts.texts or ()) @ self._past  # (n, N) similarities, sparse, each row by itself
        near.sort_indices()
        survival = np.empty((len(prompts), EDGES.size))
        for i in range(len(prompts)):
            row = slice(near.indptr[i], near.indptr[i + 1])
            survival[i] = self._near(near.indices[row], near.data[row])
        return Predictions.from_survivals(survival)

    def _near(self, past: Any, similarity: Floats) -> Floats:
        """P(L > e) for e of EDGES from the similar past rows (M,), whatever M."""
        if len(past) > self.num_neighbours:
            best = np.argsort(-similarity, kind="stable")[: self.num_neighbours]  # ties: who came first
            past, similarity = past[best], similarity[best]
        weight = np.minimum(similarity, 1.0) ** self.sharpness
        whole = float(weight.sum())
        if whole <= 0.0:
            return self._marginal
        own = weighted_survival(self._lengths[past], self._censored[past], weight, self._marginal)
        return (whole * own + self.prior * self._marginal) / (whole + self.prior)

    def state(self) -> State:
        self._need_fitted()
        arrays = {
            "idf": self._tfidf.idf, "past_data": self._past.data, "past_indices": self._past.indices,
            "past_indptr": self._past.indptr, "lengths": self._lengths, "censored": self._censored, "marginal": self._marginal,
        }  # fmt: skip
        return State({}, arrays, {"vocabulary": self._tfidf.vocabulary_text})

    def restore(self, state: State) -> None:
        from scipy.sparse import csr_matrix

        a = state.arrays
        self._tfidf = Tfidf.from_text(state.texts["vocabulary"], a["idf"])
        self._lengths, self._censored, self._marginal = a["lengths"], a["censored"], a["marginal"]
        shape = (len(a["idf"]), len(self._lengths))
        self._past = csr_matrix((a["past_data"], a["past_indices"], a["past_indptr"]), shape=shape)


def weighted_survival(lengths: Floats, censored: Any, weight: Floats, marginal: Floats) -> Floats:
    """P(L > e) for e of EDGES (len(EDGES),): Kaplan-Meier over M >= 1 lengths of positive weight, censored ones lower bounds.

    What is left beyond the greatest length falls as `marginal` (len(EDGES),) does from there.
    """
    order = np.lexsort((censored, lengths))  # at equal lengths a censored one was still at risk
    x, cut, w = lengths[order], censored[order], weight[order]
    at_risk = np.cumsum(w[::-1])[::-1]
    left = np.concatenate(([1.0], np.cumprod(np.where(cut, 1.0, np.maximum(1.0 - w / at_risk, 0.0)))))
    out = left[np.searchsorted(x, EDGES, side="right")]
    start = int(np.searchsorted(EDGES, x[-1], side="left"))  # the first edge that no neighbour passed
    if start < EDGES.size and left[-1] > 0.0 and marginal[start] > 0.0:
        out[start:] = left[-1] * marginal[start:] / marginal[start]
    return out
