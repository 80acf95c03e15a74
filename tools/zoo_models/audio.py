"""Audio-language models and speech recognisers: ragged clips, texts with and without sound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers as T
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tools.zoo_models.entry import Entry
from tools.zoo_models.parts import TEXT, llama, quiet, qwen2
from tools.zoo_models.samples import (
    AUDIO,
    IGNORED,
    VOCABULARY,
    Sample,
    after,
    blanks,
    chance,
    integer,
    padded,
    words,
)

MELS, FRAMES = 8, 32
ENCODER: dict[str, Any] = dict(
    num_mel_bins=MELS,
    d_model=32,
    encoder_layers=2,
    encoder_attention_heads=2,
    encoder_ffn_dim=64,
    max_source_positions=FRAMES // 2,
)


def qwen2_audio() -> nn.Module:
    config = T.Qwen2AudioConfig(
        audio_config=T.Qwen2AudioEncoderConfig(**ENCODER), text_config=qwen2(), audio_token_index=AUDIO
    )
    return T.Qwen2AudioForConditionalGeneration(config)


def voxtral() -> nn.Module:
    audio = T.VoxtralEncoderConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_mel_bins=MELS,
        max_source_positions=FRAMES // 2,
    )
    return T.VoxtralForConditionalGeneration(
        T.VoxtralConfig(audio_config=audio, text_config=llama(), audio_token_id=AUDIO)
    )


def granite_speech() -> nn.Module:
    """Its conformer normalises over the batch, so it is trained with those statistics fixed, as fine-tuning
    does."""
    encoder = T.GraniteSpeechEncoderConfig(
        input_dim=MELS,
        num_layers=2,
        hidden_dim=32,
        num_heads=2,
        dim_head=16,
        output_dim=16,
        context_size=8,
        max_pos_emb=16,
        conv_kernel_size=3,
    )
    projector = T.Blip2QFormerConfig(
        vocab_size=2,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        encoder_hidden_size=32,
    )
    config = T.GraniteSpeechConfig(
        text_config=T.GraniteConfig(**TEXT),
        encoder_config=encoder,
        projector_config=projector,
        audio_token_index=AUDIO,
        has_lora_adapter=False,
        downsample_rate=2,
        window_size=4,
    )
    return T.GraniteSpeechForConditionalGeneration(quiet(config)).eval()


def audioflamingo3() -> nn.Module:
    audio = T.AudioFlamingo3EncoderConfig(
        num_mel_bins=MELS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_source_positions=FRAMES // 2,
    )
    return T.AudioFlamingo3ForConditionalGeneration(
        T.AudioFlamingo3Config(audio_config=audio, text_config=qwen2(), audio_token_id=AUDIO)
    )


def _whisper_config(decoder_layers: int) -> T.WhisperConfig:
    return T.WhisperConfig(
        **ENCODER,
        vocab_size=VOCABULARY,
        decoder_layers=decoder_layers,
        decoder_attention_heads=2,
        decoder_ffn_dim=64,
        max_target_positions=64,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def whisper() -> nn.Module:
    return T.WhisperForConditionalGeneration(_whisper_config(2))


class DistilledWhisper(nn.Module):
    """A recogniser of few layers learns from one of many; both listen with the teacher's frozen encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = T.WhisperForConditionalGeneration(_whisper_config(4)).requires_grad_(False).eval()
        self.student = T.WhisperForConditionalGeneration(_whisper_config(2))
        self.student.model.encoder = self.teacher.model.encoder

    def forward(self, input_features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            heard = self.teacher.model.encoder(input_features)
            wanted = self.teacher(encoder_outputs=heard, labels=labels).logits
        found, counts = self.student(encoder_outputs=heard, labels=labels), labels != IGNORED
        divergence = F.kl_div(
            found.logits[counts].log_softmax(-1), wanted[counts].softmax(-1), reduction="sum"
        )
        return found.loss + 0.8 * divergence / counts.sum()


def moonshine() -> nn.Module:
    config = T.MoonshineConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        pad_token_id=0,
        use_cache=False,
    )
    return T.MoonshineForConditionalGeneration(config)


def speech_encoder_decoder() -> nn.Module:
    encoder = T.Wav2Vec2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        conv_dim=[16, 16],
        conv_kernel=[10, 3],
        conv_stride=[5, 2],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        vocab_size=VOCABULARY,
        apply_spec_augment=False,
        num_feat_extract_layers=2,
    )
    decoder = T.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        is_decoder=True,
        add_cross_attention=True,
        use_cache=False,
    )
    config = T.SpeechEncoderDecoderConfig(
        encoder=quiet(encoder), decoder=quiet(decoder), decoder_start_token_id=1, pad_token_id=0
    )
    return T.SpeechEncoderDecoderModel(config)


