"""Decoders of published training steps, with which `tools.check_published` checks the cost model."""
