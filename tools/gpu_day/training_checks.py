"""Checks of plans that train: on one GPU, on several ranks that share it, the same bits twice, no leak.

Every plan is compared with plain PyTorch on the same device: losses, first gradients and weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from secc.driver.compile import CompiledPlan, compile_model
from secc.driver.compile_options import CompileOptions
from secc.report.html_page import report_page
from tools.compare_training import (
    TrainingResult,
    find_differences,
    read_metrics,
    run_plan_ranks,
    train_distributed,
    train_in_one_process,
    write_recording_model,
)
from tools.gpu_day.outcome import Bench, Outcome
from tools.zoo_models import entry

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS, GLOBAL_BATCH = 3, 12
ZOO_SAMPLE = (
    "llava", "gemma3", "mllama", "llava_next", "idefics3", "qwen2_5_vl", "qwen2_5_omni", "video_llava",
    "voxtral", "whisper", "udop", "t5", "qwen3_moe", "deepseek_v3", "mamba2", "janus", "two_teachers",
    "lora_llava", "dpo", "fourier",
)  # fmt: skip
EXAMPLES = ("captions", "vlm_digits")
# (model file of tests/models, ranks, choices, options of the run)
SHARED = (
    ("skips", 3, ("model.pp=3", "model.backward=split", "model.micro_batch=2"), ()),
    ("llava_tiny", 3, ("language_model.pp=2", "vision_tower.dp=1"), ()),
    ("llava_tiny", 3, ("language_model.tp=2", "vision_tower.dp=1"), ()),
    ("qwen_distil", 3, ("student.sharding=zero3", "student.dp=2"), ()),
    ("qwen_distil", 2, ("student.sharding=zero2", "student.recompute=full", "student.dp=2"), ()),
    ("qwen_distil", 2, ("student.dp=1", "teacher.dp=1"), ("--run-ahead", "0.1")),
    ("loops", 2, ("model.sharding=zero3", "model.recompute=full", "model.dp=2"), ()),
    ("llava_tiny", 3, ("language_model.dp=2", "vision_tower.dp=1"), ("--comm", "rounds")),
    ("glm4_moe", 2, ("model.tp=2", "model.ep=2"), ()),
    ("glm4_moe", 4, ("model.dp=4", "model.ep=4", "model.micro_batch=1", "model.recompute=full"), ()),
    ("listed_experts", 2, ("model.dp=2", "model.ep=2", "model.sharding=zero3"), ()),
    ("nano", 2, ("model.cp=2", "model.micro_batch=1"), ()),
    ("nano", 1, ("model.offload=activations",), ()),
    ("nano", 1, ("model.offload=optimizer",), ()),
    ("qwen_distil", 2, ("teacher.offload=weights",), ()),
)
# Files of tests/models with unlike operations: samples of uneven lengths, second derivatives, Functions, rows
# that the data picks, experts. All make their tensors on the device of their inputs.
FEATURE_MODELS = (
    "autograd_functions", "boxes", "chunked_loss", "crf_tagger", "flex_documents", "frame_batches",
    "gpt_oss_tiny", "graphs", "handed_on", "in_place_layers", "internvl_tiny", "learned_forces",
    "packed_images", "padded_clips", "penalised_critic", "qwen3_vl_moe_tiny", "shifted_reference",
    "smoothed_layers", "task_heads", "transducer", "video_frames", "vocabulary", "voxtral_tiny",
    "writes_argument",
)  # fmt: skip
LEAK_STEPS, LEAK_WINDOW = 200, 50
MEMORY_MODEL_TEXT = '''
"""{name} with an optimizer that notes the allocated and the most allocated memory of every step."""

import json
import os
from pathlib import Path

import torch

from {name} import *  # noqa: F403
from {name} import dataset, model


def optimizer(params):
    made = torch.optim.AdamW(params, lr=1e-4)

    def note(*_):
        if torch.cuda.is_available():
            line = [torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()]
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            line = [pages * os.sysconf("SC_PAGE_SIZE")] * 2
        with (Path(os.environ["MEMORY"]) / f"rank{{os.environ.get('RANK', '')}}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\\n")

    made.register_step_post_hook(note)
    return made
'''


@dataclass(frozen=True)
class TrainingCase:
    """A plan to train and compare: a model file, its ranks, pinned choices, and options of the run."""

    model: Path
    ranks: int = 1
    choices: tuple[str, ...] = ()
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.model.stem, f"{self.ranks} ranks", *self.choices, *self.options])


def compile_case(case: TrainingCase, folder: Path) -> CompiledPlan:
    """Compiles a case into `folder/plan`, with fused operators as for a GPU. The ranks count as CPU
    processes, which decides nothing about how they compute."""
    options = CompileOptions(
        cluster=f"1x{case.ranks}xcpu", global_batch=GLOBAL_BATCH, set=case.choices, fuse=True
    )
    compiled = compile_model(case.model, options)
    compiled.write_plan(folder / "plan", report_page)
    return compiled


def run_options(case: TrainingCase) -> tuple[str, ...]:
    return (*case.options, *(["--share-gpus"] if case.ranks > 1 else []))


def compare_case(case: TrainingCase, folder: Path, device: str) -> list[str]:
    """Trains a case by its plan and in plain PyTorch; returns the differences."""
    folder.mkdir(parents=True)
    model = write_recording_model(case.model.stem, folder, case.model.parent)
    try:
        recorded = TrainingCase(model, case.ranks, case.choices, case.options)
        compiled = compile_case(recorded, folder)
        reference = train_in_one_process(model, GLOBAL_BATCH, STEPS, folder / "plain", device=device)
        world = compiled.plan.world_size
        found = train_distributed(folder / "plan", world, STEPS, folder / "run", *run_options(case))
    except Exception as error:  # of one case: the others go on
        return [f"{case}: {type(error).__name__}: {error}"[:600]]
    return [f"{case}: {difference}" for difference in find_differences(found, reference)]


def _compare_all(cases: Sequence[TrainingCase], bench: Bench) -> Outcome:
    """Compares several cases, a few at a time in processes of their own."""
    processes = 1 if bench.dry else min(len(cases), 6)
    # Products in float32 stay in float32: the comparison is as strict as on the CPU.
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    found = Outcome({"compared": len(cases)})
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        folders = [bench.folder / f"case{i}" for i in range(len(cases))]
        devices = [str(bench.device)] * len(cases)
        for differences in pool.map(compare_case, cases, folders, devices):
            found.failures += differences
    found.figures["exact"] = len(cases) - len({text.partition(":")[0] for text in found.failures})
    return found


def check_zoo(bench: Bench) -> Outcome:
    """Trains twenty public architectures on one rank."""
    cases = list[TrainingCase]()
    for name in ZOO_SAMPLE[:1] if bench.dry else ZOO_SAMPLE:
        path = bench.folder / f"{name}.py"
        path.write_text(entry(name).source())
        cases.append(TrainingCase(path))
    return _compare_all(cases, bench)


def check_features(bench: Bench) -> Outcome:
    """Trains models with unlike operations on two ranks that share the device."""
    names = FEATURE_MODELS[:1] if bench.dry else FEATURE_MODELS
    return _compare_all([TrainingCase(ROOT / "tests" / "models" / f"{name}.py", 2) for name in names], bench)


def check_examples(bench: Bench) -> Outcome:
    """Trains the examples on one rank."""
    names = EXAMPLES[:1] if bench.dry else EXAMPLES
    return _compare_all([TrainingCase(ROOT / "examples" / f"{name}.py") for name in names], bench)


def check_shared_ranks(bench: Bench) -> Outcome:
    """Trains stages, tensor parallelism, sharded weights, prefetched results, divided experts and rows of
    sequences on ranks that share the device."""
    chosen = SHARED[1:2] if bench.dry else SHARED
    cases = [
        TrainingCase(ROOT / "tests" / "models" / f"{name}.py", ranks, choices, options)
        for name, ranks, choices, options in chosen
    ]
    return _compare_all(cases, bench)


def check_same_bits(bench: Bench) -> Outcome:
    """Trains a plan twice, and a third time with every launch awaited: losses and weights have the same bits,
    so nothing depends on the order in which streams run."""
    name, ranks, choices, options = SHARED[1]
    case = TrainingCase(ROOT / "tests" / "models" / f"{name}.py", ranks, choices, options)
    recorded = write_recording_model(name, bench.folder, case.model.parent)
    world = compile_case(TrainingCase(recorded, ranks, choices), bench.folder).plan.world_size
    results = list[TrainingResult]()
    for turn, blocking in enumerate(("0", "0", "1")):
        os.environ["CUDA_LAUNCH_BLOCKING"] = blocking
        work = bench.folder / f"run{turn}"
        results.append(train_distributed(bench.folder / "plan", world, STEPS, work, *run_options(case)))
    first, found = results[0], Outcome({"runs": len(results), "steps": STEPS})
    for turn, other in enumerate(results[1:], 2):
        if other.losses != first.losses:
            found.failures.append(f"run {turn}: losses {other.losses} instead of {first.losses}")
        for name, weight in first.parameters.items():
            if not torch.equal(weight, other.parameters[name]):
                found.failures.append(f"run {turn}: {name} has other bits")
    return found


def check_leaks(bench: Bench) -> Outcome:
    """Trains 200 steps and compares the memory after a quarter of them with that at the end."""
    steps = 12 if bench.dry else LEAK_STEPS
    window = steps // 4
    found = Outcome({"steps": steps})
    for name, folder in (("captions", ROOT / "examples"), ("llava_tiny", ROOT / "tests" / "models")):
        memory = train_with_memory(folder / f"{name}.py", bench.folder / name, steps)
        early, late = (max(used for used, _ in memory[i : i + window]) for i in (window, steps - window))
        found.figures |= {f"{name} early MiB": early / 2**20, f"{name} late MiB": late / 2**20}
        if not bench.dry and late > 1.01 * early + 2**20:
            found.failures.append(f"{name}: {early / 2**20:.1f} MiB early, {late / 2**20:.1f} MiB at the end")
    return found


def train_with_memory(
    model: Path, folder: Path, steps: int, options: CompileOptions | None = None
) -> list[tuple[int, int]]:
    """Trains a model on one rank; returns the bytes allocated after each step, and the most until then. On
    the CPU both are the process's memory."""
    folder.mkdir(parents=True)
    noting = folder / f"noting_{model.stem}.py"
    head = f"import sys\nsys.path.insert(0, {str(model.parent)!r})\n"
    noting.write_text(head + MEMORY_MODEL_TEXT.format(name=model.stem))
    made = compile_model(noting, options or CompileOptions(cluster="1x1xcpu", global_batch=GLOBAL_BATCH))
    made.write_plan(folder / "plan", report_page)
    arguments = ["--steps", str(steps), "--log-dir", str(folder / "logs"), "--workers", "0"]
    run_plan_ranks(folder / "plan", made.plan.world_size, arguments, {"MEMORY": str(folder)})
    assert len(read_metrics(folder / "logs")) == steps
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]
