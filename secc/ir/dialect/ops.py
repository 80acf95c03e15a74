"""The dialect `sec`: what a compound training model is made of between capture and plan.

Declarations (`symbol`, `key`, `block`, `tie`, `section`) stand at the head of a `graph`; one `case` for each
capture follows. The ops of a case are flat; each names the section it is in (`in @vision_tower`), so that a
pass moves an op by changing one property. `lower` gathers each section's ops into `body` ops, which codegen
prints. Sizes are expressions over symbols.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from xdsl.dialects.builtin import ArrayAttr, IntAttr, StringAttr, SymbolRefAttr, UnitAttr
from xdsl.ir import Attribute, Block, Dialect, Operation, Region, SSAValue
from xdsl.irdl import (
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    region_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.irdl.operations import operand_def
from xdsl.traits import IsTerminator, NoTerminator, Pure

from secc.ir.dialect import argument_template
from secc.ir.dialect.assembly_format import (
    FLAG_KIND,
    NUMBER_KIND,
    RECORD_KIND,
    RECORDS_KIND,
    SECTION_KIND,
    TEXT_KIND,
    TEXTS_KIND,
    Keywords,
    LineOp,
)
from secc.ir.dialect.tensor_type import TensorType
from secc.ir.dialect.typed_attributes import (
    CouplingAttr,
    ExtentAttr,
    ShardAttr,
    SharedSizeAttr,
    StyleAttr,
    UnsplitAttr,
)

_IN_SECTION = ("section", "in", SECTION_KIND)
_AT_SOURCE_LINE = ("where", "at", TEXT_KIND)


def strings_attr(values: Iterable[str]) -> ArrayAttr[StringAttr]:
    """A list attribute of texts."""
    return ArrayAttr([StringAttr(v) for v in values])


def strings_of(attribute: ArrayAttr[StringAttr] | None) -> tuple[str, ...]:
    """The texts of a list attribute, () for None."""
    return tuple(a.data for a in attribute) if attribute is not None else ()


@irdl_op_definition
class GraphOp(LineOp):
    """A compound model. Attributes: `optional` (keys that a sample may lack), `labels` (the key that tokens
    are counted by), `widths`."""

    name = "sec.graph"
    sym = prop_def(StringAttr)
    optional = opt_prop_def(ArrayAttr[StringAttr])
    labels, widths = opt_prop_def(StringAttr), opt_prop_def(StringAttr)
    body = region_def("single_block")
    traits = traits_def(NoTerminator())
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (
        ("optional", "optional", TEXTS_KIND),
        ("labels", "labels", TEXT_KIND),
        ("widths", "widths", TEXT_KIND),
    )

    @property
    def cases(self) -> list[CaseOp]:
        return [op for op in self.body.block.ops if isinstance(op, CaseOp)]

    @property
    def sections(self) -> list[SectionOp]:
        return [op for op in self.body.block.ops if isinstance(op, SectionOp)]

    @property
    def blocks(self) -> dict[str, BlockOp]:
        """Declared blocks by module path."""
        return {op.path.data: op for op in self.body.block.ops if isinstance(op, BlockOp)}

    @property
    def rewrites(self) -> list[RewriteOp]:
        return [op for op in self.body.block.ops if isinstance(op, RewriteOp)]

    @property
    def cuts(self) -> list[CutOp]:
        return [op for op in self.body.block.ops if isinstance(op, CutOp)]

    @property
    def edges(self) -> list[EdgeOp]:
        return [op for op in self.body.block.ops if isinstance(op, EdgeOp)]

    @property
    def patterns(self) -> list[PatternOp]:
        return [op for op in self.body.block.ops if isinstance(op, PatternOp)]

    @property
    def symbols(self) -> dict[str, SymbolOp]:
        return {op.sym.data: op for op in self.body.block.ops if isinstance(op, SymbolOp)}


@irdl_op_definition
class SymbolOp(LineOp):
    """A size of the inputs: `kind` "rows" adds up over samples, "width" is the maximum; read as
    `batch[key].shape[dim]`. Values of the inputs decide a size of kind "data"; costs take what it is
    `about`."""

    name = "sec.symbol"
    sym, kind, key = prop_def(StringAttr), prop_def(StringAttr), prop_def(StringAttr)
    dim, about = prop_def(IntAttr), opt_prop_def(StringAttr)
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (
        ("kind", "kind", TEXT_KIND),
        ("key", "key", TEXT_KIND),
        ("dim", "dim", NUMBER_KIND),
        ("about", "about", TEXT_KIND),
    )


@irdl_op_definition
class PatternOp(LineOp):
    """A pattern of the dataset's samples: the share with these optional keys, and attributes `SYMBOL = mean
    size of one sample`."""

    name = "sec.pattern"
    when, share = prop_def(ArrayAttr[StringAttr]), prop_def(StringAttr)
    KEYWORDS: ClassVar[Keywords] = (("when", "when", TEXTS_KIND), ("share", "share", TEXT_KIND))


@irdl_op_definition
class KeyOp(LineOp):
    """A key of the collated batch: its type over symbols; `pads` lists "dim side value" for dims that
    `collate` pads; a row has several values, with commas, and
    "next" goes on counting."""

    name = "sec.key"
    key = prop_def(StringAttr)
    optional, pads = opt_prop_def(UnitAttr), opt_prop_def(ArrayAttr[StringAttr])
    result = result_def(TensorType)
    HEADLINE: ClassVar[str | None] = "key"
    KEYWORDS: ClassVar[Keywords] = (("optional", "optional", FLAG_KIND), ("pads", "pads", TEXTS_KIND))


# Of a block that lies outside of its component's stack of layers, such as a head.
OUTSIDE_STACK_ATTRIBUTE = "outside_stack"
# Of a block that is a part of a layer of a stack: the layer's path; and of its largest part.
PART_OF_LAYER_ATTRIBUTE, LARGEST_PART_ATTRIBUTE = "part_of_layer", "largest_part"
# Of a block that cannot be opened down to its layers: the reason.
WHOLE_ATTRIBUTE = "whole"


@irdl_op_definition
class BlockOp(LineOp):
    """One of the user's modules that is called whole: its class, numbers of parameters (entries), and the
    component it belongs to.

    The component is the largest module around the block that holds no other stack of layers; `coarsen` groups
    by it. `layers` is the number of layers in the component's stack, 0 for a component without one (a
    projector, a head). `couples` says what in the block makes samples of a batch depend on each other, such
    as batch norm in training mode; `remembers` where it reads a tensor that another call of it has kept, so
    that one rank must make its calls. `annotate-patterns` writes `when`: which samples reach the block, by
    their optional inputs (`secc.runtime.plan.sample_predicates`).
    """

    name = "sec.block"
    path, cls = prop_def(StringAttr), prop_def(StringAttr)
    params, trainable, layers = prop_def(IntAttr), prop_def(IntAttr), opt_prop_def(IntAttr)
    component, where = opt_prop_def(StringAttr), opt_prop_def(StringAttr)
    when, couples = opt_prop_def(ArrayAttr[StringAttr]), opt_prop_def(CouplingAttr)
    remembers = opt_prop_def(StringAttr)
    HEADLINE: ClassVar[str | None] = "path"
    KEYWORDS: ClassVar[Keywords] = (
        ("cls", "class", TEXT_KIND),
        ("params", "params", NUMBER_KIND),
        ("trainable", "trainable", NUMBER_KIND),
        ("component", "component", TEXT_KIND),
        ("layers", "layers", NUMBER_KIND),
        ("when", "when", TEXTS_KIND),
        ("couples", "couples", RECORD_KIND),
        ("remembers", "remembers", TEXT_KIND),
        _AT_SOURCE_LINE,
    )


@irdl_op_definition
class CutOp(LineOp):
    """How a module inside `block` can be split over `tp` ranks, shown exact by `secc.frontend.tp_search`.

    `ep` is the number of parts that its experts form (none: 1). `styles` has each module that works on parts,
    `shards` each parameter that is split, `partial` the whole parameters with gradients that are summed over
    ranks (each rank computes an addend), `whole` the modules inside that stay whole, with the reason.
    """

    name = "sec.cut"
    path, block, tp = prop_def(StringAttr), prop_def(StringAttr), prop_def(IntAttr)
    ep = opt_prop_def(IntAttr)
    styles, shards = prop_def(ArrayAttr[StyleAttr]), prop_def(ArrayAttr[ShardAttr])
    partial, whole = prop_def(ArrayAttr[StringAttr]), prop_def(ArrayAttr[UnsplitAttr])
    HEADLINE: ClassVar[str | None] = "path"
    KEYWORDS: ClassVar[Keywords] = (
        ("block", "block", TEXT_KIND),
        ("tp", "tp", NUMBER_KIND),
        ("ep", "ep", NUMBER_KIND),
        ("styles", "styles", RECORDS_KIND),
        ("shards", "shards", RECORDS_KIND),
        ("partial", "partial", TEXTS_KIND),
        ("whole", "whole", RECORDS_KIND),
    )


@irdl_op_definition
class TieOp(LineOp):
    """One parameter under several names."""

    name = "sec.tie"
    names = prop_def(ArrayAttr[StringAttr])
    KEYWORDS: ClassVar[Keywords] = (("names", "names", TEXTS_KIND),)


@irdl_op_definition
class RewriteOp(LineOp):
    """Code with fused operators that may stand in for `method` of `modules` (or for `function`, which their
    method calls by that name).

    `rules` are the rules of `fuse-blocks` that it applies; `code` lists the user's line and the text of each
    line. `fuse-blocks` erases all that are not wanted.
    """

    name = "sec.rewrite"
    sym, cls, method = prop_def(StringAttr), prop_def(StringAttr), prop_def(StringAttr)
    function, where = opt_prop_def(StringAttr), opt_prop_def(StringAttr)
    rules, modules, code = (
        prop_def(ArrayAttr[StringAttr]),
        prop_def(ArrayAttr[StringAttr]),
        prop_def(ArrayAttr[StringAttr]),
    )
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (
        ("rules", "rules", TEXTS_KIND),
        ("cls", "class", TEXT_KIND),
        ("method", "method", TEXT_KIND),
        ("function", "function", TEXT_KIND),
        ("modules", "modules", TEXTS_KIND),
        ("code", "code", TEXTS_KIND),
        _AT_SOURCE_LINE,
    )


@irdl_op_definition
class SectionOp(LineOp):
    """A section: its mode (forward, dgrad, train), its blocks, and which samples it is active for, by their
    optional inputs (`when`, see `secc.runtime.plan.sample_predicates`).

    The attribute dictionary holds what `annotate-costs` and `allocate` decide: dp, tp, pp, micro_batch,
    ranks, ...
    """

    name = "sec.section"
    sym = prop_def(StringAttr)
    mode = opt_prop_def(StringAttr)
    when, blocks = opt_prop_def(ArrayAttr[StringAttr]), opt_prop_def(ArrayAttr[StringAttr])
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (
        ("mode", "mode", TEXT_KIND),
        ("when", "when", TEXTS_KIND),
        ("blocks", "blocks", TEXTS_KIND),
    )


@irdl_op_definition
class CaseOp(LineOp):
    """One capture: the optional keys present (`when`) and the flat ops of the user's forward."""

    name = "sec.case"
    sym, when = prop_def(StringAttr), prop_def(ArrayAttr[StringAttr])
    body = region_def("single_block")
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (("when", "when", TEXTS_KIND),)

    @property
    def ops(self) -> list[Operation]:
        return list(iter(self.body.block.ops))  # a list of `ops` itself would count them first, one by one


@irdl_op_definition
class BodyOp(LineOp):
    """One section's part of one or more cases, after `lower`: receives, the section's ops, sends and terms.
    Codegen prints it as a method.

    `section` is @terms for the bodies that compute leaves and coefficients of the loss. `also` lists further
    patterns (their keys joined by spaces) for which the same body holds.
    """

    name = "sec.body"
    sym = prop_def(StringAttr)
    section = prop_def(SymbolRefAttr)
    when, also = prop_def(ArrayAttr[StringAttr]), opt_prop_def(ArrayAttr[StringAttr])
    body = region_def("single_block")
    traits = traits_def(NoTerminator())
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (_IN_SECTION, ("when", "when", TEXTS_KIND), ("also", "also", TEXTS_KIND))


class _SourceOp(LineOp):
    """An op without operands; its value comes from outside the case."""

    result = result_def(TensorType)

    @classmethod
    def create_source(cls, name: str, type: TensorType) -> _SourceOp:
        assert cls.HEADLINE is not None
        return cls.create(result_types=[type], properties={cls.HEADLINE: StringAttr(name)})


@irdl_op_definition
class InputOp(_SourceOp):
    """A tensor of the batch: `key` is its key, with a path behind it where the batch nests (`images[0]`)."""

    name = "sec.input"
    key = prop_def(StringAttr)
    traits = traits_def(Pure())
    HEADLINE: ClassVar[str | None] = "key"


@irdl_op_definition
class ParamOp(_SourceOp):
    """A parameter or buffer of the user's model that glue reads, by its name."""

    name = "sec.param"
    path = prop_def(StringAttr)
    traits = traits_def(Pure())
    HEADLINE: ClassVar[str | None] = "path"


@irdl_op_definition
class ConstOp(_SourceOp):
    """A tensor made from Python data while the model ran; it belongs to the graph, never to the model.

    Where it holds one number, attribute `value` has its text.
    """

    name = "sec.const"
    key = prop_def(StringAttr)
    traits = traits_def(Pure())
    HEADLINE: ClassVar[str | None] = "key"


@irdl_op_definition
class SizeOp(LineOp):
    """A size of the whole global batch, as a scalar in a loss coefficient."""

    name = "sec.size"
    value = prop_def(StringAttr)
    result = result_def(TensorType)
    traits = traits_def(Pure())
    HEADLINE: ClassVar[str | None] = "value"


class Computation(LineOp):
    """A recorded call with an argument template: the user's module or an ATen op."""

    inputs = var_operand_def(TensorType)
    outputs = var_result_def(TensorType)
    args = prop_def(StringAttr)
    no_grad = opt_prop_def(UnitAttr)
    autocast = opt_prop_def(StringAttr)
    section = opt_prop_def(SymbolRefAttr)
    where = opt_prop_def(StringAttr)
    HEADLINE: ClassVar[str | None] = "target"
    KEYWORDS: ClassVar[Keywords] = (
        ("args", "args", TEXT_KIND),
        ("outs", "outs", TEXTS_KIND),
        ("no_grad", "no_grad", FLAG_KIND),
        ("autocast", "autocast", TEXT_KIND),
        _IN_SECTION,
        _AT_SOURCE_LINE,
    )

    @property
    def arguments(self) -> argument_template.CallArguments:
        """The argument list as a structure; `OperandRef(i)` is operand i."""
        properties = self.properties["args"]
        assert isinstance(properties, StringAttr)
        return argument_template.parse_arguments(properties.data)

    @property
    def callee(self) -> str:
        """The block's path or the ATen op that is called."""
        target = self.properties["target"]
        assert isinstance(target, StringAttr)
        return target.data

    @property
    def base_name(self) -> str:
        """The name of an ATen op without its overload, `sum` for `aten.sum.dim_IntList`; any other target
        unchanged."""
        return self.callee.split(".")[1] if self.callee.startswith("aten.") else self.callee

    @classmethod
    def create_call(
        cls,
        target: str,
        operands: Sequence[SSAValue],
        args: str,
        types: Sequence[TensorType],
        **properties: Attribute | None,
    ) -> Computation:
        """Builds the op. Further properties (outs, no_grad, section, where, autocast) are given by name, None
        for absent."""
        known: dict[str, Attribute] = {"target": StringAttr(target), "args": StringAttr(args)}
        known |= {k: v for k, v in properties.items() if v is not None}
        return cls.create(operands=list(operands), result_types=list(types), properties=known)


@irdl_op_definition
class CallOp(Computation):
    """A call of a block. `outs` has an access path for each result: "" (the value itself), `[0]`,
    `.last_hidden_state`, `["logits"]`.

    Attributes put in by `secc.cost.counting.annotate_calls`, texts of expressions over symbols: `flops`
    (forward), `saved` (bytes kept for backward).
    """

    name = "sec.call"
    target = prop_def(StringAttr)
    outs = prop_def(ArrayAttr[StringAttr])


@irdl_op_definition
class GlueOp(Computation):
    """A recorded ATen op between blocks, such as `aten.add.Tensor`, or an autograd function of the user's,
    `function.Reverse`."""

    name = "sec.glue"
    target = prop_def(StringAttr)
    traits = traits_def(Pure())


@irdl_op_definition
class GuardOp(LineOp):
    """A value that Python read from inputs while the case was captured: the case is valid where it is read
    again as `equals`."""

    name = "sec.guard"
    value = operand_def(TensorType)
    equals = prop_def(StringAttr)
    section, where = opt_prop_def(SymbolRefAttr), opt_prop_def(StringAttr)
    KEYWORDS: ClassVar[Keywords] = (("equals", "equals", TEXT_KIND), _IN_SECTION, _AT_SOURCE_LINE)


@irdl_op_definition
class LeafOp(LineOp):
    """A scalar of inputs, and of random ops that it has for itself, that adds up over samples. Its result is
    the sum over the whole global batch, in float64."""

    name = "sec.leaf"
    sym = prop_def(StringAttr)
    value = operand_def(TensorType)
    result = result_def(TensorType)
    HEADLINE: ClassVar[str | None] = "sym"


@irdl_op_definition
class PlacedRowsOp(LineOp):
    """A condition on every sample alone: a mask has as many places, a scalar of inputs, as the sample has
    rows for them. `rows` is an expression over sizes, times the second operand if there is one, a scalar of
    inputs. `what` is the op that puts the rows in their places."""

    name = "sec.placed_rows"
    what, rows = prop_def(StringAttr), prop_def(StringAttr)
    counts = var_operand_def(TensorType)
    where = opt_prop_def(StringAttr)
    HEADLINE: ClassVar[str | None] = "what"
    KEYWORDS: ClassVar[Keywords] = (("rows", "rows", TEXT_KIND), _AT_SOURCE_LINE)


@irdl_op_definition
class TermOp(LineOp):
    """A term of the loss: operands are the numerator (additive over samples) and its coefficient (over leaves
    and sizes).

    Without a coefficient operand the numerator counts as it is.
    """

    name = "sec.term"
    sym = prop_def(StringAttr)
    values = var_operand_def(TensorType)
    section, where = opt_prop_def(SymbolRefAttr), opt_prop_def(StringAttr)
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (_IN_SECTION, _AT_SOURCE_LINE)

    @property
    def numerator(self) -> SSAValue:
        return self.operands[0]

    @property
    def coefficient(self) -> SSAValue | None:
        return self.operands[1] if len(self.operands) > 1 else None


@irdl_op_definition
class OutputOp(LineOp):
    """A tensor of forward that the user's `metrics()` asks for, by name. It is read in evaluations only.

    `insert-transfers` adds where each sample's entries are in it, as for an edge.
    """

    name = "sec.output"
    sym = prop_def(StringAttr)
    value = operand_def(TensorType)
    section, where = opt_prop_def(SymbolRefAttr), opt_prop_def(StringAttr)
    dim, rows = opt_prop_def(IntAttr), opt_prop_def(StringAttr)
    extents = opt_prop_def(ArrayAttr[ExtentAttr])
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (
        ("dim", "dim", NUMBER_KIND),
        ("rows", "rows", TEXT_KIND),
        ("extents", "extents", RECORDS_KIND),
        _IN_SECTION,
        _AT_SOURCE_LINE,
    )


class _EdgeBase(LineOp):
    """A tensor that `src` produces and `dst` consumes, carried by rows: `rows` entries of `dim` belong to a
    sample.

    Without `dim` and `rows` it travels whole, between stages of a pipeline.
    """

    sym = prop_def(StringAttr)
    result = result_def(TensorType)
    src, dst = prop_def(SymbolRefAttr), prop_def(SymbolRefAttr)
    dim, rows = opt_prop_def(IntAttr), opt_prop_def(StringAttr)
    extents = opt_prop_def(ArrayAttr[ExtentAttr])
    HEADLINE: ClassVar[str | None] = "sym"
    KEYWORDS: ClassVar[Keywords] = (
        ("src", "from", SECTION_KIND),
        ("dst", "to", SECTION_KIND),
        ("dim", "dim", NUMBER_KIND),
        ("rows", "rows", TEXT_KIND),
        ("extents", "extents", RECORDS_KIND),
    )


@irdl_op_definition
class TransferOp(_EdgeBase):
    """In a case: the operand of one section as a value of another."""

    name = "sec.transfer"
    value = operand_def(TensorType)


@irdl_op_definition
class EdgeOp(_EdgeBase):
    """Declares an edge after `lower`, when transfers have become sends and receives; the result type is the
    tensor's. `fills` are what its producer pads the dims of `extents` with, where that is not 0."""

    name = "sec.edge"
    fills = opt_prop_def(ArrayAttr[StringAttr])
    KEYWORDS: ClassVar[Keywords] = (*_EdgeBase.KEYWORDS, ("fills", "fills", TEXTS_KIND))


@irdl_op_definition
class ReceiveOp(_SourceOp):
    """In a body: the rows of an edge for this micro-batch's samples."""

    name = "sec.receive"
    edge = prop_def(StringAttr)
    HEADLINE: ClassVar[str | None] = "edge"


@irdl_op_definition
class SendOp(LineOp):
    """In a body: hands a tensor to an edge."""

    name = "sec.send"
    edge = prop_def(StringAttr)
    value = operand_def(TensorType)
    HEADLINE: ClassVar[str | None] = "edge"


@irdl_op_definition
class ReturnOp(LineOp):
    """Ends a case: its first operand is the user's loss. The others are named `logs`: scalars that a run
    logs, and tensors with dims that `metrics()` asks for.

    After `normalize-loss` it has none, and `constant` is what the terms leave over.
    """

    name = "sec.return"
    values = var_operand_def(TensorType)
    constant, logs = opt_prop_def(StringAttr), opt_prop_def(ArrayAttr[StringAttr])
    traits = traits_def(IsTerminator())
    KEYWORDS: ClassVar[Keywords] = (("constant", "constant", TEXT_KIND), ("logs", "logs", TEXTS_KIND))


SecDialect = Dialect(
    "sec",
    [
        GraphOp,
        SymbolOp,
        PatternOp,
        KeyOp,
        BlockOp,
        CutOp,
        TieOp,
        RewriteOp,
        SectionOp,
        CaseOp,
        BodyOp,
        InputOp,
        ParamOp,
        ConstOp,
        SizeOp,
        CallOp,
        GlueOp,
        GuardOp,
        LeafOp,
        PlacedRowsOp,
        TermOp,
        OutputOp,
        TransferOp,
        EdgeOp,
        ReceiveOp,
        SendOp,
        ReturnOp,
    ],
    [TensorType, ShardAttr, StyleAttr, UnsplitAttr, SharedSizeAttr, ExtentAttr, CouplingAttr],
)


def graph_of(module: Operation) -> GraphOp:
    """The graph of a module, which has exactly one."""
    return next(op for op in module.walk() if isinstance(op, GraphOp))


def section_of(op: Operation) -> str | None:
    """The section that an op is in, None for inputs, input-only ops and declarations, which are in none."""
    section = op.properties.get("section")
    return section.root_reference.data if isinstance(section, SymbolRefAttr) else None


def set_section(op: Operation, name: str | None) -> None:
    """Moves an op into a section; None takes it out of its section."""
    if name is None:
        op.properties.pop("section", None)
    else:
        op.properties["section"] = SymbolRefAttr(name)


def make_region(ops: Sequence[Operation]) -> Region:
    """A region with one block that holds `ops`."""
    return Region(Block(ops))
