"""Adapters whose prompts have images: the images of diffusers' pipelines, refusals, and runs from records to adapters."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import launch, tiny_conditioned, tiny_pipelines
from helpers.marks import Captured, Folders, Patch
from helpers.refusals import refuses
from helpers.tiny_conditioned import EDITS, SIZE
from helpers.tiny_pipelines import STEPS, packed, start
from PIL import Image
from torch import Tensor

from fluvial.bench.trial import pipelines
from fluvial.bench.trial.forked import Forked, wait
from fluvial.engines.cli import main as cli
from fluvial.models import decode_samples
from fluvial.models.guidance import Guided
from fluvial.models.pipelines.conditioned import check_media
from fluvial.models.pipelines.open import open_model
from fluvial.models.replay.kinds import write_image
from fluvial.models.replay.media import MediaPrompt, use_modes
from fluvial.models.step_cache import StepCache

TEXTS = "a red fox", "two cats and"
MODULES = ("pipeline_qwenimage_edit", "pipeline_qwenimage_edit_plus")  # of diffusers


class AdapterCase(NamedTuple):
    name: str  # of `tiny_conditioned`
    size: tuple[int, int]
    options: dict[str, Any]
    images: tuple[tuple[int, int], tuple[int, int]] = ((20, 40), (32, 33))
    frames: int | None = None  # of a video
    several: bool = False  # whether each prompt has two images in one argument

    @property
    def pixels(self) -> tuple[int, ...]:
        return (*self.size, *(() if self.frames is None else (self.frames,)))

    @property
    def call(self) -> list[str]:
        numbers = dict(zip(("height", "width", "frames"), self.pixels, strict=False))
        sizes = {**numbers, "text-tokens": self.options["text_tokens"]}.items()
        call = [f"{name}={json.dumps(value)}" for name, value in self.options.items() if name != "text_tokens"]
        words = [word for name, number in sizes for word in (f"--pipeline.{name}", str(number))]
        return [*words, *(["--pipeline.call", *call] if call else [])]


TEXT = {"text_tokens": 16}
WHOLE = {"text_tokens": 512}
LAST = {**TEXT, "last_image": True}
SCALES = {**TEXT, "guidance_scale_2": 1.5}  # beside another scale
SEEN = {"text_tokens": 300}
MIXED = {**SEEN, "mixed_images": True}
RATIO = ((20, 30), (40, 60))  # two sizes of images that are scaled alike
UNETS = {name: AdapterCase(name, SIZE, {"text_tokens": 40, **edit.call}, (SIZE, SIZE)) for name, edit in EDITS.items()}
ROWS = {
    "wan": AdapterCase("wan", (16, 32), TEXT, frames=5),
    "wan-last": AdapterCase("wan", (16, 32), LAST, frames=5),
    "wan-clip": AdapterCase("wan-clip", (16, 32), WHOLE, frames=5),
    "wan-both": AdapterCase("wan-both", (16, 32), WHOLE, frames=5),  # a network that is given two CLIP embeddings
    "wan-experts": AdapterCase("wan-experts", (16, 16), TEXT, frames=5),
    "wan-experts-scales": AdapterCase("wan-experts", (16, 16), SCALES, frames=5),
    "wan-first-frame": AdapterCase("wan-first-frame", (32, 16), TEXT, frames=3),
    "qwen-edit": AdapterCase("qwen-edit", (16, 24), SEEN, RATIO),
    "qwen-edit-mixed": AdapterCase("qwen-edit", (16, 24), MIXED, ((40, 20), (20, 30))),
    "qwen-edit-plus": AdapterCase("qwen-edit-plus", (16, 24), SEEN, RATIO),
    "qwen-edit-plus-several": AdapterCase("qwen-edit-plus", (16, 24), SEEN, RATIO, several=True),
    "qwen-edit-plus-mixed": AdapterCase("qwen-edit-plus", (24, 16), MIXED, ((40, 20), (20, 30))),
    **UNETS,
}
each = pytest.mark.parametrize("name", ROWS)
# Guidance is the same for all; without it, one of each network and of each way in which it takes images.
UNGUIDED = (
    "wan",
    "wan-both",
    "wan-experts",
    "wan-first-frame",
    "qwen-edit",
    "qwen-edit-plus-mixed",
    "sd-image",
    "xl-inpaint",
)
# Trained in float32, too, and evaluated; images of all are compared in float32.
EVALUATED = ("wan", "qwen-edit-mixed", *UNETS)


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    for name in MODULES:
        module = importlib.import_module(f"diffusers.pipelines.qwenimage.{name}")
        rest = module.calculate_dimensions(1024 * 1024, 1.0)[2:]

        def scaled(area: float, ratio: float, rest: Any = rest) -> Any:
            return (4 * round(4 * ratio**0.5), 4 * round(4 * ratio**-0.5), *rest)

        monkeypatch.setattr(module, "calculate_dimensions", scaled)
    monkeypatch.setattr("fluvial.models.pipelines.qwen_image_edit.AREA", 16 * 16)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("conditioned")
    return lambda name: tiny_conditioned.save(ROWS[name].name, root / ROWS[name].name)


def opened(name: str, folder: Path, **options: Any) -> Any:
    row = ROWS[name]
    sizes = dict(zip(("height", "width", "frames"), row.pixels, strict=False))
    return open_model(folder, **{**sizes, **row.options, "device": "cpu", **options})


def draw(argument: str, seed: int, size: tuple[int, int], file: Path) -> Path:
    if argument != "mask_image":
        return tiny_conditioned.draw_image(file, seed, size)
    painted = np.zeros(size, np.uint8)
    painted[2 : 9 + seed % 7, 3:15] = 255
    Image.fromarray(painted).save(file)
    return file


def prompts_of(model: Any, name: str, folder: Path) -> list[MediaPrompt]:
    def source(number: int, place: int, argument: str) -> Path | tuple[Path, ...]:
        row, seed = ROWS[name], 10 * number + place
        seeds = (seed, 10 * number + 5) if row.several else (seed,)
        files = [draw(argument, seed, row.images[number], folder / f"{name}-{argument}-{seed}.png") for seed in seeds]
        return tuple(files) if row.several else files[0]

    return [
        MediaPrompt(text, {argument: source(number, place, argument) for place, argument in enumerate(model.takes)})
        for number, text in enumerate(TEXTS)
    ]


def theirs(
    name: str, folder: Path, prompt: MediaPrompt, noise: Tensor, scale: float, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    row, pipeline = ROWS[name], tiny_conditioned.load(folder)
    pipeline.set_progress_bar_config(disable=True)
    call = {"prompt": prompt.text, "height": row.size[0], "width": row.size[1], "num_inference_steps": STEPS}
    call |= {**prompt.open_files(), "output_type": "pt", **({"negative_prompt": "bad"} if scale != 1 else {})}
    if name in UNETS:
        use_modes(pipeline.vae)
        starts = "Img2Img" in EDITS[name].pipeline
        strength = row.options.get("strength", 1.0)
        call |= {"strength": strength, "num_inference_steps": next(n for n in range(99) if int(n * strength) == STEPS)}
        for module in ("stable_diffusion", "stable_diffusion_xl"):
            place = f"diffusers.pipelines.{module}.pipeline_{module}_{'img2img' if starts else 'inpaint'}.randn_tensor"
            monkeypatch.setattr(place, lambda *_, **__: noise)
        sides = ("height", "width") if starts else ()
        call = {argument: value for argument, value in call.items() if argument not in sides}
        return pipeline(**call, guidance_scale=scale).images
    if row.frames is None:
        return pipeline(**call, latents=packed(noise), true_cfg_scale=scale).images
    call |= {"num_frames": row.frames, "max_sequence_length": row.options["text_tokens"]}
    call |= {name: row.options[name] for name in row.options if name == "guidance_scale_2"}
    return pipeline(**call, latents=noise, guidance_scale=scale).frames.transpose(1, 2)


@pytest.mark.parametrize("name", ["wan", "xl-inpaint"])
def test_a_grey_image_is_one_in_colour(name: str, folders: Folders, tmp_path: Path) -> None:
    model, noise = opened(name, folders(name)), np.random.default_rng(0)
    grey = {argument: Image.fromarray(noise.integers(0, 256, SIZE, np.uint8)) for argument in model.takes}
    both = [MediaPrompt("", {each: write_image(grey[each].convert(mode)) for each in grey}) for mode in ("L", "RGB")]
    one, other = model.encode(both).image
    assert torch.equal(one, other)


@torch.no_grad()
def sampled(model: Any, noise: Tensor, prompts: list[MediaPrompt], scale: float) -> Tensor:
    schedule, cond, module = model.schedule(STEPS, tuple(noise.shape[1:])), model.encode(prompts), model.build().eval()
    assert len(schedule.timesteps) == STEPS
    if scale != 1:
        opposed = model.encode([MediaPrompt("bad", prompt.media) for prompt in prompts])
        cond = Guided(cond, opposed, torch.full((len(noise),), scale))
    x = tiny_pipelines.sampled(model, module, noise, cond, schedule, forwards="two").final
    return decode_samples(model, x, prompts)


@pytest.mark.long
@pytest.mark.parametrize(("name", "scale"), [*((name, 3.5) for name in ROWS), *((name, 1.0) for name in UNGUIDED)])
def test_images_are_the_pipelines_own(
    name: str, scale: float, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time within 1e-5 in float32, in a batch of two within 2e-5; another image gives another sample."""
    model = opened(name, folders(name))
    prompts, noise = prompts_of(model, name, tmp_path), start(model, 2, ROWS[name].pixels)
    pairs = list(zip(prompts, noise.split(1), strict=True))
    expected = torch.cat([theirs(name, folders(name), *one, scale, monkeypatch) for one in pairs])
    found = sampled(model, noise, prompts, scale)
    alone = torch.cat([sampled(model, start, [one], scale) for one, start in pairs])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)  # sums over two samples round differently
    assert expected.std() > 0.05
    if name.endswith("mixed"):
        return
    swapped = [MediaPrompt(text, other.media) for text, other in zip(TEXTS, prompts[::-1], strict=True)]
    assert (sampled(model, noise, swapped, scale) - found).abs().flatten(1).amax(1).min() > 1e-3


