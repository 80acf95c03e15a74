"""Counting blocks on the meta device: FLOPs, saved bytes, and fallbacks for blocks that cannot be counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from secc.cost.counting import meta_run
from secc.cost.counting.annotate_calls import annotate_calls
from secc.cost.counting.example_arguments import CollatedSamples
from secc.cost.model.section_cost import integer_attribute
from secc.ir.analysis.sample_sizes import SAMPLES_ATTRIBUTE, samples_attr
from secc.ir.dialect.ops import BlockOp, TieOp, graph_of
from secc.ir.dialect.size_expr import parse_expr
from secc.runtime.sections.recompute import install_recompute, recompute_units
from tests.cost.call_graphs import call_attributes, call_graph

CALL = '    %y = sec.call "f" (%x) args "$0" outs [""] : !sec.tensor<[B, S, 8], f32, grad>\n'


class Attention(nn.Module):
    """Two heads of four, attention over S."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, dim=1)
        if mask is not None and not mask.all():
            raise ValueError("the trial should take the mask for full")
        return (
            functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class ReadsValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())]


class Experts(nn.Module):
    """Four experts of 8 x 64; each token is routed to one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 8, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        ends = torch.full((4,), 1, device=x.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        products = torch._grouped_mm(tokens, self.weight, offs=ends)  # pyright: ignore[reportPrivateUsage]
        return products[:, :8].view_as(x)


def annotate_block(block: nn.Module, calls: str = CALL) -> Any:
    model = nn.ModuleDict({"f": block})
    module = call_graph(model, calls)
    annotate_calls(module, model)
    return call_attributes(module)[0]


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_peak_of_frozen_block_is_that_of_its_largest_layer(depth: int) -> None:
    """A layer's input, and 32 features before and after the activation; from the second layer on, the
    input is the call's own."""
    frozen = CALL.replace('outs [""]', 'outs [""] no_grad').replace(", grad>", ">")
    assert (
        annotate_block(Stack(depth).requires_grad_(False), frozen)["peak"] == f"{256 + 32 * (depth > 1)}*B*S"
    )
    assert "peak" not in annotate_block(Stack(depth))


def count_on_meta(block: nn.Module, again: Sequence[nn.Module] = ()) -> meta_run.BlockCounts:
    return meta_run.run_on_meta(
        block, lambda makes: ([makes((3, 5, 8), (40, 8, 1), torch.float32)], {}), grad=True, units=again
    )


def test_runs_that_share_parameter_stand_ins_count_the_same() -> None:
    block, makes = Stack(3), meta_run.ValuelessTensors()
    shared = [
        meta_run.run_on_meta(
            block,
            lambda makes: ([makes((3, 5, 8), (40, 8, 1), torch.float32)], {}),
            True,
            recompute_units(block),
            makes,
        )
        for _ in range(2)
    ]
    assert shared == [count_on_meta(block, recompute_units(block))] * 2


class GroupedAttention(nn.Module):
    """Eight heads of queries and two of keys and values, fused or as products."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.query, self.rest = fused, nn.Linear(8, 32), nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.query(x).unflatten(-1, (8, 4)).transpose(1, 2)
        key, value = self.rest(x).unflatten(-1, (4, 4)).transpose(1, 2).chunk(2, dim=1)
        key, value = (
            t[:, :, None].expand(-1, -1, 4, -1, -1).reshape(query.shape[:2] + t.shape[2:])
            for t in (key, value)
        )
        if self.fused:
            out = functional.scaled_dot_product_attention(query, key, value)
        else:
            out = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        return out.transpose(1, 2).flatten(2)[..., :8]


@pytest.mark.parametrize("fused", [True, False])
def test_keys_and_values_count_without_repeated_heads(fused: bool) -> None:
    """Two tensors of two heads of four entries of four bytes; linear maps exchange nothing."""
    assert annotate_block(GroupedAttention(fused))["exchanged"] == f"{2 * 2 * 4 * 4}*B*S"
    assert "exchanged" not in annotate_block(nn.Linear(8, 8))


def test_linear_layer() -> None:
    """A product over 8 features reaches 2% of a large product's rate."""
    found = annotate_block(nn.Linear(8, 8))
    assert (found["flops"], found["saved"], found["cost"]) == ("128*B*S", "32*B*S", "counted")
    assert found["work"] == f"{128 * 50}*B*S"


def test_each_token_is_charged_one_expert() -> None:
    cost = annotate_block(Experts())
    assert (cost["flops"], cost["cost"]) == ("1024*B*S", "counted")
    assert cost["work"] == f"{1024 * 50}*B*S"  # as a product over 8 features
    assert cost["saved"] == "32*B*S + 16"  # float32 tokens, and where the experts' tokens end


