"""The global batches that a run of a plan would train on, as the metadata that schedules are made from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from secc.runtime.data.declared_sizes import DeclaredSizes
from secc.runtime.data.mixed_order import MixedOrder, make_sample_order
from secc.runtime.data.sample_loader import MetadataRequest, SampleLoader
from secc.runtime.data.sample_metadata import RecordCodec, SampleRecord
from secc.runtime.data.stream_batches import StreamBatches
from secc.runtime.parameters.rank_weights import load_user_model
from secc.runtime.plan.schema import Plan
from secc.runtime.plan.step_program import SampleMeta


def load_global_batches(
    directory: Path, plan: Plan, seed: int = 0, shuffle: bool = False, steps: int = 1
) -> Iterator[tuple[SampleMeta, ...]]:
    """Yields the samples of the first `steps` global batches as the ranks draw them: from the plan's model
    file, or from its `sizes(i)`.

    Raises UserError if the model file is missing or has changed since the plan was made.
    """
    user = load_user_model(plan, directory)
    user.use_plan_inputs(plan.inputs)
    epochs = make_sample_order(user, plan.global_batch, seed, shuffle)
    declared = DeclaredSizes(user, plan.symbols, plan.inputs) if user.defines("sizes") else None
    streams = StreamBatches(epochs) if isinstance(epochs, MixedOrder) else None
    loader = SampleLoader(user, RecordCodec(plan, {}), epochs, streams=streams)
    for step in range(steps):
        if declared is not None:
            yield tuple(declared.sample_metadata(i) for i in epochs.dataset_indices(step))
            continue
        records = loader.iter_records(MetadataRequest(step, tuple(range(epochs.samples_in_step(step)))))
        yield tuple(record.meta for record in records if isinstance(record, SampleRecord))
