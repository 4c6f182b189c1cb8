"""Several teachers: each for the prompts of its source, with weights or an adapter of its own, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_jobs as tiny
from helpers.refusals import refuses
from helpers.resumed import expect_resumed
from helpers.spied_runs import FAST, ODE, Spied, spy
from safetensors.torch import save_file
from torch import Tensor

from fluvial.core.guidance import classifier_free
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.methods import Distill
from fluvial.engines.run.job import Job
from fluvial.models.lora import Lokr, LoraConfig, add_lora, find_linear_layers
from fluvial.models.lora_files import load_lora, read_lora

BOTH = ("even=teacher", "odd=other")
DISTILL = Distill(teacher=BOTH, match="velocity_mse")


def run(world: World, job: Job | None = None, **changes: Any) -> Spied:
    line = "distill ode lora fast match=velocity_mse sampling.prompts=3 updates=4"
    return spy(world, line, job or tiny.job_of_sources(), **{"teacher": BOTH, **changes})


def predict(module: torch.nn.Module, items: Any, prompts: list[str]) -> Tensor:
    """Return a network's prediction at each row."""
    rows = tiny.Tiny().encode([prompts[int(i)] for i in items.sample]).rows
    with torch.no_grad():
        return module(items.x, rows, items.level)


def of_sources(items: Any, spied: Spied) -> Tensor:
    return torch.tensor([spied.records[int(i)].source == "even" for i in items.sample])


@pytest.mark.parametrize("sampler", ["ode", "flow_sde"])
@pytest.mark.parametrize("minibatches", [1, 2])
def test_one_source_is_distillation_by_one_teacher(one: World, sampler: str, minibatches: int) -> None:
    """To the bit."""
    prompts = tuple(Prompt(text, source="even") for text in tiny.PROMPTS)
    changes = {"sampling.sampler": sampler, "passes.minibatches": minibatches, "sampling.prompts": 2}
    runs = [
        run(one, tiny.job_of_sources(prompts=prompts), teacher=(word,), **changes) for word in ("teacher", "even=teacher")
    ]
    records = [[each.rollout() for _ in range(2)] for each in runs]
    assert records[0][-1]["loss"] == records[1][-1]["loss"] > 0
    first, second = (each.weights() for each in runs)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_each_row_has_the_teacher_of_its_source(one: World) -> None:
    """And the loss is that of each source, weighted by its number of rows; guidance is that of the source's teacher."""
    spied = run(one, guidance=("2", "odd=1"))
    spied.rollout()
    items, even = spied.updates[0].items, of_sources(spied.updates[0].items, spied)
    assert 0 < int(even.sum()) < len(even)
    teachers = {name: tiny.Tiny(seed=seed).build() for seed, name in enumerate(("student", "teacher", "other"))}
    uncond = predict(teachers["teacher"], items, [""] * len(spied.prompts))
    guided = classifier_free(predict(teachers["teacher"], items, spied.prompts), uncond, 2.0)
    expected = torch.where(even[:, None, None, None], guided, predict(teachers["other"], items, spied.prompts))
    torch.testing.assert_close(items.predictions["teacher"], expected)
    error = ((predict(teachers["student"], items, spied.prompts) - expected) ** 2).mean((1, 2, 3))
    parts = [error[chosen].mean() * chosen.float().mean() for chosen in (even, ~even)]
    assert spied.infos[0].loss == pytest.approx(float(sum(parts)), rel=1e-5)


@pytest.mark.parametrize("match", ["velocity_mse", "sample_mse", "clean_mse", "clean_relative"])
def test_a_student_that_is_its_teachers_has_no_loss(one: World, match: Any) -> None:
    """Whatever is matched; other distances are those of the predictions times a factor of the step."""
    same = run(one, teacher=("even=student", "odd=student"), match=match)
    assert same.rollout()["loss"] == same.infos[0].grad_norm == 0.0
    spied = run(one, match=match)
    spied.rollout()
    items = spied.updates[0].items
    d = predict(tiny.Tiny().build(), items, spied.prompts) - items.predictions["teacher"]
    scale = {"velocity_mse": items.level**0, "sample_mse": items.dt}.get(match, items.level)[:, None, None, None]
    expected = ((scale * d) ** 2).mean((1, 2, 3))
    expected = expected / (scale * d).abs().mean((1, 2, 3)) if match == "clean_relative" else expected
    expected = expected / 2 if match == "sample_mse" else expected
    assert spied.infos[0].loss == pytest.approx(float(expected.mean()), rel=1e-4)


