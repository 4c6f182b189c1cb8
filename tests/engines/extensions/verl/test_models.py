"""Every kind of model that `fluvial train --model` takes, inside verl's engine, and where its conditioning comes from."""

import io
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import omni_rollouts, tiny_conditioned, tiny_modular, tiny_pipelines, tiny_replayed, verl_runs
from helpers.marks import long
from PIL import Image
from safetensors.torch import load_file, save_file

from fluvial.core.transitions import bind
from fluvial.engines.data.records import Prompt, model_inputs
from fluvial.engines.engine.world import World
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.sampling.generate import Guidance
from fluvial.models.handwriting import Handwriting
from fluvial.models.modular.any_modular import AnyModular
from fluvial.models.pipelines.open import open_model
from fluvial.models.replay.any_pipeline import AnyPipeline

STEPS, TEXTS = verl_runs.STEPS, ("a red fox", "9 owls in 1 barn, at night", "two cats", "an owl")


class Kind(NamedTuple):
    save: Callable[[Path], Any]  # writes the folder
    model: Callable[[Path], Any]  # opens it as `fluvial train` does, without verl
    size: tuple[int, int, int] = (16, 16, 1)
    scale: float = 1.0
    image: str = ""  # argument that the image of a prompt is
    texts: Sequence[str] = TEXTS
    config: dict[str, Any] = {}  # noqa: RUF012  # further settings of verl's model config
    sampler: str = "flow_sde"
    tensors: bool = False  # whether a batch may hold the conditioning
    networks: tuple[str, ...] = ("transformer",)  # first parts of the names that a rollout engine is sent


def replayed(folder: Path, *, size: int, **options: Any) -> AnyPipeline:
    return AnyPipeline(folder, height=size, width=size, steps=STEPS, **options)


def adapted(name: str) -> Callable[[Path], Any]:
    return partial(tiny_pipelines.save, tiny_pipelines.ROWS[name])


KINDS = {
    "replayed": Kind(partial(tiny_replayed.load, "aura-flow"), partial(replayed, size=16, scale=3.5), scale=3.5),
    "replayed edit": Kind(partial(tiny_conditioned.save, "control"), partial(replayed, size=16), image="control_image"),
    "modular": Kind(
        partial(tiny_modular.folder_of, "StableDiffusion3"),
        lambda folder: AnyModular(folder, height=16, width=16, steps=STEPS, scale=3.0),
        scale=3.0,
    ),
    "edit": Kind(
        partial(tiny_conditioned.save, "qwen-edit-plus"),
        lambda folder: open_model(folder, height=16, width=16),
        scale=2.5,
        image="image",
        tensors=True,
    ),
    "adapter": Kind(
        adapted("flux"), partial(open_model, embedded_guidance=2.5), scale=2.0, config={"guidance": 2.5}, tensors=True
    ),
    "two networks": Kind(
        adapted("wan-experts"), open_model, (16, 16, 5), networks=("transformer", "transformer_2"), scale=2.0
    ),
    "epsilon": Kind(
        adapted("sdxl"),
        open_model,
        scale=2.0,
        config={"sde_type": "ddim", "tokens": 77},
        sampler="ddim",
        networks=("unet",),
        tensors=True,
    ),
    "module:name": Kind(
        lambda folder: folder.mkdir(),
        lambda folder: Handwriting(),
        (8, 32, 1),
        texts=("0427", "3141", "1999", "2718"),
        config={"architecture": "fluvial.models.handwriting:Handwriting"},
    ),
}
DEFAULT = ("replayed",)
each_kind = pytest.mark.parametrize("name", [name if name in DEFAULT else long(name) for name in KINDS])


def chat(text: str, file: bytes | None) -> list[dict[str, Any]]:
    """Return a prompt as verl's dataset makes it of a row with the placeholder of an image."""
    content: Any = text
    if file is not None:
        content = [{"type": "image", "image": Image.open(io.BytesIO(file))}, {"type": "text", "text": text}]
    return [{"role": "system", "content": "You draw."}, {"role": "user", "content": content}]