@each
@pytest.mark.long
def test_an_encoding_is_cached_by_text_and_images(
    name: str, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits from the cache, whose VAE encodes each image once, and which needs no encoders the second time."""
    plain = opened(name, folders(name))
    prompts, latents = prompts_of(plain, name, tmp_path), start(plain, 2, ROWS[name].pixels)

    def encode(model: Any) -> tuple[Any, Tensor, int]:
        seen, own = [], model.vae.encode
        monkeypatch.setattr(model.vae, "encode", lambda images: seen.append(images) or own(images))  # type: ignore[func-returns-value]
        return model.encode([*prompts, prompts[0]]), decode_samples(model, latents, prompts), len(seen)

    expected, images, count = encode(plain)
    for times in (count // 2 if getattr(plain, "decodes_prompts", False) else count, 0):
        model = opened(name, folders(name), cache=tmp_path / "texts")
        if not times:
            model._load_parts = None
        found = encode(model)
        assert all(a is None or torch.equal(a, b) for a, b in zip(expected, found[0], strict=True))
        assert torch.equal(found[1], images)
        assert found[2] == times
        assert len(list((tmp_path / "texts").iterdir())) == 2
    other = opened(name, folders(name), cache=tmp_path / "texts")
    other.encode([MediaPrompt(TEXTS[0], prompts[1].media)])
    assert len(list((tmp_path / "texts").iterdir())) == 3


def test_the_mask_of_given_frames(folders: Folders, tmp_path: Path) -> None:
    for name, last in (("wan", 0.0), ("wan-last", 1.0)):
        model = opened(name, folders(name))
        mask = model.encode(prompts_of(model, name, tmp_path)).image[:, : model.rate].amax((3, 4))
        assert torch.equal(mask, mask.new_tensor([[1, 0, 0], [1, 0, last]]).expand(2, 2, 3))


def test_tokens_of_the_image_follow_those_of_the_sample(folders: Folders, tmp_path: Path) -> None:
    counts = []
    for name in ("qwen-edit", "qwen-edit-mixed"):
        model = opened(name, folders(name))
        cond = model.encode(prompts_of(model, name, tmp_path))
        x = torch.zeros(2, 4, 8, 12)
        assert model.build_network_input(x, cond).shape == (2, 24 + cond.image.shape[1], 16)
        counts.append((cond.image.shape[1], None if cond.grid is None else cond.grid.tolist()))
    assert counts[0] == (3 * 5, None)
    assert counts[1] == (72, [[6, 3], [3, 5]])


def test_samples_with_images_of_unlike_shapes_do_not_depend_on_each_other(folders: Folders, tmp_path: Path) -> None:
    model = opened("qwen-edit-mixed", folders("qwen-edit"))
    module, prompts = model.build().eval(), prompts_of(model, "qwen-edit-mixed", tmp_path)
    x, level = start(model, 2, (16, 24)), torch.tensor([0.9, 0.4])
    with torch.no_grad():
        both = model.predict(module, x, level, model.encode(prompts))
        for row in range(2):
            alone = model.predict(module, x[row : row + 1], level[row : row + 1], model.encode(prompts[row : row + 1]))
            assert torch.equal(alone, both[row : row + 1])


def test_images_that_are_missing_or_too_many_are_named() -> None:
    """By the prompt and the argument, with what it takes."""
    two = {"image": (b"1", b"2")}
    check_media(MediaPrompt("a red fox", two), ("image",), ("image",))
    for media, lists, says in (
        ({}, (), "has no image: give its record a column image with an image$"),
        ({}, ("image",), "has no image: give its record a column image with an image or a list of images$"),
        (two, (), "has 2 images in image, expected one$"),
    ):
        refuses(f"^prompt 'a red fox' {says}", check_media, MediaPrompt("a red fox", media), ("image",), lists)


def test_what_an_adapter_cannot_use_is_refused(folders: Folders, tmp_path: Path) -> None:
    """A prompt without its image, other sizes, images of other shapes, and a last frame that there is no place for."""
    wan, edit, mixed, unet = (opened(name, folders(name)) for name in ("wan", "qwen-edit", "qwen-edit-mixed", "sd-inpaint"))
    several = opened("qwen-edit-plus", folders("qwen-edit-plus"), mixed_images=True)
    short = opened("qwen-edit", folders("qwen-edit"))
    short.check_prompt, short.text_tokens = lambda prompt: None, 133  # which counts the text alone
    long_image = tiny_conditioned.draw_image(tmp_path / "long.png", 0, (10, 50))
    masked = {**prompts_of(unet, "sd-inpaint", tmp_path)[0].media, "image": long_image}

    def encode(model: Any, media: Any) -> Callable[[], Any]:
        return lambda: model.encode([MediaPrompt("a red fox", media)])

    for call, says in (
        *(
            (encode(model, {}), "prompt 'a red fox' has no image: .* a column image with an image")
            for model in (wan, edit, unet)
        ),
        (lambda: wan.latent_shape(16, 16, 5), "the size is 16x16x5, expected 16x32x5"),
        (lambda: unet.latent_shape(8, 8), "the size is 8x8, expected that of the images, 16x24"),
        (
            lambda: edit.encode([prompts_of(edit, "qwen-edit-mixed", tmp_path)[0]]),
            "has 20x40 pixels, which are scaled to 12x24, expected 20x12, those of 24x16",
        ),
        (encode(mixed, {"image": long_image}), "has 50x10 pixels, expected sides of a ratio of at most 4: crop it"),
        (encode(unet, masked), "prompt 'a red fox' has 50x10 pixels, expected 24x16, the size of the samples"),
        (encode(several, {"image": (long_image, long_image)}), "several images, expected one with mixed_images=true"),
        (lambda: opened("wan-clip", folders("wan-clip"), text_tokens=16), "text_tokens is 16, expected 512"),
        (lambda: opened("wan-last", folders("wan"), frames=1), "last_image is true, but there are 1 frames"),
        *(
            (lambda name=name, last=last: opened(name, folders(name), last_image=last), f"{says}: leave it out")
            for name, last, says in (
                ("wan-clip", True, "last_image is true, but its network takes the embedding of one frame"),
                ("wan-both", False, "last_image is false, but its network takes embeddings of two frames"),
            )
        ),
        (
            lambda: short.encode(prompts_of(short, "qwen-edit", tmp_path)),
            "has 137 tokens with its image, expected at most 133",
        ),
    ):
        refuses(says, call)


@pytest.mark.long
def test_a_network_without_channels_of_images_is_refused(tmp_path: Path) -> None:
    folder = tiny_conditioned.save("wan-first-frame", tmp_path / "wan")
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace('"expand_timesteps": true', '"expand_timesteps": false'))
    refuses("transformer has 4 input channels, expected 10", open_model, folder)


@pytest.mark.long
@pytest.mark.parametrize("name", ["wan", "wan-clip", "qwen-edit"])
def test_steps_may_leave_out_blocks(name: str, folders: Folders, tmp_path: Path) -> None:
    model = opened(name, folders(name))
    module, x = model.build().eval(), start(model, 2, ROWS[name].pixels)
    cond = model.encode(prompts_of(model, name, tmp_path))
    counts = []
    cache = StepCache(model, module, 0.5)
    handle = next(model.blocks(module)[-1].children()).register_forward_hook(lambda *_: counts.append(1))
    with torch.no_grad():
        for level in (0.9, 0.899):
            with cache.prediction(exact=False):
                model.predict(module, x, torch.full((2,), level), cond)
    handle.remove()
    assert len(counts) == 1


def records(name: str, folder: Path, takes: tuple[str, ...]) -> Path:
    lines, row = [], ROWS[name]
    for number, text in enumerate((*TEXTS, "an owl")):
        files = {argument: f"{name}-{number}-{place}.png" for place, argument in enumerate(takes)}
        for place, (argument, file) in enumerate(files.items()):
            draw(argument, 10 * number + place, row.images[number % 2], folder / file)
        columns = {argument: [one, one] if row.several else one for argument, one in files.items()}
        lines.append(json.dumps({"prompt": text, **columns}))
    (written := folder / f"{name}.jsonl").write_text("\n".join(lines))
    return written


SHORT = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch 2 --updates 2 "
    "--passes.minibatches 1 --final-samples 2 --evaluation.every 0 --sampling.guidance.scale 3 "
    "--sampling.guidance.negative bad --train lora --tracker none"
)


def typed(name: str, folder: Path, work: Path, *more: str, recipe: str = "") -> list[str]:
    """Write prompts with images, and return the command line that trains a row's pipeline on them, without its output."""
    takes = (
        EDITS[name].media if name in UNETS else ("image", "last_image") if name in ("wan-last", "wan-both") else ("image",)
    )
    recipe = recipe or ("ddpo" if name in UNETS else "grpo")
    model = ["--model", str(folder), "--prompts", str(records(name, work, takes))]
    cached = ["--pipeline.text-cache", str(work / "texts")]
    return launch.rewarded("train", recipe, *model, *cached, *SHORT.split(), *ROWS[name].call, *more)


def updates_of(words: list[str], out: Path, capfd: Captured) -> list[dict[str, Any]]:
    """Run a command line, and return the records of its updates."""
    assert cli.run([*words, "--out", str(out)]) == 0, capfd.readouterr().err
    return [record for record in launch.records(out) if "grad_norm" in record]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "compute"), [*((name, "bfloat16") for name in ROWS), *((name, "float32") for name in EVALUATED)]
)
def test_a_run_trains_an_adapter_that_the_pipeline_opens(
    name: str, compute: str, folders: Folders, tmp_path: Path, capfd: Captured
) -> None:
    """By the command line; the first ratio is exactly 1, and what is exported is evaluated as the run evaluated it."""
    out = tmp_path / "run"
    precision = ("--engine.compute", compute, "--pipeline.frozen", compute)
    updates = updates_of(typed(name, folders(name), tmp_path, *precision), out, capfd)
    assert [record["first_pass_max_abs_log_ratio"] for record in updates] == [0.0, 0.0]
    assert updates[0]["grad_norm"] > 0
    pipeline = tiny_conditioned.load(folders(name))
    if name.startswith("wan-experts"):
        pipeline.load_lora_weights(out / "lora" / "transformer")
        pipeline.load_lora_weights(out / "lora" / "transformer_2", load_into_transformer_2=True)
        assert pipeline.transformer_2.peft_config
    else:
        pipeline.load_lora_weights(out / "lora")
    network = pipeline.unet if name in UNETS else pipeline.transformer
    assert network.peft_config
    embedded = any(".add_k_proj.lora_A" in part for part, _ in network.named_parameters())
    assert embedded == (name in ("wan-clip", "wan-both") or name.startswith("qwen"))
    if compute == "float32":
        assert cli.run(["eval", str(out), "--out", str(tmp_path / "table")]) == 0, capfd.readouterr().err
        rows = json.loads((tmp_path / "table" / "table.json").read_text())["rows"]
        expected = json.loads((out / "summary.json").read_text())["jpeg_score_after"]
        assert next(row["mean"] for row in rows if row["evaluator"] == "jpeg") == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("name", [*UNETS, "wan", "wan-first-frame", "qwen-edit-plus-mixed", "qwen-edit-mixed"])
