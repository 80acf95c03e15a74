"""What the recorder learns about a block when it runs it for its shapes: rows chosen by masks, random
numbers, coupled samples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secc.runtime.errors import UserError
from secc.runtime.model.function_blocks import add_function_block
from secc.runtime.model.nested_batch import flatten_batch
from secc.runtime.recorder import BlockError, Recorder, record_forward
from secc.runtime.recorder.fold_joins import fold_joins

BATCH = {"x": torch.arange(20.0).reshape(4, 5) / 10 - 1, "keep": torch.tensor([True, False, True, True])}


def line_free(call: str) -> str:
    """The name of a random op without its line numbers."""
    return re.sub(r"test_opaque_blocks.py:\d+", "LINE", call)


def test_a_mask_made_like_a_result_may_choose_rows_inside_a_block() -> None:
    """UDOP marks the patches that have words in a tensor made by `full_like` of what it embedded."""

    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            h = self.embed(x)
            rest, written = torch.full_like(h[:, 0], True).bool(), torch.zeros_like(h)
            rest[: len(keep) // 2] = False
            written[:2] = h[:2]
            if self.training and bool(rest.all()):
                return h
            return torch.cat([h[rest], written])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = Patches()

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.patches(x, keep).sum()

    (call,) = record_forward(Model(), BATCH, ["patches"]).block_calls
    count = len(BATCH["x"])
    assert next(iter(call.users)).meta["shape"] == (2 * count - len(BATCH["keep"]) // 2, 5)
    assert next(iter(call.users)).meta["requires_grad"]


def test_random_ops_and_batch_norm_inside_blocks_are_reported() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(5))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.tower(x).mean()

    found = record_forward(Noisy(), BATCH, ["tower"])
    assert {(h.path, h.kind) for h in found.hazards} == {("tower", "batch_norm")}
    assert [(line_free(d.draw_name), d.shape, d.is_supported) for d in found.draws] == [
        ("tower.1@LINE#0", (len(BATCH["x"]), 5), True)
    ]
    quiet = record_forward(Noisy().eval(), BATCH, ["tower"])
    assert quiet.hazards == [] and quiet.draws == []


def test_random_ops_of_equal_layers_have_different_names() -> None:
    class Layer(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p, self.linear = p, nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.linear(x), self.p) if self.p else self.linear(x)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Sequential(*(Layer(p) for p in (0.0, 0.1, 0.1, 0.2)))

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.tower(self.tower(x)).mean()

    for blocks in (["tower"], [f"tower.{i}" for i in range(4)]):
        names = [line_free(d.draw_name) for d in record_forward(Deep(), BATCH, blocks).draws]
        assert names == [f"tower.{i}@LINE<LINE#{time}" for time in range(2) for i in (1, 2, 3)]


class Conditioned(nn.Module):
    """A layer that is told of its memory before it is called, as Flamingo's are."""

    def __init__(self) -> None:
        super().__init__()
        self.cross, self.own = nn.Linear(5, 5), nn.Linear(5, 5)
        self.memory: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x) + self.cross(self.memory)


def test_a_hidden_input_suggests_the_blocks_parts() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.layers = nn.Linear(5, 5), nn.ModuleList([Conditioned(), Conditioned()])

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            memory = self.encoder(x)
            for layer in self.layers:
                layer.memory = memory
                x = layer(x)
            return x.sum()

    with pytest.raises(BlockError, match="uses a tensor that is made outside of it") as error:
        record_forward(Model(), BATCH, ["encoder", "layers.0", "layers.1"])
    assert error.value.where.startswith("test_opaque_blocks.py:")
    assert "functional_call" in error.value.remedy
    parts = error.value.suggest_blocks(["encoder", "layers.0"])
    assert parts == ["encoder", "layers.0.cross", "layers.0.own"]
    assert [
        n.target
        for n in record_forward(
            Model(), BATCH, ["encoder", "layers.0.own", "layers.0.cross", "layers.1.own", "layers.1.cross"]
        ).block_calls
    ]


