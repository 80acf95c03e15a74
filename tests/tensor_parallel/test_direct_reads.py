"""An embedding that other code reads than its own forward stays whole under tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from secc.driver.compile import compile_model
from secc.driver.compile_options import CompileOptions

MODEL = Path(__file__).parent.parent / "models" / "picture_tokens.py"
HEAD, POSITIONS = "F.linear(x, self.tokens.weight)", "self.positions.weight[: ids.shape[1]]"
CALLED = "self.positions(torch.arange(ids.shape[1]))"


@pytest.mark.parametrize(
    ("head", "positions", "split"),
    [
        (HEAD, POSITIONS, set[str]()),
        (HEAD, CALLED, {"positions"}),
        ("self.head(x)", POSITIONS, {"tokens", "head"}),
        ("self.head(x.to(self.tokens.weight.dtype))", CALLED, {"tokens", "positions", "head"}),
    ],
)
def test_embeddings_that_other_code_reads_stay_whole(
    head: str, positions: str, split: set[str], tmp_path: Path
) -> None:
    source = MODEL.read_text().replace(HEAD, head).replace(POSITIONS, positions)
    if "self.head" in head:  # tied to the embedding
        made = "self.layers = nn.ModuleList(Layer() for _ in range(3))"
        added = (
            "self.head = nn.Linear(WIDTH, WORDS + CODES, bias=False)",
            "self.head.weight = self.tokens.weight",
        )
        source = source.replace(made, "\n        ".join([made, *added]))
    (tmp_path / "model.py").write_text(source)
    options = CompileOptions(
        cluster="local:3",
        global_batch=12,
        sections=("language_model=language_model", "tokenizer=tokenizer"),
        set=("language_model.tp=2",),
    )
    plan = compile_model(tmp_path / "model.py", options).plan
    section = next(s for s in plan.sections if s.name == "language_model")
    kinds = {style.module.removeprefix("language_model."): style.kind for style in section.styles}
    assert {module for module in kinds if module in ("tokens", "positions", "head")} == split
    assert any(kind == "rowwise" for kind in kinds.values())  # layers are split all the same
