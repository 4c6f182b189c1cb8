"""Pipelines with images, replayed: their own images, what is refused, and what an image changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from helpers import tiny_conditioned
from helpers.marks import Folders, Patch, long
from helpers.refusals import refuses
from helpers.tiny_conditioned import ROWS
from PIL import Image
from torch import nn

from fluvial.core.random import key
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.kinds import write_image
from fluvial.models.replay.media import MediaPrompt, use_modes
from fluvial.models.replay.recorded import make_generators
from fluvial.models.replay.start import remove_offset

pytestmark = [  # diffusers' own use
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning"),
    pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning"),
]

STEPS = 3
TEXTS = ("a red fox", "two cats")
SHORT = ("kontext", "qwen-edit")  # in every run of the tests
each = pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in ROWS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("conditioned")
    return lambda name: tiny_conditioned.save(name, root / name)


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    tiny_conditioned.without_scaling(monkeypatch)


def prompts(name: str, folder: Path) -> list[MediaPrompt]:
    return [
        MediaPrompt(
            text,
            {
                argument: folder
                / tiny_conditioned.draw(folder, f"{number}{place}", argument, 10 * number + place, ROWS[name])
                for place, argument in enumerate(ROWS[name].media)
            },
        )
        for number, text in enumerate(TEXTS)
    ]


def opened(name: str, folder: Path, example: MediaPrompt, **options: Any) -> AnyPipeline:
    row = ROWS[name]
    size = {"height": row.size, "width": row.size, "frames": row.frames, "steps": STEPS, "scale": row.scale}
    return AnyPipeline(folder, **{**size, "call": row.call, "example": example, **options})


@each
def test_images_are_the_pipelines_own(name: str, folder: Folders) -> None:
    """For two prompts with images of their own, encoded by the mode of the VAE's distribution, from the same noise."""
    asked = prompts(name, folder(name))
    model = opened(name, folder(name), asked[0]).adapt_to(asked)
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
        options = {**model.call_arguments, **model._list_forms(prompt, 1)[model._form].one, "output_type": "pt"}
        (generator,) = make_generators(type(key(0))(torch.tensor([number]), torch.tensor([0])))
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
    if (scale := model.known.model.scale) != 1:
        x = remove_offset(x, scale, cond[-1])
    with torch.no_grad():
        for step in range(STEPS):
            x = x + (levels[step + 1] - levels[step]) * model.predict(module, x, levels[step].expand(2), cond)
    ours = model.decode(x, asked) if model.sound_rate is None else model.decode_sounds(x, asked).waves
    amplifies = name in ("z-img2img", "fibo", "kandinsky-video")  # a rounding of samples, to 1.7e-5 of the images
    torch.testing.assert_close(ours, torch.cat(theirs).float(), rtol=0, atol=2e-5 if amplifies else 1e-5)


@pytest.mark.parametrize("name", ["kontext", long("fill")])
def test_an_image_changes_the_conditioning(name: str, folder: Folders) -> None:
    first, second = prompts(name, folder(name))
    model = opened(name, folder(name), first)
    same = MediaPrompt(first.text, {argument: file.read_bytes() for argument, file in first.media.items()})  # type: ignore[union-attr]
    other = MediaPrompt(first.text, second.media)
    found = [optree.tree_leaves(model.encode([prompt])) for prompt in (first, same, other)]
    assert all(map(torch.equal, found[0], found[1]))
    assert not all(map(torch.equal, found[0], found[2]))
    assert first == same != other

    def greyed(mode: str) -> MediaPrompt:  # a mask stays grey
        files = {name: Image.open(str(file)).convert("L").convert(mode) for name, file in first.media.items()}
        return MediaPrompt(first.text, {name: write_image(image) for name, image in files.items()})

    assert all(map(torch.equal, *(optree.tree_leaves(model.encode([greyed(mode)])) for mode in ("L", "RGB"))))


