"""PARS: a BERT that learns which of two prompts has the longer answer."""

from __future__ import annotations

from .encoder import Encoder


class PARS(Encoder):
    """PARS (arXiv 2510.03243): margin ranking loss over pairs whose lengths differ enough.

    No code was released: the encoder, the margin of 1, the least difference of a fifth and the schedule are this node's, not
    the paper's. Pairs are those within a batch. Scores order requests and are no lengths (`Calibrated` makes them lengths).
    """

    name = "pars"