def adapter(folder: Path, rank: int, alpha: float, layers: tuple[str, ...] = ("into", "inner", "out")) -> Path:
    """Write an adapter of the tiny network by PEFT's names."""
    folder.mkdir()
    tensors, noise = dict[str, Tensor](), torch.Generator().manual_seed(rank)
    for name, layer in find_linear_layers(tiny.Tiny().build()).items():
        if name.split(".")[-1] in layers:
            tensors[f"{name}.lora_A.weight"] = torch.randn(rank, layer.in_features, generator=noise) / 4
            tensors[f"{name}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=noise) / 4
            tensors[f"{name}.alpha"] = torch.tensor(alpha)
    save_file(tensors, folder / "pytorch_lora_weights.safetensors")
    return folder


@pytest.mark.parametrize("product", ["factors", "merged"])
def test_adapters_teach_beside_the_policy(one: World, tmp_path: Path, product: Any) -> None:
    """Whatever their rank and scale, in its module, where they stay as they were; and beside a teacher with weights."""
    folders = [adapter(tmp_path / f"rank{rank}", rank, alpha) for rank, alpha in ((2, 3.0), (6, 1.0))]
    lora: dict[str, Any] = {"lora": LoraConfig(rank=4), "lora.form.product": product}
    spied = run(one, teacher=(f"even={folders[0]}", f"odd={folders[1]}"), **lora)
    before = spied.weights()
    for _ in range(2):
        spied.rollout()
    after = spied.weights()
    frozen = {name for name in before if ".teacher_" in name}
    assert len(frozen) == 16
    assert {name for name in before if not torch.equal(before[name], after[name])}.isdisjoint(frozen)
    items, modules = spied.updates[-1].items, list[torch.nn.Module]()
    for folder in folders:
        module = tiny.Tiny().build()
        found = read_lora(folder, module)
        add_lora(module, LoraConfig(rank=found.rank, alpha=found.alpha), found.layers)
        load_lora(module, found.tensors, "default")
        modules.append(module)
    says = [predict(module, items, spied.prompts) for module in modules]
    expected = torch.where(of_sources(items, spied)[:, None, None, None], *says)
    torch.testing.assert_close(items.predictions["teacher"], expected)
    assert not torch.allclose(says[0], says[1], atol=1e-2)
    mixed = run(one, teacher=(f"even={folders[0]}", "odd=other"), **lora)
    mixed.rollout()
    assert {".teacher_0." in name for name in mixed.weights()} == {True, False}
    assert [*mixed.trainer.run.networks.separate] == ["teacher_1"]


def test_adapters_resume_to_the_bit(one: World, tmp_path: Path) -> None:
    """With their values, and not with those of another adapter."""
    folders = [adapter(tmp_path / f"rank{rank}", rank, 2.0) for rank in (2, 3)]
    method = replace(DISTILL, teacher=(f"even={folders[0]}", f"odd={folders[1]}"))
    changes = {"sampling": replace(ODE, prompts=3), "method": method, "optimizer": FAST, "train": "lora"}
    expect_resumed(tiny.config(tmp_path / "run", updates=2, **changes), tiny.job_of_sources(), one)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"teacher": ("even=teacher",)}, "prompts of the source 'odd' have no teacher"),
        ({"teacher": (*BOTH, "neither=teacher")}, "teacher names the source 'neither'"),
        ({"teacher": ("teacher", "odd=other")}, "teacher is 'teacher'"),
        ({"teacher": (*BOTH, "odd=teacher")}, "teacher is 'odd=teacher'"),
        ({"guidance": ("neither=2",)}, "guidance is 'neither'"),
        ({"guidance": ("much",)}, "guidance is 'much'"),
        ({"teacher": ("even={adapter}", "odd=other"), "train": "full"}, "an adapter, and train is full"),
        ({"teacher": ("even={narrow}", "odd=other")}, "set lora.targets"),
        ({"teacher": ("even={adapter}", "odd=other"), "lora.form": Lokr()}, "the form lora beside lokr"),
    ],
)
def test_what_has_no_meaning(one: World, tmp_path: Path, changes: dict[str, Any], names: str) -> None:
    """It is refused before the first rollout, in one line."""
    layers = {"adapter": ("into", "inner", "out"), "narrow": ("inner", "out")}
    files = {name: adapter(tmp_path / name, 2, 2.0, adapted) for name, adapted in layers.items()}
    teacher = tuple(word.format(**files) for word in changes.get("teacher", BOTH))
    refuses(re.escape(names), run, one, **{**changes, "teacher": teacher})
