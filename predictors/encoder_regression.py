"""EncoderRegression: a BERT that regresses the logarithm of the length, calibrated to a distribution."""

from __future__ import annotations

from .encoder import Encoder


class EncoderRegression(Encoder):
    """The regression of SSJF (Qiu et al., AIOps at ASPLOS 2024) with L1 loss, and its model, schedule and input: the last 512
    tokens, 6 epochs, the encoder frozen after 3.

    Departures: the soft-log length and not the token count; answers of 512 tokens or more stay in; a calibrated distribution.
    """

    name = "encoder_regression"
