"""Formats of an export: what is written for given tensors, and what of the base model is copied."""

from pathlib import Path

import pytest
import torch
from helpers import tiny_pipelines
from safetensors.torch import load_file

from fluvial.engines.engine.world import World
from fluvial.engines.export import formats
from fluvial.engines.export.formats import COMFY_WEIGHTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "sd3"
    tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], folder)
    return folder


def test_the_original_layout_holds_the_average_that_is_given(folder: Path, tmp_path: Path, one: World) -> None:
    """As an export during training passes it; tensors without an average are the module's own."""
    model = tiny_pipelines.opened("sd3", folder)
    module = model.build()
    name, parameter = next(iter(module.named_parameters()))
    average = {name: parameter.detach() + 1}
    formats.write("comfyui", module, model, tmp_path / "average", average=average, world=one)
    formats.write("comfyui", module, model, tmp_path / "before", world=one)
    with torch.no_grad():
        parameter.add_(1)
    formats.write("comfyui", module, model, tmp_path / "in place", world=one)
    given, before, expected = (load_file(tmp_path / out / COMFY_WEIGHTS) for out in ("average", "before", "in place"))
    assert all(torch.equal(given[key], expected[key]) for key in expected)
    assert any(not torch.equal(before[key], expected[key]) for key in expected)


def test_a_whole_pipeline_has_no_file_of_the_network_before_training(folder: Path, tmp_path: Path, one: World) -> None:
    """Variants of the base network, such as fp16, are left out; the other parts are copied whole."""
    stale = "diffusion_pytorch_model.fp16.safetensors"
    for part in ("transformer", "vae"):
        (folder / part / stale).write_bytes(b"base")
    model = tiny_pipelines.opened("sd3", folder)
    formats.write("full", model.build(), model, tmp_path / "full", world=one)
    assert not (tmp_path / "full" / "transformer" / stale).exists()
    assert (tmp_path / "full" / "vae" / stale).exists()
