"""Makes a small configuration of any model type from its configuration class.

Names say what a number means in nearly all configurations (`hidden_size`, `num_attention_heads`, `depths`),
so that one table of names and a few rules shrink them all; parts (`text_config`, `vision_config`) are shrunk
in the same way. Where a model type asks for more, `EXCEPTIONS` has its values.
"""

from __future__ import annotations

import copy
import enum
import inspect
import re
from collections.abc import Mapping
from typing import Any

import transformers as T

WORDS, VOCABULARY = 100, 160  # ordinary tokens are 3 ... WORDS - 1; special ones follow
HIDDEN, HEADS, IMAGE, PATCH, MELS = 32, 4, 32, 8, 16
LABELS = 3

_NUMBERS: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim"), HIDDEN),
    **dict.fromkeys(("emb_dim", "embedding_size", "embedding_dim", "word_embed_proj_dim"), HIDDEN),
    **dict.fromkeys(("encoder_hidden_size", "decoder_hidden_size", "out_hidden_size"), HIDDEN),
    **dict.fromkeys(("projection_dim", "output_dim", "hidden_size_global", "text_hidden_size"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 2 * HIDDEN),
    **dict.fromkeys(("n_inner", "d_ff", "mlp_dim", "ffn_hidden_size", "dim_feedforward"), 2 * HIDDEN),
    **dict.fromkeys(("encoder_ffn_embed_dim", "decoder_intermediate_size"), 2 * HIDDEN),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "depth", "layers"), 2),
    **dict.fromkeys(("speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "attention_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), HEADS),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "dim_head", "v_head_dim"), HIDDEN // HEADS),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "kv_channels"), HIDDEN // HEADS),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_expert_group"), 1
    ),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), HIDDEN),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_length", "n_ctx"), 128),
    **dict.fromkeys(("max_target_positions", "model_max_length"), 128),
    "max_source_positions": 16,
    "num_key_value_heads": HEADS,
    "decoder_vocab_size": VOCABULARY,
    **dict.fromkeys(("rotary_dim", "mamba_d_state", "state_size", "conf_num_attention_heads"), 8),
    **dict.fromkeys(("mamba_n_heads",), HEADS),
    **dict.fromkeys(("mamba_d_head",), 16),
    **dict.fromkeys(("num_labels",), LABELS),
    **dict.fromkeys(("image_size", "pretrain_image_size", "crop_size"), IMAGE),
    "patch_size": PATCH,
    **dict.fromkeys(("num_mel_bins", "n_mel_bins"), MELS),
    "sliding_window": 8,
    "num_frames": 4,
    **dict.fromkeys(("num_queries", "num_query_tokens", "latent_query_num", "mm_tokens_per_image"), 4),
    **dict.fromkeys(("num_conv_pos_embeddings",), 16),
    **dict.fromkeys(("num_conv_pos_embedding_groups",), 2),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "use_cache": False,
}
# Numbers that some classes leave open.
_FILLED = (
    "head_dim",
    "num_experts_per_tok",
    "n_routed_experts",
    "num_key_value_heads",
    "decoder_vocab_size",
    "vocab_size",
)
_SILENT = re.compile(r"drop|mask_time_prob|mask_feature_prob|jitter|apply_spec_augment")
_DEPTH = re.compile(r"depths?$|num_layers|layers_per|repeats|num_blocks|blocks_per")
_SMALL_ANYWAY = re.compile(r"vocab|image_size|position|num_labels|num_frames|num_mel_bins|layers?$")
_SPECIAL_TOKEN = re.compile(r"_(token_id|token_index)$")

_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "depth")
_COUNTED = ("num_hidden_layers", "num_layers", "n_layer")
_LAYER_CHOICES = (
    "backbone_out_indices",
    "window_block_indices",
    "global_attn_indexes",
    "intermediate_hidden_state_indices",
)

# In place of a backbone of timm, which is loaded by its name.
_RESNET = T.ResNetConfig(embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1])
_RESNET.out_features = ["stage2", "stage3", "stage4"]  # type: ignore[attr-defined]


def _timm(architecture: str, hidden_size: int = 0, **model_args: Any) -> T.TimmWrapperConfig:
    """A small tower of timm in place of a large one."""
    config = T.TimmWrapperConfig(architecture=architecture, model_args=model_args)
    if hidden_size:
        setattr(config, "hidden_size", hidden_size)  # noqa: B010
    return config


