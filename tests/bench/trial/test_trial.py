"""The command that tries every pipeline of diffusers: its rows, what it counts, and a class that a new diffusers brings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import launch, wheels

from fluvial.bench.trial.pipelines import COLUMNS, PipelineTrial, _shorten_reason, format_table
from fluvial.engines.cli import main as cli
from fluvial.models.tiny import modular
from fluvial.models.tiny import pipelines as tiny

YES: dict[str, Any] = {"opens": "yes", "ranks": "yes", "served": "yes"}
TRAINS = PipelineTrial("APipeline", "recorded", ("image",), error=2e-7, ratio=1.0, layers=3, parameters=99, **YES)


def test_the_table_has_a_row_per_pipeline_and_counts_those_that_train() -> None:
    rows = [
        PipelineTrial("CPipeline", flow=False, reason="its scheduler is not a flow's (DDPMScheduler)"),
        PipelineTrial("BPipeline", reason="it does this | or that"),
        TRAINS,
        TRAINS._replace(pipeline="DPipeline", ratio=1.5),
    ]
    lines = format_table(rows).splitlines()
    assert [line[2] for line in lines[2:6]] == ["A", "B", "D", "C"]
    assert all(line.count(" | ") == len(COLUMNS) - 1 for line in lines[:6])
    assert lines[2].endswith("| image | 2e-07 | 1 | yes | yes | yes | trains |")
    assert lines[3].endswith("refused because it does this or or that |")
    assert lines[4].endswith("is off policy |")
    assert TRAINS._replace(guided=False).format_cells()[-1] == "trains without guidance"
    assert lines[-1] == "1 of 3 flow pipelines train; 0 of 1 others, which are not flows."


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("model FOLDER/model: APipeline cannot be trained without an adapter: it mixes samples", "it mixes samples"),
        ("prompts file FOLDER/prompts.jsonl, line 1: APipeline has no tokenizer", "has no tokenizer"),
        (
            "model FOLDER/model: APipeline cannot be called with height=16, text='a: b': ValueError: other: words",
            "cannot be called: ValueError: other: words",
        ),
        ("FOLDER/model/model_index.json names no vae", "model_index.json names no vae"),
        (
            "model FOLDER/model: APipeline cannot be called with width=8: NameError: name 'transforms' is not defined",
            "cannot be called: a package with `transforms` is not installed",
        ),
        (
            "ValueError: RecordingScheduler: the config is of OwnScheduler, expected FlowMatchEulerDiscreteScheduler's",
            "its scheduler is a OwnScheduler, whose steps are not Euler's of a flow",
        ),
    ],
)
def test_a_reason_names_neither_pipeline_nor_folder(said: str, reason: str, tmp_path: Path) -> None:
    assert _shorten_reason(said.replace("FOLDER", str(tmp_path)), "APipeline", tmp_path) == reason


def test_what_a_class_says_of_its_pipeline() -> None:
    """A scheduler that is not a flow's, a transformer, and the images that it edits."""
    schedulers = {
        **dict.fromkeys(("FluxPipeline", "WanPipeline", "SanaPipeline"), ""),
        "DiTPipeline": "KarrasDiffusionSchedulers",
        "PixArtAlphaPipeline": "DPMSolverMultistepScheduler of epsilon",
        "SanaSprintPipeline": "SCMScheduler",
        "CogVideoXPipeline": "CogVideoXDDIMScheduler or CogVideoXDPMScheduler",
        "HunyuanDiTPipeline": "DDPMScheduler",
        "StableAudioPipeline": "EDMDPMSolverMultistepScheduler",
    }
    assert {name: tiny.find_other_scheduler(name) for name in schedulers} == schedulers
    assert tiny.has_transformer("FluxPipeline")
    assert not any(map(tiny.has_transformer, ("StableDiffusionPipeline", "NoSuchPipeline", "FluxTransformer2DModel")))
    media = {
        **dict.fromkeys(("FluxKontextPipeline", "Flux2Pipeline", "Flux2KleinPipeline"), ("image",)),
        "FluxFillPipeline": ("image", "mask_image"),
        **dict.fromkeys(("FluxPipeline", "Flux2KleinKVPipeline"), ()),
    }
    assert {name: tiny.find_call(name).media for name in media} == media
    assert tiny.find_call("Flux2Pipeline").size == 64  # it refuses smaller ones


