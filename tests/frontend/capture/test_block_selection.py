"""Which modules become blocks, and how heads, losses, opened components, named blocks and calls that
cannot be recorded change that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from secc.errors import UserError
from secc.frontend.capture.block_selection import (
    ModuleTree,
    is_layer_stack,
    replace_with_parent,
    select_blocks,
)
from secc.runtime.recorder import Recorder

WIDTH, VOCABULARY = 8, 40
TOKENS = {"tokens": torch.randint(0, VOCABULARY, (3, 7)), "labels": torch.randint(0, VOCABULARY, (3, 7))}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, thing: object = None) -> torch.Tensor:
        return x + self.line(self.norm(x)).relu()


class Stack(nn.Module):
    """Embedding, layers, norm."""

    def __init__(self, layers: int = 3, thing: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.thing = nn.LayerNorm(WIDTH), thing

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, object() if self.thing else None)
        return self.norm(x)


class Language(nn.Module):
    """A stack with a head; the loss is computed inside if labels are given."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.head = Stack(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.decoder(tokens))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Wrapped(nn.Module):
    """A tower in a wrapper that adds no head."""

    def __init__(self, thing: bool = False) -> None:
        super().__init__()
        self.tower, self.out = Stack(thing=thing), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.tower(tokens))


class Pair(nn.Module):
    """Two components."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.gain = first, second, nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        inner = {"labels": labels} if isinstance(self.second, Language) and self.second.training else {}
        a, b = self.first(tokens), self.second(tokens, **inner)
        return (a.mean() + b.mean()) * self.gain


def chosen(model: nn.Module, **options: Any) -> list[str]:
    return select_blocks(model, [TOKENS], **options).blocks


def test_a_component_with_one_stack_is_one_block() -> None:
    assert chosen(Pair(Wrapped(), Stack())) == ["first", "second"]


def test_the_climb_ends_below_a_head() -> None:
    assert chosen(Pair(Wrapped(), Language().eval())) == ["first", "second.decoder", "second.head"]


class Around(nn.Module):
    """Hands its tokens on to a model with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Language().eval()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)


def test_a_wrapper_around_a_head_is_opened_too() -> None:
    assert chosen(Pair(Stack(), Around())) == ["first", "second.model.decoder", "second.model.head"]


def test_a_module_that_computes_the_loss_is_opened() -> None:
    assert chosen(Pair(Stack(), Language())) == ["first", "second.decoder", "second.head"]


class Merged(Wrapped):
    """A tower whose own projection is wider than its layers, which are in no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.layers, self.out = (
            nn.Identity(),
            nn.ModuleList(Layer() for _ in range(2)),
            nn.Linear(WIDTH, 2 * WIDTH),
        )
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def test_a_wide_projection_before_the_last_layer_is_no_head() -> None:
    assert chosen(Pair(Merged(), Stack())) == ["first", "second"]


def test_an_opened_component_has_its_layers_as_blocks() -> None:
    found = chosen(Pair(Wrapped(), Stack()), cut={"first"})
    assert found == [
        "first.tower.embed",
        *(f"first.tower.layers.{i}" for i in range(3)),
        "first.tower.norm",
        "first.out",
        "second",
    ]


def test_an_opened_layer_has_its_parts_as_blocks() -> None:
    layer = "first.tower.layers.1"
    found = chosen(Pair(Wrapped(), Stack()), cut={"first", layer})
    assert found[1:5] == [
        "first.tower.layers.0",
        f"{layer}.line",
        f"{layer}.norm",
        "first.tower.layers.2",
    ]


def test_parts_of_a_layer_are_the_largest_modules_with_weights_that_it_may_call() -> None:
    encoder = transformers.T5EncoderModel(transformers.T5Config(num_layers=2, d_model=8, d_ff=8, d_kv=4))
    tree = ModuleTree(encoder)
    parts = [f"encoder.block.1.layer.{i}" for i in range(2)]
    assert tree.parts_of_layer("encoder.block.1") == parts
    assert {tree.layer_around(part) for part in parts} == {"encoder.block.1"}
    assert tree.parts_of_layer(f"{parts[0]}.dropout") == [f"{parts[0]}.dropout"]


def test_the_user_may_name_blocks() -> None:
    model = Pair(Wrapped(), Language().eval())
    assert chosen(model, named=["second"]) == ["first", "second"]
    found = chosen(model, named=["first.tower.layers.1"])
    assert "first.tower.layers.1" in found and "first" not in found and "first.out" in found


@pytest.mark.parametrize("option", [{"cut": ["frist"]}, {"named": ["second.x"]}])
def test_a_path_that_is_no_module_is_refused(option: dict[str, Sequence[str]]) -> None:
    with pytest.raises(UserError, match="no module"):
        chosen(Pair(Stack(), Stack()), **option)


def test_layers_with_arguments_that_cannot_be_recorded_stay_inside_their_component() -> None:
    found = select_blocks(Pair(Wrapped(thing=True), Stack()), [TOKENS])
    assert found.blocks == ["first", "second"]


class DynamicCache:
    """Stands for Hugging Face's cache, filled before the model is called."""