def rollout(kind: Kind, folder: Path) -> tuple[verl_runs.Made, list[Any]]:
    """Return a rollout by the model alone, and its prompts as verl's batches hold them."""
    files = [tiny_modular.draw(seed, 16) if kind.image else None for seed in range(len(kind.texts))]
    raw = [chat(text, file) for text, file in zip(kind.texts, files, strict=True)]
    prompts = [Prompt(text, media={kind.image: file} if file else {}) for text, file in zip(kind.texts, files, strict=True)]
    model = kind.model(folder)
    model = model.adapt_to(model_inputs(prompts)) if isinstance(model, AnyPipeline) else model
    cond = Guidance(kind.scale).encode(model, prompts)
    x = tiny_pipelines.start(model, len(prompts), kind.size)
    schedule = model.schedule(STEPS, tuple(x.shape[1:]))
    module = model.build()
    made = tiny_pipelines.sampled(model, module, x, cond, schedule, eta=verl_runs.ETA, forwards="two")
    generator = torch.Generator().manual_seed(1)
    advantage = torch.randn(len(prompts), generator=generator)
    old = made.log_prob + 0.1 * torch.randn(made.log_prob.shape, generator=generator)
    sampler = bind(kind.sampler, verl_runs.ETA, schedule.levels)
    return verl_runs.Made("", model, cond, schedule, sampler, made, advantage, old), raw


def batch(made: verl_runs.Made, raw: list[Any], **more: Any) -> Any:
    """Return a rollout with prompts and without embeddings."""
    return verl_runs.batch(made, conditioned=False, raw_prompt=raw, **more)


@pytest.mark.filterwarnings("ignore:the gradient has an RMS of:UserWarning")
@each_kind
def test_an_update_of_any_model_is_fluvials_own(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One `train_batch` of the prompts' own conditioning leaves the weights of our update to 1e-6, and names them."""
    tiny_conditioned.without_scaling(monkeypatch)
    kind = KINDS[name]
    kind.save(tmp_path / "model")
    made, raw = rollout(kind, tmp_path / "model")
    theirs = verl_runs.build(
        "any",
        path=tmp_path / "model",
        size=kind.size,
        scale=kind.scale,
        optimizer=verl_runs.NEAR,
        **kind.config,
    )
    own = verl_runs.Own(made, world)
    loss = own.update(verl_runs.items(made), made.cond, Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP))
    found = verl_runs.train(theirs, batch(made, raw))
    assert sum(found["loss"]) == pytest.approx(loss, rel=1e-5)
    own.check_equal(theirs)
    assert {each.split(".")[0] for each, _ in theirs.get_per_tensor_param()[0]} >= {*kind.networks}
    given = batch(made, raw, **omni_rollouts.conditioning(made.cond) if kind.tensors else {}).exclude("raw_prompt")
    if kind.tensors:
        expected = verl_runs.infer(theirs, batch(made, raw))["log_probs"]
        torch.testing.assert_close(verl_runs.infer(theirs, given)["log_probs"], expected, rtol=0, atol=2e-6)
    else:
        with pytest.raises(UsageError, match=r"^raw_prompt is NoneType, expected one prompt|^the batch has no tensor"):
            verl_runs.infer(theirs, given)


