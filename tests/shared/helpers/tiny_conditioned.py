"""Tiny random pipelines of diffusers that are given images, videos or sounds besides a prompt: one row per pipeline."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import stored
from helpers.tiny_pipelines import ddim, flow, stable_diffusion
from helpers.tiny_replayed import flux2
from helpers.tiny_sounds import RATE
from PIL import Image

from fluvial.models.pipelines.folder import read_entries, silence
from fluvial.models.replay.kinds import IMAGE, KINDS, SOUND, Sound
from fluvial.models.replay.processors import read_processors
from fluvial.models.tiny.pipelines import PARTS, build, build_network, build_random, find_call, save_pipeline


class ConditionedCase(NamedTuple):
    make: Callable[[], Any]
    media: tuple[str, ...]  # arguments that are images, videos or sounds
    call: dict[str, Any]
    scale: float
    frames: int = 1
    image: tuple[int, int] = (16, 16)  # height and width of the images
    size: int = 16  # height and width of the samples


def wan_image(*, experts: bool = False, first_frame: bool = False, embedded: int = 0) -> Any:
    """Build Wan 2.1 image-to-video: channels of the first frame and of its mask follow those of the sample.

    Wan 2.2 has two experts, or holds the first frame and gives each token its own timestep. `embedded` is the number of
    images whose CLIP embeddings the network is given, as that of Wan 2.1 is.
    """
    settings: dict[str, Any] = {"num_layers": 2, "in_channels": 4 if first_frame else 4 + 2 + 4}
    images: dict[str, Any] = {}
    if embedded:
        patches = (32 // 16) ** 2 + 1
        settings |= {"image_dim": 16, "added_kv_proj_dim": 16, "pos_embed_seq_len": 2 * patches if embedded == 2 else None}
        images = {"image_encoder": PARTS["CLIPVisionModel"], "image_processor": PARTS["CLIPImageProcessorPil"]}
    names = ("transformer", "transformer_2") if experts else ("transformer",)
    networks = {name: build_network("WanTransformer3DModel", **settings) for name in names}
    own = {"boundary_ratio": 0.8 if experts else None, "expand_timesteps": first_frame}
    return build("WanImageToVideoPipeline", **networks, **images, **own, scheduler=flow(shift=3.0))


class Edit(NamedTuple):
    """A Stable Diffusion that starts from an image of 16 x 24, and how it is called."""

    pipeline: str
    large: bool
    channels: int  # of the network's input
    media: tuple[str, ...]
    call: dict[str, Any]
    predicts: str = "epsilon"

    def make(self) -> Any:
        """Build the pipeline from the parts of that of text alone, with DDIM."""
        import diffusers

        plain = stable_diffusion(large=self.large, predicts=self.predicts)
        settings = {name: value for name, value in plain.unet.config.items() if not name.startswith("_")}
        unet = diffusers.UNet2DConditionModel(**{**settings, "in_channels": self.channels, "sample_size": 64})
        options = {"add_watermarker": False} if self.large else {"requires_safety_checker": False}
        parts = {**plain.components, "unet": unet, "scheduler": ddim(plain.scheduler.config)}
        return getattr(diffusers, self.pipeline)(**parts, **options)


BOTH, STRONG = ("image", "mask_image"), {"strength": 0.6}
EDITS = {
    "sd-image": Edit("StableDiffusionImg2ImgPipeline", False, 4, ("image",), STRONG),
    "sd-v-image": Edit("StableDiffusionImg2ImgPipeline", False, 4, ("image",), {"strength": 0.35}, "v_prediction"),
    "sd-inpaint": Edit("StableDiffusionInpaintPipeline", False, 9, BOTH, {}),
    "xl-image": Edit("StableDiffusionXLImg2ImgPipeline", True, 4, ("image",), STRONG),
    "xl-inpaint": Edit("StableDiffusionXLInpaintPipeline", True, 9, BOTH, {}),
}
SIZE = (16, 24)  # height and width of their images

# Pipelines of adapters alone, which no replay is tried with.
ADAPTED: dict[str, Callable[[], Any]] = {
    "wan-clip": partial(wan_image, embedded=1),
    "wan-both": partial(wan_image, embedded=2),
    **{name: edit.make for name, edit in EDITS.items()},
}


def of(
    name: str, make: Callable[[], Any] | None = None, *, scale: float | None = None, size: int = 16, **call: Any
) -> ConditionedCase:
    """Return the row of a pipeline that is called as `fluvial models --measured` calls it, but for some arguments."""
    asked = find_call(name)
    own = {**asked.call, **call}
    scale = asked.scale if scale is None else scale
    return ConditionedCase(make or partial(build, name), asked.media, own, scale, asked.frames, (size, size), size)


def euler(name: str) -> ConditionedCase:
    """Return the row of a pipeline with Euler's steps in place of a solver's."""
    return of(name, partial(build, name, scheduler=flow(shift=3.0)))


def qwen_edit(name: str) -> ConditionedCase:
    return of(name, partial(build, name, transformer=partial(build_network, "QwenImageTransformer2DModel", num_layers=2)))


WAN = "WanImageToVideoPipeline"
BAD: dict[str, Any] = {"negative_prompt": "bad"}

ROWS: dict[str, ConditionedCase] = {
    "kontext": of("FluxKontextPipeline"),
    "kontext-guided": of("FluxKontextPipeline", scale=2.5, true_cfg_scale=3.0, **BAD),
    "fill": of("FluxFillPipeline", scale=2.5, strength=1.0),
    "control": of("FluxControlPipeline"),
    "img2img": of("FluxImg2ImgPipeline"),
    "sd3-img2img": of("StableDiffusion3Img2ImgPipeline", strength=0.5),
    "z-img2img": of("ZImageImg2ImgPipeline"),
    "qwen-img2img": of("QwenImageImg2ImgPipeline"),
    "chroma-img2img": of("ChromaImg2ImgPipeline"),
    "flux-controlnet": of("FluxControlNetPipeline"),
    "sd3-controlnet": of("StableDiffusion3ControlNetPipeline"),
    "qwen-controlnet": of("QwenImageControlNetPipeline"),
    "longcat": of("LongCatImagePipeline", enable_prompt_rewrite=False),
    "fibo": of("BriaFiboPipeline"),
    "lumina": of("LuminaPipeline", **BAD),
    "prx": of("PRXPipeline"),
    "ideogram": of("Ideogram4Pipeline", guidance_schedule=None),
    "flux2": of("Flux2KleinPipeline", flux2)._replace(image=(64, 64)),
    "qwen-edit": qwen_edit("QwenImageEditPipeline"),
    "qwen-edit-plus": qwen_edit("QwenImageEditPlusPipeline"),
    "wan": of(WAN, wan_image),
    "wan-experts": of(WAN, partial(wan_image, experts=True), guidance_scale_2=2.0),
    "wan-video": euler("WanVideoToVideoPipeline"),
    "lucy": euler("LucyEditPipeline"),
    "vace": euler("WanVACEPipeline"),
    "sound-to-sound": of("StableAudio3AudioToAudioPipeline", scale=1.0),
    "sound-inpaint": of("StableAudio3InpaintPipeline", scale=1.0),
    "reference-sound": of("AceStepPipeline"),
    "kandinsky-video": of("Kandinsky5I2VPipeline", **BAD),
    "kandinsky-text": of("Kandinsky5T2VPipeline", **BAD),
    "kandinsky-image": of("Kandinsky5I2IPipeline", scale=3.5, size=32, **BAD),
    "hunyuan-video": of("HunyuanVideo15ImageToVideoPipeline"),
    "sana-video": of("SanaImageToVideoPipeline", size=32),
    "hunyuan-llava": of("HunyuanVideoImageToVideoPipeline", size=32),
    "motif-video": of("MotifVideoImage2VideoPipeline", size=32),
    "wan-first-frame": of(WAN, partial(wan_image, first_frame=True)),
}


def without_scaling(patch: Any) -> None:
    """Make pipelines that scale images to about a megapixel keep small ones."""
    from diffusers import Kandinsky5I2IPipeline
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    patch.setattr(pipeline_qwenimage_edit, "calculate_dimensions", lambda *_: (16, 16, None))
    patch.setattr(pipeline_qwenimage_edit_plus, "calculate_dimensions", lambda *_: (16, 16))
    kept = property(lambda self: [(32, 32)], lambda self, sizes: None)
    patch.setattr(Kandinsky5I2IPipeline, "resolutions", kept, raising=False)


def load(folder: Path) -> Any:
    from diffusers import DiffusionPipeline

    absent = {name: None for name, kind in read_entries(folder).items() if kind is None}
    return DiffusionPipeline.from_pretrained(folder, local_files_only=True, **absent, **read_processors(folder))


def save(name: str, folder: Path) -> Path:
    if not folder.exists():
        make = ADAPTED[name] if name in ADAPTED else ROWS[name].make
        stored.copy_of(f"conditioned-{name}", folder, partial(write_random, make))
    return folder


def write_random(make: Callable[[], Any], folder: Path) -> None:
    with silence():
        save_pipeline(build_random(make, 0.1), folder)


def draw(folder: Path, name: str, argument: str, seed: int, row: ConditionedCase) -> str:
    """Write an image, a video of 5 frames or a sound of random numbers for an argument, and return the file's name."""
    kind = next((kind for kind in KINDS if argument in kind.arguments), IMAGE)
    numbers = np.random.default_rng(seed)
    if kind is IMAGE:
        return draw_image(folder / f"{name}.png", seed, row.image).name
    if kind is SOUND:
        made: Any = Sound(torch.from_numpy(numbers.uniform(-1, 1, (2, 128))).float(), RATE)
    else:
        made = [Image.fromarray(frame) for frame in numbers.integers(0, 256, (5, *row.image, 3), dtype=np.uint8)]
    file = folder / f"{name}.{'wav' if kind is SOUND else 'npy'}"
    file.write_bytes(kind.write(made))
    return file.name


def draw_image(file: Path, seed: int, size: tuple[int, int] = (16, 16)) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file
