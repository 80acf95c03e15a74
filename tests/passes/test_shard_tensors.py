"""A tp that is not possible is refused with the reason, and parameters tied across sections stay whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from secc import pass_pipeline
from secc.codegen.plan_builder import attribute_value
from secc.errors import ImpossibleChoice, UserError
from secc.ir.analysis.dataflow import get_values
from secc.ir.dialect.ops import graph_of
from secc.ir.dialect.typed_attributes import ShardAttr, UnsplitAttr
from secc.ir.text_io import module_text
from secc.runtime.plan.unsplit_reason import UnsplitKind

SOURCE = (Path(__file__).parent / "shard_tensors.mlir").read_text()


def sharded(source: str, passes: str = "shard-tensors"):
    module = module_text.parse_module(source)
    pass_pipeline.run_passes(module, pass_pipeline.parse_pipeline(passes))
    return graph_of(module).sections


def test_heads_that_tp_does_not_divide_are_refused() -> None:
    source = SOURCE.replace('"mixes_entries", "softmax", 0, 0', '"uneven_heads", "", 3, 2', 1)
    with pytest.raises(
        UserError, match=r"lm\.tp=2 is impossible: tower\.layers\.0\.router: tp=2 does not divide 3 heads"
    ) as error:
        sharded(source)
    assert error.value.remedy == "set lm.tp to 3"


def test_every_size_that_tp_does_not_divide_is_named_with_what_the_ranks_allow() -> None:
    """Layers with maps to 64 and 32 outputs, and an embedding of 32, on three ranks."""
    uneven = {"tower.q": 64, "tower.k": 32, "tower.o": 64, "embed": 32}
    whole = ", ".join(f'#sec.unsplit<"{path}", "uneven_outputs", "", {n}, 3>' for path, n in uneven.items())
    cut = f'sec.cut "tower" block "tower" tp 3 styles [] shards [] partial [] whole [{whole}]'
    source = SOURCE.replace("{tp = 2 : i64}", "{tp = 3 : i64, ranks = [0 : i64, 1 : i64, 2 : i64]}")
    with pytest.raises(UserError) as error:
        sharded(source.replace('  sec.cut "embed"', f'  {cut}\n  sec.cut "embed"'))
    assert error.value.message == (
        "lm.tp=3 is impossible: none of its modules can be split"
        " (tower.q: tp=3 does not divide its 64 outputs; tower.k: tp=3 does not divide its 32 outputs)"
    )
    assert error.value.remedy == "set lm.tp to 2"


def test_a_section_with_nothing_to_split_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"lm\.tp=3 is impossible: none of its modules can be split \(this tp was not tested"
    ):
        sharded(SOURCE.replace("{tp = 2 : i64}", "{tp = 3 : i64}"))


def test_a_stage_is_refused_by_the_name_of_its_section() -> None:
    stage = SOURCE.replace("{tp = 2 : i64}", '{tp = 3 : i64, pipeline = "whole", stage = 0 : i64}')
    with pytest.raises(ImpossibleChoice, match=r"whole\.tp=3 is impossible") as error:
        sharded(stage)
    assert error.value.choices == ("whole.tp",)


def test_a_plan_to_compare_may_have_any_feasible_tp() -> None:
    three = SOURCE.replace("{tp = 2 : i64}", "{tp = 3 : i64}")
    with pytest.raises(ImpossibleChoice):
        sharded(three, "shard-tensors{assume=true}")
    known = re.sub(r'(sec.block "tower".*)', r"\1 {tp = [2 : i64, 3 : i64]}", three)
    assert attribute_value(sharded(known, "shard-tensors{assume=true}")[0], "tp", 1) == 3


@pytest.mark.parametrize(
    ("tp", "message", "remedy"),
    [
        (
            3,
            "lm.tp=3 is impossible: 3 does not divide 8 heads, which its ranks would share",
            "set lm.tp to 2 or 4",
        ),
        (
            8,
            "lm.tp=8 is impossible: 8 does not divide 12 outputs, which its ranks would share",
            "set lm.tp to 2 or 4",
        ),
        (
            6,
            "lm.tp=6 is impossible: 6 does not divide 8 heads, which its ranks would share",
            "set lm.tp to 2 or 4",
        ),
    ],
)
def test_a_tp_to_compare_that_does_not_divide_a_shared_size_is_refused(
    tp: int, message: str, remedy: str
) -> None:
    asked = SOURCE.replace("{tp = 2 : i64}", f"{{tp = {tp} : i64}}")
    known = re.sub(
        r'(sec.block "tower".*)',
        r'\1 {tp = [2 : i64, 4 : i64], shared = [#sec.shared<8, "heads">, #sec.shared<12, "outputs">]}',
        asked,
    )
    with pytest.raises(UserError) as error:
        sharded(known, "shard-tensors{assume=true}")
    assert (error.value.message, error.value.remedy) == (message, remedy)


def test_an_untested_tp_to_compare_may_divide_the_shared_sizes() -> None:
    three = SOURCE.replace("{tp = 2 : i64}", "{tp = 3 : i64}")
    known = re.sub(r'(sec.block "tower".*)', r'\1 {tp = [], shared = [#sec.shared<9, "heads">]}', three)
    with pytest.raises(
        ImpossibleChoice,
        match="was not tested for this section during compilation; 3 divides what its ranks would share: "
        "9 heads",
    ):
        sharded(known, "shard-tensors{assume=true}")


def test_a_parameter_of_two_sections_stays_whole() -> None:
    """The head is another section's: the embedding that is tied to it is not cut."""
    two = SOURCE.replace(
        'blocks ["embed", "tower", "head", "extra"] {tp = 2 : i64}',
        'blocks ["embed", "tower", "extra"] {tp = 2 : i64}\n  sec.section "top" mode "train" when '
        '[] blocks ["head"]',
    )
    lm = sharded(two)[0]
    assert not any("embed" in shard.value.name for shard in get_values(lm, "shards", ShardAttr))
    unsplit = {reason.module.data: reason.value.kind for reason in get_values(lm, "whole", UnsplitAttr)}
    assert unsplit["embed"] is UnsplitKind.PARAMETER_SHARED
