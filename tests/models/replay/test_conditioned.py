"""Pipelines with images, replayed: their own images, what is refused, and what an image changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import tiny_conditioned
import torch
from tiny_conditioned import ROWS
from torch import nn

from fluvial.core.random import key
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.media import MediaPrompt, open_image, use_modes
from fluvial.models.replay.recorded import generators

STEPS = 3
TEXTS = ("a red fox", "two cats")
each = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of the pipelines, by row."""
    root = tmp_path_factory.mktemp("conditioned")
    return lambda name: tiny_conditioned.save(name, root / name)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images keep their size."""
    tiny_conditioned.without_scaling(monkeypatch)


def prompts(name: str, folder: Path) -> list[MediaPrompt]:
    """Return two prompts with images of their own."""
    return [
        MediaPrompt(
            text,
            {
                argument: tiny_conditioned.draw_image(folder / f"{number}{place}.png", 10 * number + place, ROWS[name].image)
                for place, argument in enumerate(ROWS[name].media)
            },
        )
        for number, text in enumerate(TEXTS)
    ]


def opened(name: str, folder: Path, example: MediaPrompt, **options: Any) -> AnyPipeline:
    row = ROWS[name]
    size = {"height": 16, "width": 16, "frames": row.frames, "steps": STEPS, "scale": row.scale}
    return AnyPipeline(folder, **{**size, "call": row.call, "example": example, **options})


@each
def test_images_are_the_pipelines_own(name: str, folder: Callable[[str], Path]) -> None:
    """For two prompts with images of their own, encoded by the mode of the VAE's distribution, from the same noise."""
    asked = prompts(name, folder(name))
    model = opened(name, folder(name), asked[0]).given(asked)
    module = model.build().eval()
    assert model.check(module, asked) < 1e-5
    pipe = tiny_conditioned.load(folder(name))
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    use_modes(pipe.vae)
    pipe.set_progress_bar_config(disable=True)
    cond = model.encode(asked)
    levels = model.schedule(STEPS, model.known.shape).levels
    noise, theirs = [], []
    for number, prompt in enumerate(asked):
        options = {**model.asked, **prompt.opened(), "prompt": prompt.text, "output_type": "pt"}
        (generator,) = generators(type(key(0))(torch.tensor([number]), torch.tensor([0])))
        seen: list[torch.Tensor] = []
        step = pipe.scheduler.step

        def watched(v: Any, t: Any, x: torch.Tensor, *args: Any, seen: Any = seen, step: Any = step, **more: Any) -> Any:
            seen.append(x.clone())
            return step(v, t, x, *args, **more)

        pipe.scheduler.step = watched
        made = pipe(**options, generator=generator)[0]
        pipe.scheduler.step = step
        theirs.append(made.transpose(1, 2) if made.ndim == 5 else made)
        noise.append(seen[0])
    x = torch.cat(noise).float()
    with torch.no_grad():
        for step in range(STEPS):
            x = x + (levels[step + 1] - levels[step]) * model.predict(module, x, levels[step].expand(2), cond)
    torch.testing.assert_close(model.decode(x), torch.cat(theirs).float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["kontext", "fill"])
def test_an_image_changes_the_conditioning(name: str, folder: Callable[[str], Path]) -> None:
    """The same text with another image; the same image under another name is the same."""
    first, second = prompts(name, folder(name))
    model = opened(name, folder(name), first)
    same = MediaPrompt(first.text, {argument: file.read_bytes() for argument, file in first.media.items()})  # type: ignore[union-attr]
    other = MediaPrompt(first.text, second.media)
    found = [optree.tree_leaves(model.encode([prompt])) for prompt in (first, same, other)]
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))
    assert first == same != other


def test_an_image_without_an_effect_is_refused(folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that ignores what it is given in one of its arguments."""
    name = "fill"
    asked = prompts(name, folder(name))
    model = opened(name, folder(name), asked[0])
    module = model.build().eval()
    kind = type(model._loaded())
    call = kind.__call__
    black = open_image(asked[0].media["mask_image"])
    monkeypatch.setattr(
        kind, "__call__", lambda self, *args, mask_image, **more: call(self, *args, mask_image=black, **more)
    )
    with pytest.raises(ValueError, match=r"^FluxFillPipeline .* its mask_image has no effect on the images; leave it out$"):
        model.check(module, asked)


def test_images_that_are_decoded_with_another_prompts_image_are_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline whose images depend on more of their prompt's image than the transformer is given."""
    name = "control"
    asked = prompts(name, folder(name))
    model = opened(name, folder(name), asked[0])
    module = model.build().eval()
    kind = type(model._loaded())
    call = kind.__call__

    def brighter(self: Any, *args: Any, control_image: Any, **more: Any) -> Any:
        made = call(self, *args, control_image=control_image, **more)
        light = control_image.getpixel((0, 0))[0] / 255
        return (made[0] + light if more["output_type"] == "pt" else made[0],)

    monkeypatch.setattr(kind, "__call__", brighter)
    with pytest.raises(ValueError, match="its last samples, decoded, differ from its own images"):
        model.check(module, asked)
