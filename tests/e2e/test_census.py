"""The census: small models of transformers' model types are exact; a few rows by default, a sample as slow
tests."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn
from transformers import CLIPVisionConfig, Sapiens2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.census import row_check, row_processes
from tools.census.batches import Batching
from tools.census.catalog import STAGES, HiddenStates, ModelRow
from tools.census.documented import documented_inputs
from tools.census.results import ResultFile
from tools.census.row_check import Outcome, RowResult, check_row, named_option
from tools.census.row_processes import Limits, run_rows
from tools.census.rows import rows
from tools.census.small_configs import HIDDEN, small_config
from tools.census.table import read_table, write_table
from tools.census.verdicts import RIGHT_REFUSALS, UNBUILT

QUICK = ("causal/gpt2", "masked/albert", "hidden-states/clip_text_model")
SAMPLE = 40


@pytest.mark.parametrize("name", QUICK)
def test_model_types_are_exact(name: str) -> None:
    result = check_row(name)
    assert result.outcome is Outcome.EXACT, result
    assert result.loss_error <= 1 and result.gradient_error <= 1 and result.sections


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(random.Random(1).sample(sorted(rows()), SAMPLE)))
def test_no_model_type_fails(name: str) -> None:
    result = check_row(name)
    assert result.outcome is not Outcome.FAILED, result
    assert result.outcome is not Outcome.REFUSED or result.remedy


class _Documented(nn.Module):
    def forward(self, states: torch.Tensor, steps: torch.Tensor | None = None, **kwargs: object) -> None:
        """Inputs.

        states (`torch.FloatTensor` of shape `(batch_size, episode_length, hidden_size)`):
            Where it is.
        steps (`torch.LongTensor` of shape `[batch_size, episode_length + 1]`, *optional*):
            When.
        position_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*):
            Not a parameter of forward.
        """


def test_inputs_are_drawn_as_documented() -> None:
    drawn = {
        name: draw(torch.Generator().manual_seed(0))
        for name, draw in documented_inputs(_Documented(), CLIPVisionConfig(hidden_size=24))
    }
    assert {n: {k: tuple(v.shape) for k, v in s.items()} for n, s in drawn.items()} == {
        "required inputs": {"states": (16, 24)},
        "documented inputs": {"states": (16, 24), "steps": (17,)},
    }
    assert drawn["documented inputs"]["steps"].dtype == torch.long


def test_lists_with_an_entry_for_each_layer_fit_models_made_deeper() -> None:
    config = small_config(Sapiens2Config, stages=STAGES)
    assert len(config.num_key_value_heads_per_layer) == config.num_hidden_layers == STAGES


@pytest.mark.slow
@pytest.mark.gloo
def test_a_row_is_trained_on_three_ranks() -> None:
    (result,) = run_rows([("causal/gpt2", 3)], 1, Limits())
    assert result.run == "exact"


def test_rows_are_the_model_types_of_the_auto_mappings() -> None:
    families = {name.partition("/")[0] for name in rows()}
    assert {"causal", "masked", "seq2seq", "image-text", "images", "ctc", "hidden-states"} <= families
    assert len(rows()) > 500


def test_a_row_that_does_not_end_is_failed_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(name: str, ranks: int) -> RowResult:
        time.sleep(60)
        return RowResult(name, "", Outcome.EXACT)

    monkeypatch.setattr(row_processes, "check_row", sleep)
    (result,) = run_rows([("causal/gpt2", 0)], 1, Limits(seconds=0.5))
    assert result.outcome is Outcome.FAILED and result.message == "not done after 5 s of wall-clock time"
    assert "in sleep" in result.where


def test_a_row_that_computes_without_end_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(name: str, ranks: int) -> RowResult:
        while True:
            pass

    monkeypatch.setattr(row_processes, "check_row", compute)
    (result,) = run_rows([("causal/gpt2", 0)], 1, Limits(seconds=1))
    assert result.message == "not done after 1 s of processor time"


def test_a_row_whose_process_dies_is_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(name: str, ranks: int) -> RowResult:
        return RowResult(name + str(len(bytearray(2 << 30))), "", Outcome.EXACT)

    monkeypatch.setattr(row_processes, "check_row", allocate)
    (result,) = run_rows([("causal/gpt2", 0)], 1, Limits(gib=1))
    assert result.outcome is Outcome.FAILED and result.message == "no result"
    assert "MemoryError" in result.where


def test_results_are_kept_for_their_versions(tmp_path: Path) -> None:
    old = ResultFile(tmp_path / "rows.jsonl", {"torch": "2", "commit": "a"})
    old.append(RowResult("causal/gpt2", "causal", Outcome.FAILED, "KeyError: x"))
    old.append(RowResult("causal/gpt2", "causal", Outcome.EXACT, run="exact"))
    old.append(RowResult("causal/llama", "causal", Outcome.REFUSED, "no", "m.py:1", "do"))
    new = ResultFile(old.path, {"torch": "2", "commit": "b"})
    assert new.known(any_commit=False) == set()
    assert new.known(any_commit=True) == {"causal/gpt2", "causal/llama"}
    assert new.latest()["causal/gpt2"].row.outcome is Outcome.EXACT
    (tmp_path / "benchmarks").mkdir()
    write_table(new.latest(), tmp_path)
    page = (tmp_path / "census.md").read_text()
    assert "2 rows plain PyTorch trains 2 here; 1 of these are exact (50.0%)" in page
    assert "| causal/llama | no | m.py:1 |" in page
    table = json.loads((tmp_path / "benchmarks" / "census.json").read_text())
    assert [row[:2] for row in table["rows"]] == [["causal/gpt2", "exact"], ["causal/llama", "refused"]]
    again = ResultFile(tmp_path / "none.jsonl", {"torch": "2", "commit": "b"}, read_table(tmp_path))
    assert again.known(any_commit=True) == {"causal/gpt2", "causal/llama"}
    again.append(RowResult("causal/llama", "causal", Outcome.EXACT))
    assert {r.row.outcome for r in again.latest().values()} == {Outcome.EXACT}


def test_hidden_states_of_a_norm_are_trained() -> None:
    model = HiddenStates(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)))
    loss = ((model.wrapped(torch.randn(3, 4)) - 0.5) ** 2).mean()
    assert loss.item() == pytest.approx(1.25, abs=1e-3)  # whatever the weights are
    model.forward(input=torch.randn(3, 4)).backward()
    assert model.wrapped[0].weight.grad.abs().max() > 1e-3  # pyright: ignore


def test_a_placeholder_of_a_remedy_is_no_option() -> None:
    assert named_option("see --whole-batch BLOCK; or sum it") == ""
    assert named_option("or --whole-batch model.tower, exact") == "--whole-batch model.tower"
    assert named_option("or --whole-batch a.b --whole-batch c, exact") == "--whole-batch a.b --whole-batch c"


def test_options_of_several_messages_are_given_together() -> None:
    row = RowResult("a/b", "a", Outcome.FAILED, option="--whole-batch a.b --whole-batch c --cluster local:2")
    options = row_check._options(row)  # pyright: ignore[reportPrivateUsage]
    assert (options.whole_batch, options.cluster) == (("a.b", "c"), "local:2") and not options.global_sums
    row.option = "--global-sums"
    options = row_check._options(row)  # pyright: ignore[reportPrivateUsage]
    assert options.global_sums and options.cluster == row_check.CLUSTER and not options.whole_batch


def test_places_count_rows_of_the_whole_batch() -> None:
    places = [torch.tensor([[0, -1]]), torch.tensor([[1, 2]])]
    rows = [{"p": p, "x": torch.ones(n, 4, 2)} for p, n in zip(places, (2, 1), strict=True)]
    batch = Batching(joined=frozenset({"x"}), places={"p": "x"}).collate(rows)
    assert batch["p"].tolist() == [[0, -1], [9, 10]] and batch["x"].shape == (3, 4, 2)


@pytest.mark.parametrize("name", ("tower/imagegpt", "image-text/molmo2"))
def test_rows_with_inputs_of_their_own_are_exact(name: str) -> None:
    assert check_row(name).outcome is Outcome.EXACT


def test_rows_have_other_values_of_a_configuration() -> None:
    row = rows()["detection/rt_detr:num_denoising=0"]
    assert isinstance(row, ModelRow) and row.build().config.num_denoising == 0  # type: ignore[attr-defined]
    frozen = rows()["detection/rt_detr:num_denoising=0,frozen_norms=True"]
    assert isinstance(frozen, ModelRow)
    norms = [m for m in frozen.build().modules() if "BatchNorm" in type(m).__name__]
    assert norms and not any(p.requires_grad for m in norms for p in m.parameters())


def test_fewer_ranks_that_a_remedy_names_are_taken() -> None:
    assert named_option("use at most 1 rank, or a larger global batch") == "--cluster local:1"
    assert named_option("use at most 2 ranks, or a larger global batch") == "--cluster local:2"
    assert named_option("use at most RANKS ranks") == ""


def test_parts_keep_their_own_number_of_key_value_heads() -> None:
    """PI0's experts have one, a Gemma has as many as heads by default."""
    assert small_config(CONFIG_MAPPING["pi0"]).dit_config.num_key_value_heads == 1  # type: ignore[attr-defined]