def test_attention_is_counted_as_fused_kernel() -> None:
    found = annotate_block(Attention())
    # 2*8*24 for the projection; 4*S*head for each of two heads. Saved: x, qkv (one storage), the output, a
    # log-sum of each head. Causal: S*(S + 1)/2 pairs of each head.
    assert found["flops"] == "16*B*S*S + 400*B*S" and found["attention"] == "16*B*S*S + 16*B*S"
    assert found["saved"] == f"{4 * (8 + 24 + 8 + 2)}*B*S"


def test_truth_values_of_masks_are_true() -> None:
    masked = (
        '    %y = sec.call "f" (%x, %m) args "$0, mask=$1" outs [""] : !sec.tensor<[B, S, 8], f32, grad>\n'
    )
    assert annotate_block(Attention(), masked)["cost"] == "counted"


def test_no_grad_saves_nothing() -> None:
    frozen = '    %y = sec.call "f" (%x) args "$0" outs [""] no_grad : !sec.tensor<[B, S, 8], f32>\n'
    assert annotate_block(nn.Linear(8, 8), frozen)["saved"] == "0"


class Positioned(nn.Module):
    """Adds learned positions from a table of few rows."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.positions, self.attention = nn.Embedding(places, 8), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        return self.attention(x + self.positions(places) + self.positions.weight[: len(places)])


@pytest.mark.parametrize("places", [60, 40, 18, 10])
def test_a_table_of_few_positions_does_not_change_the_counts(places: int) -> None:
    found, known = list[Mapping[str, str]](), [(frozenset[str](), {"B": 1, "S": 10, "n": 0})]
    for limit in (places, 1000):
        model = nn.ModuleDict({"f": Positioned(limit)})
        module = call_graph(model, CALL)
        graph_of(module).attributes[SAMPLES_ATTRIBUTE] = samples_attr(["B", "S", "n"], known)
        annotate_calls(module, model)
        found += call_attributes(module)
    assert found[0]["cost"] == "counted" and found[0] == found[1]


def test_block_that_reads_values_gets_default_estimate() -> None:
    found = annotate_block(ReadsValues())
    assert (found["flops"], found["saved"], found["cost"]) == ("0", "512*B*S", "default")
    assert (found["kept"], found["working"], found["again"]) == ("32*B*S", "480*B*S", "0")


class Padded(nn.Module):
    """Writes into tensors that it creates itself, with or without naming the device of its argument."""

    def __init__(self, device: bool) -> None:
        super().__init__()
        self.device, self.up = device, nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on: dict[str, Any] = {"device": x.device} if self.device else {}
        places, weights = torch.arange(x.shape[1], **on), torch.tensor([0.5] * 8, **on)
        padded = torch.zeros(x.shape[0], x.shape[1] + 1, 8, **on)
        padded[:, places] = x * weights
        return self.up(padded)[:, 1:, :8]


def test_tensors_created_with_and_without_device_cost_the_same() -> None:
    named, bare = annotate_block(Padded(device=True)), annotate_block(Padded(device=False))
    assert bare == named and named["cost"] == "counted"
    assert named["flops"] == "1024*B*S + 1024*B"  # the product of the padded rows


class Waved(nn.Module):
    """Has tensors that are not buffers, and tensors from NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up = torch.linspace(0.5, 1.0, 8), nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = torch.from_numpy(np.sin(np.arange(8, dtype=np.float32)))
        return self.up(x * self.scale + wave)[..., :8]


def test_real_tensors_can_be_combined_with_meta_tensors() -> None:
    found = annotate_block(Waved())
    assert (found["flops"], found["cost"]) == ("1024*B*S", "counted")
    assert (
        found["moved"] == f"{4 * 2 * 8 * 2}*B*S + {2 * 4 * 8}"
    )  # two operations read and write x and read eight numbers


class Rated(nn.Module):
    """Reads values of a tensor that it creates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rates: list[float] = torch.linspace(0.5, 1.0, 3).tolist()
        return self.up(x * rates[1])[..., :8]


def test_values_of_tensors_created_in_a_block_can_be_read() -> None:
    found = annotate_block(Rated())
    assert (found["flops"], found["cost"]) == ("1024*B*S", "counted")


class PerSample(nn.Module):
    """Attends within each sample of a packed batch, and reads how long they are."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        parts = x.split(lengths.tolist(), dim=1)
        return torch.cat([functional.scaled_dot_product_attention(p, p, p) for p in parts], dim=1)


