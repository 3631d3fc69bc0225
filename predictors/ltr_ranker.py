"""LTR's ranker: an OPT-125M that puts prompts in the order of their answers' lengths, and says no lengths."""

from __future__ import annotations

from .encoder import Encoder


class LTRRanker(Encoder):
    """Learning to rank (Fu et al., NeurIPS 2024), as its released code: OPT-125M, ListMLE over batches of 32, lengths grouped
    by 10 and capped at 8,192, the first 2,048 tokens of the prompt, 2e-5 without a schedule, weight decay 0.01, 5 epochs.

    Departures: AdamW where the code has Adam; float32 throughout; censored answers are lower bounds; no prompt is left out for
    its length. Scores order requests and are no lengths: policies that need lengths want a `Calibrated` head.
    """

    name = "ltr_ranker"
