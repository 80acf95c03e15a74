"""Global batches and plans for benchmarks of schedules.

The sample mixes are those of the reference workloads (`tools/workloads/parts/mix.py`) with fixed seeds;
sections have linear costs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

from secc.runtime.plan.schema import (
    PLAN_VERSION,
    Cost,
    Edge,
    Mesh,
    ModelRef,
    Plan,
    Section,
    Symbol,
    rank_position,
)
from secc.runtime.plan.step_program import SampleMeta
from tools.workloads.parts import mix

IMAGE_PATTERN, AUDIO_PATTERN = frozenset(["images"]), frozenset(["audio"])
MIX_SYMBOLS = (
    Symbol("B", "rows", "ids", 0),
    Symbol("T", "rows", "ids", 1),
    Symbol("I", "rows", "images", 0),
    Symbol("A", "rows", "audio", 0),
)
TOKEN_NS = 30_000  # ns of the language model's forward per token on one replica: 32 samples take seconds

SampleList = list[SampleMeta]


def multimodal_batch(count: int, images: float, seed: int, audio: float = 0.0) -> SampleList:
    """Draws samples with text, and with images and audio in these shares.

    Symbols: T tokens, I patches, A audio frames.
    """
    r = random.Random(f"multimodal {count} {images} {audio} {seed}")
    return [_multimodal_sample(i, r, r.random() < images, r.random() < audio) for i in range(count)]


def _multimodal_sample(i: int, r: random.Random, image: bool, audio: bool) -> SampleMeta:
    drawn = mix.multimodal(r, image, audio)
    tokens = sum(drawn.images)
    pattern = (IMAGE_PATTERN if image else frozenset()) | (AUDIO_PATTERN if audio else frozenset())
    return SampleMeta(
        i, pattern, {"B": 1, "T": drawn.text + tokens + drawn.frames // 2, "I": 4 * tokens, "A": drawn.frames}
    )


def text_sample(i: int, tokens: int) -> SampleMeta:
    """Returns a sample of text alone."""
    return SampleMeta(i, frozenset(), {"B": 1, "T": tokens, "I": 0, "A": 0})


def distillation_batch(count: int, seed: int) -> SampleList:
    """Draws samples of text for a teacher and a student."""
    r = random.Random(f"distillation {count} {seed}")
    return [text_sample(i, mix.distillation(r).text) for i in range(count)]


def linear_section(
    name: str, ranks: range, symbol: str, ns: int, mode: str = "train", when: frozenset[str] = frozenset()
) -> Section:
    """Returns a section that takes `ns` per entry of a symbol forward, and twice that backward; its
    micro-batches hold one sample.
    """
    cost = Cost(f"{ns}*{symbol}", f"{2 * ns}*{symbol}" if mode == "train" else "0")
    return Section(name, "", mode, tuple(when), (), (), Mesh(tuple(ranks), len(ranks)), 1, cost=cost)


def build_plan(sections: list[Section], edges: list[tuple[str, str]]) -> Plan:
    """Builds the plan of these sections; edges return gradients where both ends have a backward."""
    modes = {s.name: s.mode for s in sections}
    plan_edges = tuple(
        Edge(f"{a}_{b}", a, b, "float32", ("B",), 0, "1", "forward" not in (modes[a], modes[b]))
        for a, b in edges
    )
    world = 1 + max(r for s in sections for r in s.mesh.ranks)
    return Plan(
        version=PLAN_VERSION,
        hash="",
        model=ModelRef("", ""),
        world_size=world,
        global_batch=0,
        widths="own",
        symbols=MIX_SYMBOLS,
        inputs=(),
        sections=tuple(sections),
        edges=plan_edges,
        terms=(),
        ties=(),
        cluster={},
        solver={},
        prediction={},
    )


@dataclass(frozen=True)
class PipelineShape:
    """How a section runs as a pipeline on `stages` ranks; each rank takes as long as the whole section takes
    on one, in `chunks` stages that lie on the ranks as `placement` says.

    `max_in_flight`: micro-batches that a stage may hold between forward and backward (0: any number).
    `split`: half of a backward computes weight gradients and may come later.
    """

    stages: int = 1
    max_in_flight: int = 0
    split: bool = False
    chunks: int = 1
    placement: str = "loop"

    def split_section(self, section: Section) -> list[Section]:
        """Returns the stages of a section; replica d has the ranks from `first + d * stages` on."""
        if self.stages == 1:
            return [replace(section, weight_permille=500 if self.split else 0)]
        first, dp = section.mesh.ranks[0], section.mesh.dp
        meshes = [
            Mesh(tuple(range(first + i, first + i + dp * self.stages, self.stages)), dp)
            for i in range(self.stages)
        ]
        weight = 500 if self.split else 0
        forward, backward = (
            f"({text})//{self.chunks}" if self.chunks > 1 else text
            for text in (section.cost.forward_ns, section.cost.backward_ns)
        )
        return [
            replace(
                section,
                name=f"{section.name}_{i}",
                pipeline=section.name,
                stage=i,
                chunks=self.chunks,
                placement=self.placement,
                mesh=meshes[rank_position(i, self.stages, self.placement)],
                in_flight=self.max_in_flight,
                weight_permille=weight,
                cost=replace(section.cost, forward_ns=forward, backward_ns=backward),
            )
            for i in range(self.stages * self.chunks)
        ]


def vlm_plan(
    samples: SampleList,
    encoders: int,
    replicas: int,
    load: float,
    mode: str = "train",
    pipeline: PipelineShape = PipelineShape(),
) -> Plan:
    """Returns an encoder on its own ranks and a language model; `load` is the work of an encoder's rank over
    a replica's.
    """
    passes = 3 if mode == "train" else 1
    ns = forward_ns_per_entry(samples, "I", encoders, replicas, load, passes)
    vision = linear_section("vision", range(encoders), "I", ns, mode, IMAGE_PATTERN)
    lm = pipeline.split_section(linear_section("lm", range(encoders, encoders + replicas), "T", TOKEN_NS))
    return build_plan([vision, *lm], [("vision", lm[0].name), *pairwise(s.name for s in lm)])


def shared_ranks_plan(
    samples: SampleList, ranks: int, tp_sizes: tuple[int, int], load: float, micro_batch: int = 1
) -> Plan:
    """Returns an encoder and a language model on the same ranks, with these tp sizes; `load` as in
    `vlm_plan`.
    """
    vision_mesh, lm_mesh = (Mesh(tuple(range(ranks)), ranks // tp, 1, tp) for tp in tp_sizes)
    ns = forward_ns_per_entry(samples, "I", vision_mesh.dp, lm_mesh.dp, load, 3)
    vision = replace(
        linear_section("vision", range(ranks), "I", ns, when=IMAGE_PATTERN),
        mesh=vision_mesh,
        micro_batch=micro_batch,
    )
    lm = replace(linear_section("lm", range(ranks), "T", TOKEN_NS), mesh=lm_mesh)
    return build_plan([vision, lm], [("vision", "lm")])


def omni_plan(samples: SampleList, encoders: int, replicas: int, load: float) -> Plan:
    """Returns vision and audio encoders on ranks of their own that feed a language model."""
    encoder_sections = [
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
    first = encoder_sections[-1].mesh.ranks[-1] + 1
    return build_plan(
        [*encoder_sections, linear_section("lm", range(first, first + replicas), "T", TOKEN_NS)],
        [("vision", "lm"), ("audio", "lm")],
    )


def teacher_student_plan(
    samples: SampleList, teachers: int, students: int, load: float, pipeline: PipelineShape = PipelineShape()
) -> Plan:
    """Returns a frozen teacher on its own ranks and a student; the teacher feeds the student's last stage."""
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
    """Returns one encoder with two consumers on ranks of their own: a language model and, half as large, a
    head for images alone.
    """
    ns = forward_ns_per_entry(samples, "I", encoders, replicas, load, 3)
    lm = range(encoders, encoders + replicas)
    head = range(encoders + replicas, encoders + replicas + max(1, replicas // 4))
    sections = [
        linear_section("vision", range(encoders), "I", ns, when=IMAGE_PATTERN),
        linear_section("lm", lm, "T", TOKEN_NS),
        linear_section("head", head, "I", TOKEN_NS // 16, when=IMAGE_PATTERN),
    ]
    return build_plan(sections, [("vision", "lm"), ("vision", "head")])


def forward_ns_per_entry(
    samples: SampleList, symbol: str, ranks: int, replicas: int, load: float, passes: int
) -> int:
    """Returns the forward ns per entry of `symbol` that loads each of `ranks` ranks with `load` times the
    work of one of the language model's replicas.
    """
    tokens, entries = (sum(s.sizes[name] for s in samples) for name in ("T", symbol))
    return max(1, round(load * 3 * TOKEN_NS * tokens * ranks / (replicas * passes * max(1, entries))))
