"""Whether micro-batches may have their own widths: only where padded positions cannot reach the loss, shown
numerically.

A global batch is padded to its longest sample, and that padding belongs to the semantics of the user's model
where it reaches the loss (a mean over padded positions, attention without a mask). The probe pads batches
further than their own width; if loss or any gradient moves, every micro-batch must have the global batch's
width.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from secc.frontend.dataset.eager_reference import Keyed, compare, eager
from secc.frontend.dataset.input_symbols import Inputs
from secc.frontend.dataset.survey import Survey
from secc.runtime.errors import UserError
from secc.runtime.model.user_file import UserModel
from secc.runtime.plan.batch_sizes import combine, pad_batch, sizes_of
from secc.runtime.plan.schema import Draw

_SMALL = (
    1 << 22
)  # parameters of a model whose every micro-batch of a survey is probed, of others two of each pattern
_WIDER = 3  # positions of extra padding, odd so that it shows in patch and pooling sizes
# times its own width: so far a micro-batch is padded, if the dataset has samples as wide, since convolutions
# swallow a few positions
_FAR = 4


def choose(
    user: UserModel, survey: Survey, inputs: Inputs, model: nn.Module | None, draws: Sequence[Draw] = ()
) -> str:
    """Say "own" if padding provably does not reach the loss in any pattern, else "global".

    Random ops (`draws`) draw what plans draw. Without a model that fits here nothing can be shown, so the
    answer is "global" unless no input has a padded width.
    """
    if not any(s.is_padded for s in inputs.symbols):
        return "own"
    if model is None:
        return "global"
    keyed = Keyed(model, draws, inputs.symbols)
    probed = None if sum(p.numel() for p in model.parameters()) < _SMALL else 2
    batches = (
        (i, batch) for pattern in survey.unions() for i, batch in enumerate(survey.batches(pattern)[:probed])
    )
    shown = all(_indifferent(user, inputs, model, keyed, batch, far=i % 2 > 0) for i, batch in batches)
    return "own" if shown else "global"


def _indifferent(
    user: UserModel,
    inputs: Inputs,
    model: nn.Module,
    keyed: Keyed,
    samples: list[dict[str, object]],
    far: bool,
) -> bool:
    batch = user.collate(samples)
    sizes = combine([sizes_of(batch, inputs.symbols)], inputs.symbols)
    wider = {
        s.name: _wider(inputs, s.name, sizes[s.name], far)
        for s in inputs.symbols
        if s.is_padded and sizes[s.name]
    }
    try:
        padded = pad_batch(batch, inputs.inputs, wider)
        moved = eager(model, padded, keyed.of(user, samples, wider))
        return compare(moved, eager(model, batch, keyed.of(user, samples))).exact
    except (UserError, RuntimeError, ValueError, IndexError):
        return False  # the model or collate refuses other widths


def _wider(inputs: Inputs, name: str, own: int, far: bool) -> int:
    """A width to pad to: a little more, or as wide as the widest sample that was drawn."""
    widest = min(max(s[name] for s in inputs.sizes), _FAR * own) if far else 0
    return max(own + _WIDER, widest)
