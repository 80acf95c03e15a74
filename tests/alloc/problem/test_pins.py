"""What users may pin, and what is said where they may not."""

from __future__ import annotations

import pytest

from secc.alloc.problem.pins import check_pins, parse_pins
from secc.errors import UserError

SECTIONS = ["model.vision", "lm"]


def test_pins_narrow_the_candidates() -> None:
    pins = parse_pins(
        ["lm.dp=2", "lm.micro_batch=3", "model.vision.with=lm", "lm.tp=2", "lm.sharding=zero1"], SECTIONS
    )
    assert pins.dp_choices("lm", 4, [1, 2, 4]) == [2] and pins.micro_batch_choices("lm", 8) == [3]
    assert pins.number_choices("lm", "tp", [1, 4]) == [2] and pins.number_choices("lm", "pp", [1, 4]) == [
        1,
        4,
    ]
    assert pins.dp_choices("model.vision", 3, [1, 2, 3]) == [1, 2, 3] and pins.micro_batch_choices(
        "model.vision", 6
    ) == [
        1,
        2,
        4,
        6,
    ]
    assert pins.together == (("model.vision", "lm"),)
    assert pins.word_choices("lm", "sharding") == ("zero1",) and pins.word_choices("lm", "recompute") == (
        "none",
        "selective",
        "full",
    )
    assert pins.as_text == "lm.dp=2, lm.micro_batch=3, lm.tp=2, lm.sharding=zero1, model.vision.with=lm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lm.expert_load=much", "expected the exponent of Zipf's law"),
        ("lm.expert_load=-1", "expected the exponent of Zipf's law"),
        ("lm.ep=0", "expected an integer of at least 1"),
        ("lm.dp", "form SECTION.KEY=VALUE"),
        ("dp=2", "form SECTION.KEY=VALUE"),
        ("llm.dp=2", "unknown section 'llm'"),
        ("lm.depth=2", "unknown key 'depth'"),
        ("lm.zero=3", "unknown key 'zero'.*\n.*write lm.sharding=zero3;"),
        ("lm.checkpointing=full", "unknown key.*\n.*write lm.recompute=full;"),
        ("lm.microbatch=2", "unknown key.*\n.*write lm.micro_batch=2;"),
        ("lm.dp=two", "expected an integer"),
        ("lm.dp=0", "expected an integer"),
        ("lm.tp=0", "expected an integer"),
        ("lm.sharding=zero9", "unknown sharding 'zero9'"),
        ("lm.recompute=1", "unknown recompute '1'"),
        ("lm.micro_batch_tokens=0", "expected an integer of at least 1"),
        ("lm.with=lm", "expected another section"),
        ("lm.with=teacher", "expected another section"),
    ],
)
def test_impossible_pins_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_pins([text], SECTIONS)
    assert error.value.remedy
    if "section" not in message:  # what is wrong whatever the sections are
        with pytest.raises(UserError, match=message):
            check_pins([text])


def test_chunks_need_several_stages_and_a_v_two_of_them() -> None:
    assert parse_pins(["lm.pp=2"], SECTIONS).interleaving("lm") is None
    assert parse_pins(["lm.placement=v"], SECTIONS).interleaving("lm") == (2, "v")
    assert parse_pins(["lm.chunks=3", "lm.pp=2"], SECTIONS).interleaving("lm") == (3, "loop")
    for pins, message in (
        (["lm.pp=1", "lm.chunks=2"], "lm.chunks=2 is impossible: it needs several pipeline stages"),
        (["lm.chunks=1", "lm.placement=v"], "impossible with chunks=1"),
    ):
        with pytest.raises(UserError, match=message) as error:
            parse_pins(pins, SECTIONS).interleaving("lm")
        assert error.value.remedy


def test_a_split_backward_needs_stages() -> None:
    split = ["lm.backward=split", "lm.pp=2", "lm.cp=2", "lm.recompute=full", "lm.cp_per=micro_batch"]
    assert parse_pins(split, SECTIONS).splits_backward("lm")
    with pytest.raises(UserError, match="it needs several pipeline stages") as error:
        parse_pins(split[:1], SECTIONS).splits_backward("lm")
    assert error.value.remedy


def test_more_replicas_than_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="at most 4"):
        parse_pins(["lm.dp=5"], SECTIONS).dp_choices("lm", 4, [1, 2, 3, 4])


def test_refused_choices_are_not_considered_again() -> None:
    pins = parse_pins([], SECTIONS, ["lm.pp=4"])
    assert pins.number_choices("lm", "pp", [1, 2, 4]) == [1, 2] and pins.number_choices(
        "model.vision", "pp", [1, 4]
    ) == [
        1,
        4,
    ]


def test_pins_that_cannot_hold_together_are_named_together() -> None:
    with pytest.raises(UserError, match=r"lm\.pp=2 and lm.pp=4 contradict each other"):
        check_pins(["lm.pp=2", "lm.tp=2", "lm.pp=4"])
    check_pins(["lm.pp=2", "lm.pp=2", "lm.with=vision", "lm.with=audio"])
    pins = parse_pins(["lm.pp=2", "lm.tp=2", "lm.dp=3"], SECTIONS)
    with pytest.raises(UserError, match=r"lm\.dp=3 with lm\.tp=2 and lm\.pp=2 is impossible: .* at most 1"):
        pins.dp_choices("lm", 1, [1])
