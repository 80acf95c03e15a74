"""Random plans of two to six ranks train as plain PyTorch does: every parallelism, sharding, recomputation,
dtype and way to run, together.

    pytest -m slow tests/e2e/test_random_plans.py --plans 300 --hypothesis-seed 7 -s

draws 300 plans, shared evenly by the models; without the options there are a few for each and the seed is 0.
`--having cp,norms=sequence` draws only plans in which a section has these pins.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.e2e.random_plans import RunOutcome, draw_random_plan, has_section_with, try_plan
from tests.e2e.reference_runs import ReferencedModel

NAMES = (
    "nano",
    "llava_tiny",
    "qwen_distil",
    "whisper_tiny",
    "video_llava",
    "blip2",
    "gemma3",
    "t5",
    "bamba",
    "frame_batches",
)
PACKED = ("llama", "mistral", "gemma3_text")  # samples side by side in one row
EXPERTS = {"qwen3_moe": 4, "deepseek_v3": 4, "listed_experts": 4, "early_exit": 4, "moe_distil": 4}
STEPS = 2
DTYPES = ("", "", "", "bf16")
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)  # a run takes seconds


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", [*NAMES, *EXPERTS, *(f"packed {name}" for name in PACKED)])
def test_many_random_plans_train_exactly(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    packs, _, written = name.rpartition(" ")
    model = ReferencedModel(written, tmp_path, STEPS, "always" if packs else "never")
    sections = model.compiled("").plan.user_sections
    count, first = (
        request.config.getoption("plans") // (len(NAMES) + len(EXPERTS) + len(PACKED)),
        request.config.getoption("hypothesis_seed") or 0,
    )
    having = [pin for pin in request.config.getoption("having").split(",") if pin]
    tried, had = list[RunOutcome](), Counter[str]()

    @seed(first)
    @settings(max_examples=count, phases=[Phase.generate], database=None, suppress_health_check=SLOW)
    @given(st.randoms(use_true_random=True))
    def every(rng: random.Random) -> None:
        start, folder = time.perf_counter(), tmp_path / f"plan{len(tried)}"
        folder.mkdir(exist_ok=True)
        own = random.Random(
            f"{name} {first} {rng.getrandbits(64)}"
        )  # hypothesis begins with the same draw whatever the seed
        wanted = draw_random_plan(own, sections, DTYPES, EXPERTS.get(name, 0))
        while not has_section_with(wanted, having):
            wanted = draw_random_plan(own, sections, DTYPES, EXPERTS.get(name, 0))
        outcome = try_plan(model, wanted, folder)
        tried.append(outcome)
        had.update(outcome.plan_features)
        print(
            f"{name}: {outcome.error or 'exact'}: {outcome.granted} ({time.perf_counter() - start:.1f} s)",
            flush=True,
        )
        shutil.rmtree(folder)

    every()
    different, counts = (
        len({str(o.granted) for o in tried}),
        ", ".join(f"{feature}: {n}" for feature, n in sorted(had.items())),
    )
    print(f"{name}: {different} different plans of {len(tried)}, with {counts}")
    assert [outcome.error for outcome in tried if outcome.error] == []
