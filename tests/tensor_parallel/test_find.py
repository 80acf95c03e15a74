"""How modules are cut is found from their code alone, and shown exact: attention by heads, feed-forward
layers by their inner width."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as T
from torch import nn
from torch.utils._pytree import tree_map

from secc.frontend.tp_search.annotate_layouts import strip_values
from secc.frontend.tp_search.find_mapping import TpMapping, find_mapping, mapping_shards
from secc.frontend.tp_search.hf_tp_plan import hf_column_parallel
from secc.frontend.tp_search.thread_ranks import ThreadGroup, run_thread_ranks
from secc.frontend.tp_search.verify_mapping import MappingVerdict, UnsplitModule
from secc.runtime.plan.schema import ModuleStyle
from secc.runtime.plan.unsplit_reason import UnsplitKind, UnsplitReason
from secc.runtime.tensor_parallel.parameter_cuts import ParameterCut, cut_parameters
from secc.runtime.tensor_parallel.styles import apply_styles
from tests.tensor_parallel.model_layers import first_layer

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
WIDTH = 32


def shown(
    module: nn.Module, *args: Any, count: int = 2, **kwargs: Any
) -> tuple[TpMapping, MappingVerdict, MappingVerdict]:
    """The mapping, and what the comparison says of it without and with whole sizes."""
    call = (args, kwargs)
    found = find_mapping(module, call, count)
    plain, shapes = (
        UnsplitModule(module, call).compare_mapping(
            count, found.layer_styles(with_shapes), mapping_shards(module, found)
        )
        for with_shapes in (False, True)
    )
    return found, plain, shapes


SMALL: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
LLAMA = T.LlamaConfig(**SMALL, num_key_value_heads=2)
QWEN3 = T.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8)
GPT2 = T.GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=64)
PHI3 = T.Phi3Config(**SMALL, num_key_value_heads=4, pad_token_id=0)
NEOX = T.GPTNeoXConfig(**SMALL)
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
MIXTURE = T.Qwen3MoeConfig(**SMALL, **EXPERTS, **HEADS)


@pytest.mark.parametrize("config", [LLAMA, QWEN3, GPT2, PHI3, NEOX], ids=lambda c: c.model_type)
def test_layers_of_models_are_cut_everywhere(config: Any) -> None:
    """Separate and fused projections, `nn.Linear` and `Conv1D`, queries and keys side by side or head by
    head, dropout."""
    module, args, kwargs = first_layer(config)
    found, _, shapes = shown(module, *args, **kwargs)
    assert shapes.reason is None and not found.unsplit_reasons
    assert len(found.row_parallel) == 2
    assert set(shapes.partial_parameters) == {
        n for n, _ in module.named_parameters() if "q_norm" in n or "k_norm" in n
    }


def test_layers_in_bfloat16_are_cut_as_in_float32() -> None:
    """Arguments are collected in float32, with which LayerNorm refuses weights in bfloat16."""
    module, args, kwargs = first_layer(GPT2)
    narrow = find_mapping(copy.deepcopy(module).bfloat16(), (args, kwargs), 2)
    assert narrow.column_parallel == find_mapping(module, (args, kwargs), 2).column_parallel
    assert len(narrow.row_parallel) == 2 and not narrow.unsplit_reasons


def test_attention_of_a_mixture_without_values_is_cut_in_bfloat16() -> None:
    """As the layers of a model are that is too large to be built here."""
    module, args, kwargs = first_layer(MIXTURE)
    call = tree_map(lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, (args, kwargs))
    found = find_mapping(copy.deepcopy(module).bfloat16().to("meta"), call, 2)
    assert len(found.column_parallel) == 3 and found.row_parallel.keys() == {"self_attn.o_proj"}


def test_parts_of_fused_projections_are_found() -> None:
    module, args, kwargs = first_layer(PHI3)
    found, *_ = shown(module, *args, **kwargs)
    assert found.column_parallel["self_attn.qkv_proj"] == (WIDTH, WIDTH, WIDTH) and found.column_parallel[
        "mlp.gate_up_proj"
    ] == (48, 48)
    assert [str(size) for size in found.shared_sizes] == ["4 heads", f"{WIDTH} outputs", "48 outputs"]


def test_code_that_follows_its_sizes_needs_no_help() -> None:
    module, args, kwargs = first_layer(LLAMA)
    assert shown(module, *args, **kwargs)[1].reason is None


def test_heads_that_do_not_divide_stay_whole_with_the_reason() -> None:
    module, args, kwargs = first_layer(LLAMA)
    found, _, shapes = shown(module, *args, count=4, **kwargs)
    assert found.unsplit_reasons["self_attn.k_proj"] == UnsplitReason(UnsplitKind.UNEVEN_HEADS, size=2, tp=4)
    assert set(found.row_parallel) == {"mlp.down_proj"} and shapes.reason is None


def test_plain_pytorch_with_sizes_spelt_out() -> None:
    from nano import Block  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    found, plain, shapes = shown(Block(), torch.randn(2, 7, WIDTH, requires_grad=True))
    assert found.column_parallel["attn.c_attn"] == (WIDTH, WIDTH, WIDTH) and set(found.row_parallel) == {
        "attn.c_proj",
        "down",
    }
    assert plain.reason and shapes == MappingVerdict(None, ("scale",))


class Mixture(nn.Module):
    """A router weighs two ways; its softmax mixes what ranks would have parts of."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up, self.down = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.router(x).softmax(-1)
        return self.down(F.gelu(self.up(x)) * share[..., :1]) * share[..., 1:2]