def speech_to_text() -> nn.Module:
    config = T.Speech2TextConfig(
        vocab_size=VOCABULARY,
        encoder_layers=2,
        encoder_ffn_dim=64,
        encoder_attention_heads=2,
        decoder_layers=2,
        decoder_ffn_dim=64,
        decoder_attention_heads=2,
        d_model=32,
        conv_channels=32,
        input_feat_per_channel=MELS,
        max_source_positions=128,
        max_target_positions=64,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return T.Speech2TextForConditionalGeneration(quiet(config))


def _clip(g: torch.Generator, frames: int) -> torch.Tensor:
    return torch.randn(1, MELS, frames, generator=g)


def _voxtral(g: torch.Generator) -> Sample:
    if not chance(g):
        return after([], words(g))
    return after(blanks(4, AUDIO), words(g)) | {"input_features": _clip(g, FRAMES)}


def _masked(tokens: int, mask: str):
    """Half of the samples have one clip of FRAMES frames of which some are silence: `mask` says which are
    not."""

    def make(g: torch.Generator) -> Sample:
        if not chance(g):
            return after([], words(g))
        length = integer(g, 12, FRAMES + 1)
        count = ((length - 1) // 2 - 1) // 2 + 1
        sample = after(blanks(min(count, tokens), AUDIO), words(g))
        return sample | {
            "input_features": _clip(g, FRAMES),
            mask: (torch.arange(FRAMES) < length).long()[None],
        }

    return make


def _granite(g: torch.Generator) -> Sample:
    """A clip of 12 to 20 frames: two tokens for every window of four."""
    if not chance(g):
        return after([], words(g))
    frames = integer(g, 12, 21)
    return after(blanks(2 * -(-frames // 4), AUDIO), words(g)) | {
        "input_features": torch.randn(frames, MELS, generator=g)
    }


def _granite_collate(samples: Sequence[Sample]) -> Sample:
    batch = padded(samples, {"input_ids": 0, "labels": IGNORED}, "attention_mask")
    if clips := [s["input_features"] for s in samples if "input_features" in s]:
        batch["input_features"] = pad_sequence(clips, batch_first=True)
        tokens = torch.tensor([2 * -(-len(c) // 4) for c in clips])
        batch["input_features_mask"] = torch.arange(int(tokens.max())) < tokens[:, None]
    return batch


def _whisper(g: torch.Generator) -> Sample:
    return {"input_features": torch.randn(MELS, FRAMES, generator=g), "labels": words(g)}


def _spoken(g: torch.Generator) -> Sample:
    return {"input_features": torch.randn(integer(g, 20, 60), MELS, generator=g), "labels": words(g)}


def _spoken_collate(samples: Sequence[Sample]) -> Sample:
    """[samples, most frames, mels], and which frames are real."""
    batch = padded(samples, {"labels": IGNORED})
    batch["input_features"] = pad_sequence([s["input_features"] for s in samples], batch_first=True)
    batch["attention_mask"] = pad_sequence(
        [torch.ones(len(s["input_features"]), dtype=torch.long) for s in samples], batch_first=True
    )
    return batch


def _waveform(shortest: int, longest: int):
    def make(g: torch.Generator) -> Sample:
        return {"input_values": torch.randn(integer(g, shortest, longest), generator=g), "labels": words(g)}

    return make


def _waveform_collate(samples: Sequence[Sample]) -> Sample:
    return padded(samples, {"input_values": 0, "labels": IGNORED}, "attention_mask")


ENTRIES = [
    Entry("qwen2_audio", "audio", qwen2_audio, _masked(8, "feature_attention_mask")),
    Entry("voxtral", "audio", voxtral, _voxtral),
    Entry("granite_speech", "audio", granite_speech, _granite, _granite_collate),
    Entry("audioflamingo3", "audio", audioflamingo3, _masked(8, "input_features_mask")),
    Entry("whisper", "audio", whisper, _whisper),
    Entry("distil_whisper", "audio", DistilledWhisper, _whisper),
    Entry("speech_to_text", "audio", speech_to_text, _spoken, _spoken_collate),
    Entry("moonshine", "audio", moonshine, _waveform(900, 1800), _waveform_collate),
    Entry("speech_encoder_decoder", "audio", speech_encoder_decoder, _waveform(100, 300), _waveform_collate),
]
