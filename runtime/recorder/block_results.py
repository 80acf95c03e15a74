"""Learns the results of blocks without their weights: from a copy of the model with fake parameters.

A block's result is learned by calling its module in that copy, with fake tensors where values depend on a
block, and with real tensors where they depend on inputs alone (vision blocks read `cu_seqlens.tolist()`).
Results are cached, so that 64 equal layers cost one run.
"""

from __future__ import annotations

import contextvars
import copy
import hashlib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

from secc.runtime.errors import UserError
from secc.runtime.host.tensor_bytes import view_bytes
from secc.runtime.model.module_copies import CopiesWithoutHistory
from secc.runtime.model.source_lines import forward_source_line
from secc.runtime.recorder import nested_values
from secc.runtime.recorder.recording import Hazard, RandomOpCall
from secc.runtime.sections import forward_hooks
from secc.runtime.sections.module_settings import ModuleSetting

TensorShapes = Mapping[str, tuple[int, ...]]  # shapes of tensors by their access paths
# Larger floating-point inputs (pictures, sounds) are recorded without values: hardly any forward reads them,
# and they cost time and memory.
LARGE_INPUT_ENTRIES = 1 << 20
_CPU = torch.device("cpu")
_GRADIENT_LEAF = torch.zeros((), requires_grad=True)
# Result of a run, ids of the tensors in it that are independent of inputs, whether values of real tensors
# were read, hazards, random ops.
BlockRun = tuple[Any, frozenset[int], bool, tuple[Hazard, ...], tuple[RandomOpCall, ...]]

# Failures are reported in messages of our own, without torch's traceback.
logging.getLogger(FakeTensorMode.__module__).setLevel(logging.CRITICAL)


class UnpredictedShape(BaseException):
    """Raised if something depends on the shape of a block's result that no shape rule gives. The forward is
    then recorded without rules.

    It is no Exception, so that the user's forward does not catch it.
    """


def is_fake(tensor: object) -> bool:
    """Whether a tensor has no values because it depends on a parameter or on a block's result."""
    return isinstance(tensor, FakeTensor)


def autocast_state() -> str:
    """Return the autocast state: "cuda bfloat16", "cpu bfloat16", or "" if it is off."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return f"{device} {str(torch.get_autocast_dtype(device)).removeprefix('torch.')}"
    return ""


def is_large_input(tensor: torch.Tensor) -> bool:
    """Whether an input, by its dtype and number of entries in all dims, is recorded without its values as
    long as forward does not read them."""
    return tensor.is_floating_point() and tensor.numel() > LARGE_INPUT_ENTRIES


def find_fakes(tensors: list[torch.Tensor], fixed: Collection[int] = ()) -> frozenset[int]:
    """Return the places of the tensors without values that have dims, or that no input decides, by the places
    `fixed`. Another scalar may be the loss so far: a call that leaves it alone is no part of it."""
    return frozenset(i for i, t in enumerate(tensors) if is_fake(t) and (t.dim() or i in fixed))


def copy_without_values(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake copy of the same shape, with the strides that `clone` would give it."""
    with mode:
        return mode.from_tensor(tensor.detach()).clone()