_FEATURE_SIZES = [[IMAGE // stride] * 2 for stride in (4, 8, 16)]

EXCEPTIONS: dict[str, dict[str, Any]] = {
    **{
        t: {"backbone_config": _RESNET, "use_timm_backbone": False, "use_pretrained_backbone": False}
        | {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
        for t in ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer")
    },
    **{f"{t}_text": {"rope_parameters": _MROPE} for t in ("glm4v", "glm_ocr", "qwen2_vl", "qwen2_5_vl")},
    "glm4v_moe_text": {"rope_parameters": _MROPE | {"mrope_section": [2, 0, 0]}},
    "paddleocr_vl_text": {"rope_parameters": _MROPE},
    "cosmos3_edge_text": {"rope_parameters": _MROPE},
    "hy_v4_vl_text": {"rope_parameters": _MROPE | {"mrope_section": [2, 1, 1]}},
    **{t: {"rope_parameters": _MROPE} for t in ("hunyuan_vl_text", "glm_image_text", "qwen2_5_omni_text")},
    **{t: {"window_size": 1} for t in ("swin", "donut-swin")},
    **{
        t: {
            "width_coefficient": 1.0,
            "depth_coefficient": 1.0,
            "in_channels": [32, 16, 24],
            "out_channels": [16, 24, 32],
            "kernel_sizes": [3, 3, 5],
            "strides": [1, 2, 2],
            "depthwise_padding": [],
            "num_block_repeats": [1, 1, 1],
            "expand_ratios": [1, 2, 2],
            "hidden_dim": 1280,
        }
        for t in ("efficientnet", "align_vision_model")
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"n_groups": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "dots1": {"n_shared_experts": 1},
    **{t: {"upsample_groups": HIDDEN} for t in ("mimi", "pocket_tts_audio_tokenizer")},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 4,
    },
    "wav2vec2-bert": {"vocab_size": VOCABULARY},
    "wav2vec2-conformer": {"vocab_size": VOCABULARY},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HIDDEN // HEADS,
    },
    "qwen4_exp_text": {
        "indexer_n_heads": HEADS,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HIDDEN // HEADS,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "esmc": {"vocab_size": VOCABULARY},
    "layoutlmv3": {"coordinate_size": 5, "shape_size": 6},
    "lilt": {"hidden_size": 48, "intermediate_size": 96},
    "perceiver": {"num_latents": 8, "d_latents": HIDDEN, "num_self_attends_per_block": 2},
    "hgnet_v2": {
        "stem_channels": [3, 16, 16],
        "stage_in_channels": [16, 16, 32, 32],
        "stage_mid_channels": [16, 16, 16, 16],
        "stage_out_channels": [16, 32, 32, 64],
        "stage_numb_of_layers": [2, 2, 2, 2],
        "hidden_sizes": [16, 32, 32, 64],
        "embedding_size": 16,
    },
    **{t: {"num_blocks": 1} for t in ("eomt", "eomt_dinov3", "videomt")},
    "lw_detr_vit": {"num_windows": 4},
    "lw_detr": {"num_windows": 4, "projector_scale_factors": [1.0]},
    **{t: {"hidden_size": 64} for t in ("bridgetower", "bridgetower_text_model", "bridgetower_vision_model")},
    **{
        t: {"vision_start_token_id": VOCABULARY - 2, "vision_end_token_id": VOCABULARY - 3}
        for t in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
    **{
        t: {"prediction_length": 4, "context_length": 12}
        for t in ("time_series_transformer", "autoformer", "informer")
    },
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "kimi_k25_vision": {"pos_emb_height": 8, "pos_emb_width": 8},
    "longcat_flash": {"qk_head_dim": 2 * HIDDEN // HEADS},
    "cvt": {"depth": (1, 2, 3)},  # a stage's number is an index into its own layers
    "depth_pro": {
        "patch_size": IMAGE,
        "intermediate_hook_ids": (1, 0),
        "intermediate_feature_dims": (HIDDEN, HIDDEN),
        "scaled_images_feature_dims": (HIDDEN, HIDDEN, HIDDEN),
        "fusion_hidden_size": HIDDEN,
    },
    **{t: {"upsample_groups": HIDDEN} for t in ("mimi_decoder", "pocket_tts_audio_tokenizer_decoder")},
    "muse_spark_audio": {"num_hidden_layers": 4, "patch_sizes": (4, 2, 2, 2)},
    "seggpt": {
        "image_size": (2 * IMAGE, IMAGE),
        "merge_index": 0,
        "intermediate_hidden_state_indices": (1,),
    },
    "t5gemma2_text": {"dropout_rate": 0.0},  # as in the whole model
    "tvp": {"visual_prompt_size": 16, "max_img_size": 64},
    "apertus1p5": {"image_token_offset": WORDS + 10, "audio_token_offset": WORDS + 26},
    "apertus1p5_vision_tokenizer": {"codebook_size": 16},
    "wavtokenizer_encoder": {"codebook_size": 16},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "emu3": {
        "vocabulary_map": {"<image>": WORDS, "<|extra_200|>": WORDS + 1}
        | {f"<|visual token {i:06d}|>": WORDS + 2 + i for i in range(HIDDEN)}
    },
    "ernie4_5_vl_moe_text": {
        "rope_parameters": _MROPE | {"mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [HIDDEN, HIDDEN],
    },
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "2/4",
        "image_grid_pinpoints": [[IMAGE, IMAGE]],
        "vision_config": {"hidden_size": 64},
    },
    "molmo2_adapter": {"vision_feature_layer": [1, 0]},
    "nemotron_h_omni": {
        "vision_config": {"video_temporal_patch_size": 2},
        "image_token_id": WORDS,
        "video_token_id": WORDS + 1,
        "audio_token_id": WORDS + 2,
    },
    "step3p5": {"sliding_window": 8},
    "neomme": {"head_dim": 16},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": HIDDEN // 4}},
    **{
        t: {"downsampling_ratios": (2, 4), "depths": (1, 1, 1), "num_filters": 16}
        for t in (
            "vibevoice_acoustic_tokenizer",
            "vibevoice_acoustic_tokenizer_encoder",
            "vibevoice_acoustic_tokenizer_decoder",
        )
    },
    "vits": {"vocab_size": VOCABULARY, "use_stochastic_duration_prediction": False},
    "fastspeech2_conformer": {"vocab_size": VOCABULARY},
    **{t: {"out_hidden_size": 4 * HIDDEN} for t in ("muse_spark", "muse_glimmer")},
    "timm_backbone": {"backbone": "test_resnet"},
    "emu3_vqgan": {"hidden_size": 4 * HIDDEN},
    "sapiens2": {
        "head_config": {"upsample_out_channels": [16, 16], "conv_out_channels": [16]},
        "num_key_value_heads_per_layer": None,
        "num_key_value_attention_heads": 2,
        "num_first_full_attention_layers": 1,
        "num_last_full_attention_layers": 1,
    },
    "oneformer": {"task_seq_len": 16},
    "pe_video_encoder": {
        "vision_config": {"architecture": "resnet50", "model_args": None}
    },  # not a large one
    "clvp_encoder": {"hidden_size": 4 * HIDDEN},  # heads as wide as their rotary positions at least
    "clvp_decoder": {"decoder_fixing_codes": [83, 45, 45, 99]},
    "molmo2": {"image_patch_id": WORDS + 10},
    "fastspeech2_conformer_hifigan": {"model_in_dim": MELS},
    "instructblipvideo": {"video_token_index": WORDS},
    "kyutai_speech_to_text": {
        "num_codebooks": 4,
        "codebook_vocab_size": VOCABULARY,
        "audio_bos_token_id": 1,
        "audio_pad_token_id": 5 * VOCABULARY,
    },
    "uvdoc": {"backbone_config": {"out_features": [f"stage{i}" for i in range(1, 7)]}},
    "clap_audio_model": {
        "spec_size": 64,
        "window_size": 2,
        "num_mel_bins": 2 * MELS,
        "hidden_size": 8 * HIDDEN,
    },
    **{t: {"hidden_size": 2 * HIDDEN, "quantization_dim": 3 * HIDDEN} for t in ("neucodec", "xcodec2")},
    "xcodec": {  # frames as long as HuBERT's
        "acoustic_model_config": {"downsampling_ratios": [8, 5, 4, 2]},
        "codebook_dim": None,
    },
    "edgetam_vision_model": {
        "backbone_config": _timm("test_convnext", features_only=True, out_indices=[0, 1, 2, 3]),
        "backbone_channel_list": [64, 48, 32, 24],
        "backbone_feature_sizes": _FEATURE_SIZES,
    },
    "edgetam": {"prompt_encoder_config": {"patch_size": 16}},
    "sam2": {
        "vision_config": {"backbone_feature_sizes": _FEATURE_SIZES},
        "prompt_encoder_config": {"patch_size": 16},
    },
    "sam_hq_vision_model": {"num_pos_feats": HIDDEN // 2},
    "omdet-turbo": {
        "apply_layernorm_after_vision_backbone": False,
        "backbone_config": _RESNET,
        "encoder_in_channels": [16, 32, 32],
    },
    "inkling_vision": {"num_hidden_layers": 4},
    "gemma3n_vision": {"architecture": "test_convnext", "hidden_size": 64},
    "gemma3n": {"vision_soft_tokens_per_image": 1},
    "fast_vlm": {"vision_config": _timm("test_convnext", 64, in_chans=3)},
    "perception_lm": {"vision_config": _timm("test_vit", embed_dim=64, img_size=IMAGE)},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "sam3_tracker": {
        "vision_config": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    },
    "tipsv2_dpt": {"backbone_config": {"reshape_hidden_states": False}},
    "moonshine_streaming": {"num_key_value_heads": HEADS},  # as in the published files
}


class Sizes(enum.Enum):
    """What is made small. The first choice with which plain PyTorch trains a model counts: widths of the
    stages of a convolutional tower often hang together in ways that no rule knows."""

    ALL = "all sizes"
    NUMBERS = "all but lists of widths"
    DEPTHS = "depths, images and vocabulary"


def small_config(
    kind: type[T.PreTrainedConfig], sizes: Sizes = Sizes.ALL, **given: Any
) -> T.PreTrainedConfig:
    """A small configuration of class `kind`; `given` values go over what the rules choose."""
    config = kind(**_small_values(kind(), Tokens(), sizes, given.pop("stages", 0)) | given)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if vars(config).get(name) is None:
            setattr(config, name, _NUMBERS[name])
    return config


class Tokens:
    """Hands out special tokens behind the ordinary ones."""

    def __init__(self) -> None:
        self.next = WORDS

    def take(self) -> int:
        self.next += 1
        return self.next - 1


def _small_values(
    config: T.PreTrainedConfig, tokens: Tokens, sizes: Sizes, stages: int = 0
) -> dict[str, Any]:
    """Keyword arguments of the configuration class for a small model; a backbone gives the hidden states of
    `stages` layers if that is not 0."""
    values = dict[str, Any]()
    names = inspect.signature(type(config).__init__).parameters
    base = inspect.signature(T.PreTrainedConfig.__init__).parameters
    parts: Mapping[str, Any] = getattr(type(config), "sub_configs")  # noqa: B009
    for name in names:
        if name in ("self", "kwargs") or (name in base and name != "is_encoder_decoder"):
            continue
        if name not in vars(config):
            continue
        old = vars(config)[name]
        kind = parts.get(name)
        if old is None and isinstance(kind, type) and issubclass(kind, T.PreTrainedConfig):
            old = kind()  # an optional part
            values[name] = old
        new = _small_value(name, old, config, tokens, sizes)
        if new is not old or name == "num_key_value_heads":  # a part may have another than its class
            values[name] = new
    per_layer = _fit_layer_types(config, values)
    _fit_layer_choices(config, values, stages)
    _fit_lengths(values, per_layer)
    for name, value in EXCEPTIONS.get(config.model_type, {}).items():
        part = values.get(name)
        if isinstance(part, T.PreTrainedConfig) and isinstance(value, dict):
            values[name] = type(part)(**_small_values(vars(config)[name], tokens, sizes) | value)
        else:
            values[name] = copy.deepcopy(value)
    return values


def _own_values(part: T.PreTrainedConfig) -> dict[str, Any]:
    """The values of a part of a configuration that are not those of its class: `Idefics2Config` has a text
    model with another `rms_norm_eps` than Mistral's."""
    try:
        usual = vars(type(part)())
    except Exception:  # of a class that has to be given something
        return {}
    base = inspect.signature(T.PreTrainedConfig.__init__).parameters
    names = inspect.signature(type(part).__init__).parameters.keys() - {"self", "kwargs", *base}
    given = {name: vars(part)[name] for name in names if name in vars(part)}
    return {
        name: value
        for name, value in given.items()
        if not isinstance(value, T.PreTrainedConfig) and name in usual and value != usual[name]
    }


def _small_value(name: str, old: Any, config: T.PreTrainedConfig, tokens: Tokens, sizes: Sizes) -> Any:
    if isinstance(old, T.PreTrainedConfig):
        return type(old)(**_own_values(old) | _small_values(old, tokens, sizes))
    if _keeps_size(name, old, sizes):
        return old
    if _SILENT.search(name) and isinstance(old, float | bool):
        return type(old)(0)
    if _SILENT.search(name) and isinstance(old, list | tuple) and all(isinstance(o, float) for o in old):
        return type(old)(0.0 for _ in old)  # of each stage
    if isinstance(old, bool):
        return False if name == "use_cache" else old
    if _SPECIAL_TOKEN.search(name) and name not in _NUMBERS and isinstance(old, int):
        return tokens.take()
    if name == "num_key_value_heads" and isinstance(old, int):
        heads = vars(config).get("num_attention_heads", old)
        return HEADS if old == heads else 1 if old == 1 else 2
    if name in _NUMBERS and name.endswith("token_id"):
        return _NUMBERS[name]
    if name in _FILLED and old is None:
        return _NUMBERS[name]
    if name in _NUMBERS and isinstance(old, int):
        return min(old, _NUMBERS[name]) if old > 0 else old
    if isinstance(old, int) and old >= 64 and re.search(r"dim|size|channels|width|rank|units", name):
        return HIDDEN
    if isinstance(old, int) and old > HEADS and re.search(r"_heads$", name):
        return HEADS
    if (
        isinstance(old, list | tuple)
        and name in ("image_size", "patch_size")
        and all(isinstance(o, int) for o in old)
    ):
        return type(old)(min(o, _NUMBERS[name]) for o in old)
    if isinstance(old, list | tuple) and old and all(isinstance(o, int) for o in old):
        if _DEPTH.search(name):
            return type(old)(min(o, 1) for o in old)
        if re.search(r"dim|size|channels|width", name) and max(old) >= 64:
            ranks = sorted(set(old))
            if len(ranks) == 1:
                return type(old)(HIDDEN for _ in old)
            return type(old)(min(16 * 2 ** ranks.index(o), 64) for o in old)
        if re.search(r"heads", name):
            return type(old)(min(o, 2) for o in old)
    return old


def _keeps_size(name: str, old: Any, sizes: Sizes) -> bool:
    if _DEPTH.search(name) or sizes is Sizes.ALL:
        return False
    if isinstance(old, list | tuple):
        return name not in ("image_size", "patch_size")
    kept = isinstance(old, int) and not isinstance(old, bool) and not name.endswith("_id")
    return sizes is Sizes.DEPTHS and kept and not _SMALL_ANYWAY.search(name)


def _fit_layer_choices(config: T.PreTrainedConfig, values: dict[str, Any], stages: int) -> None:
    """Chooses layers that the small model has, where a configuration names some by number: as many as before
    for what a backbone gives, those that are left for others. Backbones of stages keep theirs."""
    layers = next((n for n in _LAYER_COUNTS if n in values), None)
    given = vars(config).get("_out_indices")
    if given is not None and (stages or len(given) > 1):
        chosen = stages or len(given)
        if layers is not None:
            values[layers] = max(values[layers], chosen)
            values["out_indices"] = [values[layers] - chosen + 1 + i for i in range(chosen)]
        elif not stages:
            values["out_indices"] = list(given)
    if layers is None:
        return
    for name in _LAYER_CHOICES:
        old = vars(config).get(name)
        if not isinstance(old, list | tuple):
            continue
        if name == "backbone_out_indices":
            values[layers] = max(values[layers], len(old))
            values[name] = list(range(values[layers] - len(old), values[layers]))
        else:
            values[name] = [i for i in old if i < values[layers]]


def _fit_layer_types(config: T.PreTrainedConfig, values: dict[str, Any]) -> list[str]:
    """Gives lists with an entry for each layer one of each kind that occurs; at least two layers. Returns
    their names."""
    layers = next((n for n in _COUNTED if n in values), None)
    if layers is None:
        return []
    old = getattr(config, layers)
    lists = {
        n: v
        for n, v in vars(config).items()
        if isinstance(v, list) and len(v) == old and old > 4 and not isinstance(v[0], dict)
    }
    lists = {n: v for n, v in lists.items() if not isinstance(v[0], list)}
    kinds = list(dict.fromkeys(zip(*lists.values(), strict=True))) if lists else []
    chosen = kinds[:4] if len(kinds) > 1 else kinds * 2
    for n, column in zip(lists, zip(*chosen, strict=True), strict=True):
        values[n] = list(column)
    if chosen:
        values[layers] = len(chosen)
    return list(lists) if chosen else []


def _fit_lengths(values: dict[str, Any], per_layer: list[str]) -> None:
    """Repeats the entries of lists with one for each layer where there are more layers by now."""
    count = next((values[n] for n in _COUNTED if n in values), 0)
    for name in per_layer:
        entries = values[name]
        values[name] = (entries * count)[: max(count, len(entries))]
