"""Pipelines that are not replayed: changed samples, left-out steps, other initial noise, other images, exceptions."""

import copy
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_replayed
from helpers.marks import Folders, Patch
from helpers.refusals import refuses
from helpers.tiny_replayed import PROMPTS
from torch import Tensor

from fluvial.core.random import key, normal
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.checks import ReplayError, check_chain, check_images, check_initial_noise, check_tail, wrap_errors
from fluvial.models.tiny.pipelines import build, build_random, save_pipeline

STEPS = 4
SIZE: dict[str, Any] = {"height": 16, "width": 16, "steps": STEPS}
IMAGE = torch.linspace(0, 1, 3 * 16 * 16).reshape(1, 3, 16, 16)
MASK = (torch.arange(16) < 8).float().expand(1, 1, 16, 16)
SHORT = {"max_sequence_length": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("pipelines")

    def of(name: str) -> Path:
        if name in tiny_replayed.ROWS:
            tiny_replayed.load(name, root / name)
        elif not (root / name).exists():
            save_pipeline(build_random(partial(build, name), 0.1), root / name)
        return root / name

    return of


def refused(model: Callable[[], Any], says: str) -> None:
    refuses(says, model)


def test_inpainting_is_refused_at_the_first_blended_step(folder: Folders) -> None:
    """FluxInpaintPipeline starts from noise with strength 1, and mixes the image's latents in after every step."""
    call = {"image": IMAGE, "mask_image": MASK, "strength": 1.0, **SHORT}
    model = AnyPipeline(folder("FluxInpaintPipeline"), call=call, scale=2.5, **SIZE)
    refused(
        lambda: model.latent_shape(16, 16),
        r"^FluxInpaintPipeline cannot be trained without an adapter: at step 1 the sample differs from the output of the "
        r"step before by [\d.]+ of its norm: the pipeline changes samples between steps",
    )


def test_an_image_that_a_pipeline_cannot_repeat_is_one_line(folder: Folders) -> None:
    call = {"image": IMAGE[:, :2], "strength": 0.5, **SHORT}
    model = AnyPipeline(folder("StableDiffusion3Img2ImgPipeline"), call=call, scale=2.5, **SIZE)
    refused(
        lambda: model.known,
        r"^StableDiffusion3Img2ImgPipeline cannot be called with .* image=tensor\[1, 2, 16, 16\], strength=0.5, .*: "
        "RuntimeError: ",
    )


@pytest.mark.long
def test_a_pipeline_that_fails_on_several_samples_makes_them_one_by_one(folder: Folders) -> None:
    """StableDiffusion3Img2ImgPipeline fails on one image for several; each pair of a pass is alone, as the samples were."""
    call = {"image": IMAGE, "strength": 0.5, **SHORT}
    model = AnyPipeline(folder("StableDiffusion3Img2ImgPipeline"), call=call, scale=2.5, **SIZE)
    assert model.known.model.ragged
    assert model.check(model.build().eval(), PROMPTS[:2]) < 1e-5
    assert model.decode(torch.zeros(3, *model.known.shape)).shape == (3, 3, 16, 16)


def test_what_depends_on_one_samples_noise_is_refused(folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"image": IMAGE, "strength": 0.5, **SHORT}
    model = AnyPipeline(folder("StableDiffusion3Img2ImgPipeline"), call=call, scale=2.5, **SIZE)
    prepare = type(model._load_pipeline()).encode_prompt

    def noisy(self: Any, *args: Any, **more: Any) -> Any:
        *found, pooled, other = prepare(self, *args, **more)
        return (*found, pooled + torch.randn(()), other)

    monkeypatch.setattr(type(model._load_pipeline()), "encode_prompt", noisy)
    says = "its transformer gets an input other than the sample that depends on the sample"
    refused(lambda: list(model._try_copies(model._load_pipeline(), PROMPTS[0], single=[True])), says)


@pytest.mark.long
def test_encoded_prompts_are_cached_by_every_pixel_of_an_argument(folder: Folders) -> None:
    prints = []
    for value in (0.0, 0.5):
        image = torch.zeros(1, 3, 64, 64)
        image[0, 0, 32, 32] = value
        call = {"image": image, "strength": 1.0, **SHORT}
        prints.append(AnyPipeline(folder("FluxImg2ImgPipeline"), call=call, scale=2.5, **SIZE)._fingerprint_encoders())
    assert prints[0] != prints[1]


@pytest.mark.long
def test_initial_samples_that_are_no_noise_are_refused(folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_replayed.opened("sana", folder("sana"))
    kind = type(model._load_pipeline())
    prepare = kind.prepare_latents
    changes: list[Callable[[Tensor], Tensor]] = [lambda x: 0.8 * x, lambda x: x + 0.5, lambda x: x.sign()]
    for change in changes:
        monkeypatch.setattr(kind, "prepare_latents", lambda *args, change=change, **kwargs: change(prepare(*args, **kwargs)))
        refused(lambda: model.known, "^SanaPipeline .* its initial samples are not standard normal noise: mean")


@pytest.mark.long
def test_images_that_are_decoded_otherwise_are_refused(folder: Folders) -> None:
    """A pipeline that changes its latents after the last step ends in images that the rollout would not make."""
    model = tiny_replayed.opened("sana", folder("sana"))
    module = model.build().eval()
    model.check(module, PROMPTS[:2])
    pipe = model._load_pipeline()
    decode = pipe.vae.decode
    runs_own = [True]

    def first_brighter(*args: Any, **kwargs: Any) -> Any:
        found = decode(*args, **kwargs)
        return (found[0] + 0.3,) if runs_own and runs_own.pop() else found  # the run decodes its own images first

    pipe.vae.decode = first_brighter
    refused(
        lambda: model.check(module, PROMPTS[:2]), r"^SanaPipeline .* its last samples, decoded, differ from its own images"
    )


def twins(patch: Patch, kind: Any) -> None:
    call = kind.__call__

    def two(self: Any, *args: Any, generator: Any, **more: Any) -> Any:
        generator = generator[0] if isinstance(generator, list) else generator
        more |= {"prompt": "a fox", "num_images_per_prompt": 2}
        return call(self, *args, generator=generator, **more)

    patch.setattr(kind, "__call__", two)


def late(patch: Patch, kind: Any) -> None:
    module = sys.modules[kind.__module__]
    timesteps = module.retrieve_timesteps

    def fewer(scheduler: Any, steps: int, *args: Any) -> tuple[Tensor, int]:
        found, _ = timesteps(scheduler, steps + 1, *args)
        return found[1:], steps

    patch.setattr(module, "retrieve_timesteps", fewer)


def restless(patch: Patch, kind: Any) -> None:
    call, count = kind.__call__, itertools.count()
    patch.setattr(kind, "__call__", lambda *args, **more: call(*args, attention_kwargs={"of": next(count)}, **more))


ALTERED: dict[str, tuple[Callable[[Patch, Any], None], str]] = {
    "twins": (twins, "it makes 2 samples of a prompt, although 3 were requested"),
    "late": (late, f"it takes the last {STEPS} steps only, and does not start from an image"),
    "interrupted": (lambda patch, kind: patch.setattr(kind, "interrupt", True), "its scheduler takes no step"),
    "restless": (restless, "its transformer is given inputs of unlike kinds for different noise"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_a_pipeline_that_lacks_a_property_is_refused(name: str, folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    alter, says = ALTERED[name]
    model = tiny_replayed.opened("sana", folder("sana"))
    alter(monkeypatch, type(model._load_pipeline()))
    refused(lambda: model.known, f"^SanaPipeline cannot be trained without an adapter: {says}$")


def test_a_run_that_differs_from_the_first_or_fails_is_refused(folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_replayed.opened("sana", folder("sana"))
    module, kind = model.build().eval(), type(model._load_pipeline())
    refused(lambda: model.decode_sounds(torch.zeros(1, *model.known.shape)), "^SanaPipeline makes no sounds$")
    with monkeypatch.context() as patch:
        prepare = kind.prepare_latents

        def shifted(self: Any, *args: Any) -> Tensor:
            self.scheduler.set_shift(5.0)
            self.scheduler.set_timesteps(STEPS)
            return prepare(self, *args)

        patch.setattr(kind, "prepare_latents", shifted)
        refused(lambda: model.check(module, PROMPTS[:2]), "^SanaPipeline .* its schedule differs from run to run$")

    def fail(*args: Any) -> None:
        raise MemoryError

    module.register_forward_hook(fail)
    for number in (1, 2):
        refused(lambda number=number: model.check(module, PROMPTS[:number]), "^SanaPipeline cannot be run: MemoryError$")  # type: ignore[misc]


EXCEPTIONS: dict[str, tuple[type[Exception], str]] = {
    "encode_prompt": (NameError, "be called with .*height=32.*: NameError: name 'ftfy' is not defined; and a second line$"),
    "prepare_latents": (NotImplementedError, "be called with .*height=32, .*: NotImplementedError: name 'ftfy'"),
}


@pytest.mark.parametrize("method", EXCEPTIONS)
def test_an_exception_of_the_pipeline_is_one_line(method: str, folder: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, says = EXCEPTIONS[method]
    model = tiny_replayed.opened("sana", folder("sana"))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise kind("name 'ftfy' is not defined;\nand a second line")

    pipe: Any = model._load_pipeline()
    monkeypatch.setattr(type(pipe), method, fail)
    refused(lambda: model.known, f"^SanaPipeline cannot {says}")
    assert type(pipe.scheduler).__name__ == "FlowMatchEulerDiscreteScheduler"


def test_an_exception_of_a_tokenizer_or_vae_is_one_line(folder: Folders) -> None:
    """A processor in the tokenizer's place takes no bare text; a VAE may lack memory."""
    model = tiny_replayed.opened("sana", folder("sana"))
    shape = model.latent_shape(32, 32)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    pipe = model._load_pipeline()
    pipe.vae.decode = fail
    refused(lambda: model.decode(torch.zeros(1, *shape)), "^SanaPipeline cannot decode samples: MemoryError$")
    own = pipe.tokenizer
    pipe.tokenizer = _refusing(own)
    refused(lambda: model.check_prompt("a fox"), "^SanaPipeline cannot tokenize the prompt 'a fox': TypeError: no images")
    pipe.tokenizer = own
    del own.model_max_length
    refused(
        lambda: model.check_prompt("a fox"),
        "^SanaPipeline cannot count the tokens of prompts: AttributeError: .*model_max_length",
    )


def _refusing(tokenizer: Any) -> Any:
    def refuse(self: Any, text: str) -> Any:
        raise TypeError("no images were given")

    other = copy.copy(tokenizer)
    other.__class__ = type("Refusing", (type(tokenizer),), {"__call__": refuse})
    return other


def test_the_tokenizer_inside_a_processor_counts(folder: Folders) -> None:
    from transformers import ProcessorMixin

    model = tiny_replayed.opened("sana", folder("sana"))
    pipe = model._load_pipeline()
    own = pipe.tokenizer
    processor = ProcessorMixin.__new__(type("Processor", (ProcessorMixin,), {}))
    processor.tokenizer = own
    pipe.tokenizer = processor
    assert model.find_token_limit(pipe) == (own, 24)
    model.check_prompt("a fox")
    pipe.tokenizer = None
    refused(lambda: model.check_prompt("a fox"), "^SanaPipeline has no tokenizer: it makes no images from text$")


def noise(*shape: int) -> Tensor:
    return normal(key(3), shape)


def test_normal_noise_passes_and_other_noise_does_not() -> None:
    for shape in ((3, 4, 8, 8), (3, 16, 16), (2, 40000), (1, 4, 32, 32)):
        check_initial_noise("P", noise(*shape))
        check_initial_noise("P", noise(*shape).bfloat16())
    x = noise(3, 4, 16, 16)
    partly = 0.8 * x + 0.6 * x[:1] * torch.tensor([0.0, 1, 1])[:, None, None, None]
    uniform = 3**0.5 * (2 * torch.rand_like(x) - 1)
    for other in (x * 0.7, x * 1.4, x + 0.4, uniform, x[:1].expand_as(x), partly, x * torch.nan):
        refuses(r"P cannot be trained .* not standard normal noise", check_initial_noise, "P", other)


def test_steps_and_images_agree_up_to_a_cast_or_rounding() -> None:
    x = noise(2, 4, 4)
    check_chain("P", 1, x, x.clone())
    check_chain("P", 1, x.bfloat16(), x)
    check_chain("P", 1, x.bfloat16().float(), x.bfloat16())
    for other in (x + 1e-6, x.bfloat16().float()):
        with pytest.raises(ReplayError, match="P cannot be trained without an adapter: at step 2 the sample differs"):
            check_chain("P", 2, other, x)
    with pytest.raises(
        ReplayError, match=r"at step 2 the sample has shape \(2, 16\), and the step before returned \(2, 4, 4\)"
    ):
        check_chain("P", 2, x.flatten(1), x)
    images = noise(2, 3, 4, 4).sigmoid()
    assert check_images("P", images * (1 + 1e-6), images, tolerance=1e-4) == pytest.approx(1e-6, rel=0.1)
    with pytest.raises(ReplayError, match=r"decoded, differ from its own images by 0\.01 of their norm"):
        check_images("P", images * 1.01, images, tolerance=1e-4)
    with pytest.raises(ReplayError, match="its images have shape"):
        check_images("P", images[:, :1], images, tolerance=1e-4)


def test_the_last_steps_are_taken_once_in_order() -> None:
    """Image to image leaves out the first steps of its schedule, and no others."""
    assert check_tail("P", (0, 1, 2), 3, 3) == 0
    assert check_tail("P", (2, 3, 4), 5, 3) == 2
    wrong: tuple[tuple[tuple[int, ...], int], ...] = ((1, 2), 3), ((0, 1), 3), ((0, 2, 1), 3), ((1, 2, 3), 5), ((2, 4), 5)
    for taken, steps in (*wrong, ((1, 2, 3, 4), 5)):
        shown = ", ".join(map(str, taken))
        refuses(
            f"it takes the steps {shown} of a schedule of {steps}, expected the last 3", check_tail, "P", taken, steps, 3
        )
    refuses("it takes the steps none of a schedule of 3", check_tail, "P", (), 3, 3)


def test_refusals_pass_through_and_other_exceptions_name_the_pipeline() -> None:
    with pytest.raises(ReplayError, match=r"^own$"), wrap_errors("P", "run"):
        raise ReplayError("own")
    with pytest.raises(ValueError, match=r"^P cannot run: KeyError: 'x'$"), wrap_errors("P", "run"):
        raise KeyError("x")
    with pytest.raises(KeyboardInterrupt), wrap_errors("P", "run"):
        raise KeyboardInterrupt