def copy_with_fake_parameters(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Copy `model` with fake parameters on the CPU. Buffers keep their values; those on the meta device
    become fake.

    Nothing but configurations is shared with the user's model. Raises UserError if the model cannot be
    copied.
    """
    memo: dict[int, Any] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(_empty_like(mode, p), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = _empty_like(mode, b) if b.is_meta else b.detach().clone()
    for m in model.modules():
        if (config := getattr(m, "config", None)) is not None:
            memo[id(config)] = config
    try:
        with CopiesWithoutHistory(lambda tensor: _empty_like(mode, tensor)):
            copied = copy.deepcopy(model, memo)
        forward_hooks.rebind_closures(copied, memo)
        return copied
    except Exception as error:
        remedy = (
            "keep what cannot be copied (locks, files, generators, closures over tensors) "
            "out of the model's attributes"
        )
        raise UserError(
            f"the model cannot be copied: {type(error).__name__}: {error}",
            forward_source_line(type(model)),
            remedy,
        ) from error


def _empty_like(mode: FakeTensorMode, like: torch.Tensor) -> torch.Tensor:
    with mode, torch.no_grad():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")


class ResultTensor:
    """A tensor in a block's result, at an access path.

    argument_index: number of the tensor argument that it is, None if the block makes it.
    is_input_independent: the arguments decide its shape but not its values. shape_is_unknown: its shape is
    not the one that it will have. It is no dataclass, since those count as containers here.
    """

    def __init__(
        self, path: str, tensor: torch.Tensor, argument: int | None = None, alone: bool = False
    ) -> None:
        self.path, self.argument_index, self.is_input_independent = path, argument, alone
        self.shape, self.stride, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype
        self.requires_grad, self.shape_is_unknown = tensor.requires_grad, False

    def with_shape(self, shape: tuple[int, ...] | None) -> ResultTensor:
        """Return a contiguous tensor of another shape; with None, one with an unknown shape."""
        changed = copy.copy(self)
        changed.shape_is_unknown = shape is None
        if shape is not None:
            changed.shape, changed.stride = shape, contiguous_strides(shape)
        return changed

    @property
    def is_dense(self) -> bool:
        """Whether its entries are contiguous in the order of the dims."""
        return self.stride == contiguous_strides(self.shape)


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return tuple(math.prod(max(1, d) for d in shape[i + 1 :]) for i in range(len(shape)))


@dataclass(frozen=True)
class BlockResult:
    """The result of a block's call. `skeleton` holds ResultTensor objects in place of tensors.
    `reads_values`: values of real arguments decided something. `written`: which of the tensors in the
    arguments, by their places, the block writes to."""

    skeleton: Any
    reads_values: bool
    hazards: tuple[Hazard, ...]
    draws: tuple[RandomOpCall, ...]
    written: tuple[int, ...] = ()

    def build_fakes(
        self, mode: FakeTensorMode, arguments: list[torch.Tensor]
    ) -> tuple[Any, list[tuple[ResultTensor, torch.Tensor]]]:
        """Make a new result with fake tensors in the shapes of the recorded ones. `arguments` are the tensors
        of the call, which results may be. Returns the result, and the new tensors with their ResultTensor. A
        tensor that occurs twice is one tensor."""
        new: list[tuple[ResultTensor, torch.Tensor]] = []

        def tensor(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, ResultTensor):
                return leaf
            if leaf.argument_index is not None:
                return arguments[leaf.argument_index]
            fake = next((t for known_leaf, t in new if known_leaf is leaf), None)
            if fake is None:
                fake = new_fake_tensor(mode, leaf.shape, leaf.stride, leaf.dtype, leaf.requires_grad)
                new.append((leaf, fake))
            return fake

        return nested_values.map_leaves(self.skeleton, tensor), new

    @property
    def is_plain(self) -> bool:
        """Whether it holds only tensors and None, in containers of fixed length."""
        return _holds_tensors_only(self.skeleton)

    def with_shapes(self, shapes: TensorShapes) -> BlockResult | None:
        """Return the result with other shapes, by access path. None if the shapes of its tensors do not
        determine the rest of it."""
        new: dict[ResultTensor, ResultTensor] = {}

        def resize_leaf(_: str, leaf: Any) -> Any:
            if isinstance(leaf, ResultTensor) and leaf.argument_index is None and leaf not in new:
                new[leaf] = leaf.with_shape(shapes.get(leaf.path))
            return new.get(leaf, leaf) if isinstance(leaf, ResultTensor) else leaf

        if not self.is_plain:
            return None
        skeleton = nested_values.map_leaves(self.skeleton, resize_leaf)
        fits = all(
            old.is_dense and len(leaf.shape) == len(old.shape)
            for old, leaf in new.items()
            if not leaf.shape_is_unknown
        )
        return replace(self, skeleton=skeleton, reads_values=False) if fits else None


def _holds_tensors_only(value: Any) -> bool:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return False
    children = nested_values.children_of(value)
    return (
        value is None or isinstance(value, ResultTensor)
        if children is None
        else all(_holds_tensors_only(child) for _, child in children)
    )


def new_fake_tensor(
    mode: FakeTensorMode,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Make a fake tensor that no mode sees. It is no leaf of autograd, since glue may change a block's
    result in place."""

    def make_fake() -> torch.Tensor:
        return FakeTensor(mode, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), _CPU)

    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        return (
            _GradientSource.apply(_GRADIENT_LEAF, make_fake)
            if requires_grad and not torch.is_inference_mode_enabled()
            else make_fake()
        )


