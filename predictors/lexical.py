"""Lexical: short, medium or long from 19 lexical features, as Clairvoyant does it (arXiv 2606.07248), with calibrated lengths.

As in the paper's released code: 6 features of the text and the first of 12 verbs that it names, classes below 200 tokens, below
800, and above, boosted trees of depth 6. Departs from it so: LightGBM in place of XGBoost; the first verb by a list of words in
place of its patterns, and tokens of the workload in place of a quarter of the characters; the prediction is not the class but
the mixture of the classes' distributions, its odds tempered on rows left out (Guo et al., ICML 2017); where a workload has no
answers in a class, the classes are the thirds of its training answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lengthwise.sched import EDGES

from .boosting import Booster
from .calibration import Residuals, lift_censored, soft_log, soft_offset
from .features import ends_of, refuse_label_columns, refuse_other_features
from .latency import LatencyModel
from .predictions import Predictions
from .predictor import Floats, LengthPredictor, State, TrainingRows
from .prompts import Prompts

# The first of these that a text names is its verb, in this order; some are told apart only to be `other`.
_VERBS = (
    ("summarize", "summarize summarizing summarise summarising"), ("explain", "explain"), ("compare", "compare comparing"),
    ("other", "translate translating"), ("generate", "generate generating"), ("implement", "implement"),
    ("other", "debug refactor"), ("list", "list"), ("write", "write"), ("describe", "describe describing"),
    ("define", "define defining"), ("what", "what"), ("how", "how"), ("why", "why"),
)  # fmt: skip
_NAMED = tuple(verb for verb, _ in _VERBS if verb != "other")
_WORDS_OF = tuple((verb, frozenset(words.split())) for verb, words in _VERBS)
LEXICAL: tuple[str, ...] = (
    "num_tokens", "has_code_word", "limits_length", "ends_question", "has_format_word", "num_clauses",
    *(f"verb_{verb}" for verb in _NAMED), "verb_other",
)  # fmt: skip

_CODE_WORDS = """
    code function def class script program implement algorithm debug refactor import variable loop recursion api sql regex react
    angular vue nextjs typescript javascript html css node express django flask component endpoint middleware query
