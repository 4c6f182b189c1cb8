"""Caches of encoded images and captions: of another model or other settings, on a full disk, and damaged."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs, tiny_pipelines
from helpers.marks import Patch
from helpers.pipeline_runs import photos
from helpers.refusals import fails, refuses

from fluvial.engines.engine.world import World
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.sft import Sft
from fluvial.engines.run import build
from fluvial.engines.run import job as jobs
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.job import Job
from fluvial.engines.run.jobs.evaluated import list_texts
from fluvial.engines.run.jobs.images import _describe_encoder
from fluvial.engines.run.jobs.settings import DataConfig, PipelineConfig
from fluvial.engines.run.jobs.weights import digest_adapter
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import ReadingConfig
from fluvial.engines.sampling.generate import NO_GUIDANCE
from fluvial.models.lora import Dora
from fluvial.models.lora_files import LoraFile
from fluvial.models.pipelines import base
from fluvial.models.pipelines.base import Pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny pipelines and four images with captions."""
    folder = tmp_path_factory.mktemp("caches")
    for name in ("sd3", "sdxl"):
        tiny_pipelines.save(tiny_pipelines.ROWS[name], folder / name)
    photos(folder / "foxes", [f"{number} foxes" for number in range(4)], (24, 20))
    return folder


def test_the_digest_of_an_adapter_covers_all_that_it_does() -> None:
    """Its scale, its form, and names, shapes and values of its tensors; not their order."""
    a, b = {"x.lora_A.weight": torch.arange(6.0).view(2, 3)}, {"x.lora_B.weight": torch.ones(3, 2)}
    file = LoraFile(2, 4.0, ("x",), {**a, **b})
    others = [
        file._replace(alpha=2.0),
        file._replace(form=Dora()),
        file._replace(tensors={**a, "y.lora_B.weight": torch.ones(3, 2)}),
        file._replace(tensors={"x.lora_A.weight": a["x.lora_A.weight"].view(3, 2), **b}),
        file._replace(tensors={"x.lora_A.weight": a["x.lora_A.weight"].flip(0), **b}),
    ]
    assert len({digest_adapter(file), *map(digest_adapter, others)}) == 6
    assert digest_adapter(file._replace(tensors={**b, **a})) == digest_adapter(file)


def test_the_key_of_a_function_of_ones_own_covers_its_code(folder: Path, tmp_path: Path) -> None:
    """An image cache of another `encode` is refused."""
    functions: list[Any] = [None, lambda images: images]
    functions += [lambda images: 2 * images]  # on a line of its own, because the code of a function is its lines
    asked = job(folder, tmp_path)
    settings = [
        _describe_encoder(replace(asked, encode=encode), TrainConfig(tmp_path, method=Grpo())) for encode in functions
    ]
    assert len({each["encoder"] for each in settings}) == 3


def test_an_adapter_outside_fluvial_is_known_by_its_source(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """What it encodes, of prompts and of images, is encoded again after a change."""
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for number in (1, 2):
        text = f"from fluvial.models.pipelines.sd3 import SD3\n\n\nclass Own(SD3):\n    number = {number}\n"
        (tmp_path / f"own{number}.py").write_text(text)
        kind = importlib.import_module(f"own{number}").Own
        kind.__module__ = "own"
        monkeypatch.setitem(sys.modules, "own", sys.modules[f"own{number}"])
        adapter = kind(folder / "sd3")
        found += [(adapter.fingerprint_image_encoder(), adapter._fingerprint_encoders())]
    assert {*found[0]}.isdisjoint(found[1])


def job(folder: Path, cache: Path, name: str = "sd3", **asked: Any) -> Job:
    """Return the job of a supervised run on the images."""
    config = TrainConfig(
        cache / "run",
        model=str(folder / name),
        pipeline=PipelineConfig(**{"height": 16, "width": 16, "frozen": "float32", **asked}),
        method=Sft(sampling=ReadingConfig(prompts=2)),
        data=DataConfig(images=(str(folder / "foxes"),), cache=cache),
    )
    return jobs.open_configured(config)


def prepared(job: Job, world: World) -> None:
    """Encode what the job learns from."""
    assert job.prepare is not None
    job.prepare(world, list_texts(job, job, NO_GUIDANCE))


def test_a_cache_is_of_one_model_and_its_settings(folder: Path, tmp_path: Path, one: World) -> None:
    """Another model, size, list of sizes or kind of sample, and a damaged file, are refused in one line that names them."""
    prepared(job(folder, tmp_path), one)
    sizes: Any = {"height": 512, "width": 512, "sizes": ("16x16", "24x16")}
    for other, differs in (
        (job(folder, tmp_path, "sdxl"), r"encoder SD3 \w+ there and StableDiffusionXL \w+ here"),
        (job(folder, tmp_path, height=24), "size 16x16 there and 16x24 here"),
        (job(folder, tmp_path, **sizes), "size 16x16 there and 16x16 24x16 here"),
        (job(folder, tmp_path, latents="sample"), r"\(latents mean there and sample here\)"),
    ):
        refuses(rf"was written with other settings.*{differs}", prepared, other, one)
    prepared(job(folder, tmp_path), one)
    for file in (tmp_path / "texts").iterdir():
        file.write_bytes(b"damaged")
    refuses(r"the encoded prompt .*safetensors cannot be read: .*; delete the file", prepared, job(folder, tmp_path), one)


def test_what_is_read_is_encoded_before_the_network_is_there(
    one: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that text encoders and the network are not on the device together; a prompt that fails costs no load."""
    order, network = list[str](), build._build_network

    def load(config: TrainConfig, job: Job) -> torch.nn.Module:
        order.append("network")
        return network(config, job)

    monkeypatch.setattr(build, "_build_network", load)
    with Trainer(
        tiny_jobs.config(tmp_path), replace(tiny_jobs.job(), prepare=lambda world, texts: order.append("texts")), one
    ):
        assert order == ["texts", "network"]


def test_a_full_disk_while_captions_are_encoded(
    folder: Path, tmp_path: Path, one: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line; what was encoded is kept, nothing half-written stays, and the next start encodes the rest."""
    write, encode, encoded = base.save_file, Pipeline._encode, list[str]()

    def full(tensors: Any, path: Path) -> None:
        if len([*(tmp_path / "texts").glob("*.safetensors")]) == 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(tensors, path)

    def counted(self: Pipeline, prompt: str) -> dict[str, torch.Tensor]:
        encoded.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(Pipeline, "_encode", counted)
    monkeypatch.setattr(base, "save_file", full)
    fails(r"texts: No space left on device; what is encoded is kept, start again", prepared, job(folder, tmp_path), one)
    assert len(encoded) == 3
    assert len([*(tmp_path / "texts").iterdir()]) == 2
    monkeypatch.setattr(base, "save_file", write)
    prepared(job(folder, tmp_path), one)
    assert sorted(encoded[3:]) == sorted(set(encoded[3:]))
    assert set(encoded[:2]).isdisjoint(encoded[3:])
    assert len([*(tmp_path / "texts").glob("*.safetensors")]) == len(set(encoded))