def test_block_that_reads_integers_is_measured_on_samples() -> None:
    """Samples of 10 and 30 tokens have 100 and 900 pairs, so 25 pairs per token, of 2*(8 + 8) FLOPs each."""
    packed = """    %l = sec.input "lengths" : !sec.tensor<[B], i64>
    %t = sec.input "t" : !sec.tensor<[1, T, 8], f32, grad>
    %y = sec.call "f" (%t, %l) args "$0, $1" outs [""] : !sec.tensor<[1, T, 8], f32, grad>
"""
    model = nn.ModuleDict({"f": PerSample()})
    module = call_graph(model, packed, '  sec.symbol "T" kind "rows" key "t" dim 1\n')
    annotate_calls(
        module,
        model,
        CollatedSamples([{"lengths": torch.tensor([n]), "t": torch.zeros(1, n, 8)} for n in (10, 30)], {}),
    )
    found = call_attributes(module)[0]
    assert (found["attention"], found["cost"]) == (f"{25 * 32}*T", "sampled")


class ReadsMask(nn.Module):
    """Works on padded samples, and reads which entries are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.up(x)[..., :8] if min(mask.flatten().tolist()) else x


def test_second_runs_stop_after_what_the_backward_needs() -> None:
    """Of the two equal products of a layer, the last one is not computed again, as torch counts it."""
    block, x = Stack(3), torch.randn(2, 5, 8, requires_grad=True)

    def count_step() -> int:
        with FlopCounterMode(display=False) as counter:
            block(x).sum().backward()
        return counter.get_total_flops()

    once = count_step()
    with FlopCounterMode(display=False) as forward:
        block(x)
    counted = count_on_meta(block, recompute_units(block))
    install_recompute(nn.ModuleDict({"f": block}), ["f"], "full")
    again = count_step() - once
    assert again == forward.get_total_flops() / 2 and counted.again == counted.work / 2 == counted.unneeded


def test_mean_cost_of_padded_samples_is_linear_in_rows() -> None:
    masked = CALL.replace("(%x)", "(%x, %m)").replace('"$0"', '"$0, $1"')
    model = nn.ModuleDict({"f": ReadsMask()})
    module = call_graph(model, masked)
    annotate_calls(
        module,
        model,
        CollatedSamples(
            [{"x": torch.zeros(1, n, 8), "m": torch.ones(1, n, dtype=torch.int64)} for n in (10, 30)], {}
        ),
    )
    found = call_attributes(module)[0]
    assert (found["flops"], found["saved"], found["cost"]) == ("1024*B*S", "32*B*S", "sampled")


def test_kept_and_working_bytes_of_recomputed_layers() -> None:
    """Each layer keeps its input; its second run saves the 32 inner features twice and its input."""
    found = annotate_block(Stack(5))
    assert found["kept"] == f"{5 * 4 * 8}*B*S" and found["working"] == f"{4 * (32 + 32)}*B*S"
    assert found["saved"] == f"{5 * 4 * (8 + 32 + 32)}*B*S"
    assert found["again"] == found["unneeded"] and 2 * parse_expr(found["again"]) == parse_expr(found["work"])
    block = Stack(2)
    plain = count_on_meta(block)
    assert (plain.kept, plain.working, plain.again) == (plain.saved, 0, 0)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_kept_bytes_match_a_real_run(mode: str) -> None:
    """Compared with a real run under the wrappers of the runtime; for selective recomputation, by the
    share of layers."""
    model, depth = nn.ModuleDict({"f": Stack(6)}), 6
    found = count_on_meta(model["f"], recompute_units(model["f"]))
    install_recompute(model, ["f"], mode)
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not any(tensor.data_ptr() == p.data_ptr() for p in model.parameters()):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model["f"](torch.zeros(3, 5, 8))
    again = depth if mode == "full" else depth // 2
    assert (
        sum(t.untyped_storage().nbytes() for t in kept.values())
        == found.saved - again * (found.saved - found.kept) // depth
    )


def test_kept_bytes_include_inputs_of_a_block() -> None:
    found = annotate_block(Attention())
    assert (found["kept"], found["working"]) == ("32*B*S", f"{4 * (24 + 8 + 2)}*B*S")
    assert "kept" not in annotate_block(nn.Linear(8, 8))  # nothing is inside it that could run again


def test_repeated_layers_are_counted_without_running() -> None:
    """Counts with and without skipping agree for every depth."""
    block = Stack(6)
    whole, short = count_on_meta(block), count_on_meta(block, recompute_units(block))
    for key in ("flops", "work", "moved", "saved", "ops"):
        assert getattr(whole, key) == getattr(short, key), key
    assert not any("forward" in vars(m) for m in block.modules())


class Turned(Stack):
    """Runs its layers in a given order, some perhaps twice."""

    def __init__(self, *order: int) -> None:
        super().__init__(3)
        self.order = order

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x


@pytest.mark.parametrize(
    ("order", "turned"),
    [((0, 1, 2), False), ((0, 2), False), ((0, 1, 2, 0), True), ((1, 1), True), ((1, 0), True)],
)
def test_layers_run_twice_or_out_of_order_are_marked(order: tuple[int, ...], turned: bool) -> None:
    block = Turned(*order)
    assert count_on_meta(block, recompute_units(block)).units_in_order != turned
    assert ("noted" in annotate_block(block).get("out_of_turn", "")) == turned


class Penalized(Stack):
    """Takes a weight of a layer outside of the layer, or only its dtype."""

    def __init__(self, takes_values: bool) -> None:
        super().__init__(3)
        self.takes_values = takes_values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = next(self.layers[1].parameters())
        y = super().forward(x.to(weight.dtype))
        return y + weight.square().mean() if self.takes_values else y


@pytest.mark.parametrize("takes_values", [True, False])
def test_layers_with_weights_that_other_code_takes_are_marked(takes_values: bool) -> None:
    block = Penalized(takes_values)
    assert count_on_meta(block, recompute_units(block)).units_in_order != takes_values
    assert ("noted" in annotate_block(block).get("out_of_turn", "")) == takes_values


class StackWithValues(Stack):
    """Reads a value of its own result, so that it does not run without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if float(y.sum()) < 1e9 else x


