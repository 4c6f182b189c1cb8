"""Every kind of model that `fluvial train --model` takes, inside verl's engine, and where its conditioning comes from."""

import io
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import real_verl, tiny_conditioned, tiny_modular, tiny_pipelines, tiny_replayed, verl_runs
from helpers.marks import long
from PIL import Image

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
    networks: tuple[str, ...] = ("transformer",)  # first parts of the names that a rollout engine is sent


def replayed(folder: Path, *, size: int, scale: float = 1.0, example: Any = "") -> AnyPipeline:
    return AnyPipeline(folder, height=size, width=size, steps=STEPS, scale=scale, example=example)


def adapted(name: str) -> Callable[[Path], Any]:
    return partial(tiny_pipelines.save, tiny_pipelines.ROWS[name])


KINDS = {
    "replayed": Kind(
        partial(tiny_replayed.load, "aura-flow"), partial(replayed, size=16, scale=3.5), scale=3.5
    ),
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
    ),
    "adapter": Kind(adapted("flux"), open_model, scale=2.0),
    "two networks": Kind(
        adapted("wan-experts"), open_model, (16, 16, 5), networks=("transformer", "transformer_2"), scale=2.0
    ),
    "epsilon": Kind(
        adapted("sdxl"), open_model, scale=2.0, config={"sde_type": "ddim", "tokens": 77}, sampler="ddim", networks=("unet",)
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
    model = model.given(model_inputs(prompts)) if isinstance(model, AnyPipeline) else model
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
    """Return a rollout as verl-omni's trainer passes it, with prompts and without embeddings, by verl's own function."""
    utils, trajectory = real_verl.part("verl.utils.tensordict_utils"), made.trajectory
    latents = torch.cat([trajectory.x, trajectory.x_next[:, -1:]], dim=1)
    if getattr(made.model, "packed", False):
        latents = torch.stack([tiny_pipelines.packed(latents[:, i]) for i in range(latents.shape[1])], dim=1)
    fields = {
        "all_latents": latents,
        "all_timesteps": made.schedule.timesteps[trajectory.steps],
        "old_log_probs": made.log_prob_old,
        "advantages": made.advantage[:, None].expand(-1, trajectory.x.shape[1]).clone(),
        "raw_prompt": raw,
    }
    return utils.get_tensordict({**fields, **more}, non_tensor_dict={"micro_batch_size_per_gpu": 4})


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
        "any", path=tmp_path / "model", size=kind.size, scale=kind.scale, optimizer={"override_optimizer_config": {"eps": verl_runs.EPS}}, **kind.config
    )
    own = verl_runs.Own(made, world)
    loss = own.update(verl_runs.items(made), made.cond, Grpo(clip_low=verl_runs.CLIP, clip_high=verl_runs.CLIP))
    found = verl_runs.train(theirs, batch(made, raw))
    assert sum(found["loss"]) == pytest.approx(loss, rel=1e-5)
    own.check_equal(theirs)
    assert {each.split(".")[0] for each, _ in theirs.get_per_tensor_param()[0]} >= {*kind.networks}