def test_one_that_cannot_be_trained_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.run(["models", "--measured", "NoSuchPipeline"]) == 2
    assert "the installed diffusers has no NoSuchPipeline" in capsys.readouterr().err
    assert cli.run(["models", "--measured", "VQDiffusionPipeline"]) == 0
    told = capsys.readouterr()
    assert "refused because its scheduler is not a flow's (VQDiffusionScheduler)" in told.out
    assert told.out.endswith("0 of 0 flow pipelines train; 0 of 1 others, which are not flows.\n")
    assert told.err.startswith("VQDiffusionPipeline |")
    monkeypatch.setattr(tiny, "list_pipelines", list)  # none, as where diffusers lacks a package that it needs
    assert cli.run(["models", "--measured"]) == 1
    assert "pipelines cannot be imported: python -c" in capsys.readouterr().err


def test_a_part_that_no_setting_makes_small_is_not_built() -> None:
    from torch import nn

    class Wide(nn.Module):
        def __init__(self, width: int = 2**20) -> None:
            super().__init__()
            self.layer = nn.Linear(width, width)

    with pytest.raises(tiny.UnknownPart, match=r"Wide has 1099513 million parameters"):
        tiny._check_size(Wide, {})


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
def test_most_flow_pipelines_of_diffusers_are_built() -> None:
    unknown = {}
    for name in tiny.list_pipelines():
        if not tiny.find_other_scheduler(name):
            try:
                with tiny.replace_surroundings(name, 16):
                    modular.build(name)
            except Exception as error:
                unknown[name] = str(error)
    assert len(unknown) <= 4, unknown


@pytest.mark.long
def test_a_class_that_a_new_diffusers_brings_is_tried_by_the_same_command() -> None:
    made_up, inpaint = forked("workers.made_up:measured")
    expected = {"trains": True, "how": "recorded", "conditions": ["image"], "ratio": 1.0, **YES}
    assert expected.items() <= made_up.items()
    assert made_up["error"] <= 1e-5
    assert (made_up["layers"], made_up["parameters"]) == adapted_by_hand()
    assert not inpaint["trains"]
    assert "the pipeline changes samples between steps" in inpaint["reason"]


@pytest.mark.long
def test_a_modular_pipeline_trains_on_ranks_and_from_a_server() -> None:
    (row,) = forked("fluvial.engines", "models", "--measured", "Flux3ModularPipeline", "--json")
    assert {"trains": True, "how": "blocks", "error": 0, "ratio": 1.0, **YES}.items() <= row.items()


def forked(target: str, *words: str) -> list[dict[str, Any]]:
    """Return the rows that a process with imports that are warm prints as JSON."""
    done = launch.program(target, *words, timeout=590)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def adapted_by_hand() -> tuple[int, int]:
    """Return the layers and parameters that a LoRA of rank 32 adapts in the tiny FLUX, counted without PEFT."""
    from torch import nn

    from fluvial.models.replay.any_pipeline import TARGETS

    network = tiny.build("FluxImg2ImgPipeline").transformer
    layers = [
        layer
        for name, layer in network.named_modules()
        if isinstance(layer, nn.Linear) and any(name.endswith(f".{target}") for target in TARGETS)
    ]
    return len(layers), sum(32 * (layer.in_features + layer.out_features) for layer in layers)


ROOT = Path(__file__).parents[3]
PROJECT = (ROOT / "pyproject.toml").read_text()
OLDEST = re.search(r'"diffusers>=([\d.]+)', PROJECT)[1] + ".0"  # type: ignore[index]
NEEDS = (("httpx", "0.28.1"), ("httpcore", "1.0.9"))  # of that version, and not of the newest
ADAPTED = ("StableDiffusion3Pipeline", "FluxPipeline", "QwenImagePipeline", "WanPipeline", "ZImagePipeline")
REPLAYED = ("SanaPipeline", "FluxKontextPipeline")


ALONE = """
import sys
from helpers import short_runs
from fluvial.engines.cli import main
from fluvial.bench.trial import pipelines

short_runs.shorten_runs()
pipelines._two_ranks = pipelines._train_served = lambda *args, **named: ""  # which no version of diffusers takes part in
raise SystemExit(main.run(["models", "--measured", *sys.argv[1:], "--json"]))
"""


@pytest.mark.long
def test_the_oldest_diffusers_that_is_allowed_trains_the_same_pipelines(tmp_path: Path) -> None:
    own = [wheels.install(name, version) for name, version in (("diffusers", OLDEST), *NEEDS)]
    variables = launch.environment(helpers=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", ALONE, *ADAPTED, *REPLAYED],
        env={**variables, "PYTHONPATH": os.pathsep.join([*map(str, own), variables["PYTHONPATH"]])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["pipeline"] for row in rows if not row["trains"]] == []
    assert {row["opens"] for row in rows} == {"yes"}
    assert all(row["error"] < 1e-5 for row in rows if row["how"] == "recorded")
    assert [row["how"] for row in rows] == ["adapter"] * len(ADAPTED) + ["recorded"] * len(REPLAYED)
