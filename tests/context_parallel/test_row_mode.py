"""Models on the rows of several ranks (threads) give the loss and gradients of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from secc.frontend.cp_search.find_row_layer import RowLayer, find_row_layer
from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.runtime.context_parallel import row_exchange
from secc.runtime.context_parallel.row_marks import deal_rows
from secc.runtime.context_parallel.row_mode import RowMode, split_first_input
from secc.runtime.plan.unsplit_reason import UnsplitKind
from secc.runtime.sections.recompute import recompute_units
from secc.runtime.sections.row_layers import wrap_row_modules
from secc.runtime.tensor_parallel.vocab_parallel_ops import VocabShards

Batch = dict[str, Any]


def run_on_rows(
    model: nn.Module, batch: Batch, group: ThreadGroup, attention: str = "gather"
) -> tuple[Any, dict[str, Any], RowMode]:
    """Returns the loss, this rank's gradients and the mode."""
    for layer in recompute_units(model):
        layer.forward = split_first_input(layer.forward)
    wrap_row_modules(model, [path for path, _ in model.named_modules() if path.endswith("mlp.experts")])
    mode = RowMode(group, attention)
    _, out = mode.run_section(lambda b, edges: ({}, {"loss": model(**b)}), batch, {})
    out["loss"].backward()
    return out["loss"].detach(), {n: p.grad for n, p in model.named_parameters()}, mode


def assert_same(model: nn.Module, batch: dict[str, Any], count: int, attention: str = "gather") -> RowMode:
    model = model.double()
    model.zero_grad()
    loss = model(**batch)
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters()}
    models = [copy.deepcopy(model) for _ in range(count)]
    for m in models:
        m.zero_grad()
    ranks = run_thread_ranks(count, lambda group: run_on_rows(models[group.index], batch, group, attention))
    total = sum(float(g.square().sum()) for g in expected.values() if g is not None) ** 0.5
    for found, _, _ in ranks:
        assert torch.allclose(found, loss.detach(), rtol=1e-6), (found, loss)
    for name, gradient in expected.items():
        parts = [g[name] for _, g, _ in ranks if g[name] is not None]
        if gradient is None:
            assert not parts or all(float(p.abs().max()) == 0 for p in parts), name
            continue
        summed = torch.stack(parts).sum(0)
        difference = float((summed - gradient).norm())
        # The models' own code computes norms and softmax in float32.
        assert difference <= 1e-5 * float(gradient.norm()) + 1e-7 * total, (name, difference, total)
    return ranks[0][2]


WIDTHS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


class WithLoss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.inner(**batch).loss


def _llama(**options: Any) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**WIDTHS, **options))


def _gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**WIDTHS, head_dim=8, sliding_window=4, layer_types=kinds)
    return hf.Gemma3ForCausalLM(config)


def _gpt_oss(**options: Any) -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return hf.GptOssForCausalLM(
        hf.GptOssConfig(**WIDTHS, **experts, **options, head_dim=8, sliding_window=4, layer_types=kinds)
    )


def _t5() -> nn.Module:
    sizes: dict[str, Any] = {
        "decoder_start_token_id": 0,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
        "dropout_rate": 0.0,
    }
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=64, pad_token_id=0, **sizes))


def _bloom() -> nn.Module:
    return hf.BloomForCausalLM(hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "grouped queries": _llama,
    "eager attention": lambda: _llama(attn_implementation="eager"),
    "windows": _gemma3,
    "relative bias": _t5,
    "alibi": _bloom,
}


def make_batch(length: int, padded: bool) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (2, length), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, : length // 3] = -100
    mask[1, length - length // 3 :] = 0
    return {"input_ids": ids, "labels": labels} | ({"attention_mask": mask} if padded else {})


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_rows_has_the_loss_and_gradients_of_one_rank(name: str) -> None:
    torch.manual_seed(0)
    assert_same(WithLoss(MODELS[name]()), make_batch(13, padded=True), 2)


def _mistral() -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**WIDTHS, sliding_window=4))