@pytest.mark.parametrize(
    ("name", "argument", "ignored"),
    [
        ("fill", "mask_image", lambda given: Image.new("L", (16, 16))),
        ("reference-sound", "reference_audio", torch.zeros_like),
    ],
)
def test_an_image_or_sound_without_an_effect_is_refused(
    name: str, argument: str, ignored: Callable[[Any], Any], folder: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(name, folder(name))
    model = opened(name, folder(name), asked[0])
    module = model.build().eval()
    kind = type(model._load_pipeline())
    call = kind.__call__
    monkeypatch.setattr(kind, "__call__", lambda *args, **more: call(*args, **{**more, argument: ignored(more[argument])}))
    refuses(rf"^{kind.__name__} .* its {argument} has no effect on the samples; leave it out$", model.check, module, asked)


@pytest.mark.parametrize("larger", [long(0), 1])
def test_images_of_two_sizes_are_refused(larger: int, folder: Folders) -> None:
    """Whether the first or the last prompt has the larger one; prompts of several lengths are padded, images never."""
    name = "kontext"
    asked = prompts(name, folder(name))
    file = tiny_conditioned.draw_image(folder(name) / "wide.png", 3, (32, 16))
    asked[larger] = MediaPrompt(asked[larger].text, {"image": file})
    model = opened(name, folder(name), asked[0]).adapt_to(asked)
    says = r"samples of both cannot be in one batch: give all prompts images of one size$"
    refuses(f"^FluxKontextPipeline .* inputs of other shapes .* {says}", model.encode, asked)


@pytest.mark.long
def test_each_sample_is_decoded_with_its_own_prompts_image(folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline whose images depend on more of their prompt's image than the transformer is given, e.g. LTX's."""
    name = "control"
    asked = prompts(name, folder(name))
    model = opened(name, folder(name), asked[0])
    module = model.build().eval()
    kind = type(model._load_pipeline())
    call = kind.__call__

    def brighter(self: Any, *args: Any, control_image: Any, **more: Any) -> Any:
        made = call(self, *args, control_image=control_image, **more)
        light = control_image.getpixel((0, 0))[0] / 255
        return (made[0] + light if more["output_type"] == "pt" else made[0],)

    monkeypatch.setattr(kind, "__call__", brighter)
    assert model.check(module, asked) < 1e-5
    latents = torch.zeros(2, *model.known.shape)
    first, second = model.decode(latents, asked)
    assert not torch.equal(first, second)
    torch.testing.assert_close(model.decode(latents, asked[::-1])[1], first)
    monkeypatch.setattr(type(model), "_needs_images_to_decode", lambda self: False)  # all with the example's
    refuses("its last samples, decoded, differ from its own images", model.check, module, asked)


def test_a_decoding_that_mixes_samples_is_refused(folder: Folders, monkeypatch: Patch) -> None:
    asked = prompts("kontext", folder("kontext"))
    model = opened("kontext", folder("kontext"), asked[0])
    module = model.build().eval()
    vae = type(model._load_pipeline().vae)
    decode = vae.decode

    def mix(self: Any, z: torch.Tensor, *args: Any, **more: Any) -> Any:
        return decode(self, (z + z.mean(0, keepdim=True)) / 2, *args, **more)

    monkeypatch.setattr(vae, "decode", mix)
    refuses(r"^FluxKontextPipeline .* decodes together differ .* mixes the samples of a batch$", model.check, module, asked)


@pytest.mark.long
def test_a_scale_of_the_whole_batch_is_refused(folder: Folders) -> None:
    asked = prompts("kandinsky-video", folder("kandinsky-video"))
    model = opened("kandinsky-video", folder("kandinsky-video"), asked[0])
    module = model.build().eval()
    assert model.check(module, asked) < 1e-4
    model.decode_chunk = 2
    refuses("mixes the samples of a batch", model.check, module, asked)


@pytest.mark.long
def test_samples_of_image_to_image_start_as_noise(folder: Folders) -> None:
    """The levels fall from 1, the offset is the image's alone, and a sample is decoded with the offset of its prompt."""
    name = "img2img"
    first, second = prompts(name, folder(name))
    model = opened(name, folder(name), first).adapt_to([first, second])
    levels, scale = model.schedule(STEPS, model.known.shape).levels, model.known.model.scale
    assert len(levels) == STEPS + 1
    assert (float(levels[0]), float(levels[-1])) == (1.0, 0.0)
    assert 0 < scale < 1
    offsets = model.encode([first, second])[-1]
    assert not torch.equal(offsets[0], offsets[1])
    x = torch.zeros(2, *model.known.shape)
    images = model.decode(x, [first, second])
    assert not torch.equal(images[0], images[1])
    torch.testing.assert_close(model.decode(x[:1], [second])[0], images[1])
    refuses("its samples start from an image", model.encode_images, torch.zeros(1, 3, 16, 16))
