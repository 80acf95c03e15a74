"""Why refusals are right, what is known of failures, and why rows cannot be built, as found by reading the
models' code and by measuring. A row without an entry is one to look into."""

from __future__ import annotations

from collections.abc import Mapping

_DENOISING = (
    "an image has as many groups of denoising queries as a constant divided by the most objects of any image"
    " of the batch (`max_gt_num`): its loss depends on its neighbours"
)
_MEAN_OF_BATCH = (
    "a series without observed values is scaled by the mean of its batch, unless the configuration has a"
    " `default_scale`"
)
_BATCH_NORM = (
    "torch 2.13 computes gradients of this batch norm wrongly for one sample, on CPUs, in float64, too: plain"
    " PyTorch itself gives another gradient for the samples of a batch"
)

RIGHT_REFUSALS: Mapping[str, str] = {
    "detection/rt_detr": _DENOISING,
    "detection/rt_detr_v2": _DENOISING,
    "detection/d_fine": _DENOISING,
    "detection/deimv2": _DENOISING,
    "hidden-states/autoformer": _MEAN_OF_BATCH,
    "hidden-states/informer": _MEAN_OF_BATCH,
    "hidden-states/time_series_transformer": _MEAN_OF_BATCH,
    "images/cvt": _BATCH_NORM,
    "images/levit": _BATCH_NORM,
    "tower/levit": _BATCH_NORM,
    "tower/cvt": _BATCH_NORM,
    "hidden-states/aimv2": (
        "attention within a text is causal only if some text of the batch is padded: without padding no mask"
        " is made, and words see those behind them"
    ),
    "hidden-states/lightglue": (
        "an image has as many keypoints as its values give, and a batch as many rows as the image with the"
        " most of them; the class itself says that it is not trainable"
    ),
    "hidden-states/vits": (
        "the length of the speech is the sum of durations that the model predicts, so that no size behind"
        " them is known from the inputs"
    ),
    "hidden-states/xclip": "the texts of all samples attend to each clip",
    "image-text/hunyuan_vl": (
        "images are numbered over the whole batch, and their tokens have that number as a position"
        " (`image_index` in `get_rope_index`)"
    ),
}

KNOWN_FAILURES: Mapping[str, str] = {
    "segmentation/oneformer": (
        "rounding decides what this loss computes: it draws points, keeps the most uncertain ones, and"
        " matches queries to masks. One rank gives losses of step 3 that differ by 1.4e-5 of them with"
        " micro-batches of one sample and of four, and one rank and three ranks give losses that differ"
        " by 1.3e-5"
    ),
}

UNBUILT: Mapping[str, str] = {
    "hidden-states/tvp": (
        "plain PyTorch fails for more than one sample: embeddings of columns are viewed as"
        " `[batch, 1, width, channels]` without being repeated (modeling_tvp.py:243)"
    ),
    "hidden-states/omdet-turbo": "the census draws no lists of classes and tasks",
    "hidden-states/clvp": "the census draws no speech that its small parts agree about",
    "image-text/molmo2": "the census draws no crops with the places that pool them",
    "prefix/falcon": "peft makes a prefix for each of the queries' heads; Falcon's keys have one head",
    "tower/imagegpt": "its inputs are tokens of colours, which the census draws for no tower",
    "tower/perceiver": "its inputs are embedded before the tower",
}