def test_a_whole_activation_that_meets_parts_gets_its_whole_gradient() -> None:
    torch.manual_seed(0)
    found, plain, shapes = shown(Mixture(), torch.randn(2, 3, WIDTH, requires_grad=True))
    assert set(found.column_parallel) == {"up"} and found.unsplit_reasons["router"].subject == "softmax"
    assert (
        plain.reason and shapes.reason is None
    )  # without marks the router's gradient would be a part of the sum


class Wrong(nn.Module):
    """Reads its own width off its weights, which are parts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu() / self.up.weight.shape[0])


def test_a_mapping_that_is_not_exact_is_found_out() -> None:
    torch.manual_seed(0)
    _, plain, shapes = shown(Wrong(), torch.randn(2, 3, WIDTH, requires_grad=True))
    assert plain.reason == shapes.reason == UnsplitReason(UnsplitKind.RESULTS_DIFFER)


def test_adapters_are_cut_with_their_layer() -> None:
    """A LoRA of rank 8 next to a linear map: what it adds is whole, and joins parts."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))})
    adapted = peft.get_peft_model(
        model["mlp"], peft.LoraConfig(target_modules=["0"], r=8, lora_alpha=8, init_lora_weights=False)
    )
    found, _, shapes = shown(adapted, torch.randn(2, 3, WIDTH, requires_grad=True))
    assert shapes.reason is None and len(found.row_parallel) >= 1


def test_what_a_model_says_of_itself_is_tried_first() -> None:
    model = T.AutoModelForCausalLM.from_config(QWEN3)
    assert hf_column_parallel(model, "model.layers.1") == [
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj",
    ]  # fmt: skip
    assert hf_column_parallel(model, "lm_head") == [] and hf_column_parallel(Mixture(), "up") == []


