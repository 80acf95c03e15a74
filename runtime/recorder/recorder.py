"""The recorder: runs a user's forward with opaque blocks and writes down what happens between them.

Blocks return fake tensors, which have a shape but no values; ops on inputs alone run for real. So weights and
logits never exist, a branch on an input takes the way the user's data takes, and a branch on a block's result
is an error instead of a wrong graph.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from secc.runtime.errors import UserError
from secc.runtime.model.deferred_scalar import Unread
from secc.runtime.model.nested_batch import columns_of, lists_of, nested
from secc.runtime.model.source_lines import class_place, drawer, paths_of, place, raised_at
from secc.runtime.model.user_file import loss_of, scalars_of
from secc.runtime.plan.schema import EACH, SIZES
from secc.runtime.randomness.random_op_values import is_random, supported
from secc.runtime.recorder import nested_values, random_run
from secc.runtime.recorder.block_results import (
    Extents,
    Guess,
    Run,
    Shapes,
    fake_copy,
    is_fake,
    is_large,
    valueless,
)
from secc.runtime.recorder.finalize import finish
from secc.runtime.recorder.function_calls import record_apply
from secc.runtime.recorder.functionalise import functionalise, mutates
from secc.runtime.recorder.glue_ops import Executor, Glue, tensors_of
from secc.runtime.recorder.graph_tape import Tape, here
from secc.runtime.recorder.hazards import Watch
from secc.runtime.recorder.interception import (
    Calls,
    Ops,
    autograd_functions,
    idle_autocast,
    intercept,
    unvalidated,
)
from secc.runtime.recorder.recorded_modules import Anatomy
from secc.runtime.recorder.recording import (
    BlockError,
    Drawn,
    Enough,
    Hazard,
    NeedsValues,
    Observer,
    Recording,
)
from secc.runtime.recorder.setting_tracker import Settings, watched
from secc.runtime.recorder.shape_dependencies import Touched
from secc.runtime.recorder.shortcuts import Shortcuts
from secc.runtime.recorder.tensor_origins import Origins
from secc.runtime.sections import forward_hooks

NO_STATE = "let what is kept from batch to batch change after the step (in the optimizer, or between runs), not in forward"
Rules = Mapping[str, Extents]
NO_RULES: Rules = {}


class Recorder:
    """Records forwards of one model with one choice of blocks (module paths), many times.

    The model may be on the meta device; it is copied and never changed. With `logs` the further scalars that
    forward returns are kept as well; `logged` says whether there were any.
    """

    def __init__(self, model: nn.Module, blocks: Collection[str]) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = fake_copy(model, self._mode)
        self._modules = dict(self._model.named_modules())
        self._anatomy = Anatomy(self._modules)
        self._tensors = {n: t for n, t in (*self._model.named_parameters(), *self._model.named_buffers())}
        self._state = {id(t): n for n, t in self._tensors.items()}
        self._paths = paths_of(self._model)
        self._taken_apart, self._making_up = (
            set[str](),
            False,
        )  # blocks with hooks inside; a module runs with made-up values
        self._origins = Origins(
            self._state, {t.untyped_storage()._cdata: n for n, t in self._tensors.items()}
        )
        self._settings = Settings(self._modules)
        self._shapes, self._layers, self.shorten = (
            Shapes(),
            self._anatomy.layers(),
            Shortcuts(self._mode, self._shortened),
        )
        self._valueless = True  # large inputs have no values, until forward has asked for one
        self._lacking = False  # whether there are such inputs in the recording that is made
        self._observer = Observer()
        intercept(self._model, self._call)
        self.logs, self.logged = False, False
        self.use(blocks)

    def use(self, blocks: Collection[str]) -> None:
        """Take these modules as blocks from now on. Raises UserError for a path that is no module."""
        unknown = sorted(set(blocks) - self._modules.keys())
        if unknown:
            where, remedy = class_place(type(self._model)), "name modules as named_modules() does"
            raise UserError(f"the model has no module {unknown[0]!r}", where, remedy)
        self.blocks, self._opaque = frozenset(blocks), dict[str, bool]()

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Tell `observer` of the calls made inside."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = Observer()

    def record(
        self, batch: Mapping[str, Any], rules: Rules = NO_RULES, until: int | None = None
    ) -> Recording:
        """Record `model(**nested(batch))`. Raises UserError for what cannot be recorded, BlockError where
        other blocks may help.

        `rules` give the shapes of blocks' results, by call (`secc.runtime.recorder.outline`) and access path:
        such blocks need not run. With `until` the recording ends with the call of a block that has this
        number (from 0).
        """
        self._until = until
        with suppress(Guess):
            return self._attempt(batch, rules)
        return self._attempt(batch, NO_RULES)

    def taken(self, recording: Recording) -> Recording:
        """A recording that another process made with a copy of this recorder, which now knows of it too."""
        self.logged |= any("log" in node.meta for node in recording.graph.nodes)
        return recording

    def _attempt(self, batch: Mapping[str, Any], rules: Rules) -> Recording:
        self._rules = rules
        self._lacking = self._valueless and any(is_large(t) for _, t in nested_values.named(batch))
        if self._lacking:
            try:
                return self._record(batch)
            except UserError:
                self._valueless = self._lacking = False
        return self._record(batch)

    def _record(self, batch: Mapping[str, Any]) -> Recording:
        self.paused, self._open, self._hazards, self._watch = False, [""], dict[Hazard, None](), Watch("")
        self._unpacking = ""  # while the batch's lists are made: forward's place
        self._tape = Tape(self._state, self._now, {}, self._stray)
        self._lists = dict[tuple[int, ...], dict[str, torch.Tensor]]()  # by the ids of their tensors
        self._draws, self._met, self._called = list[Drawn](), Counter[str](), Counter[str]()
        self._touched = Touched(self._tape)
        self._running: tuple[str, set[int]] = (
            "",
            set(),
        )  # the block whose shapes are learnt, and its arguments
        self._executor = Executor(self._mode, self._fail)
        self._glue = Glue(self._tape, self._executor, self._fail)
        inputs = self._copies(batch)
        for name, tensor in nested_values.named(inputs):
            self._tape.bind(tensor, self._tape.head("placeholder", name, tensor))
        try:
            with (
                Calls(self),
                Ops(self),
                autograd_functions(self),
                idle_autocast(self),
                unvalidated(),
                watched(self._set),
            ):
                found = self._forward(inputs)
        finally:
            self._settings.reset()
        self._tape.graph.output(() if found is None else self._tape.node(found[0]))
        for name, tensor in found[1].items() if found is not None and self.logs else ():
            meta = self._tape.node(tensor).meta
            meta["log"], self.logged = (*meta.get("log", ()), name), True
        tape = self._functional(batch) if mutates(self._tape.graph) else self._tape
        for node in tape.graph.nodes if found is None else ():
            node.meta |= (
                {"kept": True} if node.op == "call_module" or node.target is nested_values.take else {}
            )
        graph = finish(tape.graph)
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
            found is None,
            idle,
            self._touched.inputs(),
        )

    def _now(self) -> dict[str, Any]:
        """What is known of the moment at which an op is recorded."""
        return here(self._open[-1]) | ({"where": self._unpacking} if self._unpacking else {})

    def _forward(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]] | None:
        """The loss and the scalars beside it; None where the recording ends before."""
        where = class_place(type(self._model))
        try:
            given = self._nested(inputs)
            output = self._model(**given)
            loss = loss_of(output, where)
        except Enough:
            return None
        except UserError:
            raise
        except Exception as error:
            message = f"forward raises {type(error).__name__}: {error}"
            path = next(filter(self._anatomy.gathers, sorted(self.blocks)), None)
            if path is not None and (around := self._anatomy.around(path)) is not None:
                raise BlockError(
                    path, around, message, raised_at(error) or where, "take a larger module as the block"
                ) from error
            raise UserError(message, raised_at(error) or where, "correct the model or its data") from error
        if not self._executor.unknown(loss):
            raise UserError(
                "the loss depends on none of the model's parameters",
                where,
                "return the loss that is to be minimised",
            )
        return loss, scalars_of(output)

    def _nested(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch as forward takes it; lists that grow with the samples are known by their tensors from now
        on."""
        self._unpacking = class_place(type(self._model))
        given = nested(inputs)
        self._unpacking = ""
        lists = lists_of(given)
        grown = {key.removesuffix(f".{EACH}") for key in inputs if key.endswith(f".{EACH}")}
        for key in grown:
            both = {step: inputs[f"{key}.{step}"] for step in (EACH, SIZES) if f"{key}.{step}" in inputs}
            self._lists[tuple(map(id, lists[key]))] = both
        return given

    def _packed(self, value: Any) -> Any:
        """Arguments of a block in which the lists that grow with the samples are the two tensors that they
        come from."""
        if isinstance(value, (list, tuple)) and (both := self._lists.get(tuple(map(id, value)))):
            return both
        if isinstance(value, dict):
            return {key: self._packed(child) for key, child in value.items()}
        if (columns := columns_of(value)) is not None and all(
            tuple(map(id, tensors)) in self._lists for tensors in columns.values()
        ):
            return {EACH: self._packed(columns)}
        plain = type(value) in (list, tuple)
        return type(value)(self._packed(child) for child in value) if plain else value

    def _functional(self, batch: Mapping[str, Any]) -> Tape:
        inputs = dict(nested_values.named(self._copies(batch)))

        def value(node: fx.Node) -> torch.Tensor:
            name = str(node.target)
            if node.op == "placeholder":
                return inputs[name]
            return self._tape.constants[name].clone() if name in self._tape.constants else self._tensors[name]

        return functionalise(self._tape, value, self._mode, self._fail)

    def _copies(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with tensors of its own, so that forward may write into them and one tensor may be passed
        twice."""

        def own(_: str, leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.copy(leaf)
            return (
                valueless(self._mode, leaf) if self._valueless and is_large(leaf) else leaf.detach().clone()
            )

        return nested_values.replace(dict(batch), own)

    # -- what the modes tell
    # ------------------------------------------------------------------------------------------------------

    def dispatch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op between blocks."""
        self._touched.see((args, kwargs))
        out = self._glue.run(func, args, kwargs)
        if is_random(func, args, kwargs):
            first = out if isinstance(out, torch.Tensor) else out[0]
            self._tape.node(first).meta["draw"] = self._drew(self._drawn(func, first))
            self._executor.forget(first)
        return out

    def watch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op inside a block, while its result's shape is learnt."""
        self._watch.see(func, args, kwargs)
        if self._making_up and self._running[0]:
            return self._valued(func, args, kwargs)
        self._refuse_hidden(args, kwargs)
        out = self._executor.execute_inside(func, args, kwargs)
        if is_random(func, args, kwargs):
            self._watch.draws.append(self._drawn(func, out if isinstance(out, torch.Tensor) else out[0]))
        for name in self._origins.made(func, args, kwargs, out):
            self._watch.note("state", name)
        return out

    def _valued(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op on made-up values."""
        if any(map(is_fake, tensors_of(args, kwargs))):
            self.fail(
                f"{func} takes a tensor without values that is no argument of the module",
                "pass it as an argument",
            )
        out = func(*args, **kwargs)
        if is_random(func, args, kwargs):
            self._watch.draws.append(self._drawn(func, out if isinstance(out, torch.Tensor) else out[0]))
        self._origins.made(func, args, kwargs, out)
        return out

    def _shortened(self, args: Any, kwargs: Any, out: torch.Tensor) -> None:
        """A function inside a block gave `out` without any op."""
        self._refuse_hidden(args, kwargs)
        self._origins.adopt(out, all(map(self._origins.is_alone, tensors_of(args, kwargs))))

    def _refuse_hidden(self, args: Any, kwargs: Any) -> None:
        """Raise for an op in a block that takes what was made outside and is no argument of the block: nobody
        would hand it over."""
        path, given = self._running
        for tensor in tensors_of(args, kwargs) if path else ():
            if id(tensor) in given:
                continue
            if (name := self._state.get(id(tensor))) is not None and id(tensor) not in self._anatomy.own(
                path
            ):
                message = f"block {path} uses {name}, which is none of its own parameters and buffers"
                raise BlockError(
                    path,
                    self._anatomy.around(path),
                    message,
                    place(),
                    "pass it as an argument",
                    self._anatomy.parts(path),
                )
            if maker := self._origins.maker(tensor):
                self._refuse_kept(maker, path)
            if self._tape.made(tensor):
                message = (
                    f"block {path} uses a tensor that is made outside of it and is no argument of its forward"
                )
                raise BlockError(
                    path,
                    self._anatomy.around(path),
                    message,
                    place(),
                    "pass it as an argument",
                    self._anatomy.parts(path),
                )

    def _refuse_kept(self, maker: str, user: str) -> NoReturn:
        """Raise for a tensor that block `maker` keeps, and `user` uses. Blocks like it keep theirs, which
        have not run here."""
        cls = type(self._modules[maker])
        parts = [
            part
            for path in self.blocks
            if type(self._modules[path]) is cls
            for part in self._anatomy.parts(path)
        ]
        message = f"block {maker} keeps a tensor on a module, which {user or 'forward'} uses"
        raise BlockError(
            maker,
            self._anatomy.around(maker),
            message,
            place(),
            "return it from forward, and pass it as an argument",
            parts,
        )

    def _drawn(self, func: Any, out: torch.Tensor) -> Drawn:
        path, lines = drawer(self._paths)
        return Drawn(
            path,
            lines[: len(lines) - len(self._watch.outside)],
            str(func),
            place(),
            tuple(out.shape),
            supported(func),
        )

    def _drew(self, drawn: Drawn) -> str:
        """Note a random op that a rank will meet here; its name."""
        self._draws.append(replace(drawn, number=self._met[drawn.name]))
        self._met[drawn.name] += 1
        return self._draws[-1].call

    def touch(self, *values: Any) -> None:
        """What is done with these tensors may depend on their shapes."""
        self._touched.see(values)

    def read(self, kind: str, tensor: torch.Tensor) -> None:
        """Python looks at a tensor's values."""
        with self.silence():
            self._glue.read(kind, tensor)

    def number(self, tensor: torch.Tensor) -> Any:
        """Python asks for a tensor's one value, which may be for the log."""
        if self._lacking or not self._executor.unknown(tensor) or tensor.numel() != 1:
            return tensor.item()
        return Unread(tensor.detach().reshape(()), lambda: self._glue.refuse_read("item", tensor))

    def idle_autocast(self) -> None:
        """Forward asks for autocast on a device that is not here."""
        self._hazards[Hazard("", "autocast", "cuda", place())] = None

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        """An attribute of a module is set."""
        if isinstance(value, torch.Tensor) and name in module._buffers:
            self._replaced(name, value)
        elif not self.paused:
            self._settings.note(module, name, value)

    def _replaced(self, name: str, value: torch.Tensor) -> None:
        """A buffer of a module is replaced: what it holds of samples then stays for the next micro-batch."""
        if self._running[0] and not self._origins.is_alone(value):
            self._watch.note("state", name)
        elif not self.paused and self._executor.unknown(value):
            self.fail(
                f"forward puts another tensor in the place of the buffer {name}, between its modules",
                NO_STATE,
            )

    def function(self, cls: Any, args: Any, run: Callable[..., Any]) -> Any:
        """The user applies a `torch.autograd.Function`."""

        def quietly() -> Any:
            out = run(*(self._executor.fake(a) for a in args))
            if self._watch.draws:
                self.fail(
                    f"{cls.__name__}.apply draws random numbers between the model's modules",
                    "draw them outside, and pass them to it",
                )
            return out

        self._touched.see(args)
        with self.silence():
            return record_apply(self._tape, self._mode, cls, args, quietly, self._fail)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing is recorded inside."""
        before, self.paused = self.paused, True
        watch, self._watch = self._watch, Watch("")
        try:
            yield
        finally:
            self.paused, self._watch = before, watch

    def fail(self, message: str, remedy: str, kind: type[BlockError] = BlockError) -> NoReturn:
        """Raise for something that the module running now cannot do in the open."""
        path = self._open[-1]
        raise kind(path, path or None, message, place(), remedy)

    # -- blocks
    # -------------------------------------------------------------------------------------------------------------------

    def _call(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.paused:
            if not self._running[0] or self._making_up:
                return module._call_impl(*args, **kwargs)
            return (
                self._layer(path, module, args, kwargs)
                if path in self._layers
                else self._inside(module, args, kwargs)
            )
        self._observer.entered(path, args, kwargs)
        if self._is_opaque(path, module):
            result = self._block(path, module, args, kwargs)
        else:
            self._open.append(path)
            result = module._call_impl(*args, **kwargs)
            self._open.pop()
        self._observer.left(path, result)
        return result

    def _is_opaque(self, path: str, module: nn.Module) -> bool:
        """A block, or a part of a block with weights of its own that is called while the block is not
        running."""
        if path not in self._opaque:
            inside = any(path.startswith(f"{b}.") for b in self.blocks)
            has_state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
            self._opaque[path] = path in self.blocks or (inside and has_state)
        return self._opaque[path]

    def _block(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the call of a block, and give its result without its values."""
        watched = self._anatomy.watched(path)
        if watched is not None and path not in self._taken_apart and (parts := self._anatomy.parts(path)):
            self._taken_apart.add(path)  # where its parts cannot be blocks, it is one after all
            raise BlockError(
                path, None, f"a forward hook sees what {watched} gives", place(), "take smaller blocks", parts
            )
        with self.silence():
            call, rule = self._node(path, args, kwargs), self._rule(path, args, kwargs)
            unknown = nested_values.replace((args, kwargs), lambda _, leaf: self._executor.fake(leaf))
            self._running = path, {id(t) for _, t in nested_values.tensors((args, kwargs, *unknown))}
            settings = self._settings.of(path)
            result = self._shapes.result(
                path, module, unknown, lambda: self._run(path, module, *unknown), rule, settings
            )
            self._running = "", set()
            out, new = result.build(self._mode, [t for _, t in nested_values.tensors((args, kwargs))])
            call.meta["reads"], call.meta["settings"] = result.reads, settings
            if not result.is_plain:
                self._touched.see((args, kwargs))
            for leaf, tensor in new:
                self._tape.take(call, leaf.path, tensor, leaf.requires_grad).meta |= {
                    "alone": leaf.alone,
                    "guessed": leaf.guessed,
                }
                if leaf.guessed:
                    self._touched.hide(tensor)
            self._hazards |= {Hazard(path, h.kind, h.op, h.where): None for h in result.hazards}
            site = drawer(self._paths)[1]
            call.meta["site"] = "<".join(site)
            for drawn in result.draws:
                self._drew(drawn.at(path, site))
        return forward_hooks.called(module, args, kwargs, out)

    def _rule(self, path: str, args: Any, kwargs: Any) -> Extents | None:
        """The rule for a call of a block, which is the next one. Raises Enough if the recording ends with
        it."""
        self._touched.refuse((args, kwargs))
        number = self._called[path]
        self._called[path] += 1
        if self._until is not None and self._called.total() > self._until:
            self._touched.see((args, kwargs))
            raise Enough
        return self._rules.get(f"{path}#{number}" if number else path)

    def _layer(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A layer inside a block whose shape is learnt: sixty-four equal layers cost one."""
        if any(m._forward_hooks for m in module.modules() if m is not module):
            return module._call_impl(*args, **kwargs)  # the hooks want to see what happens inside
        try:
            nested_values.arguments((args, kwargs), lambda t: None)
        except nested_values.NotLiteral:
            return module._call_impl(*args, **kwargs)
        watch, site = self._watch, drawer(self._paths)[1]
        site = site[: len(site) - len(watch.outside)]
        run = lambda: self._run(path, module, args, kwargs)  # noqa: E731
        result = self._shapes.result(path, module, (args, kwargs), run, settings=self._settings.of(path))
        self._watch = watch.joined(result.reads, result.hazards, (d.at(path, site) for d in result.draws))
        out, new = result.build(self._mode, [t for _, t in nested_values.tensors((args, kwargs))])
        for leaf, tensor in new:
            self._origins.adopt(tensor, leaf.alone)
        forward_hooks.gather(module, args, out)
        return out

    def _inside(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The result of a module in a running block; where it needs values that nobody has, or an op that
        fake tensors have not, with made-up ones."""
        watch = self._watch.copy()
        try:
            return module._call_impl(*args, **kwargs)
        except Exception as error:
            if isinstance(error, BlockError) and not isinstance(error, NeedsValues):
                raise
            watch.reads |= self._watch.reads
            with suppress(Exception):
                found = random_run.result(
                    self._mode, module, args, kwargs, lambda call: self._made_up(watch, call)
                )
                if found is not None:
                    for leaf, tensor in found[1]:
                        self._origins.adopt(tensor, leaf.alone)
                    return found[0]
            raise

    def _made_up(self, watch: Watch, call: Callable[[], Any]) -> tuple[Any, frozenset[int]]:
        """Make a call with made-up values. What the block has done is what `watch` knew and the call does."""
        self._watch, self._making_up, reads = watch.copy(), True, watch.reads
        try:
            out = call()
            return out, frozenset(id(t) for _, t in nested_values.tensors(out) if self._origins.is_alone(t))
        finally:
            self._making_up, self._watch.reads = False, reads

    def _node(self, path: str, args: Any, kwargs: Any) -> fx.Node:
        try:
            arguments = nested_values.arguments(
                self._packed((args, kwargs)) if self._lists else (args, kwargs), self._tape.node
            )
        except nested_values.NotLiteral as error:
            message = f"block {path} is called with {error}, which cannot be written into a plan"
            remedy = "pass tensors and plain values, or let its class stand in a module that the model file imports"
            raise BlockError(path, self._anatomy.around(path), message, place(), remedy) from None
        return self._tape.call(path, *arguments)

    def _run(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> Run:
        self._watch = Watch(path, drawer(self._paths)[1])
        try:
            own = [module] if path == self._running[0] else []
            with self._origins.run(self._running[0]), forward_hooks.without(own):
                out = self._inside(module, args, kwargs)
                alone = frozenset(id(t) for _, t in nested_values.tensors(out) if self._origins.is_alone(t))
        except BlockError as error:
            if error.parts:
                raise
            raise BlockError(
                path,
                self._anatomy.around(path),
                f"in block {path}: {error.message}",
                error.where,
                error.remedy,
            ) from error
        except Exception as error:
            message = f"the shapes of block {path} cannot be found: {type(error).__name__}: {error}"
            raise BlockError(
                path,
                self._anatomy.around(path),
                message,
                raised_at(error),
                "take a larger module as the block",
            ) from error
        return (
            out,
            frozenset() if self._watch.reads else alone,
            self._watch.reads,
            tuple(self._watch.hazards),
            tuple(self._watch.draws),
        )

    def _fail(self, message: str, remedy: str) -> NoReturn:
        self.fail(message, remedy, NeedsValues if self._running[0] else BlockError)

    def _stray(self, tensor: torch.Tensor) -> NoReturn:
        if maker := self._origins.maker(tensor):
            self._refuse_kept(maker, self._open[-1])
        message = "a tensor of a block's result travels inside an object that cannot be looked into"
        self.fail(message, "return it in a tuple, dict or dataclass")


def record(model: nn.Module, batch: Mapping[str, Any], blocks: Collection[str]) -> Recording:
    """One forward of `model(**batch)` with the given blocks; see `Recorder`."""
    return Recorder(model, blocks).record(batch)
