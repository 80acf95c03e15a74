"""Workload vlm-72b-xl: vlm-72b with 2,048 samples a step on 128x8 H100."""

from vlm_72b import collate, dataset, model, sizes, small_dataset, small_model

__all__ = ["collate", "dataset", "model", "sizes", "small_dataset", "small_model"]
