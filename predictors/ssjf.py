"""SSJF: a BERT that tells length classes apart, whose bounds are percentiles of the training lengths."""

from __future__ import annotations

from .encoder import Encoder


class SSJF(Encoder):
    """Speculative shortest job first (Qiu et al., AIOps at ASPLOS 2024), five classes, as its released code: the prompt's last
    512 tokens, two layers of 128 above the encoder, classes that end at the 25th, 50th, 75th and 99th percentile, weights of
    inverse frequency, AdamW at 1e-5 falling to 0, batches of 16, 6 epochs, the encoder frozen after 3 and the rest at 1e-4.

    Departures: answers of 512 tokens or more are neither left out of training nor of tests; all class probabilities make a
    distribution, where SSJF takes the likeliest class; no model id is appended, one predictor is for one model.
    """

    name = "ssjf"
