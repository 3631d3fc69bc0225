"""S3: a DistilBERT that tells ten equal length buckets apart."""

from __future__ import annotations

from .encoder import Encoder


class S3(Encoder):
    """S3 (Jin et al., NeurIPS 2023): ten buckets of equal width up to the greatest length, cross entropy.

    No code was released: model and buckets are the paper's, the schedule is that of TRAIL's DistilBERT (2e-5 falling to 0, 4
    epochs). Buckets end at tenths of 2,048 tokens, and the last is open. Departure: all probabilities make a distribution,
    where S3 reserves the upper end of the likeliest bucket.
    """

    name = "s3"
