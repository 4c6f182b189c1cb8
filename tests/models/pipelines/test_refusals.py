"""Refusals of the adapters, each in one line: sizes, schedules, options, other pipelines, missing files."""

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from helpers.marks import Captured, Folders, Patch
from helpers.refusals import refuses
from helpers.tiny_pipelines import STEPS, each_text_row, opened
from safetensors.torch import load_file, save_file

from fluvial.models.pipelines.base import check_size
from fluvial.models.pipelines.flux import Flux
from fluvial.models.pipelines.open import open_model
from fluvial.models.pipelines.sd3 import SD3

INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"


@each_text_row
def test_a_size_that_does_not_divide_is_refused(name: str, folders: Folders) -> None:
    model = opened(name, folders(name))
    refuses(r"the size is 17x23, expected multiples of 4.*: the nearest is 16x24", model.latent_shape, 17, 23)
    assert model.latent_shape(16, 24)[-2:] == (16 // model.vae_scale, 24 // model.vae_scale)
    refuses("frames is 4, expected 1", model.latent_shape, 16, 24, 4)


@pytest.mark.parametrize(
    ("name", "file", "changes", "message"),
    [
        ("wan", "model_index.json", {"boundary_ratio": 0.5}, "only one of transformer_2 and boundary_ratio"),
        ("wan-experts", "model_index.json", {"boundary_ratio": None}, "only one of transformer_2 and boundary_ratio"),
        ("wan", SCHEDULER, {"use_flow_sigmas": False}, "UniPCMultistepScheduler without use_flow_sigmas"),
        ("sd1", SCHEDULER, {"prediction_type": "sample"}, "PNDMScheduler of sample, expected a scheduler with betas"),
        ("sd1", SCHEDULER, {"timestep_spacing": "trailing", "beta_start": 0.5, "beta_end": 1.0}, "has no 3 steps"),
        ("sd1", SCHEDULER, {"steps_offset": 0}, "scheduler has no 3 steps whose alpha_bar rises"),
        (
            "sd3",
            INDEX,
            {"scheduler": ["diffusers", "DDIMScheduler"]},
            "has the scheduler DDIMScheduler, expected FlowMatchEuler",
        ),
        ("sd3", INDEX, {"_class_name": "KandinskyPipeline"}, "holds a KandinskyPipeline, which has no adapter"),
        ("sd3", INDEX, {"vae": [None, None]}, "names no vae: save or download the whole pipeline"),
        ("sd3", "transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "expected a SD3Transformer2DModel"),
    ],
)
def test_a_pipeline_or_schedule_of_another_kind_is_refused(
    name: str, file: str, changes: dict[str, Any], message: str, tmp_path: Path, folders: Folders
) -> None:
    folder = edited(folders(name), tmp_path, file, **changes)
    refuses(message, lambda: opened(name, folder).schedule(STEPS, (4, 4, 4)))


def test_sizes_frames_steps_and_options_out_of_range_are_refused(folders: Folders) -> None:
    sd3, wan, sd1 = (opened(name, folders(name)) for name in ("sd3", "wan", "sd1"))
    assert sd3.latent_shape(64, 64) == (4, 32, 32)
    refuses(
        "expected multiples of 4, at most 64: the nearest is 16x64", sd3.latent_shape, 16, 68
    )  # it has no more positions
    for size, near in (((1, 1), "16x16"), ((24, 1000), "32x1008"), ((512, 15), "512x16")):
        refuses(f"the nearest is {near}$", check_size, *size, multiple=16)  # never zero, and a tie is rounded up
    assert [wan.latent_shape(16, 16, frames)[1] for frames in (1, 3, 5)] == [1, 2, 3]
    for frames in (0, 2, 4):
        refuses(f"frames is {frames}, expected 1 plus a multiple of 2", wan.latent_shape, 16, 16, frames)
    assert len(sd1.schedule(999, (4, 4, 4)).timesteps) == 999  # its spacing is offset by one
    for steps in (0, 1000, 1001):
        refuses(f"has no {steps} steps", sd1.schedule, steps, (4, 4, 4))
    for option, value, range_ in (
        ("text_tokens", 0, "1 to 512"),
        ("text_tokens", 513, "1 to 512"),
        ("decode_chunk", 0, "at least 1"),
    ):
        refuses(f"{option} is {value}, expected {range_}", SD3, folders("sd3"), **{option: value})


def edited(folder: Path, tmp_path: Path, file: str, **changes: Any) -> Path:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return tmp_path / "copy"


def test_settings_that_are_none_are_refused(tmp_path: Path, folders: Folders) -> None:
    folder = edited(folders("sd3"), tmp_path, "model_index.json")
    settings = folder / "transformer" / "config.json"
    for text, says in (("{", "cannot be read: Expecting property name"), ("[1]", "holds a list, expected a JSON object")):
        settings.write_text(text)
        refuses(f"config.json {says}", open_model, folder)
    refuses("holds a StableDiffusion3Pipeline, expected a FluxPipeline", Flux, folder)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("model_index.json", "holds no pipeline: model_index.json is missing; expected a folder as diffusers saves one"),
        ("transformer", "transformer is incomplete: there is no such folder; save or download the pipeline again"),
        ("transformer/config.json", "transformer is incomplete: there is no config.json"),
        ("vae/diffusion_pytorch_model.safetensors", "vae is incomplete: there is no diffusion_pytorch_model.saf"),
        ("text_encoder_2/model.safetensors", "text_encoder_2 is incomplete: there is no diffusion_pytorch"),
        ("tokenizer", "tokenizer is incomplete: there is no such folder"),
        ("scheduler", "scheduler is incomplete: there is no such folder"),
    ],
)
def test_a_missing_file_is_named(gone: str, message: str, tmp_path: Path, folders: Folders) -> None:
    shutil.copytree(folders("sd3"), tmp_path / "copy")
    path = tmp_path / "copy" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refuses(message, open_model, tmp_path / "copy")


