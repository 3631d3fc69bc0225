"""Output-length predictors: features, models, calibration, evaluation, artefacts."""
