"""Global batches and plans for benchmarks of schedules: the reference workloads' sample mixes
(`tools/workloads/parts/mix.py`) with fixed seeds, and sections with linear costs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from secc.runtime.plan.schema import PLAN_VERSION, Cost, Edge, Mesh, ModelRef, Plan, Section, Symbol
from secc.runtime.plan.step_program import SampleMeta
from tools.workloads.parts import mix

IMAGE_PATTERN, AUDIO_PATTERN = frozenset(["images"]), frozenset(["audio"])
MIX_SYMBOLS = (
    Symbol("B", "rows", "ids", 0),
    Symbol("T", "rows", "ids", 1),
    Symbol("I", "rows", "images", 0),
    Symbol("A", "rows", "audio", 0),
)
TOKEN_NS = 30_000  # of the language model's forward on one replica, so that 32 samples take seconds

SampleList = list[SampleMeta]


def multimodal_batch(count: int, images: float, seed: int, audio: float = 0.0) -> SampleList:
    """Samples with text, and with images and audio in these shares. T: tokens, I: patches, A: audio
    frames."""
    r = random.Random(f"multimodal {count} {images} {audio} {seed}")
    return [_multimodal_sample(i, r, r.random() < images, r.random() < audio) for i in range(count)]


def _multimodal_sample(i: int, r: random.Random, image: bool, audio: bool) -> SampleMeta:
    held = mix.multimodal(r, image, audio)
    tokens = sum(held.images)
    pattern = (IMAGE_PATTERN if image else frozenset()) | (AUDIO_PATTERN if audio else frozenset())
    return SampleMeta(
        i, pattern, {"B": 1, "T": held.text + tokens + held.frames // 2, "I": 4 * tokens, "A": held.frames}
    )


def text_sample(i: int, tokens: int) -> SampleMeta:
    """A sample of text alone."""
    return SampleMeta(i, frozenset(), {"B": 1, "T": tokens, "I": 0, "A": 0})


def distillation_batch(count: int, seed: int) -> SampleList:
    """Samples of text for a teacher and a student."""
    r = random.Random(f"distillation {count} {seed}")
    return [text_sample(i, mix.distillation(r).text) for i in range(count)]


def linear_section(
    name: str, ranks: range, symbol: str, ns: int, mode: str = "train", when: frozenset[str] = frozenset()
) -> Section:
    """A section that takes `ns` for each entry of a symbol forward, and twice that backward; one sample to a
    micro-batch."""
    cost = Cost(f"{ns}*{symbol}", f"{2 * ns}*{symbol}" if mode == "train" else "0")
    return Section(name, "", mode, tuple(when), (), (), Mesh(tuple(ranks), len(ranks)), 1, cost=cost)


def build_plan(sections: list[Section], edges: list[tuple[str, str]]) -> Plan:
    """The plan of these sections, all edges with gradients where both ends owe a backward."""
    modes = {s.name: s.mode for s in sections}
    made = tuple(
        Edge(f"{a}_{b}", a, b, "float32", ("B",), 0, "1", "forward" not in (modes[a], modes[b]))
        for a, b in edges
    )
    world = 1 + max(r for s in sections for r in s.mesh.ranks)
    return Plan(
        PLAN_VERSION,
        "",
        ModelRef("", ""),
        world,
        0,
        "own",
        MIX_SYMBOLS,
        (),
        tuple(sections),
        made,
        (),
        (),
        {},
        {},
        {},
    )


@dataclass(frozen=True)
class PipelineShape:
    """How a section runs in stages, each of which takes as long as the section takes in one.

    A stage holds at most `room` micro-batches between forward and backward; `split`: half of a backward is
    for weights and comes later.
    """

    stages: int = 1
    max_in_flight: int = 0
    split: bool = False

    def split_section(self, whole: Section) -> list[Section]:
        """The stages of a section: replica d has the ranks from `first + d * stages` on."""
        if self.stages == 1:
            return [replace(whole, weight_permille=500 if self.split else 0)]
        first, dp = whole.mesh.ranks[0], whole.mesh.dp
        meshes = [
            Mesh(tuple(range(first + i, first + i + dp * self.stages, self.stages)), dp)
            for i in range(self.stages)
        ]
        weight = 500 if self.split else 0
        return [
            replace(
                whole,
                name=f"{whole.name}_{i}",
                pipeline=whole.name,
                stage=i,
                mesh=m,
                in_flight=self.max_in_flight,
                weight_permille=weight,
            )
            for i, m in enumerate(meshes)
        ]


def vlm_plan(
    samples: SampleList,
    encoders: int,
    replicas: int,
    load: float,
    mode: str = "train",
    pipeline: PipelineShape = PipelineShape(),
) -> Plan:
    """An encoder on its own ranks and a language model; `load` is the encoder's work on each rank over the
    language model's."""
    passes = 3 if mode == "train" else 1
    ns = forward_ns_per_entry(samples, "I", encoders, replicas, load, passes)
    vision = linear_section("vision", range(encoders), "I", ns, mode, IMAGE_PATTERN)
    lm = pipeline.split_section(linear_section("lm", range(encoders, encoders + replicas), "T", TOKEN_NS))
    return build_plan([vision, *lm], [("vision", lm[0].name), *pairwise(s.name for s in lm)])