@pytest.mark.long
def test_a_replayed_pipeline_takes_the_levels_and_the_negative_prompt_of_the_rollout(tmp_path: Path) -> None:
    """Its velocity is known at the schedule's levels alone, so noise is drawn there; a negative prompt opens it again."""
    kind, path = KINDS["replayed"], tmp_path / "model"
    kind.save(path)
    made, raw = rollout(kind, path)
    options: dict[str, Any] = {"path": path, "size": kind.size, "scale": kind.scale, "kind": "diffusion_dpo_model"}
    engine = verl_runs.build("any", **options, **verl_runs.LORA)
    fields = {"latents_clean": made.trajectory.final, "sample_level_rewards": torch.ones(4)}
    drawn = verl_runs.infer(engine, batch(made, raw, **fields))
    assert {*drawn["timesteps"].flatten().tolist()} <= {*made.schedule.timesteps.tolist()}
    noise = drawn["noise"][:, 0]
    at = {**fields, "noise": noise, "timesteps": made.schedule.timesteps[1].repeat(4)}
    plain = verl_runs.infer(engine, batch(made, raw, **at))["noise_pred"][:, 0]
    level = made.schedule.levels[1].repeat(4)
    with torch.no_grad():
        x = (1 - level[:, None, None, None]) * made.trajectory.final + level[:, None, None, None] * noise
        expected = made.model.predict(made.model.build(), x, level, made.cond)
        other = replayed(path, size=16, scale=kind.scale, negative="bad").adapt_to(list(kind.texts))
        opposed = other.predict(made.model.build(), x, level, other.encode(kind.texts))
    torch.testing.assert_close(plain, expected, rtol=0, atol=1e-5)
    negative = verl_runs.infer(engine, batch(made, raw, **at, raw_negative_prompt=["bad"] * 4))["noise_pred"][:, 0]
    torch.testing.assert_close(negative, opposed, rtol=0, atol=1e-5)
    assert not torch.allclose(negative, plain, atol=1e-4)
    for says, more in (
        (
            "the batch has 2 negative prompts, and a pipeline without an adapter takes one",
            {"raw_negative_prompt": ["a", "b"] * 2},
        ),
        ("raw_negative_prompt has 1 values, expected one per sample, 4", {"raw_negative_prompt": ("bad",)}),
        ("all_timesteps holds 123, which is not one of the 3 timesteps", {"timesteps": torch.full((4,), 123.0)}),
    ):
        with pytest.raises(UsageError, match=f"^{says}"):
            verl_runs.infer(engine, batch(made, raw, **{**at, **more}))
    engine.settings.__dict__["model"] = "mine:opened"  # as if a function of the user's had opened it
    with pytest.raises(UsageError, match=r"^the batch has a raw_negative_prompt, and mine:opened has its own"):
        verl_runs.infer(engine, batch(made, raw, **at, raw_negative_prompt=["bad"] * 4))


def test_weights_may_lie_in_another_folder(tmp_path: Path) -> None:
    """Beside the pipeline's own network (`transformer_subfolder`), or anywhere (`config_path`)."""
    folder = tiny_pipelines.save(tiny_pipelines.ROWS["sd3"], tmp_path / "model")
    expected = torch.full((), 0.25)
    other: dict[str, Any] = {"config_path": str(tmp_path / "other")}
    for name, given in (("ema", {"transformer_subfolder": "ema"}), ("../other", other)):
        shutil.copytree(folder / "transformer", folder / name)
        file = folder / name / "diffusion_pytorch_model.safetensors"
        save_file({key: expected.expand_as(value).contiguous() for key, value in load_file(file).items()}, file)
        engine = verl_runs.build("sd3", path=folder, **given)
        assert all(bool((tensor == 0.25).all()) for _, tensor in engine.get_per_tensor_param()[0])


@pytest.mark.long
def test_what_does_not_fit_a_model_is_one_line(tmp_path: Path) -> None:
    """Padding that a network attends to, noise of a flow for another model, and an image that is none."""
    folder = tiny_pipelines.save(tiny_pipelines.ROWS["sdxl"], tmp_path / "sdxl")
    ddim: dict[str, Any] = {"path": folder, "sde_type": "ddim", **verl_runs.LORA}
    made = verl_runs.rollout("sd3")
    image = [{"role": "user", "content": [{"type": "image", "image": 3}]}]
    cases: tuple[tuple[str, dict[str, Any], list[Any]], ...] = (
        ("model.pipeline.max_sequence_length is 512, and the model pads prompts to 77 ", {}, list(TEXTS)),
        (
            "the model predicts epsilon, and verl-omni adds noise as",
            {"kind": "diffusion_dpo_model"},
            list(TEXTS),
        ),
        ("raw_prompt has an image of type int, expected a path, bytes or a PIL image", {"tokens": 77}, [image] * 4),
    )
    for says, given, raw in cases:
        engine = verl_runs.build("any", **ddim, **given)
        shape = engine.denoiser.model.latent_shape(16, 16)
        own = batch(made, raw, latents_clean=torch.zeros(4, *shape), sample_level_rewards=torch.ones(4))
        own["all_latents"] = torch.zeros(4, 3, *shape)
        own["all_timesteps"] = engine.denoiser.schedule(shape).timesteps[:2].repeat(4, 1)
        with pytest.raises(UsageError, match=f"^{says}"):
            verl_runs.infer(engine, own)