def test_flex_attention_is_refused_where_torch_has_no_gradients_of_it_on_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a version of torch in which `prepare_flex_attention` does not find the names it replaces."""
    from torch.nn.attention import flex_attention as torch_module
    from torch.nn.attention.flex_attention import flex_attention

    def refuse(*args: torch.Tensor) -> None:
        raise NotImplementedError("FlexAttention does not support backward on CPU.")

    monkeypatch.setattr(torch_module, "_validate_device", refuse)

    class Flexible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([FlexibleLayer()])

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x).sum()

    class FlexibleLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.own(x)[:, None, :, None]
            return flex_attention(heads, heads, heads)  # pyright: ignore[reportReturnType]

    with pytest.raises(BlockError, match="FlexAttention does not support backward on CPU") as error:
        record_forward(Flexible(), BATCH, ["layers.0"])
    assert "test_opaque_blocks.py:" in error.value.where
    assert "scaled_dot_product_attention with a mask" in error.value.remedy


def test_a_block_mask_of_blocks_alone_is_refused() -> None:
    """torch ignores blocks on CPUs, so the comparison with plain PyTorch would not see them."""
    from torch.nn.attention.flex_attention import BlockMask

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.ModuleList([Masked()])

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            one = torch.ones(1, 1, 1, dtype=torch.int32)
            mask = BlockMask.from_kv_blocks(one, one[None] - 1, seq_lengths=(5, 5))
            return self.own[0](x, mask).sum()

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, mask: BlockMask) -> torch.Tensor:
            return x * self.scale

    with pytest.raises(UserError, match="a block mask without mask_mod") as error:
        record_forward(Blocks(), BATCH, ["own.0"])
    assert "test_opaque_blocks.py:" in error.value.where


def test_growing_lists_are_passed_to_blocks_as_entries_and_sizes() -> None:
    class Joins(nn.Module):
        def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
            return torch.cat(pictures).sum() * self.weight

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.joins = nn.Linear(5, 3), Joins()

        def forward(self, x: list[torch.Tensor]) -> torch.Tensor:
            return (self.own(torch.cat(x)) * self.joins(list(x))).sum()

    batch = {"x.*": torch.randn(9, 5), "x.*sizes": torch.tensor([[4], [2], [3]])}
    own, joins = fold_joins(record_forward(Model(), batch, ["own", "joins"])).block_calls
    assert str(own.args) == "(x_,)" and str(joins.args) == "({'*': x_, '*sizes': x_sizes},)"
    assert next(iter(own.users)).meta["shape"] == (9, 3)


class Biased(nn.Module):
    """Gives back `x`, a bias that its shape alone decides, and one that `x` was written into."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.near = nn.Linear(5, 5), nn.Embedding(9, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bias = self.near(torch.arange(x.shape[-1]))
        mixed = torch.zeros_like(bias)
        mixed += self.own(x).mean(0)
        return self.own(x), bias, mixed


def test_results_independent_of_inputs_are_marked() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Biased(), Biased()])

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            x, bias, mixed = self.layers[1](self.layers[0](x)[0])
            return x.sum() + bias.sum() + mixed.sum()

    found = record_forward(Model(), BATCH, ["layers.0", "layers.1"])
    alone = {str(out.args[1]): out.meta["alone"] for out in found.block_calls[1].users}
    assert alone == {"[0]": False, "[1]": True, "[2]": False}


def test_results_that_fixed_arguments_decide_are_marked() -> None:
    """Positions are made of sizes in glue; those that samples were written into are no longer fixed."""

    class Positions(nn.Embedding):
        def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return super().forward(positions)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near = Positions(9, 5)

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            positions, written = torch.arange(x.shape[-1]) + 1, torch.arange(x.shape[-1])
            written[:2] = keep.sum().long() % 2
            outs = (self.near(x, positions), self.near(x, written + 1), self.near(x, keep.long()))
            return x.sum() + sum(out.sum() for out in outs)

    found = record_forward(Model(), BATCH, ["near"])
    assert [next(iter(call.users)).meta["alone"] for call in found.block_calls] == [True, False, False]


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(5, 5), nn.Linear(5, 5)
        self.loss: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.own(x))
        self.loss = x.square().sum()
        return x


def test_a_stored_tensor_suggests_the_parts_of_all_blocks_of_the_class() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Keeping(), Keeping()])

        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.sum() + self.layers[0].loss  # type: ignore[operator]

    recorder = Recorder(Model(), ["layers.0", "layers.1"])
    for _ in range(2):  # the second time, the block's result is known, and it does not run
        with pytest.raises(
            BlockError, match=r"block layers\.0 keeps a tensor on a module, which forward uses"
        ) as error:
            recorder.record(BATCH)
    assert error.value.suggest_blocks(["layers.0", "layers.1"]) == [
        f"layers.{i}.{part}" for i in (0, 1) for part in ("other", "own")
    ]


class KeepingScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.mean = nn.Parameter(torch.ones(())), torch.zeros(1)

    def forward(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        if back:
            return x * self.weight + self.mean
        self.mean = x.mean(1, keepdim=True)
        return (x - self.mean) * self.weight


class ScaledThere(nn.Module):
    """Statements with a list of layers make what a module keeps for its call behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layers = KeepingScale(), nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        x = self.scale(x)
        for layer in self.layers:
            x = layer(x)
        return self.scale(x, back=True).square().sum()


def test_what_a_block_of_statements_keeps_for_a_module_is_refused() -> None:
    model = ScaledThere()
    path = add_function_block(model, ":ScaledThere.forward#0-1@", __name__)
    for _ in range(2):
        with pytest.raises(BlockError, match=f"block {path} keeps a tensor on a module, which scale uses"):
            Recorder(model, [path, "scale"]).record(BATCH)


def test_packed_sequences_and_ctc_losses_have_shapes_from_input_lengths() -> None:
    class Heard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 6)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heard = Heard()

        def forward(
            self, x: torch.Tensor, lengths: torch.Tensor, words: torch.Tensor, counts: torch.Tensor
        ) -> torch.Tensor:
            found = self.heard(x, lengths).log_softmax(-1).transpose(0, 1)
            return F.ctc_loss(found, words, lengths, counts, reduction="sum")

    lengths, counts = torch.tensor([4, 9, 7]), torch.tensor([2, 1, 3])
    batch = {
        "x": torch.randn(3, 9, 3),
        "lengths": lengths,
        "words": torch.randint(1, 6, (3, 3)),
        "counts": counts,
    }
    found = record_forward(Model(), batch, ["heard"])
    (call,) = found.block_calls
    assert next(iter(call.users)).meta["shape"] == (3, 9, 6) and call.meta["reads"]
    (aligned,) = (n for n in found.graph.nodes if "_ctc_loss" in str(n.target))
    assert [r["shape"] for r in aligned.meta["results"]] == [(3,), (3, 9, 7)]


class LongEnough(nn.Module):
    """A loss of the steps that a length leaves, as a transducer's: with a length of 0 there are none."""

    def forward(self, h: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        loss = torch.full((), float("inf"))
        for step in (1, 2):
            valid = lengths >= step
            if bool(valid.any()):
                loss = torch.where(valid, h.sum(1), h.new_zeros(())).mean()
        return loss


class WithLengths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.count, self.loss = nn.Linear(5, 5), nn.Linear(5, 1), LongEnough()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(self.body(x), self.count(x)[:, 0].int())


def test_a_loss_of_no_step_has_a_gradient_all_the_same() -> None:
    recording = record_forward(WithLengths(), {"x": BATCH["x"]}, ["body", "count", "loss"])
    loss = next(iter(recording.block_calls[-1].users))
    assert loss.meta["shape"] == () and loss.meta["requires_grad"]


class ListedOneByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 2)

    def forward(self, pages: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.encode(page) for page in pages]).sum()


def test_the_only_entry_of_a_list_may_be_a_blocks_only_argument() -> None:
    batch = flatten_batch({"pages": [BATCH["x"]]}, lists={"pages": 1})
    (call,) = record_forward(ListedOneByOne(), batch, ["encode"]).block_calls
    assert next(iter(call.users)).meta["shape"] == (4, 2)


def test_equal_layers_run_once_where_hooks_inside_collect_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face's models have hooks for attention weights, also where only hidden states are wanted."""
    from transformers import CLIPVisionConfig, CLIPVisionModel
    from transformers.models.clip.modeling_clip import CLIPAttention

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = CLIPVisionConfig(
                hidden_size=8,
                intermediate_size=8,
                num_attention_heads=2,
                num_hidden_layers=6,
                image_size=8,
                patch_size=4,
            )
            self.tower: Any = CLIPVisionModel(config)

        def forward(self, pixels: torch.Tensor, weights: bool = False) -> torch.Tensor:
            found = self.tower(pixels, output_hidden_states=True, output_attentions=weights)
            return found.hidden_states[3].sum() + sum(a.sum() for a in found.attentions or ())

    runs, forward = list[str](), CLIPAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append("attention")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(CLIPAttention, "forward", counted)
    batch = {"pixels": torch.randn(2, 3, 8, 8)}
    record_forward(Model(), batch, ["tower"])
    assert len(runs) == 1
    runs.clear()
    record_forward(Model(), batch | {"weights": True}, ["tower"])
    assert len(runs) == 6
