"""Imports the user's model file, calls its functions, and turns what can be wrong with it into UserErrors.

The file is plain PyTorch. It defines `model()` and `dataset()` or `datasets()`, and optionally the other
functions of `ROLES`. The compiler and the ranks both load it through this module, so that both see the same
functions and the same defaults.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset

from secc.runtime.errors import UserError
from secc.runtime.host.hidden_ranks import hidden_ranks
from secc.runtime.model.counted_stream import CountedStream
from secc.runtime.model.default_collate import DefaultCollate, drop_values, find_joined_key, open_dicts
from secc.runtime.model.deferred_scalar import unwrap_deferred_scalar
from secc.runtime.model.error_remedies import remedy_for
from secc.runtime.model.flex_attention import prepare_flex_attention
from secc.runtime.model.function_blocks import add_function_block
from secc.runtime.model.imported_code import forget_changed_modules
from secc.runtime.model.item_seeds import choose_survey_indices, load_seeded_item
from secc.runtime.model.nested_batch import (
    KEY_SEPARATOR,
    argument_of_key,
    check_batch_key,
    find_growing_lists,
    flatten_batch,
    growing_lists_from_dims,
    may_hold_growing_lists,
)
from secc.runtime.model.packed_collate import PackedCollate, is_packed
from secc.runtime.model.sample_forms import has_names, original_sample, sample_as_dict
from secc.runtime.model.sample_sources import (
    SampleSource,
    check_source,
    describe_type,
    find_source,
    mixture_sources,
)
from secc.runtime.model.stream_reader import StreamFailure, StreamReader
from secc.runtime.plan import schema

NamedParams = list[tuple[str, nn.Parameter]]

# The functions of a model file that a run calls when something has happened; they see the run as it is.
CALLBACKS = ("on_step", "on_save", "on_evaluate")
# The functions that a model file may define.
ROLES = (
    "model",
    "dataset",
    "datasets",
    "collate",
    "optimizer",
    "scheduler",
    "sizes",
    "eval_dataset",
    "metrics",
    "small_model",
    "small_dataset",
    *CALLBACKS,
    "generate_samples",
)
_VARIADIC_KINDS = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_SAMPLES_COLLATED_TOGETHER = 4  # samples that are collated together to see which lists grow
_import_counter = itertools.count()
_MODULE_PREFIX = "secc_user_model_"  # of the names under which model files are imported
_MODEL_FILE_ATTRIBUTE = "_secc_model_file"  # an attribute of a model: the name of the file's module


class UserModel:
    """A loaded model file. Every method raises UserError, with the user's file:line, for what goes wrong in
    the user's code."""

    def __init__(self, path: Path, module: ModuleType, sha256: str) -> None:
        self.path, self.module, self.sha256 = path, module, sha256
        self.is_small, self._uses_small_dataset = False, False
        self._cached_sources: tuple[SampleSource, ...] | None = None
        self._first_samples: dict[int, _FirstSamples] = {}  # of streams, by the first id of the source
        self._evaluation_sets: dict[str, Any] = {}  # by name; filled in what `for_evaluation` returns
        self._forward_signature: Mapping[str, inspect.Parameter] | None = None
        self._forward_line = ""
        self._default_collate: DefaultCollate | None = None
        self._packs = False
        self.function_blocks: tuple[str, ...] = ()  # functions that models get as blocks
        # Lists of a batch that grow with the samples; None before the first batch with lists.
        self._growing_lists: Mapping[str, int] | None = None

    # -- the model ------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Call the file's `model()`, or `small_model()` after `as_small`. The model is made on torch's
        current default device."""
        function = "small_model" if self.is_small else "model"
        return self._check_model(function, self.call_function(function))

    def build_small_model(self) -> nn.Module | None:
        """Call the file's `small_model()`, the same architecture but small. Returns None if the file has
        none."""
        return (
            self._check_model("small_model", self.call_function("small_model"))
            if self.defines("small_model")
            else None
        )

    @property
    def forward_keys(self) -> frozenset[str] | None:
        """Names of the arguments that forward takes; None if it takes any (`**kwargs`)."""
        parameters = self._forward_parameters()
        return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else self.forward_names

    @property
    def forward_names(self) -> frozenset[str]:
        """Names of the arguments in forward's signature, without `*args` and `**kwargs`."""
        return frozenset(
            name for name, p in self._forward_parameters().items() if p.kind not in _VARIADIC_KINDS
        )

    @property
    def forward_source_line(self) -> str:
        """file:line of the model's forward, "" if its source is not available."""
        self._forward_parameters()
        return self._forward_line

    def _check_model(self, function: str, model: Any) -> nn.Module:
        if not isinstance(model, nn.Module):
            raise UserError(
                f"{function}() returns {describe_type(model)}, not an nn.Module",
                self.function_source_line(function),
                "return the model itself",
            )
        while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner  # of torch.compile, which has no part in a plan's sections
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = (n for n, _ in (*model.named_modules(), *tensors))
        if (unwritable := next((n for n in names if not _is_writable_text(n)), None)) is not None:
            raise UserError(
                f"{function}() has a module, parameter or buffer with the name {unwritable!a}",
                self.function_source_line(function),
                "let names be text without lone surrogates",
            )
        if lazy := next((n for n, tensor in tensors if nn.parameter.is_lazy(tensor)), None):
            raise UserError(
                f"{function}() returns a model with a parameter or buffer that has no shape yet: {lazy}",
                self.function_source_line(function),
                f"give its module all sizes (nn.Linear in place of nn.LazyLinear), or let {function}() call "
                "the model once",
            )
        if self._forward_signature is None:
            self._forward_signature = inspect.signature(model.forward).parameters
            self._forward_line = self._source_line(model.forward)
        setattr(model, _MODEL_FILE_ATTRIBUTE, self.module.__name__)
        for function in self.function_blocks:
            add_function_block(model, function, self.module.__name__)
        return model

    def _forward_parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return forward's parameters. They do not depend on weights, so if no model was built yet, one is
        built on the meta device."""
        if self._forward_signature is None:
            with torch.device("meta"):
                self.build_model()
        assert self._forward_signature is not None
        return self._forward_signature

    # -- the data -------------------------------------------------------------------------------------------

    def sources(self) -> tuple[SampleSource, ...]:
        """Return what `dataset()` gives, or the entries of `datasets()`. The file's function is called once,
        and once more each time that a generator has to start from its beginning."""
        if self._cached_sources is None:
            mixes = not self._uses_small_dataset and self.defines("datasets")
            function = "small_dataset" if self._uses_small_dataset else "datasets" if mixes else "dataset"
            place = self.function_source_line(function)
            if mixes and self.defines("dataset"):
                raise UserError("the model file has both dataset() and datasets()", place, "keep one of them")

            call = partial(self.call_function, function)
            if mixes:
                sources = mixture_sources(call(), place, self.call_guarded, call)
            else:
                made = check_source(call(), "dataset()", place, self.call_guarded)
                sources = (SampleSource("", "dataset()", 1, made, 0, place, self.call_guarded, call),)
            if self.defines("sizes") and (mixes or sources[0].is_stream):
                raise UserError(
                    "sizes(i) is about sample i of a map-style dataset(), which the model file lacks",
                    self.function_source_line("sizes"),
                    "take sizes() out of the model file",
                )
            self._cached_sources = sources
        return self._cached_sources

    def dataset(self) -> Any:
        """Return the map-style dataset. Raises UserError if the file has streams or mixes several."""
        first, *others = self.sources()
        if others or first.is_stream:
            message = f"{first.expression} has no numbered samples, which this needs"
            raise UserError(message, first.place, "return a map-style dataset")
        return first.dataset

    @property
    def sample_count(self) -> int | None:
        """The number of samples; None for streams and mixtures, which go on without end."""
        first, *others = self.sources()
        return None if others else first.length

    def describe_samples(self) -> str:
        """Return what a checkpoint records of the data."""
        sources = self.sources()
        parts = sum(s.parts for s in sources)
        return "; ".join(s.describe(parts) for s in sources)

    def survey_ids(self, count: int = 64, seed: int = 0) -> list[int]:
        """Choose at most `count` samples that represent the data, by id: of a map-style dataset the first and
        random others, of a stream the first, of a mixture as many of each source as a run draws."""
        ids: list[int] = []
        sources = self.sources()
        parts = sum(s.parts for s in sources)
        for source in sources:
            share = max(1, count * source.parts // parts)
            if source.is_stream:
                known = self._first_samples_of(source).count_up_to(share)
                ids += range(source.first_id, source.first_id + known)
            else:
                ids += (source.first_id + i for i in choose_survey_indices(source.length or 0, share, seed))
        return ids

    def _first_samples_of(self, source: SampleSource) -> _FirstSamples:
        """Return the reader of a stream's first samples."""
        return self._first_samples.setdefault(source.first_id, _FirstSamples(source))

    def as_small(self) -> UserModel:
        """Return this model file with `small_model()` as its model, and the samples of `small_dataset()` if
        it defines that. Raises UserError if it has no `small_model()`."""
        if not self.defines("small_model"):
            raise UserError(
                "the model file has no small_model()",
                str(self.path),
                "define small_model(), the same architecture but small, or check without --small",
            )
        user = copy.copy(self.with_small_dataset())
        user.is_small = True
        return user

    def with_small_dataset(self) -> UserModel:
        """Return this model file with the samples of `small_dataset()`, to which `sizes` does not apply; the
        file as it is if it defines none."""
        if self._uses_small_dataset or not self.defines("small_dataset"):
            return self
        user = copy.copy(self)
        user._uses_small_dataset, user._cached_sources, user._first_samples = True, None, {}
        return user

    def for_evaluation(self, window: int = 1024) -> UserModel:
        """Return this model file with the samples of `eval_dataset()` as its dataset, those of several sets
        one after another; `sizes` does not apply to them. Streams are counted, and the last `window` samples
        of each are kept. Raises UserError if the file has no usable `eval_dataset()`."""
        call = partial(self.call_function, "eval_dataset")
        given = call()
        sets = dict(given) if isinstance(given, Mapping) else {"": given}
        place, first_id = self.function_source_line("eval_dataset"), 0
        for name, one in sets.items():
            what = f"eval_dataset()[{name!r}]" if name else "eval_dataset()"
            if not isinstance(name, str) or not (name.isidentifier() or one is given):
                raise UserError(
                    f"eval_dataset() has the key {name!r}", place, "name each set by a word, as in a metric"
                )
            check_source(one, what, place, self.call_guarded)

            def reopen(name: str = name) -> Any:
                return call()[name] if name else call()

            source = SampleSource(name, what, 1, one, first_id, place, self.call_guarded, reopen)
            if source.is_stream:
                sets[name] = CountedStream(source, window)
            first_id += len(sets[name])
        if not sets:
            raise UserError("eval_dataset() is empty", place, "return a dataset, or several by name")
        user = copy.copy(self)
        user._evaluation_sets = sets
        joined = ConcatDataset(list(sets.values()))
        source = SampleSource("", "eval_dataset()", 1, joined, 0, place, self.call_guarded, lambda: joined)
        user._cached_sources = (source,)
        return user

    @property
    def evaluates_streams(self) -> bool:
        """Whether an evaluation set is a stream; only of what `for_evaluation` returns."""
        return any(isinstance(one, CountedStream) for one in self._evaluation_sets.values())

    @property
    def evaluation_lengths(self) -> dict[str, int]:
        """The number of samples of each evaluation set by name, "" for a single one without a name; only of
        what `for_evaluation` returns."""
        return {name: len(one) for name, one in self._evaluation_sets.items()}

    @property
    def metric_tensors(self) -> tuple[str, ...]:
        """The tensors that the file's `metrics` asks for: the names of its arguments after the first."""
        if not self.defines("metrics"):
            return ()
        try:
            parameters = inspect.signature(self.module.metrics).parameters.values()
        except (TypeError, ValueError):
            return ()
        return tuple(p.name for p in parameters if p.kind not in _VARIADIC_KINDS)[1:]

    def compute_metrics(
        self, outputs: Mapping[str, float], tensors: Mapping[str, Sequence[torch.Tensor | None]]
    ) -> dict[str, float]:
        """Call the file's `metrics` with the loss and the further scalars of an evaluation set, its numbers
        of `samples` and `tokens`, and the `tensors` that it asks for, one for each sample. Returns its
        numbers; empty if the file has none."""
        if not self.defines("metrics"):
            return {}
        place = self.function_source_line("metrics")
        metrics = self.module.metrics
        numbers = self.call_guarded("metrics()", lambda: metrics(dict(outputs), **tensors))
        if not isinstance(numbers, Mapping):
            raise UserError(
                f"metrics() returns {describe_type(numbers)}, not a dict", place, "return {name: number}"
            )
        for name, value in numbers.items():
            if not isinstance(value, int | float) and not _is_scalar_tensor(value):
                raise UserError(
                    f"metrics() gives {describe_type(value)} for {name!r}, not a number",
                    place,
                    "return {name: number}",
                )
        return {str(name): float(value) for name, value in numbers.items()}

    def sample_name(self, i: int) -> str:
        """The expression by which a user knows sample `i`: `dataset()[3]`, `eval_dataset()['long'][3]`,
        `sample 3 of dataset()` for a stream."""
        for name, one in self._evaluation_sets.items():
            if i < len(one):
                return f"eval_dataset(){f'[{name!r}]' if name else ''}[{i}]"
            i -= len(one)
        source = find_source(self.sources(), i)
        number = i - source.first_id
        return (
            f"sample {number} of {source.expression}"
            if source.is_stream
            else f"{source.expression}[{number}]"
        )

    def load_sample(self, i: int, seed: int = 0, epoch: int = 0) -> dict[str, Any]:
        """Load the sample with the id `i`, with random states seeded by (seed, epoch, i). Only the first
        samples of a stream are kept for this."""
        source = find_source(self.sources(), i)
        if source.is_stream:
            item = self._first_samples_of(source).load(i - source.first_id)
            return self._require_names(item, i, original_sample(item))
        dataset, first = source.dataset, source.first_id
        item = self.call_guarded(
            self.sample_name(i), lambda: load_seeded_item(dataset, i, seed, epoch, first)
        )
        return self._require_names(sample_as_dict(item), i, item)

    def require_same_sample(self, i: int, sample: Mapping[str, Any], seed: int) -> None:
        """Load sample `i` again. Raises UserError if it is not `sample`, which was loaded with the same seed:
        several ranks may load a sample, each for its sections, and a resumed run loads it again."""
        again = self.load_sample(i, seed)
        changed = [
            name for name in sample if name not in again or not are_same_values(sample[name], again[name])
        ]
        if changed:
            raise UserError(
                f"{self.sample_name(i)} is another sample when it is loaded again: {changed[0]!r} differs",
                self._getitem_source_line(),
                "draw from the generators of torch, np.random or random, which are seeded for each sample, "
                "or make one with the sample's number in __getitem__",
            )

    def _require_names(self, sample: dict[str, Any] | None, i: int, item: Any) -> dict[str, Any]:
        """Return `sample`, from what the dataset gave as sample `i`. Raises UserError if it has no names and
        no `collate` of the file's own gives it any."""
        if sample is not None and self.defines("collate"):
            return sample
        if sample is not None and has_names(sample):
            if (key := find_joined_key(sample)) is not None:
                check_batch_key(key, where=self._getitem_source_line() or str(self.path))
            return open_dicts(sample)
        raise UserError(
            f"{self.sample_name(i)} is {describe_type(item)}, not a dict",
            self._getitem_source_line(),
            "return a dict of forward's arguments, or write collate(samples), which makes one of any samples",
        )

    def collate(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `samples` into a flat batch of forward's keyword arguments
        (`secc.runtime.model.nested_batch`), by the user's function or by the default rules. Keys with the
        value None are left out."""
        if not self.defines("collate"):
            if self._default_collate is None:
                self.fit_default_collate([self.load_sample(i) for i in self.survey_ids()])
            assert self._default_collate is not None
            with self._errors_located_in_dataset():
                return self._default_collate(samples)
        batch = self._call_collate(samples)
        if self._growing_lists is None and may_hold_growing_lists(batch):
            self._growing_lists = self._survey_growing_lists()
        return flatten_batch(batch, self.function_source_line("collate"), self._growing_lists or {})

    def collate_shapes(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Collate `samples` as `collate` does, for shapes and dtypes: by the default rules, tensors lie on
        the meta device, which saves copies of long samples."""
        if self.defines("collate") or self._packs:
            return self.collate(samples)
        with self._errors_located_in_dataset():
            return self.collate([drop_values(s) for s in samples])

    def _call_collate(self, samples: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Call the user's `collate` and check that it returns a dict."""
        batch = self.call_function("collate", [original_sample(s) for s in samples])
        if not isinstance(batch, Mapping):
            raise UserError(
                f"collate() returns {describe_type(batch)}, not a dict",
                self.function_source_line("collate"),
                "return forward's keyword arguments",
            )
        return batch

    def _survey_growing_lists(self) -> dict[str, int]:
        """Find the lists that grow with the samples, by collating samples of the survey both in groups and
        one by one."""
        groups: list[tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = []
        indices = self.survey_ids()
        for together in (
            indices[i : i + _SAMPLES_COLLATED_TOGETHER]
            for i in range(0, len(indices), _SAMPLES_COLLATED_TOGETHER)
        ):
            # A sample that does not load or collate is reported, or skipped, when it is trained.
            with suppress(UserError):
                samples = [self.load_sample(i) for i in together]
                groups.append((self._call_collate(samples), [self._call_collate([s]) for s in samples]))
        return find_growing_lists(groups, self.function_source_line("collate"))

    def fit_default_collate(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Fix the rules of the default collate from a survey of the dataset. They are not used if the file
        defines `collate`."""
        fit = PackedCollate.fit if self._packs else DefaultCollate.fit
        with self._errors_located_in_dataset():
            self._default_collate = fit(samples, self.forward_names)

    def pack_samples(self) -> UserModel:
        """Return this model file with a default collate that puts samples side by side in one row. Raises
        UserError if the file has its own `collate`."""
        if self.defines("collate"):
            message = "samples cannot be packed: collate() of the model file makes the batches"
            remedy = "let collate() put them side by side, or leave --pack out"
            raise UserError(message, self.function_source_line("collate"), remedy)
        user = copy.copy(self)
        user._packs, user._default_collate = True, None
        return user

    def use_plan_inputs(self, inputs: Iterable[schema.Input]) -> None:
        """Fix the rules of the default collate, and which lists grow with the samples, as the plan has them.
        No sample is loaded."""
        inputs = tuple(inputs)
        collate = PackedCollate if is_packed(inputs) else DefaultCollate
        self._default_collate = collate.from_inputs(inputs)
        self._growing_lists = growing_lists_from_dims({i.key: i.dims for i in inputs})

    def declared_sizes(self, i: int) -> dict[str, Any] | None:
        """Call `sizes(i)`, which gives rows and lengths of sample i without loading it. Returns None if the
        file has no `sizes`. Keys with the value None are left out."""
        if not self.defines("sizes"):
            return None
        sizes = self.call_function("sizes", i)
        if not isinstance(sizes, Mapping):
            raise UserError(
                f"sizes({i}) is {describe_type(sizes)}, not a dict",
                self.function_source_line("sizes"),
                "return the sizes of sample i's inputs",
            )
        return {key: value for key, value in sizes.items() if value is not None}

    def check_batch_keys(self, keys: Iterable[str], required: Iterable[str]) -> None:
        """Check the keys of batches against forward's signature.

        Raises UserError if a key in `keys` is no argument of forward, or if an argument without default is
        missing in `required`, the keys that every batch has.
        """
        source, place = (
            ("collate()", self.function_source_line("collate"))
            if self.defines("collate")
            else ("a sample", self._getitem_source_line())
        )
        accepted = self.forward_keys
        unknown = [] if accepted is None else sorted({argument_of_key(k) for k in keys} - accepted)
        if unknown:
            arguments = ", ".join(sorted(accepted or ()))
            remedy = (
                f"forward takes {arguments}: rename the key, leave it out, or add the argument to forward"
            )
            raise UserError(
                f"{source} has the key {unknown[0]!r}, which forward does not take", place, remedy
            )
        needed = {
            n
            for n, p in self._forward_parameters().items()
            if p.kind not in _VARIADIC_KINDS and p.default is p.empty
        }
        missing = sorted(needed - {argument_of_key(k) for k in required})
        if missing and any(_is_in_nested_list(key, missing[0]) for key in keys):
            remedy = (
                "return one list of all samples' tensors, one behind the other, and how many each sample has "
                "in a tensor of its own; forward can split the list by it"
            )
            message = (
                f"{source} has a list of lists in {missing[0]!r}, which differ in length between batches"
            )
            raise UserError(message, place, remedy)
        if missing:
            remedy = "add the key to every sample, or give the argument a default"
            raise UserError(
                f"forward needs the argument {missing[0]!r}, which {source} lacks",
                self.forward_source_line or place,
                remedy,
            )

    @contextmanager
    def _errors_located_in_dataset(self) -> Iterator[None]:
        """Give UserErrors of the default collate, which have no place, that of the dataset's
        `__getitem__`."""
        try:
            yield
        except UserError as error:
            raise UserError(error.message, error.where or self._getitem_source_line(), error.remedy) from None

    def _getitem_source_line(self) -> str:
        if self._evaluation_sets:
            return self.function_source_line("eval_dataset")
        source = self.sources()[0]
        method = "__iter__" if source.is_stream else "__getitem__"
        return self._source_line(getattr(type(source.dataset), method, None)) or source.place

    # -- the optimizer --------------------------------------------------------------------------------------

    def build_optimizer(self, named_params: NamedParams) -> torch.optim.Optimizer:
        """Call the file's `optimizer` with (name, parameter) pairs; AdamW with a learning rate of 1e-4 if
        it has none."""
        if not self.defines("optimizer"):
            return torch.optim.AdamW(named_params, lr=1e-4)
        remedy = (
            "optimizer(params) gets (name, parameter) pairs; torch.optim takes them as they are, "
            "others need `[p for _, p in params]`"
        )
        try:
            optimizer = self.call_function("optimizer", list(named_params), remedy=remedy)
        except UserError as error:
            # A rank may have no parameter of some group, which then seems to be one without names.
            if not isinstance(error.__cause__, ValueError) or "without names" not in str(error.__cause__):
                raise
            with _empty_groups_have_names():
                optimizer = self.call_function("optimizer", list(named_params), remedy=remedy)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise UserError(
                f"optimizer() returns {describe_type(optimizer)}, not a torch.optim.Optimizer",
                self.function_source_line("optimizer"),
                "return one",
            )
        given = {id(p) for _, p in named_params}
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if others := [p for p in held if id(p) not in given]:
            raise UserError(
                f"optimizer() updates {len(others)} tensors that are not among the {len(given)} parameters"
                " that it was given, such as those of another model",
                self.function_source_line("optimizer"),
                "take the parameters from the argument: `AdamW(params)`, or `[p for _, p in params]`",
            )
        required = inspect.signature(optimizer.step).parameters.values()
        if any(p.default is p.empty and p.name == "closure" for p in required):
            raise UserError(
                f"optimizer() returns {type(optimizer).__name__}, with a step that evaluates the model again "
                "(its closure is not optional); a run calls step() once, with the gradients of the batch",
                self.function_source_line("optimizer"),
                "return an optimizer with step()",
            )
        return optimizer

    def build_scheduler(self, optimizer: torch.optim.Optimizer, steps: int | None = None) -> Any:
        """Call the file's learning-rate `scheduler`, which is stepped once per global batch, with the number
        of the run's `steps` if it takes a second argument. Returns None if the file has none, or it returns
        None."""
        if not self.defines("scheduler"):
            return None
        try:
            parameters = inspect.signature(self.module.scheduler).parameters.values()
        except (TypeError, ValueError):
            parameters = ()
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        takes_steps = steps is not None and sum(p.kind in positional for p in parameters) > 1
        scheduler = self.call_function("scheduler", optimizer, *([steps] if takes_steps else []))
        if scheduler is not None and not callable(getattr(scheduler, "step", None)):
            place = self.function_source_line("scheduler")
            raise UserError(
                f"scheduler() returns {describe_type(scheduler)}, which has no step()",
                place,
                "return a torch.optim.lr_scheduler, or None for a constant rate",
            )
        return scheduler

    # -- the file's functions -------------------------------------------------------------------------------

    def defines(self, function: str) -> bool:
        """Whether the model file defines `function`. A module of that name, as Hugging Face's `datasets`, is
        none."""
        other_samples = self._uses_small_dataset or bool(self._evaluation_sets)
        member = getattr(self.module, function, None)
        is_there = member is not None and not isinstance(member, ModuleType)
        return is_there and not (other_samples and function == "sizes")

    def function_source_line(self, function: str) -> str:
        """file:line of a function of the model file, or the file's path if the line is not available."""
        return self._source_line(getattr(self.module, function, None)) or str(self.path)

    def _source_line(self, function: Any) -> str:
        """file:line of a function, with the model file's path as the user gave it. "" if there is no source,
        as for a list's `__getitem__`."""
        try:
            file, line = _find_definition(inspect.unwrap(getattr(function, "__func__", function)))
        except (TypeError, OSError):
            return ""
        return f"{self.path if file == str(self.path.resolve()) else file}:{line}"

    def check_functions(self) -> None:
        """Raise UserError if the file lacks model(), or both dataset() and datasets(), or if one of these
        names is not a function."""
        self._find_function("model")
        self._find_function("datasets" if self.defines("datasets") else "dataset")

    def _find_function(self, function: str) -> Callable[..., Any]:
        member = getattr(self.module, function, None)
        if member is None:
            raise UserError(
                f"the model file has no {function}()", str(self.path), f"define `def {function}():` in it"
            )
        if not callable(member):
            raise UserError(
                f"{function} in the model file is {describe_type(member)}, not a function",
                str(self.path),
                "make it a function",
            )
        return member

    def call_function(self, function: str, *args: Any, remedy: str = "") -> Any:
        """Call a function of the model file, which sees one process if it is no callback of a run. Raises
        UserError if it is missing, not callable, or raises."""
        member = self._find_function(function)
        with _without_arguments(self.path), nullcontext() if function in CALLBACKS else hidden_ranks():
            return self.call_guarded(f"{function}()", lambda: member(*args), remedy)

    def call_guarded(self, what: str, call: Callable[[], Any], remedy: str = "") -> Any:
        """Return `call()`. Exceptions of the user's code become UserErrors that name the innermost line of
        the user's files; `what` says what was called."""
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            place = error_line_in_user_code(error, self.path) or str(self.path)
            raise UserError(
                f"{what} raises {_describe_error(error)}", place, remedy or remedy_for(error)
            ) from error


class _FirstSamples:
    """The first samples of a stream, read when they are asked for and kept: for surveys and checks, which do
    not move the place of a run in the stream."""

    def __init__(self, source: SampleSource) -> None:
        self._reader = StreamReader(source)
        self._end: int | None = None  # the number of samples of the first epoch, once it is known

    def count_up_to(self, count: int) -> int:
        """Return the number of samples, at most `count`; reads that many."""
        while self._end is None and self._reader.next_number < count:
            sample = self._reader.read(self._reader.next_number)
            if sample.epoch or isinstance(sample.error, StreamFailure):
                ended = self._reader.ended_epochs
                self._end = ended[0] if ended else sample.index + 1
        return count if self._end is None else min(count, self._end)

    def load(self, number: int) -> dict[str, Any]:
        """Return a sample. Raises UserError if the stream raised in its place."""
        sample = self._reader.read(number)
        if sample.error is not None:
            raise sample.error
        return dict(sample.item)


class _LoaderOfText(importlib.machinery.SourceFileLoader):
    """Imports a Python file from its text. Python's own loader may take cached bytecode of another text, if
    the file was edited within a second and kept its length."""

    def __init__(self, name: str, path: str, text: bytes) -> None:
        super().__init__(name, path)
        self._text = text

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self._text, self.path)


def add_import_folder(model_file: Path) -> None:
    """Lets Python find the modules next to a model file and, for a file of a package, the package."""
    folder = model_file.resolve().parent
    for found in {folder: None, _package_of(folder)[0]: None}:
        if str(found) not in sys.path:
            sys.path.insert(0, str(found))


def _package_of(folder: Path) -> tuple[Path, str]:
    """Return the folder that holds the outermost package around `folder`, and the name of the package
    `folder`; the folder itself and "" if it is none."""
    names: list[str] = []
    while (folder / "__init__.py").exists() and folder.name.isidentifier():
        names.append(folder.name)
        folder = folder.parent
    return folder, ".".join(reversed(names))


def load_model_file(path: str | Path) -> UserModel:
    """Import the model file under a fresh module name and put its folder on sys.path. Files that it imports
    are read again if they have changed. Raises UserError if the file is missing, is not Python, or fails to
    import."""
    path = Path(path)
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the model file: {error.strerror}", str(path), "give the path of a Python file"
        ) from None
    forget_changed_modules()
    add_import_folder(path)
    name = f"{_MODULE_PREFIX}{next(_import_counter)}"
    if path.suffix != ".py":
        raise UserError("the model file is not a Python file", str(path), "give the path of a .py file")
    loader = _LoaderOfText(name, str(path.resolve()), text)
    spec = importlib.util.spec_from_file_location(name, path.resolve(), loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if package := _package_of(path.resolve().parent)[1]:
        module.__package__ = package  # for relative imports
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by name
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"__package__ != __spec__\.parent")
            with _without_arguments(path):
                loader.exec_module(module)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        place = error_line_in_user_code(error, path) or str(path)
        raise UserError(
            f"importing the model file raises {_describe_error(error)}", place, remedy_for(error)
        ) from error
    prepare_flex_attention()
    return UserModel(path, module, hashlib.sha256(text).hexdigest())


@contextmanager
def _without_arguments(path: Path) -> Iterator[None]:
    """Context in which the model file sees a command line without arguments: those are of secc, and differ
    between a compilation and the ranks of a run."""
    before, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = before


def is_model_file_module(module: str) -> bool:
    """Whether a module name is one under which a user's model file was imported."""
    return module.startswith(_MODULE_PREFIX)


def model_file_module(model: nn.Module) -> str:
    """Name of the imported module with the `model()` that made this model."""
    return getattr(model, _MODEL_FILE_ATTRIBUTE)


def extract_loss(output: Any, where: str = "") -> torch.Tensor:
    """Return the loss in forward's output as a 0-dim tensor.

    The output may be a scalar tensor, or an object or mapping with `loss`. In a plain tuple or list, the loss
    is the first item if that is a scalar that requires a gradient, else the only such item (`logits, loss`).
    `where` is the file:line of forward for the message. Raises UserError if there is no scalar loss.
    """
    loss: Any = output
    if type(output) in (tuple, list):
        scalars = [item for item in output if _is_scalar_tensor(item)]
        differentiable = [item for item in scalars if item.requires_grad] or scalars
        loss = (
            differentiable[0]
            if len(differentiable) == 1 or (differentiable and differentiable[0] is output[0])
            else None
        )
    elif not isinstance(output, torch.Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if _is_scalar_tensor(loss):
        return loss if loss.ndim == 0 else loss.reshape(())
    if isinstance(loss, torch.Tensor):
        received = f"a tensor of shape {list(loss.shape)} and dtype {str(loss.dtype).removeprefix('torch.')}"
    else:
        received = describe_type(output) + (" with loss None" if hasattr(output, "loss") else "")
    remedy = (
        "let forward return the loss: a scalar tensor, a tuple that begins with it, "
        "or an object or dict with `loss` (Hugging Face models need `labels`)"
    )
    raise UserError(f"forward returns no loss: it returns {received}", where, remedy)


def _is_scalar_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()


def extract_logged_scalars(output: Any) -> dict[str, torch.Tensor]:
    """Return the other scalars in forward's output by name; a run logs them with the loss. In a tuple or
    list, the first dict counts."""
    if type(output) in (tuple, list):
        output = next((item for item in output if isinstance(item, Mapping)), {})
    if isinstance(output, torch.Tensor):
        return {}
    members: Mapping[Any, Any] = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    values = ((k, unwrap_deferred_scalar(v)) for k, v in members.items())
    scalars = {k: v for k, v in values if isinstance(v, torch.Tensor) and v.ndim == 0 and not v.is_complex()}
    return {k: v for k, v in scalars.items() if isinstance(k, str) and k.isidentifier() and k != "loss"}


def extract_tensors(output: Any, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors with dims that forward's output, or a batch, has under some of `names`."""
    if type(output) in (tuple, list):
        output = next((item for item in output if isinstance(item, Mapping)), {})
    members = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    found = {name: members[name] for name in names if name in members}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor) and value.ndim}


def error_line_in_user_code(error: BaseException, path: Path) -> str:
    """file:line of the innermost traceback frame in the model file or a module in its folder; "" if there is
    none."""
    resolved = path.resolve()
    if (
        isinstance(error, SyntaxError)
        and error.filename
        and Path(error.filename).resolve().parent == resolved.parent
    ):
        return f"{_as_user_path(Path(error.filename), path)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent == resolved.parent:
            return f"{_as_user_path(Path(frame.filename), path)}:{frame.lineno}"
    return ""


def _as_user_path(file: Path, path: Path) -> str:
    """Path of a file in the model file's folder, with the folder spelled as the user gave it."""
    return str(path.parent / file.name)


def _describe_error(error: BaseException) -> str:
    try:
        text = str(error).strip()
    except Exception:  # its own __str__ is at fault
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _is_writable_text(text: str) -> bool:
    """Whether a text can be written as UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_in_nested_list(key: str, argument: str) -> bool:
    """Whether a flat key is of a tensor in a list of lists that is an argument of forward."""
    first, *steps = key.split(KEY_SEPARATOR)
    return first == argument and sum(step.isdecimal() for step in steps) > 1


def are_same_values(value: Any, other: Any) -> bool:
    """Whether numbers, texts and tensors in two values are the same; of other objects nothing is known."""
    leaves, others = tree_leaves(value), tree_leaves(other)
    return len(leaves) == len(others) and all(map(_is_same_leaf, leaves, others))


def _is_same_leaf(value: Any, other: Any) -> bool:
    if hasattr(value, "__array__") and hasattr(other, "__array__"):
        with suppress(TypeError, ValueError):  # an array of texts, or of another shape
            value, other = torch.as_tensor(value), torch.as_tensor(other)
            return value.shape == other.shape and bool(((value == other) | (value != value)).all())
    plain = (bool, int, float, complex, str, bytes)
    return not isinstance(value, plain) or value == other or value != value


@contextmanager
def _empty_groups_have_names() -> Iterator[None]:
    """Lets torch take groups without parameters for groups with names."""
    add = torch.optim.Optimizer.add_param_group

    def add_named(self: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        if isinstance(param_group["params"], (list, tuple)) and not param_group["params"]:
            param_group = {**param_group, "param_names": []}
        add(self, param_group)

    torch.optim.Optimizer.add_param_group = add_named  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.add_param_group = add  # type: ignore[method-assign]


@functools.lru_cache(maxsize=64)
def _find_definition(function: Any) -> tuple[str | None, int]:
    """Return file and line of a function, which takes a while to find."""
    return inspect.getsourcefile(function), inspect.getsourcelines(function)[1]