@pytest.mark.parametrize("size", ["10GB", "30KB"])
def test_weights_in_float16_are_read_if_there_are_no_others(
    size: str, tmp_path: Path, folders: Folders, capfd: Captured
) -> None:
    """As diffusers saves the variant, in one file or several: values are those of float16, and one line says so."""
    copy, whole = tmp_path / "copy", opened("sd3", folders("sd3"))
    shutil.copytree(folders("sd3"), copy)
    networks: dict[str, Any] = {"transformer": whole.build(), "vae": whole.vae}
    for part, network in networks.items():
        for file in (copy / part).glob("*.safetensors*"):
            file.unlink()
        deepcopy(network).half().save_pretrained(copy / part, variant="fp16", max_shard_size=size)
    text = copy / "text_encoder"
    tensors = {name: tensor.half() for name, tensor in load_file(text / "model.safetensors").items()}
    save_file(tensors, text / "model.fp16.safetensors", metadata={"format": "pt"})
    (text / "model.safetensors").unlink()
    models = [opened("sd3", copy), opened("sd3", copy)]
    assert (
        capfd.readouterr().err == f"{copy}: text_encoder, transformer, vae have weights in float16 alone, which are read\n"
    )
    for found, expected in ((models[0].build(), networks["transformer"]), (models[1].vae, networks["vae"])):
        pairs = zip(found.parameters(), expected.parameters(), strict=True)
        assert all(torch.equal(one, other.half().float()) for one, other in pairs)
    assert models[0].encode(["a fox"]).tokens.isfinite().all()


def test_a_missing_shard_is_named(tmp_path: Path, folders: Folders) -> None:
    shutil.copytree(folders("sd3"), tmp_path / "copy")
    network: Any = opened("sd3", folders("sd3")).build()
    shutil.rmtree(tmp_path / "copy" / "transformer")
    network.save_pretrained(tmp_path / "copy" / "transformer", max_shard_size="30KB")
    assert all(map(torch.equal, opened("sd3", tmp_path / "copy").build().parameters(), network.parameters()))
    shard = sorted((tmp_path / "copy" / "transformer").glob("*-of-*.safetensors"))[1]
    shard.unlink()
    refuses(f"transformer is incomplete: there is no {shard.name}", opened, "sd3", tmp_path / "copy")


def test_a_hub_id_is_downloaded(folders: Folders, monkeypatch: Patch) -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        if name == "somebody/half" and "variant" not in options:
            raise OSError("Could not find the necessary `safetensors` weights in {...} (variant=None)")
        if not name.startswith("somebody/"):
            raise OSError("We couldn't connect.\nMore lines.")
        return str(folders("sd3"))

    monkeypatch.setattr(DiffusionPipeline, "download", download)
    model = open_model("somebody/model")
    assert isinstance(model, SD3)
    assert model.weights == folders("sd3") / "transformer"
    options = {"use_safetensors": True, "trust_remote_code": False}
    assert asked == [("somebody/model", options)]
    open_model("somebody/half")
    assert asked[2:] == [("somebody/half", {"variant": "fp16", **options})]
    refuses("no-one/model is not a folder, and cannot be downloaded from the Hub: We couldn't", open_model, "no-one/model")