def test_layers_of_which_nothing_is_known_are_marked() -> None:
    found = annotate_block(StackWithValues(3))
    assert (found["cost"], found["out_of_turn"]) == ("default", "noted")
    assert "out_of_turn" not in annotate_block(ReadsValues())  # a block without layers is held whole anyhow


@pytest.mark.parametrize("depth", [1, 5])
def test_flops_match_torch_flop_counter(depth: int) -> None:
    block = Stack(depth)
    with FlopCounterMode(display=False) as counter:
        block(torch.zeros(3, 5, 8))
    found = count_on_meta(block)
    assert found.flops == counter.get_total_flops()


@pytest.mark.parametrize("depth", [1, 5])
def test_saved_bytes_match_autograd(depth: int) -> None:
    block, kept = Stack(depth), {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not any(tensor.data_ptr() == p.data_ptr() for p in block.parameters()):
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        block(torch.zeros(3, 5, 8))
    found = count_on_meta(block)
    assert found.saved == sum(t.untyped_storage().nbytes() for t in kept.values())


def test_equal_calls_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[nn.Module] = []

    def counted(module: nn.Module, *rest: Any, **options: Any) -> meta_run.BlockCounts:
        runs.append(module)
        return meta_run.run_on_meta(module, *rest, **options)

    monkeypatch.setattr("secc.cost.counting.annotate_calls.run_on_meta", counted)
    model = nn.ModuleDict({"f": nn.Linear(8, 8), "g": nn.Linear(8, 8)})
    second = CALL.replace("%y", "%z").replace('"f"', '"g"')
    module = call_graph(model, CALL + second)
    annotate_calls(module, model)
    assert call_attributes(module)[0] == call_attributes(module)[1]
    assert set(runs) == {model["f"]}


def test_bytes_of_blocks_and_tied_parameters() -> None:
    model = nn.ModuleDict(
        {"f": nn.Linear(8, 8, bias=False).to(torch.bfloat16), "g": nn.Linear(8, 8, bias=False)}
    )
    model["g"].weight = model["f"].weight
    module = call_graph(model, CALL, '  sec.tie names ["f.weight", "g.weight"]\n')
    annotate_calls(module, model)
    ops = list(graph_of(module).body.block.ops)
    assert [integer_attribute(op, "bytes", 0) for op in ops if isinstance(op, BlockOp)] == [128, 128]
    assert [
        (integer_attribute(op, "params", 0), integer_attribute(op, "bytes", 0))
        for op in ops
        if isinstance(op, TieOp)
    ] == [(64, 128)]


def test_user_modules_are_not_modified() -> None:
    block = Stack(2)
    before = {n: p.clone() for n, p in block.named_parameters()}
    annotate_block(block)
    assert all(
        torch.equal(p, before[n]) and p.grad is None and not p.is_meta for n, p in block.named_parameters()
    )
