"""How the frameworks of published steps differ from secc's runtime: named options of the comparison.

A step that others measured ran with their kernels and their overlap of communication. Each source has one
framework here; what a source does not say is fitted on all of its rows at once (docs/costs.md has the method
and the cross-validation), never row by row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from secc.cluster import Framework

# Percent of the vendor's peak that large products reach, fitted on all rows but Megatron-LM's.
PRODUCT_PERCENT = {"A100": 81, "H100": 69}

# Percent of the memory that ran free in the fullest layouts that ran; fitted on Hagemann's rows.
FRAMEWORK_MEMORY_MARGIN = 3


@dataclass(frozen=True)
class PublishedFramework:
    """A framework as rows were measured with it. attention_percent: of the peak, by chip."""

    framework: Framework
    attention_percent: dict[str, int]


# FlashAttention-2 (Dao 2023, arXiv:2307.08691): 50 to 73% of an A100's peak. On H100 370 TFLOP/s forward at
# 4,096 tokens and more with heads of 128 (Shah et al. 2024, arXiv:2407.08608, figure 5), less backward.
FLASH_ATTENTION_2 = {"A100": 60, "H100": 35}
# The Triton kernel of FlashAttention-1, which reaches 25 to 40% of an A100's peak (Dao 2023). Fitted on rows
# with 8,192 tokens and more.
FLASH_ATTENTION_1 = {"A100": 31, "H100": 19}
# FlashAttention-3 and cuDNN: 600 to 650 TFLOP/s forward (Shah et al. 2024), less backward.
HOPPER_ATTENTION = {"A100": 60, "H100": 55}
# Scores are written and read in memory, by fused kernels for scale, mask and softmax: fitted on four rows.
STORED_SCORES = {"A100": 8, "H100": 8}

# Norms, rotations and residuals are partly fused; recomputation takes longer than the first forward, and
# steps of two stages are longer by eight micro-batches for a cause that is not known. All fitted on
# Hagemann's rows.
HAGEMANN = PublishedFramework(
    Framework(
        name="Hagemann et al. 2023",
        layer_passes=38,
        lost_rows=250,
        recompute_percent=133,
        tp_recompute_percent=170,
        tp_percent=134,
        waits_of_two_stages=8,
        whole_inputs=3,
    ),
    FLASH_ATTENTION_2,
)
# FSDP gathers each layer's parameters only after the gradients of the one before
# (BackwardPrefetch.BACKWARD_POST, Composer's default). Fitted on llm-foundry's rows.
LLM_FOUNDRY = PublishedFramework(
    Framework(name="llm-foundry", layer_passes=50, zero3_open_percent=52), FLASH_ATTENTION_1
)
# Sums over tp in the open (Narayanan et al. 2021, arXiv:2104.04473). Fitted on four rows.
MEGATRON_2021 = PublishedFramework(
    Framework(name="Megatron-LM 2021", layer_passes=22, lost_rows=250), STORED_SCORES
)
# --tp-comm-overlap, --overlap-grad-reduce and --overlap-param-gather are on (Megatron-LM's README of 2024),
# and stages are interleaved. Fitted on five rows that leave out micro-batch and virtual stages.
MEGATRON_2024 = PublishedFramework(
    Framework(
        name="Megatron-LM 2024",
        layer_passes=80,
        lost_rows=600,
        tp_hidden_percent=70,
        hides_gathers=True,
        virtual_stages=4,
    ),
    HOPPER_ATTENTION,
)
# Medians of the others.
UNKNOWN = PublishedFramework(
    Framework(name="unknown", layer_passes=44, lost_rows=250, recompute_percent=115, zero3_open_percent=30),
    FLASH_ATTENTION_2,
)
BY_SOURCE = {
    "WANT (Hagemann 2023)": HAGEMANN,
    "MosaicML llm-foundry": LLM_FOUNDRY,
    "Megatron-LM 2021": MEGATRON_2021,
    "Megatron-LM README 2024": MEGATRON_2024,
}


def framework_of(source: str, note: str = "") -> PublishedFramework:
    """The framework that a source's steps were measured with: the one listed for it, else one that its
    name contains, else the one with the most common habits. A note may say how many virtual stages there are,
    such as "3 virtual stages"."""
    words = {"Hagemann": HAGEMANN, "llm-foundry": LLM_FOUNDRY, "Megatron": MEGATRON_2024}
    like = next((framework for word, framework in words.items() if word in source), UNKNOWN)
    found = BY_SOURCE.get(source, like)
    stages = re.search(r"(\d+) virtual stages", note)
    if stages is None:
        return found
    return replace(found, framework=replace(found.framework, virtual_stages=int(stages[1])))