"""
_CODE = frozenset(_CODE_WORDS.split())
_FORMAT = re.compile(r"list|table|bullet|step by step|enumerate|outline|numbered|format|structure")
_LIMIT = re.compile(
    r"\b(?:in \d+ (?:word|sentence)s?|no more than \d+|under \d+ words?|briefly|concisely|shortly|one[ -]liner|tl;?dr)\b"
)
_CLAUSE = re.compile(r"[,;]| (?:and|but|because) ")
_WORD = re.compile(r"[^\W_]+")

CLASSES = ("short", "medium", "long")
BOUNDS = (200.0, 800.0)  # tokens: the least of medium, and of long
MIN_IN_CLASS = 20  # uncensored answers; with fewer the paper's bounds say nothing here
_TEMPERATURES = np.geomspace(0.25, 8.0, 41)


def _row(prompt: str, prompt_len: float) -> list[float]:
    low = ends_of(prompt).lower()
    words = frozenset(_WORD.findall(low))
    verb = next((verb for verb, names in _WORDS_OF if not words.isdisjoint(names)), "other")
    return [
        prompt_len, not words.isdisjoint(_CODE), _LIMIT.search(low) is not None, low.rstrip().endswith("?"),
        _FORMAT.search(low) is not None, len(_CLAUSE.findall(low)), *(verb == name for name in _NAMED), verb == "other",
    ]  # fmt: skip


def lexical_features(texts: Sequence[str], prompt_len: ArrayLike) -> Floats:
    """(N,) texts and their lengths in tokens -> (N, 19), columns in the order of LEXICAL."""
    lens = np.asarray(prompt_len, dtype=np.float64).tolist()
    return np.array([_row(text, n) for text, n in zip(texts, lens, strict=True)], dtype=np.float64).reshape(-1, len(LEXICAL))


class Lexical(LengthPredictor):
    """LightGBM over the 19 features says the odds of the three classes; a row's distribution is the classes', mixed by them."""

    name = "lexical"
    needs_text = True

    def __init__(
        self,
        num_rounds: int = 100,
        num_leaves: int = 31,
        learning_rate: float = 0.05,
        num_folds: int = 5,
        latency: LatencyModel | None = None,
    ) -> None:
        if num_folds < 2:
            raise ValueError(f"num_folds={num_folds}: at least 2")
        self.num_rounds, self.num_leaves, self.learning_rate, self.num_folds = num_rounds, num_leaves, learning_rate, num_folds
        self.latency = latency
        self._new()  # refuses bad values here, not after minutes
        self._classes: Booster | None = None
        self._temperature = 1.0
        self._bounds: tuple[float, float] = BOUNDS
        self._survivals: Floats = np.zeros((0, EDGES.size))  # of each class

    @property
    def fitted(self) -> bool:
        return self._classes is not None

    def learn(self, rows: TrainingRows) -> None:
        offset, cut, fold = soft_offset(rows.lengths), rows.censored, rows.folds(self.num_folds)
        x, observed = lexical_features(rows.prompts.texts or (), rows.prompts.prompt_len), soft_log(rows.lengths, offset)
        refuse_label_columns(x, LEXICAL, observed)
        whole = Residuals.fit(np.zeros(len(observed)), observed, cut, offset)
        self._bounds = _bounds(rows.lengths[~cut])
        lifted = lift_censored(np.full(len(observed), float(np.median(observed))), observed, cut)
        of = np.searchsorted(soft_log(self._bounds, offset), lifted, side="right")
        self._survivals = _by_class(whole, self._bounds)

        labels, odds = of.astype(np.float64), np.empty((len(of), len(CLASSES)))
        for k in range(int(fold.max()) + 1):
            left_out = fold == k
            odds[left_out] = _logs(self._new().fit(x[~left_out], labels[~left_out]).predict(x[left_out]))
        loss = [-np.mean(_softmax(odds / t, log=True)[np.arange(len(of)), of]) for t in _TEMPERATURES]
        self._temperature = float(_TEMPERATURES[int(np.argmin(loss))])
        self._classes = self._new().fit(x, labels)

    def _new(self) -> Booster:
        return Booster(
            self.num_rounds, self.num_leaves, self.learning_rate, "multiclass", num_class=len(CLASSES), max_depth=6
        )  # fmt: skip

    def predict_columns(self, prompts: Prompts) -> Predictions:
        self._need_fitted(prompts)
        assert self._classes is not None
        x = lexical_features(prompts.texts or (), prompts.prompt_len)
        share = _softmax(_logs(self._classes.predict(x)) / self._temperature)
        out = np.zeros((len(prompts), EDGES.size))
        for k in range(len(CLASSES)):  # not a product: rows must not depend on their batch
            out += share[:, k : k + 1] * self._survivals[k]
        return Predictions.from_survivals(np.minimum(out, 1.0))  # shares add up to 1 but for the last bit

    def state(self) -> State:
        self._need_fitted()
        assert self._classes is not None
        values = {"temperature": self._temperature, "bounds": list(self._bounds)}
        return State(values, {"survivals": self._survivals}, {"classes": self._classes.text}, LEXICAL)

    def restore(self, state: State) -> None:
        refuse_other_features(state.features, LEXICAL)
        self._temperature, (low, high) = float(state.values["temperature"]), state.values["bounds"]
        self._bounds, self._survivals = (float(low), float(high)), state.arrays["survivals"]
        self._classes = Booster.from_text(state.texts["classes"])


def _bounds(lengths: Floats) -> tuple[float, float]:
    """The paper's bounds, or the thirds of `lengths` (N,) where one of its classes is nearly empty."""
    counts = np.bincount(np.searchsorted(BOUNDS, lengths, side="right"), minlength=len(CLASSES))
    if counts.min() >= MIN_IN_CLASS:
        return BOUNDS
    low, high = np.quantile(lengths, (1 / 3, 2 / 3)).tolist()
    return low, max(high, low + 1.0)


def _by_class(whole: Residuals, bounds: tuple[float, float]) -> Floats:
    """The survival of each class on EDGES (classes, len(EDGES)): the whole distribution, given that a length is in it."""
    x = np.concatenate(([0.0], EDGES))
    survival = np.concatenate(([1.0], whole.survival(np.zeros(1))[0]))
    at = np.interp([0.0, *bounds], x, survival)
    out: list[NDArray[Any]] = []
    for k, high in enumerate(at):
        low = at[k + 1] if k + 1 < len(at) else 0.0
        out.append(np.clip((survival[1:] - low) / max(high - low, 1e-12), 0.0, 1.0))
    return np.array(out)


def _logs(probabilities: Floats) -> Floats:
    return np.log(np.maximum(probabilities, 1e-12))


def _softmax(odds: Floats, log: bool = False) -> Floats:
    """Rows of log odds (N, K) as (the logs of) probabilities."""
    top = odds - odds.max(axis=1, keepdims=True)
    logs = top - np.log(np.exp(top).sum(axis=1, keepdims=True))
    return np.asarray(logs if log else np.exp(logs))
