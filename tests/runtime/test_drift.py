"""When a run says that its plan no longer fits: the ranks are busy less evenly than the plan expected."""

from __future__ import annotations

import io
import json
from pathlib import Path

from secc.runtime.drift import FILE, WARM, Times, predicted, warning
from secc.runtime.wavefront import schedule
from tests.schedule.plans import edge, plan, sample, section, stages

SECTIONS = [section("vision", [0], forward="100*S", backward="200*S"), *stages("lm", [[1], [2]], forward="100*S", backward="200*S")]
PLAN = plan(SECTIONS, [edge("vision", "lm_0")], 3)
SAMPLES = [sample(i, length=10 + i) for i in range(4)]
PREDICTED = predicted(PLAN, SAMPLES, schedule(PLAN, SAMPLES))


def times(factor: float) -> dict[tuple[str, str], float]:
    """What the plan predicts, the encoder's times `factor`."""
    return {(name, kind): seconds * (factor if name == "vision" else 1.0) for (name, kind), seconds in PREDICTED.items()}


def test_predicted_times_are_those_of_all_stages_and_replicas() -> None:
    assert PREDICTED == {("vision", "F"): 4600e-9, ("vision", "B"): 9200e-9, ("lm", "F"): 9200e-9, ("lm", "B"): 18400e-9}


def test_times_as_predicted_or_all_alike_are_no_news() -> None:
    for slower in (1.0, 5.0):
        steps = [({key: slower * s for key, s in PREDICTED.items()}, PREDICTED)] * 3
        assert list(warning(PLAN, steps, Path("plan/logs"))) == []


def test_a_section_that_slows_all_others_down_is_named_with_the_gain_there_may_be() -> None:
    said = list(warning(PLAN, [(times(4.0), PREDICTED)] * 3, Path("plan/logs")))
    assert "vision are busy 2.00 times as long" in said[0] and "up to 50% faster" in said[0]
    assert said[1].endswith("secc drift plan plan/logs")


def test_one_slow_step_is_no_drift() -> None:
    steps = [(times(9.0), PREDICTED), *[(times(1.0), PREDICTED)] * 2]
    assert list(warning(PLAN, steps, Path("logs"))) == []


def test_the_first_steps_do_not_count(tmp_path: Path) -> None:
    log, stream = Times(tmp_path, PLAN), io.StringIO()
    for step in range(WARM + 2):
        log.log(step, times(9.0 if step < WARM else 1.0), SAMPLES, schedule(PLAN, SAMPLES))
    log.close(stream)
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert stream.getvalue() == "" and len(rows) == WARM + 2
    assert rows[0]["mix"] == [{"when": [], "count": 4, "sizes": {"B": 4, "S": 46, "I": 0}}]
    assert rows[0]["sections"]["lm"]["predicted_backward_s"] == PREDICTED["lm", "B"]