def _gemma3_with_images() -> nn.Module:
    kinds = ["sliding_attention", "full_attention"]
    text = hf.Gemma3TextConfig(**WIDTHS, head_dim=8, sliding_window=4, layer_types=kinds)
    vision = hf.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    return hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE
        )
    )


def _qwen2_5_vl() -> nn.Module:
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32}
    text = {**WIDTHS, "rope_parameters": rotary}
    return hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _whisper() -> nn.Module:
    counts = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
    sizes: dict[str, Any] = {f"{side}_{k}": n for side in ("encoder", "decoder") for k, n in counts.items()}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 8, "max_target_positions": 32, "num_mel_bins": 8}
    return hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(vocab_size=64, d_model=32, **lengths, **tokens, **sizes)
    )


class OwnLayer(nn.Module):
    """Attention with its own rotary code, mask and softmax, of queries in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        samples, rows, _ = x.shape
        heads = self.qkv(self.norm(x)).view(samples, rows, 8, 8).transpose(1, 2)
        q, k, v = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        cos, sin = angles.cos(), angles.sin()

        def turn(t: torch.Tensor) -> torch.Tensor:
            even, odd = t[..., ::2], t[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

        k, v = (t.repeat_interleave(2, dim=1) for t in (turn(k), v))
        scores = torch.einsum("bhqd,bhkd->bhqk", turn(q), k) / 8**0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return x + self.out(
            torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).reshape(samples, rows, 32)
        )


class OwnDecoder(nn.Module):
    """A decoder in plain PyTorch that pads by a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(OwnLayer() for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        rows = input_ids.shape[1]
        places = (attention_mask.cumsum(1) - 1).clamp(min=0)
        angles = places[:, None, :, None] * 0.1 ** torch.arange(4)
        causal = torch.ones(rows, rows, dtype=torch.bool).tril()
        mask = (causal & attention_mask[:, None, :].bool())[:, None] | torch.eye(rows, dtype=torch.bool)
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, angles.to(x.dtype), mask)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return hf.utils.ModelOutput(loss=loss)


IMAGE = 61
MORE_MODELS: dict[str, Callable[[], nn.Module]] = MODELS | {
    "one window": _mistral,
    "sinks": lambda: _gpt_oss(experts_implementation="eager"),  # grouped products take no float64
    "images that see both ways": _gemma3_with_images,
    "three-dimensional positions": _qwen2_5_vl,
    "speech": _whisper,
    "own code": OwnDecoder,
}


