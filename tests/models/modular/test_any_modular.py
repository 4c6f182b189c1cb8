"""Modular pipelines as models, over one table of tiny random ones: their samples, velocities, gradients, and refusals."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import tiny_modular
from helpers.marks import Folders, Patch, long
from helpers.refusals import refuses
from helpers.tiny_modular import REFUSED, STEPS, TRAIN, opened, prompts
from PIL import Image
from torch import Tensor, nn

from fluvial.core.random import key, normal
from fluvial.core.transitions import bind
from fluvial.engines.engine.world import World
from fluvial.engines.export.model_folder import write_lora
from fluvial.models import is_recorded, knows_any_level
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.modular import any_modular
from fluvial.models.modular.blocks import ProbedNetwork, wrap_media
from fluvial.models.pipelines.folder import read_settings
from fluvial.models.replay.media import use_modes
from fluvial.models.tiny.modular import find_call
from fluvial.models.tiny.pipelines import replace_surroundings

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
SHORT = ("Flux3", "MiniMaxH3")  # in every run of the tests
# Pipelines whose samples share the passes of the network, with prompts of unlike lengths.
TOGETHER = (
    *("Echo", "Flux3", "Flux2", "Flux2Klein", "Flux2KleinBase", "FluxKontext", "Ideogram4", "Krea2"),
    *("Krea2Turbo", "LTX", "LTX2", "LTX25", "StableDiffusion3", "Wan", "Wan22"),
)
few = pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in TRAIN])
each = pytest.mark.parametrize("name", [name if name == "Flux3" else long(name) for name in TRAIN])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("modular")
    return lambda name: tiny_modular.folder_of(name, root / name)


@pytest.fixture(autouse=True)
def small(request: pytest.FixtureRequest) -> Iterator[None]:
    name = getattr(request.node, "callspec", None)
    kind = f"{name.params['name']}ModularPipeline" if name is not None and "name" in name.params else "Flux3ModularPipeline"
    with replace_surroundings(kind, find_call(kind).size):
        yield


def both(model: Any, module: nn.Module, pipe: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the images and sounds of the ODE from the noise of diffusers' own call, and those of that call."""
    prompt, steps = model.example, model.known.requested_steps
    generator = torch.Generator().manual_seed(any_modular._compute_seed(prompt))
    state, cond = pipe(**model._build_arguments(prompt, steps), generator=generator), model.encode([prompt])

    def velocity(x: Tensor, level: Tensor, step: int) -> Tensor:
        return model.predict(module, x, level, cond)

    loop_inputs = model._enter(prompt, steps)
    with torch.no_grad():
        final = model._roll_out(velocity, model._read_initial_samples(loop_inputs), loop_inputs)
    ours, again, theirs = model._decode_chunk(final, prompt), model._decode_chunk(final, prompt), model._read_output(state)
    assert all(one is None or torch.equal(one, other) for one, other in zip(ours, again, strict=True))
    assert theirs.images is not None or theirs.waves is not None
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            yield one, other


@pytest.mark.bits
@few
def test_samples_are_those_of_diffusers_own_call(name: str, folder: Folders) -> None:
    """From the same noise the ODE, or Echo's steps, end at those of the pipeline's call, to the bit or as its row says."""
    model, pipe = opened(name, folder(name)), tiny_modular.loaded(name, folder(name))
    if isinstance(pipe.vae, nn.Module):
        use_modes(pipe.vae)
    for one, other in both(model, model.build().eval().requires_grad_(False), pipe):
        assert float((one - other).norm() / other.norm()) <= TRAIN[name].error


@pytest.mark.parametrize("name", ["Flux3", *(long(name) for name in ("QwenImage", "Wan22", "LTX2", "StableDiffusion3"))])
def test_an_exported_adapter_opens_in_diffusers(name: str, folder: Folders, tmp_path: Path, one: World) -> None:
    """With the loader of the pipeline's class, and the images are those of the network that was adapted."""
    model, pipe = opened(name, folder(name)), tiny_modular.loaded(name, folder(name))
    module = model.build().eval().requires_grad_(False)
    (before, _), *_ = both(model, module, pipe)
    add_lora(module, LoraConfig(rank=2, alpha=2.0), model.lora_targets, seed=0)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05
    write_lora(module, tmp_path, world=one)
    parts = [*module] if isinstance(module, nn.ModuleDict) else [""]
    for part in parts:
        pipe.load_lora_weights(tmp_path / part, **({"load_into_transformer_2": True} if part.endswith("_2") else {}))
    for ours, theirs in both(model, module, pipe):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert ours.shape != before.shape or not torch.allclose(ours, before, atol=1e-3)