def kept(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes that a forward keeps for its backward, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    held: dict[int, torch.Tensor] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            held[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(*args, **kwargs)
    return sum(t.untyped_storage().nbytes() for t in held.values())


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_norms_on_parts_of_the_sequence_are_exact_and_keep_less(config: Any, count: int) -> None:
    """Six positions on four ranks: some have one, some two. Four ranks need as many heads."""
    wide = copy.deepcopy(config)
    wide.num_key_value_heads = 4
    module, args, kwargs = first_layer(wide)
    found = find_mapping(module, (args, kwargs), count)
    cut = mapping_shards(module, found)
    verdict = UnsplitModule(module, (args, kwargs)).compare_mapping(count, found.sequence_styles(False), cut)
    assert verdict.reason is None and {"input_layernorm.weight", "post_attention_layernorm.weight"} <= set(
        verdict.partial_parameters
    )

    def bytes_of(styles: list[ModuleStyle]) -> int:
        def rank(group: ThreadGroup) -> int:
            part = copy.deepcopy(module)
            cut_parameters(
                part,
                {
                    s.name: ParameterCut(
                        module.get_parameter(s.name).shape, s.dim, s.parts, group.index, count
                    )
                    for s in cut
                },
            )
            apply_styles(part, styles, group, cut)
            inputs = [a.detach().clone().requires_grad_() for a in args]
            return kept(part, *inputs, **kwargs)

        return sum(run_thread_ranks(count, rank))

    assert bytes_of(found.sequence_styles(False)) < (0.9, 0.75)[count == 4] * bytes_of(
        found.layer_styles(False)
    )


class MapsAndFeedForward(nn.Module):
    """Attention that returns its maps, as distillation wants them, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind()
        maps = (q @ k.mT).softmax(-1)
        x = x + self.out((maps @ v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu()), maps


def test_attention_that_returns_its_maps_stays_whole_and_blames_no_number_of_heads() -> None:
    found, plain, shapes = shown(MapsAndFeedForward(), torch.randn(2, 5, WIDTH))
    assert set(found.column_parallel) == {"up"} and set(found.row_parallel) == {"down"}
    assert found.unsplit_reasons["qkv"].kind is UnsplitKind.LEAVES_IN_PARTS
    assert plain.reason is None or shapes.reason is None


class Convolved(nn.Module):
    """A feed-forward layer after a convolution, which refuses a bias in another dtype than its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.conv(x.transpose(1, 2)).transpose(1, 2))))


def test_a_large_layer_in_sixteen_bits_is_split() -> None:
    """Of a model too large to run, arguments are made up in float32."""
    call = ((torch.empty(2, 7, WIDTH, device="meta"),), dict[str, Any]())
    layer = strip_values(Convolved().bfloat16(), call)
    found = find_mapping(layer, call, 2)
    assert found.column_parallel.keys() == {"up"} and found.row_parallel.keys() == {"down"}


class StateOfHeads(nn.Module):
    """Linear attention that starts from a state of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(len(x), -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        state = q.new_zeros(len(x), 4, WIDTH // 4, WIDTH // 4)
        for at in range(2):
            state = state * 0.5 + k[:, :, at : at + 1].mT @ v[:, :, at : at + 1]
        x = x + self.out((q @ state).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


def test_queries_keys_and_values_are_blamed_for_no_number_of_heads() -> None:
    found, *_ = shown(StateOfHeads(), torch.randn(2, 5, WIDTH))
    assert {"up"} == set(found.column_parallel)
    assert found.unsplit_reasons["qkv"].kind is not UnsplitKind.UNEVEN_HEADS


class ThreeHeads(nn.Module):
    """Attention of three heads. A table with an entry for each entry of a head rotates the values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, 3 * 16), nn.Linear(3 * 16, WIDTH)
        self.register_buffer("turn", torch.linspace(0.5, 1.5, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x).view(len(x), -1, 3, 16).transpose(1, 2) * self.turn
        return self.out((((q @ q.mT).softmax(-1)) @ q).transpose(1, 2).flatten(2))


def test_three_heads_are_blamed_where_two_ranks_cannot_share_them() -> None:
    x = torch.randn(2, 5, WIDTH)
    found = find_mapping(ThreeHeads(), ((x,), {}), 2)
    assert (found.unsplit_reasons["query"].kind, found.unsplit_reasons["query"].size) == (
        UnsplitKind.UNEVEN_HEADS,
        3,
    )
