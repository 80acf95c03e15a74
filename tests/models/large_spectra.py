"""The spectrograms of `some_spectra`, with a model that is too large to be built on a small machine."""

from some_spectra import Model
from some_spectra import dataset as dataset
from torch import nn


def model() -> nn.Module:
    large = Model()
    large.head = nn.Sequential(nn.Linear(8, 1 << 27), nn.Linear(1 << 27, 1))
    return large