def test_further_options_train(name: str, folders: Folders, tmp_path: Path, capfd: Captured) -> None:
    """A reference with another scale of guidance; edits of several sizes; noised samples, at any level."""
    several = name == "qwen-edit-mixed"
    recipe, more = "", ["--kl.coef", "0.1", "--kl.guidance", "2", "--sampling.window", "all"]
    if name not in UNETS:
        more = ["--pipeline.sizes", "16x16", "24x16"] if several else ["--noising.each", "2"]
        recipe = "" if several else "nft"
    words = typed(name, folders(name), tmp_path, *more, recipe=recipe)
    if several:
        words = words[: (at := words.index("--pipeline.height"))] + words[at + 4 :]
    updates = updates_of(words, tmp_path / "run", capfd)
    if name in UNETS:
        assert updates[0]["objective"]["kl_ref"] > 0
    if recipe:
        assert [record["grad_norm"] > 0 for record in updates] == [True, True]
    else:
        assert updates[0]["first_pass_max_abs_log_ratio"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", UNETS)
def test_a_run_from_a_server_trains_the_same_adapter(name: str, folders: Folders, tmp_path: Path) -> None:
    (folder := tmp_path / "model").symlink_to(folders(name))
    words = typed(name, folder, tmp_path)[1:]
    ended = wait([Forked(lambda: cli.run(["train", *words, "--out", str(tmp_path / "run")]), tmp_path / "run.txt")])
    assert ended.code == 0, ended.output
    assert pipelines._train_served(words, tmp_path, cli.run, recorded=False) == "yes"


def test_images_that_a_run_cannot_use_are_refused_before_it(folders: Folders, tmp_path: Path, capfd: Captured) -> None:
    """In one line: an image that is not asked for, one of another size, and options without a meaning."""
    for name, takes, more, says in (
        ("wan", ("image", "last_image"), (), "has a column last_image, which would be ignored"),
        ("sd-image", ("image",), ("--pipeline.height", "24"), "has 24x16 pixels, expected 24x24, the size of the samples"),
        (
            "qwen-edit",
            ("image",),
            ("--pipeline.call", "mixed_images=no"),
            "mixed_images=no, expected a number, true or false",
        ),
        ("wan", ("image",), ("--pipeline.call", "frames=9"), "--pipeline.call has no effect with an adapter"),
    ):
        words = typed(name, folders(name), tmp_path, *more)
        records(name, tmp_path, takes)
        capfd.readouterr()
        assert cli.run([*words, "--out", str(tmp_path / "run")]) == 2
        assert says in launch.one_line(capfd.readouterr().err)


@pytest.mark.long
@pytest.mark.parametrize("name", ["wan", "wan-clip", "wan-first-frame", "qwen-edit", "qwen-edit-plus-several", *UNETS])
def test_samples_are_drawn_of_a_file_of_prompts_with_images(
    name: str, folders: Folders, tmp_path: Path, capfd: Captured
) -> None:
    takes = EDITS[name].media if name in UNETS else ("image",)
    lines, drawn = records(name, tmp_path, takes).read_text().splitlines(), []
    start = ["sample", str(folders(name)), "--steps", "3", "--each", "1", *ROWS[name].call]
    for number, line in enumerate((lines[0], lines[0].replace(f"{name}-0-0", f"{name}-2-0"))):
        (file := tmp_path / f"{number}.jsonl").write_text(line)
        out = tmp_path / f"{number}.png"
        assert cli.run([*start, "--prompts", str(file), "--out", str(out)]) == 0, capfd.readouterr().err
        drawn.append(np.asarray(Image.open(out)))
    assert (drawn[0] != drawn[1]).any()
    capfd.readouterr()
    assert cli.run([*start, "--prompts", "a red fox", "--out", str(tmp_path / "x.png")]) == 2
    assert "prompt 'a red fox' has no column image" in launch.one_line(capfd.readouterr().err)