class Prefixed(nn.Module):
    """Layers that are called with a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = Stack()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        cache, x = DynamicCache(), self.tower.embed(tokens)
        for layer in self.tower.layers:
            x = layer(x, cache)
        return x


def test_layers_that_are_called_with_a_cache_are_opened() -> None:
    model = Pair(Prefixed(), Stack())
    recorder = Recorder(model, ())
    select_blocks(model, [TOKENS], recorder=recorder)
    assert {f"first.tower.layers.{i}.line" for i in range(3)} <= {*recorder.blocks}


def test_layers_are_called_without_a_cache_that_nobody_reads() -> None:
    """With `use_cache`, Hugging Face's models make an empty cache and call their layers with it."""
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
    )
    model, tokens = transformers.LlamaForCausalLM(config), torch.ones(2, 7, dtype=torch.long)
    recorder = Recorder(model, ())
    select_blocks(model, [{"input_ids": tokens, "labels": tokens}], recorder=recorder)
    assert {*recorder.blocks} == {f"model.layers.{i}" for i in range(3)}


class CachedLine(nn.Linear):
    def __init__(self, layer_idx: int | None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.layer_idx = layer_idx

    def forward(self, x: torch.Tensor, cache: transformers.DynamicCache | None) -> torch.Tensor:
        return super().forward(x)


class TwoCalls(nn.Module):
    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = transformers.DynamicCache()
        return self.layers[-1](self.layers[0](x, cache), cache).sum()


@pytest.mark.parametrize("layers", [[CachedLine(None)], [CachedLine(3), CachedLine(3)]])
def test_a_cache_that_is_read_is_kept(layers: Sequence[nn.Module]) -> None:
    """By a second call of a layer, or by a layer of the same number in another model."""
    blocks = [f"layers.{i}" for i in range(len(layers))]
    with pytest.raises(UserError, match="called with a value of type DynamicCache"):
        Recorder(TwoCalls(layers), blocks).record({"x": torch.ones(2, WIDTH)})


def test_a_block_and_its_part_that_want_each_other_are_refused() -> None:
    """The layer takes a tensor that nothing passes to it, so its parts are to be blocks; one of these is
    called with an object, so the layer is to be one. That went on without an end."""
    held = list[torch.Tensor]()

    class Part(nn.Linear):
        def forward(self, x: torch.Tensor, thing: object) -> torch.Tensor:
            return super().forward(x)

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = Part(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.line(x + held[0], object())

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Held(), Held()])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            held[:] = [x.exp()]
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(UserError, match="which cannot be written into a plan"):
        select_blocks(Pair(Holder(), Stack()), [TOKENS])


def test_the_component_is_the_largest_module_without_another_stack() -> None:
    model = Pair(Wrapped(), Language())
    assert ModuleTree(model).component_of("first.tower") == "first"
    assert ModuleTree(model).component_of("second.head") == "second"
    assert ModuleTree(Language()).component_of("head") == ""


def test_a_head_is_no_part_of_the_stack_of_its_component() -> None:
    tree = ModuleTree(Pair(Wrapped(), Language()))
    parts = ("second", "second.decoder", "second.decoder.layers.1", "second.head")
    assert [tree.is_part_of_stack(part, "second") for part in parts] == [True, True, True, False]
    assert ModuleTree(Language()).is_part_of_stack("", "")


def test_stacks_are_lists_of_equal_layers_with_weights() -> None:
    assert is_layer_stack(nn.ModuleList([Layer(), Layer()])) and is_layer_stack(
        nn.Sequential(Layer(), Layer(), Layer())
    )
    assert not is_layer_stack(nn.ModuleList([Layer()]))
    assert not is_layer_stack(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)))
    assert not is_layer_stack(nn.Sequential(Layer(), nn.LayerNorm(WIDTH)))
    assert not is_layer_stack(nn.ModuleList([nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())]))


class Crossing(Layer):
    """A layer of another class in the same file."""


class Deep(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.attention, self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.ModuleList(inner)


class DeepCrossing(Deep):
    """A layer with parts of another class in the same file."""


def test_a_stack_may_mix_layers_of_one_file_that_have_parts() -> None:
    assert is_layer_stack(nn.ModuleList([Deep(), DeepCrossing(), Deep()]))
    assert not is_layer_stack(nn.ModuleList([Layer(), Crossing()]))
    assert not is_layer_stack(nn.ModuleList([Deep(Layer(), Layer()), DeepCrossing(Layer(), Layer())]))


def test_a_coarser_block_replaces_the_blocks_inside_it() -> None:
    assert replace_with_parent(["a.b.0", "a.b.1", "a.c", "ab"], "a.b") == ["a.b", "a.c", "ab"]
