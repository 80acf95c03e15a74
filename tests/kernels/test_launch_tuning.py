from __future__ import annotations

import json
import subprocess
import sys
from itertools import count

import pytest
import torch

from secc.runtime.errors import UserError
from secc.runtime.kernels import launch_tuning, tune


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A cache file for this test."""
    path = tmp_path / "deep" / "kernels.json"
    monkeypatch.setenv("SECC_KERNEL_CACHE", str(path))
    launch_tuning.forget_measured_launches()
    yield path
    launch_tuning.forget_measured_launches()


def test_fastest_parameters_are_cached(cache):
    clock = count(10)

    def time(run):
        run()
        return 1.0 if next(clock) == 12 else 5.0

    found = tune(4, {"gated": 1024}, torch.float32, "cpu", time=time)["gated"]
    assert found == launch_tuning.TUNABLE_KERNELS["gated"].launch_candidates(1024, torch.device("cpu"))[1]
    key = launch_tuning.measurement_key("gated", 1000, torch.float32, torch.device("cpu"))
    assert launch_tuning.LaunchParameters(**json.loads(cache.read_text())[key]) == found
    launch_tuning.forget_measured_launches()
    assert launch_tuning.measured_launches()[key] == found
    assert (
        launch_tuning.measurement_key("gated", 1025, torch.float32, torch.device("cpu"))
        not in launch_tuning.measured_launches()
    )


def test_candidates_that_do_not_fit_are_skipped(cache):
    def time(run):
        raise RuntimeError("out of resource: shared memory")

    assert tune(4, {"gated": 64}, torch.float32, "cpu", time=time)["gated"] == launch_tuning.TUNABLE_KERNELS[
        "gated"
    ].default_launch(64, torch.device("cpu"))


def test_trials_of_all_kernels_run(cache):
    for name, size in {
        "gated": 64,
        "norm": 64,
        "rope": 16,
        "rows": 32,
        "linear_cross_entropy": 50,
        "linear_kl": 50,
        "linear_kl_ce": 50,
    }.items():
        launch_tuning.TUNABLE_KERNELS[name].make_trial(3, size, torch.float32, torch.device("cpu"))()
    assert len(launch_tuning.TUNABLE_KERNELS) == 7


def test_broken_cache_counts_as_empty(cache):
    cache.parent.mkdir()
    for text in ("not json", "[]", '{"x": {"blocks": 3}}'):
        cache.write_text(text)
        launch_tuning.forget_measured_launches()
        assert launch_tuning.measured_launches() == {}


def test_unknown_kernel_and_missing_gpu_are_rejected(cache):
    with pytest.raises(UserError, match="unknown kernel rmsnorm"):
        tune(4, {"rmsnorm": 8}, device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="none here"):
            tune(4, {"norm": 8})


def test_operators_work_without_triton():
    code = "import sys; sys.modules['triton'] = None\nimport torch\nfrom secc.runtime import kernels\n"
    code += "hidden, weight, target = torch.zeros(2, 3), torch.zeros(4, 3), torch.tensor([0, 1])\n"
    code += "print(kernels.linear_cross_entropy(hidden, weight, target)[1].item())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2\n", result.stderr