def test_parts_keep_values_that_their_class_has_not_by_default() -> None:
    """A decoder of an encoder and decoder attends to the encoder; PaliGemma's tower has no head."""
    encoder_decoder = small_config(CONFIG_MAPPING["vision-encoder-decoder"])
    assert encoder_decoder.decoder.add_cross_attention  # type: ignore[attr-defined]
    assert not small_config(CONFIG_MAPPING["paligemma"]).vision_config.vision_use_head  # type: ignore[attr-defined]
    assert small_config(CONFIG_MAPPING["mistral3"]).text_config.hidden_size == HIDDEN  # type: ignore[attr-defined]


def test_sizes_of_dropout_in_lists_are_silent() -> None:
    assert set(small_config(CONFIG_MAPPING["cvt"]).drop_path_rate) == {0.0}  # type: ignore[attr-defined]


def test_keys_are_lined_up_along_their_last_dim() -> None:
    rows = [{"x": torch.ones(3, 2, 4 * n)} for n in (1, 2)]
    assert Batching(lined_up=frozenset({"x"})).collate(rows)["x"].shape == (3, 2, 12)


def test_every_published_refusal_has_been_looked_into() -> None:
    table = read_table()
    refused = {n for n, r in table.items() if r.row.outcome is Outcome.REFUSED}
    unbuilt = {n for n, r in table.items() if r.row.outcome is Outcome.NOT_BUILT}
    assert refused <= RIGHT_REFUSALS.keys()
    assert unbuilt <= UNBUILT.keys()
