"""Samples of a survey that are light enough for a model to run them in seconds."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from secc.frontend.dataset.survey import DatasetSurvey, Sample, sequence_length


def count_entries(model: nn.Module, samples: Sequence[Sample]) -> int:
    """Returns the entries of a batch's largest tensor, which is mostly the scores of a vocabulary for each
    token, with padding."""
    return len(samples) * max(map(sequence_length, samples)) * count_features(model)


def count_features(model: nn.Module) -> int:
    """Returns the most features that a linear layer returns."""
    return max((m.out_features for m in model.modules() if isinstance(m, nn.Linear)), default=1)


def select_light_samples(survey: DatasetSurvey, model: nn.Module, most: int) -> DatasetSurvey:
    """Returns the survey with lighter samples, until no batch has more than `most` entries or there are no
    lighter ones; the survey itself if no batch has more."""
    while any(
        count_entries(model, batch) > most
        for pattern in survey.micro_batch_patterns()
        for batch in survey.compose_batches(pattern)
    ):
        lighter = survey.with_lighter_samples()
        if lighter is survey:
            break
        survey = lighter
    return survey
