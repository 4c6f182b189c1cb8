"""The table of `fluvial models --measured`: what a row says, and that tiny pipelines train as large ones would."""

import json

import pytest
from marks import long

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.models import Row, measured_table
from fluvial.models.tiny.pipelines import asked_of, is_flow_pipeline

TRAINED = Row("APipeline", "recorded", ("image",), 0.0, 1.0, "yes", "")
REFUSED = Row("BPipeline", "", (), None, None, "", "its scheduler takes no step")
OFF = Row("CPipeline", "recorded", (), 1e-6, 1.1, "yes", "")


def test_a_row_trains_only_on_policy() -> None:
    """One that is refused, or whose first ratio is not exactly 1, does not; those that train come first."""
    assert [row.trains for row in (TRAINED, REFUSED, OFF)] == [True, False, False]
    lines = measured_table([REFUSED, OFF, TRAINED]).splitlines()
    assert lines[2] == "| APipeline | recorded | image | 0 | 1 | yes | trains |"
    assert lines[3].endswith("| refused because its scheduler takes no step |")
    assert lines[4].endswith("| is off policy |")


def test_every_flow_pipeline_is_known_by_name() -> None:
    """Those that edit images are given some; others are given text only."""
    assert all(map(is_flow_pipeline, ("FluxPipeline", "FluxKontextPipeline", "WanImageToVideoPipeline")))
    assert not any(map(is_flow_pipeline, ("StableDiffusionPipeline", "FluxTransformer2DModel", "NoSuchPipeline")))
    assert asked_of("FluxKontextPipeline").media == ("image",)
    assert asked_of("FluxFillPipeline").media == ("image", "mask_image")
    assert asked_of("FluxPipeline").media == ()


@pytest.mark.parametrize(("name", "how"), [("FluxImg2ImgPipeline", "recorded"), long("SanaPipeline", "recorded")])
def test_a_tiny_pipeline_trains(name: str, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From the class alone to an adapter that its own loader opens."""
    assert cli.run(["models", "--measured", name, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["how"], row["ratio"], row["opens"], row["trains"], row["reason"]) == (how, 1.0, "yes", True, "")
    assert row["error"] < 1e-5


def test_what_cannot_be_tried_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """A class without tiny parts is a row, and one that diffusers lacks is wrong input."""
    assert cli.run(["models", "--measured", "VQDiffusionPipeline", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert not row["trains"]
    assert row["reason"].startswith("no tiny one can be built to try it: no tiny vqvae")
    assert cli.run(["models", "--measured", "NoSuchPipeline"]) == 2
    assert "the installed diffusers has no NoSuchPipeline" in capsys.readouterr().err
