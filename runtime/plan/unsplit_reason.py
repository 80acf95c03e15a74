"""Why tensor parallelism leaves a module or parameter whole: a kind with its numbers, and the one table of
sentences.

What a plan may choose depends on kinds and sizes, never on the sentences: rewording `SENTENCES` changes no
plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class UnsplitKind(StrEnum):
    """What keeps a module whole. The value is the kind's name in the IR's text."""

    # A tp that does not divide a size.
    UNEVEN_HEADS = "uneven_heads"
    UNEVEN_OUTPUTS = "uneven_outputs"
    UNEVEN_EXPERTS = "uneven_experts"
    UNEVEN_EXPERT_COUNT = "uneven_expert_count"
    # Code that cannot run on one rank's part of a tensor (`secc.runtime.tensor_parallel.rules`).
    WRITES_INTO_WHOLE = "writes_into_whole"
    DIFFERENT_PARTS = "different_parts"
    OTHER_SIZE = "other_size"
    TIMES_VECTOR = "times_vector"
    SUMS_OVER_PARTS = "sums_over_parts"
    PARTS_OF_SEVERAL_DIMS = "parts_of_several_dims"
    ATTENTION_OVER_PARTS = "attention_over_parts"
    ATTENTION_WHOLE_KEYS = "attention_whole_keys"
    MIXES_ENTRIES = "mixes_entries"
    NO_RULE = "no_rule"
    READS_VALUES = "reads_values"
    TAKES_PIECE = "takes_piece"
    TAKES_ENTRY = "takes_entry"
    INDEXED_BY_TENSOR = "indexed_by_tensor"
    STRIDED = "strided"
    EMPTY_SLICE = "empty_slice"
    JOINED_WITH_WHOLE = "joined_with_whole"
    REPEATED = "repeated"
    UNCLEAR_VIEW = "unclear_view"
    MERGED = "merged"
    MERGED_WITH_PIECE = "merged_with_piece"
    SPLIT_UNEVENLY = "split_unevenly"
    SPLIT_ACROSS_EDGES = "split_across_edges"
    SQUEEZED = "squeezed"
    EXPANDED = "expanded"
    LEAVES_IN_PARTS = "leaves_in_parts"
    FAILS_ON_PARTS = "fails_on_parts"
    # What the search for a layout finds (`secc.frontend.tp_search`).
    WHOLE_ACTIVATIONS = "whole_activations"
    OUTPUTS_UNUSED = "outputs_unused"
    NOT_CALLED = "not_called"
    TOO_LARGE = "too_large"
    SMALL = "small"
    READ_BY_OTHER_CODE = "read_by_other_code"
    GRADIENT_HOOK = "gradient_hook"
    TAKEN_FROM_INSIDE = "taken_from_inside"
    SMALL_MODEL_DIFFERS = "small_model_differs"
    EXPERTS_BY_SEQUENCE = "experts_by_sequence"
    EXPERTS_INEXACT = "experts_inexact"
    EXPERTS_MIX_TOKENS = "experts_mix_tokens"
    LISTED_EXPERTS_SHARED = "listed_experts_shared"
    RESULTS_DIFFER = "results_differ"
    INPUT_GRADIENTS_DIFFER = "input_gradients_differ"
    GRADIENT_DIFFERS = "gradient_differs"
    # What sections and glue need (`shard-tensors`, `shard-logits`).
    READ_BY_GLUE = "read_by_glue"
    PARAMETER_READ_OUTSIDE = "parameter_read_outside"
    PARAMETER_SHARED = "parameter_shared"
    TIED_TO_OTHER_LAYOUT = "tied_to_other_layout"
    NORMS_WHOLE = "norms_whole"
    NORMS_WHOLE_ON_ROWS = "norms_whole_on_rows"
    LOGITS_GATHERED = "logits_gathered"
    # What the search for layers that work on rows of the sequence finds (`secc.frontend.cp_search`).
    NO_ROWS = "no_rows"
    MIXES_ROWS = "mixes_rows"
    WRITES_INTO_ROWS = "writes_into_rows"


# {subject}, {size} and {tp} are the fields of the reason.
SENTENCES: dict[UnsplitKind, str] = {
    UnsplitKind.UNEVEN_HEADS: "tp={tp} does not divide {size} heads",
    UnsplitKind.UNEVEN_OUTPUTS: "tp={tp} does not divide its {size} outputs",
    UnsplitKind.UNEVEN_EXPERTS: "tp={tp} does not divide the inner width of its experts into parts of {size}",
    UnsplitKind.UNEVEN_EXPERT_COUNT: "ep={tp} does not divide its {size} experts",
    UnsplitKind.WRITES_INTO_WHOLE: "a whole tensor is changed by values that are split over ranks",
    UnsplitKind.DIFFERENT_PARTS: "its operands are split in different ways",
    UnsplitKind.OTHER_SIZE: "a split tensor meets one of another size",
    UnsplitKind.TIMES_VECTOR: "a split tensor is multiplied with a vector",
    UnsplitKind.SUMS_OVER_PARTS: "a product sums over a split dim",
    UnsplitKind.PARTS_OF_SEVERAL_DIMS: "a product would be split along several dims",
    UnsplitKind.ATTENTION_OVER_PARTS: "attention mixes the entries of a split dim",
    UnsplitKind.ATTENTION_WHOLE_KEYS: "attention has split queries, but whole keys and values",
    UnsplitKind.MIXES_ENTRIES: "{subject} mixes the entries of a split dim",
    UnsplitKind.NO_RULE: "{subject} has no rule for split tensors",
    UnsplitKind.READS_VALUES: "{subject} reads values of a split tensor",
    UnsplitKind.TAKES_PIECE: "a piece of a split dim is taken",
    UnsplitKind.TAKES_ENTRY: "one entry of a split dim is taken",
    UnsplitKind.INDEXED_BY_TENSOR: "a split tensor is indexed by a tensor",
    UnsplitKind.STRIDED: "a split dim is sliced with a step",
    UnsplitKind.EMPTY_SLICE: "an empty slice of a split dim is taken",
    UnsplitKind.JOINED_WITH_WHOLE: "split tensors are joined with whole ones",
    UnsplitKind.REPEATED: "a split tensor is repeated by a tensor, or as a whole",
    UnsplitKind.UNCLEAR_VIEW: "a view as {subject} does not show where a split dim goes",
    UnsplitKind.MERGED: "a split dim is merged into another",
    UnsplitKind.MERGED_WITH_PIECE: "a split dim is merged with a piece of another",
    UnsplitKind.SPLIT_UNEVENLY: "a split dim is viewed as several that do not divide it",
    UnsplitKind.SPLIT_ACROSS_EDGES: "a split dim is viewed as several across the edges of its parts",
    UnsplitKind.SQUEEZED: "a split dim may be squeezed",
    UnsplitKind.EXPANDED: "a split dim is expanded",
    UnsplitKind.LEAVES_IN_PARTS: "its outputs leave the module split",
    UnsplitKind.FAILS_ON_PARTS: "its code fails on split tensors: {subject}",
    UnsplitKind.WHOLE_ACTIVATIONS: "it gets whole activations",
    UnsplitKind.OUTPUTS_UNUSED: "no module takes its outputs split",
    UnsplitKind.NOT_CALLED: "it was not called during compilation",
    UnsplitKind.TOO_LARGE: (
        "it is too large to be shown exact during compilation: small_model() should have a layer of its class"
        " with the same linear maps"
    ),
    UnsplitKind.SMALL: "it is small",
    UnsplitKind.READ_BY_OTHER_CODE: "its parameter is read by code outside of its forward",
    UnsplitKind.GRADIENT_HOOK: "a hook sees the gradient of its parameter, and would see a part on each rank",
    UnsplitKind.TAKEN_FROM_INSIDE: "a result from inside of it (attention weights) is returned past it",
    UnsplitKind.SMALL_MODEL_DIFFERS: (
        "the same layer of small_model() is split otherwise: it should have as many heads, of keys and values"
        " too, as a replica has ranks, or two"
    ),
    UnsplitKind.EXPERTS_BY_SEQUENCE: "with norms=sequence its experts stay whole",
    UnsplitKind.EXPERTS_INEXACT: (
        "no way to split its experts was shown exact (its code should take their number from its parameters"
        " or from an attribute, which a rank sets to its own number, and not from a constant)"
    ),
    UnsplitKind.EXPERTS_MIX_TOKENS: (
        "at {subject} a token's result depends on which other tokens come with it (a capacity for the batch,"
        " tokens dropped by position), and ranks have different tokens"
    ),
    UnsplitKind.LISTED_EXPERTS_SHARED: (
        "its experts are modules in a list, each whole on one rank: {size} ranks cannot share ep={tp} parts"
    ),
    UnsplitKind.RESULTS_DIFFER: "its results differ when it is split",
    UnsplitKind.INPUT_GRADIENTS_DIFFER: "gradients of its inputs differ when it is split",
    UnsplitKind.GRADIENT_DIFFERS: "the gradient of {subject} differs when it is split",
    UnsplitKind.READ_BY_GLUE: "it is read outside of its module",
    UnsplitKind.PARAMETER_READ_OUTSIDE: "one of its parameters is read outside",
    UnsplitKind.PARAMETER_SHARED: "one of its parameters belongs to several sections",
    UnsplitKind.TIED_TO_OTHER_LAYOUT: "one of its parameters is tied to one that is split otherwise",
    UnsplitKind.NORMS_WHOLE: "its norms keep the whole sequence: its code does not run on positions alone",
    UnsplitKind.NORMS_WHOLE_ON_ROWS: (
        "its norms keep all rows of a rank: with cp, {subject} runs on rows by itself, and with tp on parts"
    ),
    UnsplitKind.LOGITS_GATHERED: "its logits are gathered for {subject}",
    UnsplitKind.NO_ROWS: "it gets no hidden states [samples, rows, width]",
    UnsplitKind.MIXES_ROWS: "{subject} mixes rows of the sequence, or has no rule for them",
    UnsplitKind.WRITES_INTO_ROWS: "{subject}",
}

TOKEN_MIXING_REMEDY = (
    "let a token's result depend on its own sample only: a capacity for each sample, or none"
)
_UNEVEN = frozenset({UnsplitKind.UNEVEN_HEADS, UnsplitKind.UNEVEN_OUTPUTS, UnsplitKind.UNEVEN_EXPERTS})
_UNITS = {UnsplitKind.UNEVEN_HEADS: "heads", UnsplitKind.UNEVEN_OUTPUTS: "outputs"}


@dataclass(frozen=True)
class SharedSize:
    """A size that the ranks of a replica share evenly, such as 8 heads: their number must divide it."""

    size: int
    unit: str  # "heads" or "outputs"

    def __str__(self) -> str:
        return f"{self.size} {self.unit}"


@dataclass(frozen=True)
class UnsplitReason:
    """Why a module stays whole. `subject` names the function, parameter or error concerned; `size` is the
    size that `tp` (of experts: `ep`) does not divide (0 where no size matters)."""

    kind: UnsplitKind
    subject: str = ""
    size: int = 0
    tp: int = 0

    @property
    def is_uneven(self) -> bool:
        """Whether the tp does not divide a size, so that another tp may do."""
        return self.kind in _UNEVEN

    @property
    def shared_size(self) -> SharedSize | None:
        """The size that another tp would have to divide, where it is known."""
        return SharedSize(self.size, _UNITS[self.kind]) if self.kind in _UNITS else None

    def __str__(self) -> str:
        return SENTENCES[self.kind].format(subject=self.subject, size=self.size, tp=self.tp)