def _padded_batch(name: str, length: int, left: bool) -> Batch:
    """Two samples, one of them padded, with the other inputs that the model takes."""
    batch = make_batch(length, padded=True)
    if left:
        batch = {key: value.flip(1) for key, value in batch.items()}
    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    generator = torch.Generator().manual_seed(1)
    if name == "images that see both ways":
        batch["input_ids"][0, 5:9] = IMAGE
        batch["token_type_ids"] = (batch["input_ids"] == IMAGE).long()
        batch["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator).double()
    if name == "speech":
        batch = {
            "input_features": torch.randn(2, 8, 16, generator=generator).double(),
            "labels": batch["labels"],
        }
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize(("length", "count"), [(13, 2), (13, 4), (3, 4)])
@pytest.mark.parametrize("name", MORE_MODELS)
def test_padding_on_either_side_and_short_samples(name: str, length: int, count: int, left: bool) -> None:
    """13 rows do not divide; of 3 rows, one of 4 ranks has none."""
    if name == "images that see both ways" and length < 9:
        pytest.skip("an image has more tokens")
    if name in ("eager attention", "alibi") and left:
        pytest.skip("in float64, plain PyTorch has nan for rows that see nothing")
    torch.manual_seed(0)
    model = WithLoss(MORE_MODELS[name]())
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    assert_same(model.eval() if name == "speech" else model, _padded_batch(name, length, left), count)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mamba", "Mamba2"])
def test_state_spaces_stay_whole(kind: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_heads": 8, "head_dim": 8, "n_groups": 1} if kind == "Mamba2" else {}
    config = getattr(hf, f"{kind}Config")(
        vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1, **sizes
    )
    layer = getattr(hf, f"{kind}ForCausalLM")(config).backbone.layers[0]
    reason = find_row_layer(layer, ((torch.randn(2, 6, 32, requires_grad=True),), {}), 2).reason
    assert reason is not None and reason.kind in (UnsplitKind.MIXES_ROWS, UnsplitKind.WRITES_INTO_ROWS)


@pytest.mark.parametrize(("length", "count"), [(3, 4), (2, 2), (9, 4)])
def test_lengths_need_not_divide_and_ranks_may_have_no_rows(length: int, count: int) -> None:
    torch.manual_seed(0)
    mode = assert_same(WithLoss(_llama()), make_batch(length, padded=False), count)
    assert not mode.gathered


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_keys_and_values_are_gathered_before_heads_are_repeated(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask makes transformers repeat heads before attention: 2 of 4 heads travel, both ways."""
    torch.manual_seed(0)
    sent = list[int]()
    gather = ThreadGroup.all_gather

    def all_gather(group: ThreadGroup, tensor: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        sent.append(tensor.numel())
        return gather(group, tensor, lengths)

    monkeypatch.setattr(ThreadGroup, "all_gather", all_gather)
    assert_same(WithLoss(_llama(attn_implementation=attention)), make_batch(13, padded=True), 4)
    key_entries = 2 * 13 * 2 * 8  # samples, rows, heads, width
    layers, tensors = 2, 2
    assert sum(n for n in sent if n > 13) == layers * tensors * key_entries


class RepeatedHeads(nn.Module):
    """Attention of 8 heads of queries on 4 of keys and values, each repeated `how` before the call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(h).unflatten(-1, (16, 4)).transpose(1, 2).split([8, 4, 4], 1)
        if self.how == "in order":
            k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        else:
            k, v = (t[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2) for t in (k, v))
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril() if self.how == "masked" else None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return h + self.out(out.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList([RepeatedHeads(how), RepeatedHeads(how)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.words(input_ids)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


class AllToAlls:
    """Counts the numbers that ranks exchange by all-to-all and by gathering."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exchanged, self.gathered = list[int](), list[int]()
        all_to_all, all_gather = ThreadGroup.all_to_all, ThreadGroup.all_gather

        def count_all_to_all(group: ThreadGroup, rows: torch.Tensor, sent: Any, received: Any) -> Any:
            self.exchanged.append(rows.numel())
            return all_to_all(group, rows, sent, received)

        def count_all_gather(group: ThreadGroup, tensor: torch.Tensor, lengths: Any) -> Any:
            self.gathered.append(tensor.numel())
            return all_gather(group, tensor, lengths)

        monkeypatch.setattr(ThreadGroup, "all_to_all", count_all_to_all)
        monkeypatch.setattr(ThreadGroup, "all_gather", count_all_gather)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("length", "count"), [(13, 2), (13, 4), (3, 4)])
def test_ranks_exchange_rows_for_heads(
    length: int, count: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys and values there, results back, in forward and backward; nothing is gathered for them."""
    torch.manual_seed(0)
    sizes = WIDTHS | {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = WithLoss(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)))
    counted = AllToAlls(monkeypatch)
    assert not assert_same(model, make_batch(length, padded), count, "ulysses").gathered
    heads, layers, directions = 8 + 4 + 4 + 8, 2, 2
    assert sum(counted.exchanged) == 2 * length * heads * 8 * layers * directions
    assert not [n for n in counted.gathered if n >= length * 8]


@pytest.mark.parametrize(("how", "exchanges"), [("in order", 6), ("masked", 8), ("in turns", 8)])
def test_heads_are_exchanged_before_they_are_repeated_in_order(
    how: str, exchanges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that are repeated 0, 0, 1, 1 travel once; those repeated 0, 1, 0, 1 travel as they are."""
    torch.manual_seed(0)
    counted = AllToAlls(monkeypatch)
    assert_same(Decoder(how), make_batch(9, padded=False), 2, "ulysses")
    layers, directions = 2, 2
    assert sum(counted.exchanged) == 2 * 9 * 4 * 4 * exchanges * layers * directions


@pytest.mark.parametrize("name", MODELS)
def test_attention_without_a_share_of_heads_gathers(name: str) -> None:
    """2 heads of keys and values on 4 ranks, biases of each head, and products in the model's own code."""
    torch.manual_seed(0)
    assert_same(WithLoss(MODELS[name]()), make_batch(13, padded=True), 4, "ulysses")


class PackedAttention(nn.Module):
    """Samples side by side in one row, each attending to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, dim=1)
        samples = zip(*(t.split(lengths.tolist(), dim=2) for t in parts), strict=True)
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in samples]
        return x + self.out(torch.cat(outs, dim=2).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("count", [2, 4])
def test_samples_side_by_side_attend_to_themselves_on_rows(count: int) -> None:
    torch.manual_seed(0)
    call = ((torch.randn(1, 16, 8, requires_grad=True), torch.tensor([3, 1, 7, 5])), dict[str, Any]())
    assert find_row_layer(PackedAttention(), call, count) == RowLayer(None)


@pytest.mark.parametrize("reduction", [1, 2], ids=["mean", "sum"])
@pytest.mark.parametrize("count", [2, 4])
def test_the_loss_of_captured_code_sees_rows(count: int, reduction: int) -> None:
    """Each rank has the logits of its rows alone; one of four has none."""
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(2, 3, 8).double(), torch.randn(8, 16).double(), torch.arange(6) % 5
    labels[1] = -100

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        logits = torch.ops.aten.reshape.default(x @ weight, [-1, 16])
        probabilities = torch.ops.aten._log_softmax.default(logits, 1, False)
        return torch.ops.aten.nll_loss_forward.default(probabilities, labels, None, reduction, -100)[0]

    def run(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor, RowMode]:
        mode, own = RowMode(group), hidden.clone().requires_grad_()
        _, out = mode.run_section(
            lambda _, edges: ({}, {"loss": loss_of(mode.take_own_rows(own, 1))}), {}, {}
        )
        out["loss"].backward()
        assert own.grad is not None
        return out["loss"].detach(), own.grad, mode

    whole = hidden.clone().requires_grad_()
    loss_of(whole).backward()
    ranks = run_thread_ranks(count, run)
    assert all(torch.allclose(found, loss_of(hidden)) and not mode.gathered for found, _, mode in ranks)
    assert whole.grad is not None and torch.allclose(sum(g for _, g, _ in ranks), whole.grad)


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mse": F.mse_loss,
    "mse of captured code": lambda x, y: torch.ops.aten.mse_loss.default(x, y, 2),
    "mse without reduction": lambda x, y: F.mse_loss(x, y, reduction="none").mean(-1).sum(),
    "l1": lambda x, y: F.l1_loss(x, y, reduction="sum"),
    "weighted": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0, 0].exp()),
    "smooth": lambda x, y: torch.ops.aten.smooth_l1_loss.default(x, y, 1, 0.5),
    "huber": lambda x, y: F.huber_loss(x.flatten(0, 1), y.flatten(0, 1), delta=0.3),
    "divergence": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "counts": lambda x, y: F.poisson_nll_loss(x, y.exp(), reduction="sum"),
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y.argmax(-1), ignore_index=0),
    "classes second, captured": lambda x, y: torch.ops.aten.nll_loss2d_forward.default(
        x.transpose(1, 2).log_softmax(1).contiguous()[:, :, None], y.argmax(-1)[:, None], None, 1, 0
    )[0],
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("count", [2, 4])
def test_losses_see_rows(count: int, name: str) -> None:
    torch.manual_seed(0)
    hidden, target, loss_of = torch.randn(2, 3, 8).double(), torch.randn(2, 3, 8), LOSSES[name]
    target = target.double()

    def run(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor, RowMode]:
        mode, own = RowMode(group), hidden.clone().requires_grad_()
        _, out = mode.run_section(
            lambda _, edges: ({}, {"loss": loss_of(mode.take_own_rows(own, 1), target)}), {}, {}
        )
        out["loss"].backward()
        assert own.grad is not None
        return out["loss"].detach(), own.grad, mode

    whole = hidden.clone().requires_grad_()
    loss_of(whole, target).backward()
    ranks = run_thread_ranks(count, run)
    for found, _, mode in ranks:
        assert torch.allclose(found, loss_of(hidden, target)) and not mode.gathered
    assert whole.grad is not None and torch.allclose(sum(g for _, g, _ in ranks), whole.grad)


class RecomputesItself(nn.Module):
    """A layer that recomputes its attention, with dropout in it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.qkv, self.reentrant = nn.Linear(8, 24), reentrant

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.3)
        return seen.transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._attend, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("count", [2, 4])
def test_code_that_recomputes_itself_works_on_rows(count: int, reentrant: bool) -> None:
    torch.manual_seed(0)
    call = ((torch.randn(2, 7, 8, requires_grad=True),), dict[str, Any]())
    assert find_row_layer(RecomputesItself(reentrant), call, count) == RowLayer(None)


class Layer(nn.Module):
    """A layer with one of several ways to mix rows."""

    def __init__(self, mix: str) -> None:
        super().__init__()
        self.mix, self.up, self.down = mix, nn.Linear(8, 16), nn.Linear(16, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mix == "conv":
            x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        elif self.mix == "writes":
            x = x.clone()
            x[:, 1:] = x[:, :-1] * 0.5
        elif self.mix == "shift":
            x = x + F.pad(x[:, :-1], (0, 0, 1, 0))
        return x + self.down(torch.tanh(self.up(x)))


def test_a_layer_that_mixes_rows_stays_whole_with_the_reason() -> None:
    call = ((torch.randn(2, 6, 8, requires_grad=True),), dict[str, Any]())
    found = {mix: find_row_layer(Layer(mix), call, 2) for mix in ("none", "conv", "writes", "shift")}
    assert found["none"] == RowLayer(None)
    kinds = {mix: layer.reason.kind for mix, layer in found.items() if layer.reason is not None}
    assert kinds == {
        "conv": UnsplitKind.MIXES_ROWS,
        "writes": UnsplitKind.WRITES_INTO_ROWS,
        "shift": UnsplitKind.MIXES_ROWS,
    }


def test_experts_work_on_rows_by_themselves() -> None:
    torch.manual_seed(0)
    model, batch = _gpt_oss(), make_batch(7, padded=False)
    layer = model.get_submodule("model.layers.0")
    calls: list[tuple[Any, Any]] = []
    hook = layer.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    model(**batch)
    hook.remove()
    args, kwargs = calls[0]
    args, kwargs = tree_map(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, (args, kwargs))
    assert find_row_layer(layer, (args, kwargs), 2) == RowLayer(None, ("mlp.experts",))


def test_rows_are_dealt_head_and_tail() -> None:
    rows = deal_rows(16, 4)
    assert rows.runs[0] == ((0, 2), (14, 16)) and rows.runs[3] == ((6, 10),)
    assert sorted(rows.order) == list(range(16))
    causal_work = [sum(row + 1 for run in runs for row in range(*run)) for runs in rows.runs]
    assert set(causal_work) == {34}
    assert rows.window(1, 15).counts == (2, 4, 4, 4)


@pytest.mark.parametrize("name", ["log_softmax", "softmax", "logsumexp"])
def test_vocabulary_shards_work_on_rows(name: str) -> None:
    """Logits stay on their rank: gathered ones would take the memory of the whole sequence."""
    logits, parts = torch.randn(2, 5, 8, dtype=torch.float64), VocabShards(8)
    expected = getattr(torch, name)(logits, -1)

    def run(group: ThreadGroup) -> tuple[torch.Tensor, RowMode]:
        mode = RowMode(group)
        with mode:
            out = getattr(parts, name)(mode.take_own_rows(logits, 1), -1)
        return row_exchange.leave_section(out, group), mode

    for found, mode in run_thread_ranks(2, run):
        assert torch.allclose(found, expected) and not mode.gathered