def shared_ranks_plan(
    samples: SampleList, ranks: int, widths: tuple[int, int], load: float, micro_batch: int = 1
) -> Plan:
    """An encoder and a language model on the same ranks, in replicas of `widths` ranks each; `load` as
    above."""
    narrow, wide = (Mesh(tuple(range(ranks)), ranks // tp, 1, tp) for tp in widths)
    ns = forward_ns_per_entry(samples, "I", narrow.dp, wide.dp, load, 3)
    vision = replace(
        linear_section("vision", range(ranks), "I", ns, when=IMAGE_PATTERN),
        mesh=narrow,
        micro_batch=micro_batch,
    )
    lm = replace(linear_section("lm", range(ranks), "T", TOKEN_NS), mesh=wide)
    return build_plan([vision, lm], [("vision", "lm")])


def omni_plan(samples: SampleList, encoders: int, replicas: int, load: float) -> Plan:
    """Vision and audio encoders on ranks of their own, both into a language model."""
    made = [
        linear_section(
            name,
            ranks,
            symbol,
            forward_ns_per_entry(samples, symbol, len(ranks), replicas, load, 3),
            when=when,
        )
        for name, ranks, symbol, when in (
            ("vision", range(encoders), "I", IMAGE_PATTERN),
            ("audio", range(encoders, encoders + max(1, encoders // 2)), "A", AUDIO_PATTERN),
        )
    ]
    first = made[-1].mesh.ranks[-1] + 1
    return build_plan(
        [*made, linear_section("lm", range(first, first + replicas), "T", TOKEN_NS)],
        [("vision", "lm"), ("audio", "lm")],
    )


def teacher_student_plan(
    samples: SampleList, teachers: int, students: int, load: float, pipeline: PipelineShape = PipelineShape()
) -> Plan:
    """A frozen teacher on its own ranks and a student, whose last stage takes what the teacher says."""
    ns = forward_ns_per_entry(samples, "T", teachers, students, load, 1)
    student = pipeline.split_section(
        linear_section("student", range(teachers, teachers + students), "T", TOKEN_NS)
    )
    names = [s.name for s in student]
    return build_plan(
        [linear_section("teacher", range(teachers), "T", ns, "forward"), *student],
        [("teacher", names[-1]), *pairwise(names)],
    )


def shared_encoder_plan(samples: SampleList, encoders: int, replicas: int, load: float) -> Plan:
    """One encoder with two consumers on ranks of their own: a language model and, half as large, a head for
    images alone."""
    ns = forward_ns_per_entry(samples, "I", encoders, replicas, load, 3)
    lm, head = (
        range(encoders, encoders + replicas),
        range(encoders + replicas, encoders + replicas + max(1, replicas // 4)),
    )
    sections = [
        linear_section("vision", range(encoders), "I", ns, when=IMAGE_PATTERN),
        linear_section("lm", lm, "T", TOKEN_NS),
        linear_section("head", head, "I", TOKEN_NS // 16, when=IMAGE_PATTERN),
    ]
    return build_plan(sections, [("vision", "lm"), ("vision", "head")])


def forward_ns_per_entry(
    samples: SampleList, symbol: str, ranks: int, replicas: int, load: float, passes: int
) -> int:
    """The forward time of an entry of `symbol` that loads `ranks` ranks with `load` of what loads the
    language model's replicas."""
    tokens, entries = (sum(s.sizes[name] for s in samples) for name in ("T", symbol))
    return max(1, round(load * 3 * TOKEN_NS * tokens * ranks / (replicas * passes * max(1, entries))))