@each
def test_the_check_passes_and_levels_are_known(name: str, folder: Folders) -> None:
    model = opened(name, folder(name))
    assert model.check(model.build().eval(), [*prompts(name, 1), *prompts(name)]) <= TRAIN[name].error  # one twice
    assert is_recorded(model)
    assert knows_any_level(model) == TRAIN[name].any_level
    module, levels, x = model.build(), model.known.levels, normal(key(1), (2, *model.known.shape))
    model.predict(module, x, levels[:2], model.encode(prompts(name)[:1] * 2)).square().sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.bits
@pytest.mark.parametrize("name", [name if name in ("Flux3", "Wan") else long(name) for name in TRAIN])
def test_velocities_depend_on_no_other_sample(name: str, folder: Folders) -> None:
    """Prompts of unlike lengths, at unlike steps, in other batches: the log-ratio of a recorded step is exactly 0.

    Where the pipeline's own call joins samples they share passes, and batches of other sizes round otherwise.
    """
    model = opened(name, folder(name))
    module, cond = model.build().eval(), model.encode([*prompts(name, 3), *prompts(name, 1)])
    levels = model.schedule(STEPS, model.known.shape).levels
    step, x = torch.tensor([0, 2, 1, 1]), normal(key(1), (4, *model.known.shape))
    count = count_passes(module)
    with torch.no_grad():
        together = model.predict(module, x, levels[step], cond)
        shares, calls = bool(model.known.model.joined), model.known.model.passes[0]
        assert shares == (name in TOGETHER)
        both = name == "Wan22"  # a pass of a batch on both sides of the boundary is one of each network
        assert len(count) == calls * (1 + both if shares else 4)
        for order in ([2, 0], [1], [1, 2, 3, 0]):
            apart = model.predict(module, x[order], levels[step[order]], tuple(row[order] for row in cond))
            error = float((apart - together[order]).norm() / apart.norm())
            assert error <= (1e-5 if shares and len(order) < 4 else 0), order


def count_passes(module: nn.Module) -> list[str]:
    """Return a list that grows by one with each pass of a network, or of one of two."""
    count = list[str]()
    for name, part in module.named_children() if isinstance(module, nn.ModuleDict) else [("", module)]:
        part.register_forward_pre_hook(lambda *_, name=name: count.append(name))
    return count


def test_prompts_of_unlike_lengths_share_no_pass(folder: Folders) -> None:
    """Of a pipeline that does not pad them to one; where those of a run have one length, a longer one is refused."""
    short, long_one = tiny_modular.TEXTS[0], " and ".join([tiny_modular.TEXTS[1]] * 9)
    model = opened("Flux3", folder("Flux3"))
    refuses("or larger ones, for the prompt 'two cats.* samples of both cannot be in one batch", model.encode, [long_one])
    model = model.adapt_to([short, long_one])
    assert not model.known.model.joined
    module, cond = model.build().eval(), model.encode([short, long_one])
    count = count_passes(module)
    with torch.no_grad():
        model.predict(module, normal(key(1), (2, *model.known.shape)), model.known.levels[:1].expand(2), cond)
    assert len(count) == 2 * model.known.model.passes[0]


