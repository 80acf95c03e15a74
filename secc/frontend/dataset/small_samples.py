"""Samples that a model file's `small_model()` is run on, in proofs for a model that is too large to run."""

from __future__ import annotations

from secc.errors import UserError
from secc.frontend.dataset.sampling import survey_dataset
from secc.frontend.dataset.survey import DatasetSurvey
from secc.runtime.model.user_file import UserModel


def survey_small_samples(user: UserModel, survey: DatasetSurvey) -> DatasetSurvey:
    """Draws samples of `small_dataset()`, which are short; returns `survey`, of the dataset, if the model
    file defines none, or if its samples do not have all input patterns of the dataset's."""
    small_user = user.with_small_dataset()
    if small_user is user:
        return survey
    try:
        small = survey_dataset(small_user)
    except UserError:  # `secc check --small` reports it
        return survey
    same_keys = (small.required_keys, small.optional_keys) == (survey.required_keys, survey.optional_keys)
    return small if same_keys and small.pattern_counts.keys() >= survey.pattern_counts.keys() else survey
