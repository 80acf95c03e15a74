"""secc: a section compiler for compound training models. See README.md."""

__version__ = "0.2.0"