class Wide(torch.overrides.TorchFunctionMode):
    """Keeps float64 where networks and blocks cast to float32, for finite differences."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, low = dict(kwargs or {}), (torch.float32, torch.bfloat16)
        wide = any(isinstance(one, Tensor) and one.dtype == torch.float64 for one in args)
        if function is Tensor.float and wide:
            return args[0]
        if wide and function in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if isinstance(one, torch.dtype) and one in low else one for one in args)
        if wide and kwargs.get("dtype") in low:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


@pytest.mark.parametrize("name", ["Flux3", *(long(name) for name in TRAIN if name not in ("Flux3", "Ideogram4"))])
def test_gradients_are_the_differences_of_the_loss(name: str, folder: Folders) -> None:
    """Of a step's log-probability, by the weights of a LoRA, in float64, along a random direction.

    Not of Ideogram 4, whose second network is frozen in float32.
    """
    model = opened(name, folder(name), compute=torch.float64)
    module = model.build().eval().double()
    add_lora(module, LoraConfig(rank=2, alpha=2.0), model.lora_targets, seed=0)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    source = torch.Generator().manual_seed(0)
    for parameter in trained:
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
    cond = tuple(row.double() if row.is_floating_point() else row for row in model.encode(prompts(name)[:1]))
    levels = model.schedule(STEPS, model.known.shape).levels
    sampler, eta = ("ddim", 1.0) if model.prediction == "epsilon" else ("flow_sde", 0.7)
    transition = bind(sampler, eta, levels)(levels[1:2].double(), levels[2:3].double())
    x, moved = (torch.randn(1, *model.known.shape, generator=source, dtype=torch.float64) for _ in range(2))

    def loss() -> Tensor:
        from fluvial.core.gaussian import log_prob

        with Wide():
            v = model.predict(module, x, levels[1:2], cond)
        return log_prob(transition, x, v, moved).sum()

    gradients = torch.autograd.grad(loss(), trained, allow_unused=True)
    assert sum(gradient is None or not gradient.any() for gradient in gradients) <= len(trained) // 2
    along = [torch.randn(parameter.shape, generator=source, dtype=torch.float64) for parameter in trained]
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, along, strict=True) if g is not None)
    ends = []
    with torch.no_grad():
        for size in (1e-5, -2e-5):
            for parameter, direction in zip(trained, along, strict=True):
                parameter.add_(size * direction)
            ends.append(float(loss()))
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


@each
def test_levels_between_those_of_the_schedule(name: str, folder: Folders) -> None:
    """The velocity at a level is the same whether another schedule has it, or none; or the level is refused."""
    model, other = opened(name, folder(name)), opened(name, folder(name), steps=STEPS + 2)
    if name in ("Cosmos3Distilled", "Echo", "Ideogram4"):  # whose number of steps is fixed
        other = model
    module, cond = model.build().eval(), model.encode(prompts(name)[:1])
    level = other.schedule(other.steps, other.known.shape).levels[1:2] if other is not model else torch.tensor([0.77])
    x = normal(key(1), (1, *model.known.shape))
    if not TRAIN[name].any_level:
        refuses("has no step at sigma", model.predict, module, x, level, cond)
        return
    with torch.no_grad():
        v = model.predict(module, x, level, cond)
        if other is not model:
            theirs = other.predict(module, x, level, other.encode(prompts(name)[:1]))
            torch.testing.assert_close(v, theirs, rtol=1e-3, atol=1e-4)
    assert not torch.equal(v, model.predict(module, x, model.known.levels[:1], cond))


@pytest.mark.parametrize("name", ["Flux3Distilled", *(long(name) for name in REFUSED if name != "Flux3Distilled")])
def test_what_is_no_velocity_is_refused(name: str, folder: Folders) -> None:
    refuses(rf"^{name}ModularPipeline cannot be trained .*{REFUSED[name]}$", lambda: opened(name, folder(name)).known)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [("Helios", {"frames": 13}, "it makes a sample in 3 chunks"), ("Echo", {"steps": 4}, "it takes 3: --sampling.steps 3$")],
)
def test_samples_in_chunks_and_steps_of_another_number_are_refused(
    name: str, asked: dict[str, int], says: str, folder: Folders
) -> None:
    refuses(says, lambda: opened(name, folder(name), **asked).known)


def test_a_network_that_keeps_what_it_computed_is_refused(folder: Folders) -> None:
    model = opened("Flux3", folder("Flux3"))
    module = model.build().eval()
    own, kept = module.forward, list[Any]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        kept.append(own(*args, **kwargs))
        return (kept[-1][0] + len(kept) * 1e-3,)

    forward.__signature__ = __import__("inspect").signature(own)  # type: ignore[attr-defined]
    module.forward = forward
    refuses("its velocity depends on earlier calls", model.check, module, prompts("Flux3"))


def test_a_step_that_changes_samples_is_refused(folder: Folders, monkeypatch: Patch) -> None:
    from diffusers.modular_pipelines.flux3.denoise import Flux3LoopAfterDenoiser

    own = Flux3LoopAfterDenoiser.__call__

    def blend(self: Any, components: Any, block_state: Any, **variables: Any) -> Any:
        components, block_state = own(self, components, block_state, **variables)
        block_state.latents = 0.5 * block_state.latents
        return components, block_state

    monkeypatch.setattr(Flux3LoopAfterDenoiser, "__call__", blend)
    refuses("its step changes latents besides what its scheduler returns", lambda: opened("Flux3", folder("Flux3")).known)


def test_a_loop_that_keeps_an_object_is_refused(folder: Folders, monkeypatch: Patch) -> None:
    """It may hold what the network computed with other weights."""
    run_to_loop = any_modular.run_to_loop

    def keep(*args: Any) -> Any:
        loop_inputs = run_to_loop(*args)
        kept = object()
        for values in loop_inputs.values:
            values["cache"] = kept
        return loop_inputs

    monkeypatch.setattr(any_modular, "run_to_loop", keep)
    refuses("its loop keeps a object, which may last", lambda: opened("Flux3", folder("Flux3")).known)


@pytest.mark.parametrize(
    ("guider", "settings"),
    [
        ("AdaptiveProjectedGuidance", {}),
        long("ClassifierFreeZeroStarGuidance", {"zero_init_steps": 0}),  # steps of zeros have no gradient
        long("TangentialClassifierFreeGuidance", {}),
        long("AdaptiveProjectedMixGuidance", {}),
    ],
)
def test_guiders_that_are_functions_of_the_outputs(
    guider: str, settings: dict[str, Any], folder: Folders, monkeypatch: Patch
) -> None:
    import diffusers

    place = any_modular.AnyModular._place_parts

    def with_guider(self: Any, pipe: Any, blocks: Any) -> None:
        pipe.update_components(guider=getattr(diffusers, guider)(**settings))
        place(self, pipe, blocks)

    monkeypatch.setattr(any_modular.AnyModular, "_place_parts", with_guider)
    model = opened("Flux3", folder("Flux3"))
    assert model.check(model.build().eval(), prompts("Flux3")) == 0
    assert type(model._load_pipeline().guider).__name__ == guider


@pytest.mark.long
def test_ltx_2_3_is_a_network_of_ltx_2(tmp_path: Path) -> None:
    """With gates, and cross-attention that is modulated by the other stream's time; its own call is the same to the bit."""
    import diffusers

    part = tiny_modular.folder_of("LTX2", tmp_path / "model") / "transformer"
    settings = dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True)
    network = diffusers.LTX2VideoTransformer3DModel.from_config({**read_settings(part / "config.json"), **settings})
    network.save_pretrained(part)
    with replace_surroundings("LTX2ModularPipeline", 32):
        model = opened("LTX2", part.parent, call={"use_cross_timestep": True})
        assert model.check(model.build().eval(), prompts("LTX2")) == 0


