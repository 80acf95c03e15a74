"""Why refusals are right, what is known of failures, what rounding decides, and why rows cannot be built, as
found by reading the models' code and by measuring. A row without an entry is one to look into."""

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

RIGHT_REFUSALS: Mapping[str, str] = {
    "detection/rt_detr": _DENOISING,
    "detection/rt_detr_v2": _DENOISING,
    "detection/d_fine": _DENOISING,
    "detection/deimv2": _DENOISING,
    "hidden-states/autoformer": _MEAN_OF_BATCH,
    "hidden-states/informer": _MEAN_OF_BATCH,
    "hidden-states/time_series_transformer": _MEAN_OF_BATCH,
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

KNOWN_FAILURES: Mapping[str, str] = {}

ROUNDING_DECIDES: Mapping[str, str] = {
    "segmentation/oneformer": (
        "the loss draws points and keeps the most uncertain ones of each mask: in step 1 of plain PyTorch one"
        " of 36 choices is a tie within 6e-8; offsets of deformable attention start on whole pixels, where"
        " the gradient of sampling jumps; with AdamW's 1e-3 the loss goes from 18 to 56 to 19. So plain"
        " PyTorch with weights moved by their last bit gives losses of step 3 that differ by 5e-5 to 1.3e-3"
    ),
    "questions/led": (
        "this bias is added to the scores of all positions alike, which a softmax over positions takes out"
        " again: its gradient is zero but for what rounding leaves"
    ),
}

UNBUILT: Mapping[str, str] = {
    "hidden-states/tvp": (
        "plain PyTorch fails for more than one sample: embeddings of columns are viewed as"
        " `[batch, 1, width, channels]` without being repeated (modeling_tvp.py:243)"
    ),
    "hidden-states/omdet-turbo": (
        "training is not implemented (forward refuses labels), and embeddings of classes are kept with their"
        " graph for later batches (`language_cache_class`, modeling_omdet_turbo.py:1049)"
    ),
}