class _GradientSource(torch.autograd.Function):
    """Gives a new tensor a place in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, made: Callable[[], torch.Tensor]) -> torch.Tensor:
        return made()

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise NotImplementedError("nothing is differentiated that has no values")


class BlockResultCache:
    """Results of blocks by class, parameters, arguments and, if the block read values, the values of real
    arguments.

    If a rule gives the shapes of a result, a cached result for arguments of other sizes supplies everything
    else.
    """

    def __init__(self) -> None:
        self._results: dict[Any, BlockResult] = {}
        self._results_by_layout: dict[Any, BlockResult] = {}  # without the sizes of the arguments
        self._keys_reading_values: set[Any] = set()
        self._signatures: dict[str, Any] = {}
        self._digests = TensorDigests()

    def learn_result(
        self,
        path: str,
        module: nn.Module,
        arguments: Any,
        run: Callable[[], BlockRun],
        rule: TensorShapes | None = None,
        settings: tuple[ModuleSetting, ...] = (),
        fixed: frozenset[int] = frozenset(),
    ) -> BlockResult:
        """Return the result of `module(*arguments)` under `settings`; `run` calls it. `rule` gives the
        shapes of its tensors, `fixed` the places of the tensors among the arguments that no input decides."""
        key = self._module_signature(path, module), _grad_and_autocast_state(), repr(settings), fixed
        if (
            rule is not None
            and (
                other_sizes := self._results_by_layout.get(
                    (*key, _describe_arguments(arguments, sizes=False))
                )
            )
            is not None
        ):
            result = other_sizes.with_shapes(rule)
            if result is not None:
                return result
        return self._run_or_recall(path, key, arguments, run, fixed)

    def _run_or_recall(
        self,
        path: str,
        base_key: tuple[Any, ...],
        arguments: Any,
        run: Callable[[], BlockRun],
        fixed: frozenset[int],
    ) -> BlockResult:
        inputs = [t for _, t in nested_values.iter_tensors(arguments)]
        key = (*base_key, _describe_arguments(arguments))
        cache_key = (key, self._value_digests(inputs)) if key in self._keys_reading_values else key
        if cache_key in self._results:
            known = self._results[cache_key]
            for i in known.written:
                increment_version(inputs[i])
            return known
        versions = tensor_versions(inputs)
        # An empty context: Hugging Face's output recorders collect what runs in the caller's context, and
        # this run is not the user's.
        out, input_independent, reads, hazards, draws = contextvars.Context().run(run)
        result = BlockResult(
            result_skeleton(
                out, inputs, versions, input_independent, find_fakes(inputs, fixed) if reads else ()
            ),
            reads,
            hazards,
            tuple(d.relative_to_block(path) for d in draws),
            tuple(
                i for i, (a, b) in enumerate(zip(versions, tensor_versions(inputs), strict=True)) if a != b
            ),
        )
        if reads:
            self._keys_reading_values.add(key)
        self._results[(key, self._value_digests(inputs)) if reads else key] = result
        self._results_by_layout[(*base_key, _describe_arguments(arguments, sizes=False))] = result
        return result

    def _value_digests(self, inputs: list[torch.Tensor]) -> tuple[bytes, ...]:
        return tuple(self._digests.digest_of(t) for t in inputs if not is_fake(t))

    def _module_signature(self, path: str, module: nn.Module) -> Any:
        if path not in self._signatures:
            self._signatures[path] = (
                tuple(map(_describe_module, module.modules())),
                tuple(_describe_parameters(module)),
            )
        return self._signatures[path]


class TensorDigests:
    """Hashes of the values of real tensors, computed once: all layers of a tower are called with the same
    ones."""

    def __init__(self) -> None:
        self._known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # with the version that they are of

    def digest_of(self, tensor: torch.Tensor) -> bytes:
        """Returns a digest of the values of a tensor of any shape. It is cached until an op changes the
        tensor in place."""
        if torch.is_inference(tensor):
            return hash_values(tensor)
        cached = self._known.get(tensor)
        if cached is None or cached[0] != tensor._version:
            cached = tensor._version, hash_values(tensor)
            self._known[tensor] = cached
        return cached[1]


def _describe_module(module: nn.Module) -> Any:
    """Return what distinguishes a module from others of its class. Dropout probabilities often grow from
    layer to layer."""
    numbers = tuple(sorted((k, v) for k, v in vars(module).items() if isinstance(v, float)))
    return type(module), module.training, str(module.extra_repr()), numbers


def _describe_parameters(module: nn.Module) -> Iterator[Any]:
    for name, t in (*module.named_parameters(), *module.named_buffers()):
        yield name, tuple(t.shape), t.dtype, t.requires_grad


def _grad_and_autocast_state() -> Any:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()


def _describe_arguments(arguments: Any, sizes: bool = True) -> str:
    def describe(t: torch.Tensor) -> Any:
        return f"{(tuple(t.shape), t.stride()) if sizes else t.ndim} {t.dtype} {t.requires_grad} {is_fake(t)}"

    return repr(nested_values.encode_arguments(arguments, describe))


def hash_values(tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor's entries."""
    return hashlib.sha256(view_bytes(tensor).numpy().data).digest()


def tensor_versions(tensors: list[torch.Tensor]) -> list[int]:
    """Return how often ops have written to each tensor; 0 for those that do not count it."""
    return [0 if torch.is_inference(t) else t._version for t in tensors]


def result_skeleton(
    out: Any,
    inputs: list[torch.Tensor],
    versions: list[int],
    alone: frozenset[int],
    new: Collection[int] = (),
) -> Any:
    """Return a block's result with ResultTensor objects (shape, dtype, strides) in place of tensors; the same
    object for the same tensor. versions: `tensor_versions` of the inputs before the call. An input that the
    block wrote to is another value afterwards, so a result that is this tensor counts as a new one, as does
    one of the inputs at the places `new`, where other values may give another result."""
    leaves: dict[int, ResultTensor] = {}
    unwritten = zip(inputs, versions, tensor_versions(inputs), strict=True)
    position = {
        id(t): i for i, (t, before, after) in enumerate(unwritten) if before == after and i not in new
    }

    def leaf(path: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in leaves:
            leaves[id(value)] = ResultTensor(path, value, position.get(id(value)), id(value) in alone)
        return leaves[id(value)]

    return nested_values.map_leaves(out, leaf)
