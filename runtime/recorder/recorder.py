"""The recorder: runs a user's forward with opaque blocks and records what happens between them.

Blocks return fake tensors, which have a shape but no values; ops on inputs alone run for real. So weights and
logits never exist, a branch on an input goes where the user's data leads, and a branch on a block's result is
an error instead of a wrong graph.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import FakeTensorMode

from secc.runtime.errors import UserError
from secc.runtime.model.dataclass_args import cache_layer, is_empty_cache
from secc.runtime.model.deferred_scalar import DeferredScalar
from secc.runtime.model.function_blocks import FunctionBlock, find_running_functions, intercepted_functions
from secc.runtime.model.nested_batch import dict_list_columns, find_tensor_lists, unflatten_batch
from secc.runtime.model.source_lines import (
    current_source_line,
    error_source_line,
    format_source_line,
    forward_code,
    forward_source_line,
    module_paths_by_id,
    running_module_and_frames,
    running_module_and_lines,
)
from secc.runtime.model.user_file import (
    extract_logged_scalars,
    extract_loss,
    extract_tensors,
    is_model_file_module,
)
from secc.runtime.plan.call_sites import format_call_site
from secc.runtime.plan.schema import COUNTS_SUFFIX, EACH_SUFFIX, SIZES_SUFFIX
from secc.runtime.randomness.random_op_values import is_random, is_supported
from secc.runtime.recorder import nested_values, random_run
from secc.runtime.recorder.block_results import (
    BlockResultCache,
    BlockRun,
    TensorShapes,
    UnpredictedShape,
    copy_with_fake_parameters,
    copy_without_values,
    is_fake,
    is_large_input,
)
from secc.runtime.recorder.drawn_values import drawn_with_seed
from secc.runtime.recorder.finalize import finalize_graph
from secc.runtime.recorder.function_calls import record_function_apply
from secc.runtime.recorder.functionalise import functionalise_tape, has_mutations
from secc.runtime.recorder.glue_ops import GlueRecorder, OpExecutor, argument_tensors, makes_nested_tensor
from secc.runtime.recorder.graph_tape import Tape, describe_moment
from secc.runtime.recorder.hazards import BlockWatch
from secc.runtime.recorder.interception import (
    CallInterceptor,
    OpInterceptor,
    intercept_autograd_functions,
    intercept_idle_autocast,
    intercept_module_calls,
    without_distribution_validation,
)
from secc.runtime.recorder.operand_dtypes import require_one_dtype
from secc.runtime.recorder.recorded_modules import RecordedModules
from secc.runtime.recorder.recording import (
    BlockError,
    CallObserver,
    Hazard,
    NeedsValues,
    RandomOpCall,
    Recording,
    RecordingEnded,
    is_gradient_error,
    mark_written,
)
from secc.runtime.recorder.setting_tracker import SettingTracker, watch_attributes
from secc.runtime.recorder.shape_dependencies import FixedNodes, ShapeDependencies
from secc.runtime.recorder.shortcuts import Shortcuts
from secc.runtime.recorder.tensor_origins import TensorOrigins
from secc.runtime.sections import forward_hooks, gradient_hooks

_FLEX_REMEDY = (
    "torch has no gradients of flex attention on CPUs, where plans are compared with plain PyTorch: use "
    'scaled_dot_product_attention with a mask, or attn_implementation="sdpa"'
)
_UNWRITABLE_ARGUMENT_REMEDIES = {
    "PackedSequence": "pack, run the recurrent layers and unpack in one nn.Module that takes and returns "
    "padded tensors; it is then one block",
    "DynamicCache": "call the model without a cache (use_cache=False); for a cache that you fill before, let "
    "one nn.Module hold what fills it and what reads it",
}
NO_BATCH_STATE_REMEDY = (
    "let what is kept from batch to batch change after the step (in the optimizer, or between runs), "
    "not in forward"
)
_SUBCLASS_MESSAGE = (
    "forward makes a tensor of a class other than torch.Tensor between its modules, or asks for the class of"
    " one, which cannot be recorded"
)
_SUBCLASS_REMEDY = "make and use it inside one nn.Module that takes plain tensors and returns plain ones"
_NESTED_MESSAGE = "forward makes a nested tensor between its modules, which cannot be recorded"
_NESTED_REMEDY = (
    "make and use it inside one nn.Module that takes lists or padded tensors and returns padded ones"
)
_DIGESTED_ENTRIES = 16  # of each input, which tell batches of the same sizes apart
ResultShapeRules = Mapping[str, TensorShapes]
NO_SHAPE_RULES: ResultShapeRules = {}


class _CacheUsedAgain(BaseException):
    """Ends the run of a block that uses a cache of keys and values for a second time. It is no Exception, so
    that forward does not catch it."""


class Recorder:
    """Records forwards of one model with one choice of blocks (module paths), any number of times.

    The model may be on the meta device; it is copied and never changed. With `keeps_scalars`, other scalars
    that forward returns are kept as well, and the tensors `kept_tensors` that it returns or gets;
    `found_scalars` says whether there were any. With `shows_placed_rows`, blocks that put rows in the places
    of a mask are to be opened. With `follows_draws`, masks that forward draws may select rows; they select
    others on a rank, so such a recording is not valid for a micro-batch.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = copy_with_fake_parameters(model, self._mode)
        self._modules = dict(self._model.named_modules())
        self._recorded_modules = RecordedModules(self._modules)
        self._tensors = {n: t for n, t in (*self._model.named_parameters(), *self._model.named_buffers())}
        self._state = {id(t): n for n, t in self._tensors.items()}
        self._paths = module_paths_by_id(self._model)
        self._suggested_parts = set[str]()  # in place of blocks inside which a caller collects results
        self._growing_blocks = set[str]()  # blocks that add to lists or dicts of their callers
        self._keeps_caches = False  # a block reads what an earlier call wrote into a cache
        self._fills_caches = False  # a layer inside a block reads what an earlier call wrote into a cache
        self._unfilled_caches = dict[tuple[str, int], object]()  # by layer and id, in the running block
        self._omitted_caches = dict[int, tuple[object, set[int | str]]]()  # by id, and the layers without it
        self._opened_blocks = set[str]()  # blocks that hide what should be seen, which were opened
        self.shows_placed_rows = self.follows_draws = False
        self._uses_random_values = False  # whether a module runs with random values now
        self._differentiates = False  # whether a block runs now that takes gradients of what it calls
        self._origins = TensorOrigins(
            self._state, {t.untyped_storage()._cdata: n for n, t in self._tensors.items()}
        )
        self._settings = SettingTracker(self._modules)
        self._block_results = BlockResultCache()
        self._layers = self._recorded_modules.stacked_layers()
        self.shortcut_call = Shortcuts(self._mode, self._on_shortcut)
        self._drops_large_values = True  # large inputs are recorded without values until forward reads one
        self._has_valueless_inputs = False  # whether the present recording has such inputs
        self._observer = CallObserver()
        intercept_module_calls(self._model, self._on_module_call)
        self.keeps_scalars, self.found_scalars = False, False
        self.kept_tensors: Collection[str] = ()
        self.use_blocks(blocks)

    def use_blocks(self, blocks: Collection[str]) -> None:
        """Use these modules as blocks from now on. Raises UserError for a path that is no module."""
        unknown = sorted(set(blocks) - self._modules.keys())
        if unknown:
            where, remedy = forward_source_line(type(self._model)), "name modules as named_modules() does"
            raise UserError(f"the model has no module {unknown[0]!r}", where, remedy)
        self.blocks, self._opaque = frozenset(blocks), dict[str, bool]()

    @contextmanager
    def observed_by(self, observer: CallObserver) -> Iterator[None]:
        """Report the calls made inside to `observer`."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = CallObserver()

    def record(
        self, batch: Mapping[str, Any], rules: ResultShapeRules = NO_SHAPE_RULES, until: int | None = None
    ) -> Recording:
        """Record `model(**unflatten_batch(batch))`. Raises UserError for what cannot be recorded, BlockError
        if other blocks may help.

        `rules` give the shapes of blocks' results, by label of the call (`secc.runtime.recorder.outline`) and
        access path: blocks with a rule need not run. With `until`, the recording ends with the block call of
        that number, counted from 0.
        """
        self._until = until
        try:
            return self._record_with_rules(batch, rules)
        except UnpredictedShape:
            pass
        except UserError:
            if not rules:
                raise  # else perhaps since the batch takes another path than the one with these shapes
        return self._record_with_rules(batch, NO_SHAPE_RULES)

    @property
    def configuration(self) -> Hashable:
        """What decides recordings besides the batch."""
        return (
            self.blocks,
            self.keeps_scalars,
            tuple(self.kept_tensors),
            self.shows_placed_rows,
            self.follows_draws,
            self._drops_large_values,
        )

    def adopt_recording(self, recording: Recording) -> Recording:
        """Take over what a recording shows that another process made with a copy of this recorder, and
        return it."""
        self.found_scalars |= any("log" in node.meta for node in recording.graph.nodes)
        return recording

    def _record_with_rules(self, batch: Mapping[str, Any], rules: ResultShapeRules) -> Recording:
        self._rules = rules
        self._has_valueless_inputs = self._drops_large_values and any(
            is_large_input(t) for _, t in nested_values.iter_batch_tensors(batch)
        )
        if self._has_valueless_inputs:
            try:
                return self._record_once(batch)
            except UserError:  # perhaps because forward reads a large input: record with values from now on
                self._drops_large_values = self._has_valueless_inputs = False
        return self._record_once(batch)

    def _record_once(self, batch: Mapping[str, Any]) -> Recording:
        self.paused = False
        self._open = [""]  # paths of the running modules outside of blocks, innermost last
        self._hazards, self._watch = dict[Hazard, None](), BlockWatch("")
        self._unpacking = ""  # forward's source line while the batch's lists are made
        self._tape = Tape(self._state, self._node_meta, {}, self._refuse_stray_tensor)
        self._dense_masks = dict[int, tuple[Any, Any]]()  # block masks and their truth values, by id
        self._lists = dict[tuple[int, ...], dict[str, torch.Tensor]]()  # growing lists by their tensors' ids
        self._grouped = dict[tuple[tuple[int, ...], ...], dict[str, Any]]()  # lists of lists by theirs
        self._omitted_caches.clear()
        self._draws, self._met, self._called = list[RandomOpCall](), Counter[str](), Counter[str]()
        self._runs = dict[int, tuple[int, FrameType]]()  # numbers of functions' frames, which stay alive
        self._touched, self._fixed = ShapeDependencies(self._tape), FixedNodes(self._tape.graph)
        self._running: tuple[str, set[int]] = (
            "",
            set(),
        )  # the block that runs for its shapes, ids of arguments
        self._executor = OpExecutor(self._mode, self._fail_in_running_block, self.follows_draws)
        self._glue = GlueRecorder(self._tape, self._executor, self._fail_in_running_block)
        inputs = self._copy_inputs(batch)
        self._draw_seed = _digest_batch(inputs)
        for name, tensor in nested_values.iter_batch_tensors(inputs):
            self._tape.bind_tensor(tensor, self._tape.head_node("placeholder", name, tensor))
        try:
            with (
                CallInterceptor(self),
                OpInterceptor(self),
                intercept_autograd_functions(self),
                intercept_idle_autocast(self),
                without_distribution_validation(),
                watch_attributes(self._on_attribute_set),
                intercepted_functions(self._model, self._on_function_call),
            ):
                loss_and_scalars = self._run_forward(inputs)
        finally:
            self._settings.reset_modules()
            self._runs.clear()
        ends_early = loss_and_scalars is None
        if ends_early:
            self._tape.graph.output(())
        else:
            loss, scalars = loss_and_scalars
            self._glue.confirm_passed_checks(loss)
            nodes = {name: self._tape.node_of(t) for name, t in scalars.items() if self.keeps_scalars}
            self._tape.graph.output(self._tape.node_of(loss))
            for name, node in nodes.items():
                meta = node.meta
                meta["log"], self.found_scalars = (*meta.get("log", ()), name), True
        tape = self._functionalised_tape(batch) if has_mutations(self._tape.graph) else self._tape
        if ends_early:  # without a loss, no block would be needed: keep all
            for node in tape.graph.nodes:
                if node.op == "call_module" or node.target is nested_values.take_at_path:
                    node.meta["kept"] = True
        graph = finalize_graph(tape.graph)
        used = {n.target for n in graph.nodes if n.op == "get_attr"}
        placeholders = {str(n.target): n for n in graph.nodes if n.op == "placeholder"}
        constants = {n: t for n, t in tape.constants.items() if n in used}
        idle = sum(n.op == "call_module" for n in graph.nodes) < self._called.total()
        return Recording(
            graph,
            placeholders,
            constants,
            list(self._hazards),
            self._draws,
            ends_early,
            idle,
            self._touched.dependent_inputs(),
        )

    def _node_meta(self) -> dict[str, Any]:
        """Return the meta of an op that is recorded now."""
        return describe_moment(self._open[-1]) | ({"where": self._unpacking} if self._unpacking else {})

    def _run_forward(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """Run forward. Returns the loss, and the other scalars and kept tensors; None if the recording ends
        early."""
        where = forward_source_line(type(self._model))
        self._refuse_gradient_hooks("", self._model)
        try:
            arguments = self._unflatten_inputs(inputs)
            output = self._model(**arguments)
            loss = extract_loss(output, where)
        except RecordingEnded:
            return None
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if "FakeTensor" in str(error):  # what stands for tensors here has a class of its own
                place = error_source_line(error) or where
                raise BlockError("", None, _SUBCLASS_MESSAGE, place, _SUBCLASS_REMEDY) from error
            message = f"forward raises {type(error).__name__}: {error}"
            collecting = sorted(filter(self._recorded_modules.collects_outputs, self.blocks))
            for path in collecting:
                enclosing = self._recorded_modules.enclosing_module(path)
                parts = self._split_collecting_blocks(collecting)
                if enclosing is not None or parts:
                    raise BlockError(
                        path,
                        enclosing,
                        message,
                        error_source_line(error) or where,
                        "take other modules as blocks",
                        parts,
                    ) from error
            raise UserError(
                message, error_source_line(error) or where, "correct the model or its data"
            ) from error
        if not self._executor.has_unknown_values(loss):
            raise UserError(
                "the loss depends on none of the model's parameters",
                where,
                "return the loss that is to be minimised",
            )
        kept = extract_tensors(arguments, self.kept_tensors) | extract_tensors(output, self.kept_tensors)
        return loss, extract_logged_scalars(output) | kept

    def _split_collecting_blocks(self, collecting: Iterable[str]) -> list[str]:
        """Return parts of blocks inside which a caller collects results, which show these; [] if parts were
        suggested before and some of them could not be blocks."""
        if not self._suggested_parts.isdisjoint(self.blocks):
            return []
        parts = [p for b in collecting for p in self._recorded_modules.parts_that_show_outputs(b)]
        self._suggested_parts.update(parts)
        return parts

    def _unflatten_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Restore the batch that forward takes. Lists that grow with the samples are recognised by their
        tensors from now on."""
        self._unpacking = forward_source_line(type(self._model))
        arguments = unflatten_batch(inputs)
        self._unpacking = ""
        lists = find_tensor_lists(arguments)
        grown = {key.removesuffix(f".{EACH_SUFFIX}") for key in inputs if key.endswith(f".{EACH_SUFFIX}")}
        for key in grown:
            columns = {
                step: inputs[f"{key}.{step}"]
                for step in (EACH_SUFFIX, SIZES_SUFFIX)
                if f"{key}.{step}" in inputs
            }
            self._lists[tuple(map(id, lists[key]))] = columns
        for key in (k.removesuffix(f".{COUNTS_SUFFIX}") for k in inputs if k.endswith(f".{COUNTS_SUFFIX}")):
            grouped: Any = arguments
            for step in key.split("."):
                grouped = grouped[step]
            packed = {COUNTS_SUFFIX: inputs[f"{key}.{COUNTS_SUFFIX}"]}
            if f"{key}.{EACH_SUFFIX}" in lists:
                packed[EACH_SUFFIX] = self._lists[tuple(map(id, lists[f"{key}.{EACH_SUFFIX}"]))]
            self._grouped[_ids_of_lists(grouped)] = packed
        return arguments

    def _pack_arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Pack the lists in a block's arguments. The arguments are none themselves, though they may hold the
        only entry of one."""
        return tuple(map(self._pack_lists, args)), {k: self._pack_lists(v) for k, v in kwargs.items()}

    def _pack_lists(self, value: Any) -> Any:
        """Replace growing lists in a block's arguments by the tensors that they were made from."""
        if isinstance(value, (list, tuple)) and (flat_list := self._lists.get(tuple(map(id, value)))):
            return flat_list
        nested = isinstance(value, (list, tuple)) and all(isinstance(v, (list, tuple)) for v in value)
        if nested and value and (packed := self._grouped.get(_ids_of_lists(value))):
            return packed
        if isinstance(value, dict):
            return {key: self._pack_lists(child) for key, child in value.items()}
        if (columns := dict_list_columns(value)) is not None and all(
            tuple(map(id, tensors)) in self._lists for tensors in columns.values()
        ):
            return {EACH_SUFFIX: self._pack_lists(columns)}
        is_plain = type(value) in (list, tuple)
        return type(value)(self._pack_lists(child) for child in value) if is_plain else value

    def _functionalised_tape(self, batch: Mapping[str, Any]) -> Tape:
        inputs = dict(nested_values.iter_batch_tensors(self._copy_inputs(batch)))

        def value(node: fx.Node) -> torch.Tensor:
            name = str(node.target)
            if node.op == "placeholder":
                return inputs[name]
            return self._tape.constants[name].clone() if name in self._tape.constants else self._tensors[name]

        return functionalise_tape(
            self._tape, value, self._mode, self._fail_in_running_block, self.follows_draws
        )

    def _copy_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Copy the batch, so that forward may write into its tensors and one tensor may be passed twice."""

        def copy_leaf(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.copy(leaf)
            return (
                copy_without_values(self._mode, leaf)
                if self._drops_large_values and is_large_input(leaf)
                else leaf.detach().clone()
            )

        return nested_values.map_leaves(dict(batch), copy_leaf)

    # -- what is intercepted -------------------------------------------------------------------------------

    def on_glue_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record an op between blocks."""
        require_one_dtype(func, args)
        if makes_nested_tensor(func, args, kwargs):
            self.fail(_NESTED_MESSAGE, _NESTED_REMEDY)
        self._touched.mark_used((args, kwargs))
        if any(map(self._settings.is_changed, argument_tensors(args, kwargs))):
            args, kwargs = nested_values.map_leaves(
                (args, kwargs), lambda _, leaf: self._detach_if_frozen(leaf)
            )
        if not is_random(func, args, kwargs):
            return self._glue.run_op(func, args, kwargs)
        number = self._draw_seed + len(self._draws)
        with drawn_with_seed(number):
            out = self._glue.run_op(func, args, kwargs)
        first = out if isinstance(out, torch.Tensor) else out[0]
        name = self._note_random_op(self._describe_random_op(func, first))
        self._tape.node_of(first).meta |= {"draw": name, "draw_number": number}
        self._executor.mark_drawn(first)
        return out

    def _detach_if_frozen(self, value: Any) -> Any:
        """Return an argument of an op; a parameter that forward has frozen for now is detached."""
        if not self._settings.is_changed(value):
            return value
        name = self._tape.state_name(value)
        if value.requires_grad:
            self.fail(
                f"forward lets {name} need gradients for an op between its modules",
                "let it need gradients from the start, and detach it elsewhere",
            )
        return self._glue.run_op(torch.ops.aten.detach.default, (value,), {})

    def on_block_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op inside a block that runs for its shapes."""
        require_one_dtype(func, args)
        self._watch.observe_op(func, args, kwargs)
        if self._uses_random_values and self._running[0]:
            return self._run_op_on_random_values(func, args, kwargs)
        self._refuse_hidden_inputs(args, kwargs)
        out = self._executor.execute_in_block(func, args, kwargs)
        if is_random(func, args, kwargs):
            self._watch.draws.append(
                self._describe_random_op(func, out if isinstance(out, torch.Tensor) else out[0])
            )
        for name in self._origins.note_result(func, args, kwargs, out):
            self._watch.note_hazard("state", name)
        return out

    def _run_op_on_random_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on random values."""
        if any(map(is_fake, argument_tensors(args, kwargs))):
            self.fail(
                f"{func} takes a tensor without values that is not passed to the module",
                "pass it as an argument",
            )
        out = func(*args, **kwargs)
        if is_random(func, args, kwargs):
            self._watch.draws.append(
                self._describe_random_op(func, out if isinstance(out, torch.Tensor) else out[0])
            )
        self._origins.note_result(func, args, kwargs, out)
        return out

    def _on_shortcut(self, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """Note a result `out` that a shortcut inside a block made without any op."""
        self._refuse_hidden_inputs(args, kwargs)
        self._origins.adopt_result(
            out, all(map(self._origins.is_input_independent, argument_tensors(args, kwargs)))
        )

    def _refuse_hidden_inputs(self, args: Any, kwargs: Any) -> None:
        """Raise for an op in a block that takes a tensor from outside that is no argument of the block: on
        a rank, nothing would pass it."""
        path, argument_ids = self._running
        for tensor in argument_tensors(args, kwargs) if path else ():
            if id(tensor) in argument_ids:
                continue
            name = self._state.get(id(tensor))
            if name is not None and id(tensor) not in self._recorded_modules.owned_tensor_ids(path):
                message = f"block {path} uses {name}, which is none of its own parameters and buffers"
                parts = self._recorded_modules.parts_with_weights(path)
                raise self._block_error(path, message, "pass it as an argument", parts)
            if maker := self._origins.making_block(tensor) or self._block_that_kept(tensor, path):
                self._refuse_kept_tensor(maker, path)
            if self._origins.was_made_in_earlier_run(tensor):
                self._watch.note_hazard("remembered", "")
            if self._tape.is_computed(tensor):
                message = (
                    f"block {path} uses a tensor that is made outside of it and is not passed to its forward"
                )
                parts = self._recorded_modules.parts_with_weights(path)
                remedy = (
                    "pass it as an argument, or put what makes it (weights for `functional_call`) and the"
                    " call into an nn.Module of their own"
                )
                raise self._block_error(path, message, remedy, parts)

    def _block_error(
        self, path: str, message: str, remedy: str, parts: Collection[str] = (), where: str | None = None
    ) -> BlockError:
        """Return an error about the block at `path`, by default at the present source line."""
        place = current_source_line() if where is None else where
        return BlockError(path, self._recorded_modules.enclosing_module(path), message, place, remedy, parts)

    def _refuse_kept_tensor(self, maker: str, user: str) -> NoReturn:
        """Raise for a tensor that block `maker` stores and `user` uses. Blocks of the same class store
        theirs too, though they have not run here."""
        cls = type(self._modules[maker])
        parts = [
            part
            for path in self.blocks
            if type(self._modules[path]) is cls
            for part in self._recorded_modules.parts_with_weights(path)
        ]
        message = f"block {maker} keeps a tensor on a module, which {user or 'forward'} uses"
        raise self._block_error(maker, message, "return it from forward, and pass it as an argument", parts)

    def _describe_random_op(self, func: Any, out: torch.Tensor) -> RandomOpCall:
        path, frames = running_module_and_frames(self._paths)
        frames = frames[: len(frames) - len(self._watch.outer_lines)]
        return RandomOpCall(
            path,
            tuple(format_source_line(frame.f_code, frame.f_lineno) for frame in frames),
            str(func),
            current_source_line(),
            tuple(out.shape),
            is_supported(func),
            runs=self._number_runs(frames),
        )

    def _number_runs(self, frames: Sequence[FrameType]) -> tuple[int, ...]:
        """Return a number for each frame of the present recording."""
        return tuple(self._runs.setdefault(id(f), (len(self._runs), f))[0] for f in frames)

    def _note_random_op(self, drawn: RandomOpCall) -> str:
        """Note a random op that a rank will execute here; return its name."""
        self._draws.append(replace(drawn, number=self._met[drawn.call_site_name]))
        self._met[drawn.call_site_name] += 1
        return self._draws[-1].draw_name

    def on_tensor_use(self, *values: Any) -> None:
        """These tensors are used in a way that may depend on their shapes."""
        self._touched.mark_used(values)

    def make_contiguous(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor. One that only its sizes of 1 make contiguous is copied, since it would
        be in batches of other sizes."""
        node = self._tape.find_node(tensor)
        is_expanded = node is not None and node.target is torch.ops.aten.expand.default
        if is_expanded or tensor.stride() != make_contiguous_strides_for(tensor.shape):
            return tensor.clone(memory_format=torch.contiguous_format)
        return tensor.contiguous()

    def on_read(self, kind: str, tensor: torch.Tensor) -> None:
        """Record that Python reads the values of a tensor of any shape."""
        with self.pause_recording():
            self._glue.record_read(kind, tensor)

    def read_scalar(self, tensor: torch.Tensor) -> Any:
        """Return a tensor's only value for Python; the tensor may have any number of dims. An unknown value
        may be for the log, so it fails only when it is used."""
        if self._has_valueless_inputs or not self._executor.has_unknown_values(tensor) or tensor.numel() != 1:
            return tensor.item()
        if (passed := self._glue.pass_check(tensor)) is not None:
            return passed
        return DeferredScalar(tensor.detach().reshape(()), lambda: self._glue.refuse_read("item", tensor))

    def on_idle_autocast(self) -> None:
        """Note that forward enters autocast for a device that this machine does not have."""
        self._hazards[Hazard("", "autocast", "cuda", current_source_line())] = None

    def _on_attribute_set(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute of a module is about to be set."""
        if isinstance(value, torch.Tensor) and name in module._buffers:
            self._on_buffer_replaced(name, value)
        elif not self.paused:
            self._settings.note_setting(module, name, value)

    def _on_buffer_replaced(self, name: str, value: torch.Tensor) -> None:
        """A buffer of a module is replaced. If the new one depends on samples, it would stay for the next
        micro-batch."""
        if self._running[0] and not self._origins.is_input_independent(value):
            self._watch.note_hazard("state", name)
        elif not self.paused and self._executor.has_unknown_values(value):
            self.fail(
                f"forward replaces the buffer {name} between its modules",
                NO_BATCH_STATE_REMEDY,
            )

    def apply_function(self, cls: Any, args: Any, run: Callable[..., Any]) -> Any:
        """Record that the user applies a `torch.autograd.Function`."""

        def apply_on_fakes() -> Any:
            out = run(*(self._executor.fake_if_unknown(a) for a in args))
            if self._watch.draws:
                self.fail(
                    f"{cls.__name__}.apply draws random numbers between the model's modules",
                    "draw them outside, and pass them to it",
                )
            return out

        self._touched.mark_used(args)
        with self.pause_recording():
            return record_function_apply(
                self._tape, self._mode, cls, args, apply_on_fakes, self._fail_in_running_block
            )

    @contextmanager
    def pause_recording(self) -> Iterator[None]:
        """Record nothing inside."""
        before, self.paused = self.paused, True
        watch, self._watch = self._watch, BlockWatch("")
        try:
            yield
        finally:
            self.paused, self._watch = before, watch

    def fail(self, message: str, remedy: str, kind: type[BlockError] = BlockError) -> NoReturn:
        """Raise for something that the running module cannot do outside of a block."""
        path = self._open[-1]
        functions = find_running_functions(forward_code(type(self._modules[path])), is_model_file_module)
        raise kind(path, path or None, message, current_source_line(), remedy, functions=functions)

    # -- blocks --------------------------------------------------------------------------------------------

    def _on_module_call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.paused:
            if not self._running[0] or self._uses_random_values or self._differentiates:
                return module._call_impl(*args, **kwargs)
            return (
                self._run_layer(path, module, args, kwargs)
                if path in self._layers
                else self._run_inside_block(module, args, kwargs)
            )
        self._observer.on_enter(path, args, kwargs)
        if self._is_opaque(path, module):
            result = self._record_block(path, module, args, kwargs)
        else:
            self._refuse_gradient_hooks(path, module)
            self._open.append(path)
            result = module._call_impl(*args, **kwargs)
            self._open.pop()
        self._observer.on_exit(path, result)
        return result

    def _refuse_gradient_hooks(self, path: str, module: nn.Module) -> None:
        """Raise for a module outside of blocks with a hook on its gradients: only a block has these."""
        hooks = gradient_hooks.module_hooks(module)
        if not hooks:
            return
        name, where = gradient_hooks.describe_hook(hooks[0])
        message = (
            f"the hook {name} on the gradients of {path or 'the whole model'} runs in calls of blocks only"
        )
        remedy = "register it on modules inside that return rows of the samples, or on parameters"
        raise BlockError(path, path or None, message, where, remedy)

    def _on_function_call(self, block: FunctionBlock, args: Any, kwargs: Any) -> Any:
        """A function that is a block is called."""
        if self.paused:
            return block.call_directly(args, kwargs)
        args, kwargs = block.name_arguments(args, kwargs)
        return block(*args, **kwargs)

    def _is_opaque(self, path: str, module: nn.Module) -> bool:
        """Whether a module is a block, or a part of a block with parameters or buffers that is called
        while the block does not run."""
        if path not in self._opaque:
            inside = any(path.startswith(f"{b}.") for b in self.blocks)
            has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
            self._opaque[path] = path in self.blocks or (inside and has_state)
        return self._opaque[path]

    def _record_block(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the call of a block, and return its result without values."""
        watched = self._recorded_modules.hooked_submodule(path)
        if watched is not None and self._recorded_modules.parts_with_weights(path):
            self._wish_opened(path, f"a forward hook reads the result of {watched}", current_source_line())
        args, kwargs = self._omit_empty_caches(path, module, args, kwargs)
        args, kwargs = self._write_out_block_masks(path, (args, kwargs))
        with self.pause_recording():
            call, rule = self._emit_block_call(path, args, kwargs), self._next_shape_rule(path, args, kwargs)
            unknown = nested_values.map_leaves(
                (args, kwargs), lambda _, leaf: self._executor.fake_if_unknown(leaf)
            )
            # The block's ops may use its arguments as they are and as the fakes that it is called with.
            self._running = path, {id(t) for _, t in nested_values.iter_tensors((args, kwargs, *unknown))}
            self._unfilled_caches.clear()
            settings, fixed = self._settings.settings_of_block(path), self._find_fixed_arguments(args, kwargs)
            block_args, block_kwargs = unknown
            stand_ins = [t for i, (_, t) in enumerate(nested_values.iter_tensors(unknown)) if i in fixed]
            result = self._block_results.learn_result(
                path,
                module,
                unknown,
                lambda: self._run_block(path, module, block_args, block_kwargs, stand_ins),
                rule,
                settings,
                fixed,
            )
            self._running = "", set()
            if _count_leaves((block_args, block_kwargs)) != _count_leaves((args, kwargs)):
                self._growing_blocks.add(path)
            if path in self._growing_blocks:
                reason = "it adds to a list or dict of its caller's, which reads what was added"
                self._wish_opened(path, reason, current_source_line())
            for hazard in result.hazards:
                # Stages could not put its calls on different ranks. What a single call reads it has kept at
                # another size, or of an earlier batch.
                if hazard.kind == "remembered" and self._called[path] > 1:
                    reason = "it keeps a tensor on itself in one call and uses it in another"
                    self._wish_opened(path, reason, hazard.where)
                if hazard.kind == "placed_rows" and self.shows_placed_rows:
                    self._wish_opened(path, f"{hazard.op} puts rows in the places of a mask", hazard.where)
            given = [t for _, t in nested_values.iter_tensors((args, kwargs))]
            for i in result.written:
                mark_written(self._tape.node_of(given[i]))
            out, new = result.build_fakes(self._mode, given)
            call.meta["reads"], call.meta["settings"] = result.reads_values, settings
            if not result.is_plain:
                self._touched.mark_used((args, kwargs))
            for leaf, tensor in new:
                self._tape.emit_take(call, leaf.path, tensor, leaf.requires_grad).meta |= {
                    "alone": leaf.is_input_independent,
                    "guessed": leaf.shape_is_unknown,
                }
                if leaf.shape_is_unknown:
                    self._touched.mark_unknown_shape(tensor)
            self._hazards |= {Hazard(path, h.kind, h.op, h.where): None for h in result.hazards}
            owner, frames = running_module_and_frames(self._paths)
            is_function = isinstance(module, FunctionBlock)
            frames = frames[is_function:]  # without that of the code in the function's place
            site = tuple(format_source_line(frame.f_code, frame.f_lineno) for frame in frames)
            runs = self._number_runs(frames)
            call.meta["site"] = format_call_site(site, owner if is_function and result.draws else None)
            for drawn in result.draws:
                placed = drawn.placed_in_block(path, site, runs, self._called.total())
                is_own = is_function and placed.path == path  # plain PyTorch runs it in the module around it
                self._note_random_op(replace(placed, path=owner) if is_own else placed)
        return forward_hooks.run_forward_hooks(module, args, kwargs, out)

    def _omit_empty_caches(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Replaces empty caches of keys and values among a block's arguments by None, since no other block
        reads what this one would write. If a second block with the same layer number, or the same block
        again, is called with a cache, it does read the first one's keys: from then on caches stay."""
        for value in (*args, *kwargs.values()):
            if is_empty_cache(value):
                layer = path if (number := cache_layer(module)) is None else number
                _, layers = self._omitted_caches.setdefault(id(value), (value, set()))
                self._keeps_caches |= layer in layers
                layers.add(layer)
        if self._keeps_caches or not self._omitted_caches:
            return args, kwargs
        return (
            tuple(None if is_empty_cache(value) else value for value in args),
            {name: None if is_empty_cache(value) else value for name, value in kwargs.items()},
        )

    def _find_fixed_arguments(self, args: Any, kwargs: Any) -> frozenset[int]:
        """Return the places, among the tensors of a block's arguments, of those that sizes and weights alone
        decide, such as positions."""
        nodes = [self._tape.find_node(t) for _, t in nested_values.iter_tensors((args, kwargs))]
        return frozenset(i for i, node in enumerate(nodes) if node is not None and self._fixed.is_fixed(node))

    def start_capture(self) -> None:
        """Record for a plan from now on."""
        self._opened_blocks.clear()
        self.keeps_scalars = self.shows_placed_rows = True

    def _wish_opened(self, path: str, reason: str, where: str) -> None:
        """Raise the wish that a block is opened, because the capture should see inside; once only: if its
        parts cannot be blocks, it becomes one after all."""
        if path not in self._opened_blocks and not isinstance(self._modules[path], FunctionBlock):
            self._opened_blocks.add(path)
            parts = self._recorded_modules.parts_with_weights(path)
            raise BlockError(path, None, reason, where, "take smaller blocks", parts, is_wish=True)

    def _next_shape_rule(self, path: str, args: Any, kwargs: Any) -> TensorShapes | None:
        """Return the shape rule of the next call, which is of this block. Raises RecordingEnded if the
        recording ends here."""
        self._touched.require_known_shapes((args, kwargs))
        number = self._called[path]
        self._called[path] += 1
        if self._until is not None and self._called.total() > self._until:
            self._touched.mark_used((args, kwargs))
            raise RecordingEnded
        return self._rules.get(f"{path}#{number}" if number else path)

    def _run_layer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a layer inside a block that runs for its shapes. Of 64 equal layers only one is run."""
        inside = (hook for m in module.modules() if m is not module for hook in m._forward_hooks.values())
        if not all(map(forward_hooks.is_idle_collector, inside)):
            return module._call_impl(*args, **kwargs)  # hooks inside the layer must see its calls
        described = self._describe_empty_caches(path, module, (args, kwargs))
        try:
            nested_values.encode_arguments(described, lambda t: None)
        except nested_values.NotLiteral:
            return module._call_impl(*args, **kwargs)
        watch, frames = self._watch, running_module_and_frames(self._paths)[1]
        frames = frames[: len(frames) - len(watch.outer_lines)]
        site = tuple(format_source_line(frame.f_code, frame.f_lineno) for frame in frames)
        result = self._block_results.learn_result(
            path,
            module,
            described,
            lambda: self._run_block(path, module, args, kwargs),
            settings=self._settings.settings_of_block(path),
        )
        runs, call = self._number_runs(frames), len(watch.draws)
        self._watch = watch.absorb(
            result.reads_values,
            result.hazards,
            (d.placed_in_block(path, site, runs, call) for d in result.draws),
        )
        out, new = result.build_fakes(self._mode, [t for _, t in nested_values.iter_tensors((args, kwargs))])
        for leaf, tensor in new:
            self._origins.adopt_result(tensor, leaf.is_input_independent)
        forward_hooks.run_collector_hooks(module, args, out)
        return out

    def _describe_empty_caches(self, path: str, module: nn.Module, arguments: Any) -> Any:
        """Return a layer's arguments with a text for each empty cache of keys and values, so that calls of
        equal layers are alike. Only the first of them fills its part of a cache. Raises _CacheUsedAgain if a
        layer gets a cache for the second time, as it would read what it did not fill."""
        if self._fills_caches:
            return arguments
        number = cache_layer(module)

        def describe_cache(_: str, leaf: Any) -> Any:
            if not is_empty_cache(leaf, number):
                return leaf
            if (path, id(leaf)) in self._unfilled_caches:
                raise _CacheUsedAgain
            self._unfilled_caches[path, id(leaf)] = leaf
            return "an empty cache"

        return nested_values.map_leaves(arguments, describe_cache)

    def _run_inside_block(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module in a running block. If it needs values that are not known, or an op that fake
        tensors do not support, run it with random values."""
        watch = self._watch.copy()
        try:
            return module._call_impl(*args, **kwargs)
        except Exception as error:
            if isinstance(error, BlockError) and not isinstance(error, NeedsValues):
                raise
            # What the failed attempt noted is dropped, but not that it read values of real tensors. If random
            # values do not help either, the first error is the one to report.
            watch.reads_values |= self._watch.reads_values
            with suppress(Exception):
                layout = random_run.layout_by_random_run(
                    self._mode, module, args, kwargs, lambda call: self._run_with_random_values(watch, call)
                )
                if layout is not None:
                    for leaf, tensor in layout[1]:
                        self._origins.adopt_result(tensor, leaf.is_input_independent)
                    return layout[0]
            raise

    def _run_differentiable(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a block. Where it asks for gradients that known results of its layers cut off, or reads caches
        that these leave empty, run it again with all that it calls."""
        watch = self._watch.copy()
        try:
            return self._run_inside_block(module, args, kwargs)
        except _CacheUsedAgain:
            self._watch, self._fills_caches = watch, True
            return self._run_inside_block(module, args, kwargs)
        except RuntimeError as error:
            if self._differentiates or not is_gradient_error(error):
                raise
        self._watch, self._differentiates, self.shortcut_call.is_on = watch, True, False
        try:
            return self._run_inside_block(module, args, kwargs)
        finally:
            self._differentiates, self.shortcut_call.is_on = False, True

    def _run_with_random_values(
        self, watch: BlockWatch, call: Callable[[], Any]
    ) -> tuple[Any, frozenset[int]]:
        """Make a call with random values. The block's watch is then what `watch` knew, with what the call
        adds; reads of random values do not count."""
        self._watch, self._uses_random_values, reads = watch.copy(), True, watch.reads_values
        try:
            out = call()
            return out, frozenset(
                id(t) for _, t in nested_values.iter_tensors(out) if self._origins.is_input_independent(t)
            )
        finally:
            self._uses_random_values, self._watch.reads_values = False, reads

    def _write_out_block_masks(self, path: str, arguments: Any) -> Any:
        """Return a block's arguments with the truth values of block masks of flex attention, which glue
        computes once for each mask."""
        module = sys.modules.get("torch.nn.attention.flex_attention")
        if module is None:
            return arguments
        found = list[Any]()
        nested_values.map_leaves(
            arguments, lambda _, leaf: found.append(leaf) if isinstance(leaf, module.BlockMask) else None
        )
        if not found:
            return arguments
        from secc.runtime.model.dense_block_mask import make_dense

        for mask in found:
            if id(mask) in self._dense_masks:
                continue
            if mask.mask_mod is module.noop_mask:
                raise UserError(
                    f"block {path} is called with a block mask without mask_mod: blocks alone have no effect "
                    "on CPUs, where plans are compared",
                    current_source_line(),
                    "give mask_mod to create_block_mask or from_kv_blocks, or leave the mask out if all "
                    "queries attend to all keys",
                )
            self._dense_masks[id(mask)] = mask, make_dense(mask)
        return nested_values.map_leaves(
            arguments,
            lambda _, leaf: self._dense_masks[id(leaf)][1] if id(leaf) in self._dense_masks else leaf,
        )

    def _emit_block_call(self, path: str, args: Any, kwargs: Any) -> fx.Node:
        try:
            arguments = nested_values.encode_arguments(
                self._pack_arguments(args, kwargs) if self._lists or self._grouped else (args, kwargs),
                self._tape.node_of,
            )
        except nested_values.NotLiteral as error:
            message = f"block {path} is called with {error}, which cannot be written into a plan"
            kind = type(error.value).__name__
            remedy = _UNWRITABLE_ARGUMENT_REMEDIES.get(
                kind, "pass tensors and plain values, or define its class in an imported module"
            )
            # What is filled before it is passed around is joined with other keys inside of each layer.
            parts = self._recorded_modules.parts_with_weights(path) if kind == "DynamicCache" else ()
            raise self._block_error(path, message, remedy, parts) from None
        call = self._tape.emit_call(path, *arguments)
        call.meta["mixed_dims"] = self._recorded_modules.mixed_dims(path)
        return call

    def _run_block(
        self, path: str, module: nn.Module, args: Any, kwargs: Any, fixed: Iterable[torch.Tensor] = ()
    ) -> BlockRun:
        self._watch = BlockWatch(path, running_module_and_lines(self._paths)[1])
        try:
            modules_without_hooks = [module] if path == self._running[0] else []
            with (
                self._origins.running_block(self._running[0], fixed),
                forward_hooks.without_user_hooks(modules_without_hooks),
            ):
                out = self._run_differentiable(module, args, kwargs)
                input_independent = frozenset(
                    id(t) for _, t in nested_values.iter_tensors(out) if self._origins.is_input_independent(t)
                )
        except BlockError as error:
            if error.parts:
                raise
            message = f"in block {path}: {error.message}"
            raise self._block_error(path, message, error.remedy, where=error.where) from error
        except Exception as error:
            message = f"the shapes of block {path} cannot be found: {type(error).__name__}: {error}"
            remedy = _FLEX_REMEDY if "FlexAttention" in str(error) else "take a larger module as the block"
            raise self._block_error(path, message, remedy, where=error_source_line(error)) from error
        if nested_values.holds_packed_sequence(out):
            # Its rows stand time step after time step, so they cannot be told apart by sample.
            message = f"block {path} returns a PackedSequence, which cannot be written into a plan"
            raise self._block_error(path, message, _UNWRITABLE_ARGUMENT_REMEDIES["PackedSequence"])
        return (
            out,
            frozenset() if self._watch.reads_values else input_independent,
            self._watch.reads_values,
            tuple(self._watch.hazards),
            tuple(self._watch.draws),
        )

    def _fail_in_running_block(self, message: str, remedy: str) -> NoReturn:
        self.fail(message, remedy, NeedsValues if self._running[0] else BlockError)

    def _refuse_stray_tensor(self, tensor: torch.Tensor) -> NoReturn:
        if maker := self._origins.making_block(tensor) or self._block_that_holds(tensor):
            self._refuse_kept_tensor(maker, self._open[-1])
        message = "a block's result holds a tensor inside an object of unknown type"
        self.fail(message, "return it in a tuple, dict or dataclass")

    def _block_that_kept(self, tensor: torch.Tensor, user: str) -> str:
        """Return the other block that has kept a tensor since an earlier run, "" if there is none."""
        if tensor.is_leaf or self._origins.is_known(tensor):
            return ""
        maker = self._block_that_holds(tensor)
        return maker if maker != user else ""

    def _block_that_holds(self, tensor: torch.Tensor) -> str:
        """Return the block with a module that has a tensor as an attribute, "" if there is none. A block with
        a known result does not run again, so it keeps the tensor of an earlier run."""
        for path, module in self._modules.items():
            if any(value is tensor for value in vars(module).values()):
                around = (b for b in self.blocks if path == b or path.startswith(f"{b}."))
                return next(around, "")
        return ""


def _ids_of_lists(value: Sequence[Sequence[torch.Tensor]]) -> tuple[tuple[int, ...], ...]:
    """Return what tells a list of lists of tensors from others: the ids of its tensors, or its own if there
    are none."""
    return tuple(tuple(map(id, inner)) for inner in value) if any(value) else ((id(value),),)


def _digest_batch(inputs: Mapping[str, Any]) -> int:
    """Return a number that differs between batches, so that they draw other masks, on any machine alike."""
    digest = 0
    for name, tensor in nested_values.iter_batch_tensors(inputs):
        values = [] if is_fake(tensor) else tensor.flatten()[:_DIGESTED_ENTRIES].tolist()
        digest = zlib.crc32(f"{name} {tuple(tensor.shape)} {values}".encode(), digest)
    return digest


def record_forward(model: nn.Module, batch: Mapping[str, Any], blocks: Collection[str]) -> Recording:
    """Record one forward of `model(**batch)` with the given blocks; see `Recorder`."""
    return Recorder(model, blocks).record(batch)


def _count_leaves(value: Any) -> int:
    """Return the number of values in the containers of a nested value."""
    children = nested_values.children_of(value)
    return 1 if children is None else sum(_count_leaves(child) for _, child in children)