@pytest.mark.long
def test_steps_with_unlike_numbers_of_passes_are_refused(folder: Folders, monkeypatch: Patch) -> None:
    """As those of skip-layer guidance, which leaves out the first."""
    import diffusers

    layer = diffusers.hooks.LayerSkipConfig(indices=[0], fqn="blocks")
    guider = diffusers.SkipLayerGuidance(
        skip_layer_config=[layer], skip_layer_guidance_start=0.0, skip_layer_guidance_stop=1.0
    )
    place = any_modular.AnyModular._place_parts

    def with_guider(self: Any, pipe: Any, blocks: Any) -> None:
        pipe.update_components(guider=guider)
        place(self, pipe, blocks)

    monkeypatch.setattr(any_modular.AnyModular, "_place_parts", with_guider)
    with replace_surroundings("WanModularPipeline", 32):
        refuses(
            "its steps call the network 2 to 3 times, expected the same number in every step",
            lambda: opened("Wan", folder("Wan")).known,
        )


@pytest.mark.parametrize(
    ("name", "media"),
    [
        ("Flux3", ("image",)),
        *(long("MiniMaxH3", media) for media in (("image",), ("image", "last_image"), ("references",), ("references",) * 2)),
    ],
)
def test_images_of_prompts_choose_the_blocks(name: str, media: tuple[str, ...], folder: Folders) -> None:
    """References, first and last frames: other blocks run, and images and sounds change the velocity."""
    from fluvial.models.replay.kinds import Sound, write_sound
    from fluvial.models.replay.media import MediaPrompt

    def draw(seed: int) -> dict[str, Any]:
        files = [tiny_modular.draw(seed + number, 32) for number in range(len(media))]
        if "references" not in media:
            return dict(zip(media, files, strict=True))
        wave = torch.rand(2, 800, generator=torch.Generator().manual_seed(seed))
        return {"references": (files[0], write_sound(Sound(wave, 160)))[: len(media)]}

    asked = [MediaPrompt("a red fox", draw(seed)) for seed in range(2)]
    model = opened(name, folder(name), example=asked[0]).adapt_to(asked)
    module = model.build().eval()
    assert model.check(module, asked) <= TRAIN[name].error
    x = normal(key(0), (1, *model.known.shape)).expand(2, -1, -1)
    level = model.known.levels[:1].expand(2, *model.known.levels.shape[1:])
    with torch.no_grad():
        one, other = model.predict(module, x, level, model.encode(asked))
    assert not torch.equal(one, other)


