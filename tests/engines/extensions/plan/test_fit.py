"""`engine.fit` chooses settings of a run, which then trains with them, or says that nothing fits."""

import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import handwriting_jobs, tiny_pipelines
from rich.console import Console

from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.extensions.plan import fit
from fluvial.engines.extensions.plan.fit import fit_config, to_plan_config
from fluvial.engines.extensions.plan.plan import GIB, PlanConfig
from fluvial.engines.extensions.plan.plan import plan as planned
from fluvial.engines.methods import HeadGan
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.recipes import RECIPES
from fluvial.engines.run.trainer import Trainer

CPU = torch.device("cpu")


def asked(out: Path, share: float) -> TrainConfig:
    """Return a run of adapters that may take a share of what it takes as it is, beside the reserve."""
    config = handwriting_jobs.config(out, train="lora", **{"engine.micro_batch": 8, "engine.fit": "80GiB"})
    need = planned("handwriting", to_plan_config(config, "handwriting", 1, CPU), device=CPU).need
    memory = PlanConfig.reserve_gib * GIB + share * need
    return with_values(config, {"engine.fit": f"{memory / 2**20:.6f}MiB"})


@pytest.mark.long
def test_a_run_trains_with_the_settings_that_fit(tmp_path: Path) -> None:
    said = io.StringIO()
    config = asked(tmp_path, 0.9)
    with Trainer(config, handwriting_jobs.job(), console=Console(file=said, width=200)) as trainer:
        assert trainer.config.engine.checkpointing == "block"
        assert trainer.config.engine.fit is None
        assert trainer.engine.sharding.checkpointing == "block"
        trainer.update()
    assert "--engine.checkpointing block" in said.getvalue()
    assert "saves" in said.getvalue()


@pytest.mark.long
def test_ever_less_memory_quantises_and_then_ends_in_one_line(tmp_path: Path) -> None:
    found = fit_config(asked(tmp_path, 0.2), ranks=1, device=CPU)[0]
    assert (found.engine.base, found.engine.micro_batch) != ("auto", 8)
    with pytest.raises(RunError, match=r"handwriting does not fit into .* the least is") as error:
        fit_config(asked(tmp_path, 0.001), ranks=1, device=CPU)
    assert "\n" not in str(error.value)


def test_a_run_is_planned_with_the_passes_that_its_loss_holds() -> None:
    graphs = [
        to_plan_config(RECIPES[name]("handwriting"), "handwriting", 1, CPU).graphs for name in ("ac-dmd", "dmd2", "grpo")
    ]
    assert graphs == [3, 1, 1]
    opposed = with_values(RECIPES["dmd2"]("handwriting"), {"gan": HeadGan()})
    assert to_plan_config(opposed, "handwriting", 1, CPU).graphs == 2


def test_ranks_that_share_samples_hold_all_of_their_groups() -> None:
    config = with_values(RECIPES["grpo"]("handwriting"), {"engine.comm": "reshard", "engine.context_parallel": 4})
    assert to_plan_config(config, "handwriting", 8, CPU).samples == config.method.sampling.batch / 2


def test_the_text_encoders_of_a_pipeline_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], tmp_path / "sd3")
    pipeline = PipelineConfig(height=64, width=64)
    changes = {"out": tmp_path, "train": "lora", "engine.micro_batch": 2, "pipeline": pipeline, "engine.fit": "24GiB"}
    config = with_values(RECIPES["grpo"](str(saved)), changes)
    found, _ = fit_config(config, ranks=1, device=CPU)
    assert found.pipeline.text_cache == tmp_path / "encoded" / "texts"
    assert found.pipeline.text_base == "auto"
    named = with_values(config, {"pipeline": replace(pipeline, text_cache=tmp_path / "mine")})
    assert fit_config(named, ranks=1, device=CPU)[0].pipeline.text_cache == tmp_path / "mine"
    monkeypatch.setattr(fit, "count_text_encoder_bytes", lambda *args: {None: 40, "int8": 20, "nf4": 17}[args[1]] * GIB)
    assert fit_config(named, ranks=1, device=CPU)[0].pipeline.text_base == "nf4"
    with pytest.raises(RunError, match=r"do not fit into 22GiB .* 17.00 GiB with --pipeline.text-base nf4"):
        fit_config(with_values(named, {"engine.fit": "22GiB"}), ranks=1, device=CPU)


@pytest.mark.long
def test_text_encoders_are_quantised_where_they_do_not_fit(tmp_path: Path) -> None:
    """FLUX's take 9.3 GiB in bfloat16, before the network is there, beside 6 GiB that are kept free."""
    config = replace(RECIPES["grpo"]("black-forest-labs/FLUX.1-dev"), out=tmp_path, train="lora", prompts=("x.txt",))
    config = with_values(config, {"sampling.prompts": 1})
    device = torch.device("cuda")
    fits = partial(fit_config, ranks=1, device=device)
    for memory, base in (("15GiB", "int8"), ("24GiB", "auto")):
        found = fits(with_values(config, {"engine.fit": memory, "engine.base": "int8", "engine.checkpointing": "block"}))[0]
        assert (found.engine.base, found.pipeline.text_base) == ("int8", base)


def test_what_has_no_closed_form_is_refused(tmp_path: Path) -> None:
    """Without a memory nothing changes."""
    plain, config = (handwriting_jobs.config(tmp_path, **more) for more in ({}, {"engine.fit": "24GiB"}))
    assert fit_config(plain, ranks=1, device=CPU) == (plain, None)
    with pytest.raises(UsageError, match=r"engine.fit is '24 apples', expected a number and a unit"):
        with_values(plain, {"engine.fit": "24 apples"})
    unet = str(tiny_pipelines.save(tiny_pipelines.ROWS["sd1"], tmp_path / "sd1"))
    for model, says in (("words", "there is no transformer 'words'"), (unet, "inputs of UNet2D")):
        with pytest.raises(UsageError, match=says):
            fit_config(replace(config, model=model), ranks=1, device=CPU)