@pytest.mark.long
def test_a_reference_has_the_class_of_its_kind_and_its_rate(folder: Folders) -> None:
    """An image, a video, and a sound; tiny ones of videos need torchvision, which the error says."""
    from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3Reference
    from diffusers.modular_pipelines.modular_pipeline_utils import InputParam

    from fluvial.models.replay.kinds import Frames, Sound, read_video
    from fluvial.models.replay.media import MediaPrompt

    image, blocks = Image.new("RGB", (8, 8)), SimpleNamespace(inputs=[InputParam("references", list[MiniMaxH3Reference])])
    media = [image, Frames([image] * 2, 12.5), Sound(torch.zeros(1, 4), 160)]
    made = wrap_media(blocks, {"references": media})["references"]  # type: ignore[arg-type]
    assert [(each.kind, getattr(each, "fps", None), getattr(each, "sample_rate", None)) for each in made] == [
        ("image", None, None),
        ("video", 12.5, None),
        ("audio", None, 160),
    ]
    (one,) = wrap_media(blocks, {"references": Frames([image] * 2)})["references"]  # type: ignore[arg-type]
    assert (one.kind, one.fps) == ("video", 24.0)
    with io.BytesIO() as file:
        image.save(file, "GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), "red")], duration=80)
        assert read_video(file.getvalue()).rate == 12.5
    asked = MediaPrompt("a red fox", {"references": (tiny_modular.draw(0, 32), tiny_modular.draw_video(0, 32))})
    with pytest.raises(ValueError, match="a video in a prompt needs torchvision, which is not installed"):
        _ = opened("MiniMaxH3", folder("MiniMaxH3"), example=asked).adapt_to([asked]).known


def test_video_and_sound_have_levels_of_their_own(folder: Folders) -> None:
    """Those of MiniMax-H3's two schedulers, at the rows of each; the model is told those of its sample."""
    model = opened("MiniMaxH3", folder("MiniMaxH3"))
    levels, (video, sound) = model.known.levels, (len(stream.elements) for stream in model.known.model.streams)
    rows, width = model.known.shape
    assert levels.shape == (STEPS + 1, rows)
    assert video % width == sound % width == 0
    assert video + sound == rows * width
    pipe = tiny_modular.loaded("MiniMaxH3", folder("MiniMaxH3"))
    for scheduler, part in ((pipe.scheduler, slice(0, video // width)), (pipe.audio_scheduler, slice(video // width, rows))):
        scheduler.set_timesteps(STEPS + 1)
        assert torch.equal(levels[:, part], scheduler.sigmas[:, None].expand_as(levels[:, part]))


def test_probes_leave_the_pipeline_as_it_was(folder: Folders) -> None:
    """Noise in place of the network is the same at each probe, and follows its inputs' shapes alone."""
    model = opened("Flux3", folder("Flux3"))
    before = copy.copy(model._load_pipeline().components)
    assert model.known.model.passes == (2,) * STEPS
    assert model._load_pipeline().components == before
    inputs = list[list[Tensor]]()
    watched = ProbedNetwork(model._load_pipeline().transformer, inputs)
    assert watched.dtype == torch.float32
    assert Path(model.folder, "modular_model_index.json").is_file()
