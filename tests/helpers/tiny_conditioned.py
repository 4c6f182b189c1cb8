"""Tiny random pipelines of diffusers that are given images, videos or sounds besides a prompt: one row per pipeline."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import stored
import torch
from PIL import Image
from tiny_pipelines import flux, qwen_image, sd3, wan, z_image
from tiny_replayed import flux2
from tiny_sounds import RATE

from fluvial.models.replay.kinds import IMAGE, KINDS, SOUND, Sound
from fluvial.models.replay.processors import processor_without_video, read_processors
from fluvial.models.tiny.pipelines import PARTS, build, find_call


class Row(NamedTuple):
    """One pipeline: how to build and call it."""

    make: Callable[[], Any]
    media: tuple[str, ...]  # arguments that are images, videos or sounds
    call: dict[str, Any]
    scale: float
    frames: int = 1
    image: tuple[int, int] = (16, 16)  # height and width of the images
    size: int = 16  # height and width of the samples


def kontext() -> Any:
    """Build FLUX Kontext from the parts of FLUX.1: tokens of the image follow those of the sample."""
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**flux().components)


def own(network: Any) -> dict[str, Any]:
    """Return the settings that a network was built with."""
    return {name: value for name, value in network.config.items() if not name.startswith("_")}


def wider_flux(channels: int) -> dict[str, Any]:
    """Return the parts of FLUX.1 with a transformer that takes more channels than it returns."""
    from diffusers import FluxTransformer2DModel

    parts: dict[str, Any] = flux().components
    for name in ("image_encoder", "feature_extractor"):
        parts.pop(name, None)
    settings = {**own(parts["transformer"]), "in_channels": channels, "out_channels": 16}
    return {**parts, "transformer": FluxTransformer2DModel.from_config(settings)}


def fill() -> Any:
    """Build FLUX Fill: channels of the masked image and of the mask follow those of the sample."""
    from diffusers import FluxFillPipeline

    return FluxFillPipeline(**wider_flux(16 + 16 + 4 * 4))


def control() -> Any:
    """Build FLUX Control: channels of the image follow those of the sample."""
    from diffusers import FluxControlPipeline

    return FluxControlPipeline(**wider_flux(32))


def image_to_image(kind: str = "FluxImg2ImgPipeline", make: Callable[[], Any] = flux) -> Any:
    """Build an image-to-image pipeline: it starts from noise mixed with the image, at the end of the schedule."""
    import diffusers

    return getattr(diffusers, kind)(**make().components)


def controlled(kind: str, make: Callable[[], Any]) -> Any:
    """Build a pipeline whose transformer is given what a control network makes of the sample and an image."""
    import diffusers

    names = {
        "FluxControlNetPipeline": "FluxControlNetModel",
        "StableDiffusion3ControlNetPipeline": "SD3ControlNetModel",
        "QwenImageControlNetPipeline": "QwenImageControlNetModel",
    }
    network, parts = getattr(diffusers, names[kind]), make().components
    takes = inspect.signature(network).parameters
    settings = {name: value for name, value in own(parts["transformer"]).items() if name in takes}
    if "extra_conditioning_channels" in takes:
        settings["extra_conditioning_channels"] = 0
    return getattr(diffusers, kind)(**parts, controlnet=network(**settings))


def processor() -> Any:
    """Build the processor of Qwen2.5-VL without torchvision's image processor."""
    from transformers import Qwen2VLImageProcessorPil

    from fluvial.models.tiny.encoders import qwen_tokenizer

    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]})
    return processor_without_video(Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56), tokenizer)


def qwen_edit(plus: bool = False) -> Any:
    """Build Qwen-Image-Edit from the parts of Qwen-Image."""
    from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline

    kind = QwenImageEditPlusPipeline if plus else QwenImageEditPipeline
    parts, both = qwen_image().components, processor()
    parts["text_encoder"].resize_token_embeddings(len(both.tokenizer))
    parts["text_encoder"].config.image_token_id = both.image_token_id
    return kind(**{**parts, "tokenizer": both.tokenizer}, processor=both)


def wan_image(*, experts: bool = False, first_frame: bool = False, embedded: int = 0) -> Any:
    """Build Wan 2.1 image-to-video: channels of the first frame and of its mask follow those of the sample.

    Wan 2.2 has two experts, or holds the first frame and gives each token its own timestep. `embedded` is the number of
    images whose CLIP embeddings the network is given, as that of Wan 2.1 is.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, WanImageToVideoPipeline, WanTransformer3DModel

    parts = wan(experts=experts).components
    settings = {**own(parts["transformer"]), "in_channels": 4 if first_frame else 4 + 2 + 4}
    if embedded:
        patches = (32 // 16) ** 2 + 1
        settings |= {"image_dim": 16, "added_kv_proj_dim": 16, "pos_embed_seq_len": 2 * patches if embedded == 2 else None}
        parts |= {"image_encoder": PARTS["CLIPVisionModel"](), "image_processor": PARTS["CLIPImageProcessorPil"]()}
    names = ("transformer", "transformer_2") if experts else ("transformer",)
    networks = {name: WanTransformer3DModel.from_config(settings) for name in names}
    return WanImageToVideoPipeline(
        **{**parts, **networks, "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0)},
        boundary_ratio=0.8 if experts else None,
        expand_timesteps=first_frame,
    )


def wan_video(kind: str) -> Any:
    """Build a pipeline of Wan's parts that is given a video, with Euler's steps in place of a solver's."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = build(kind)
    pipe.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
    return pipe


SHORT = {"max_sequence_length": 12}
STRENGTH = {"max_sequence_length": 32, "strength": 0.6}

# Pipelines of adapters alone, which no replay is tried with.
ADAPTED: dict[str, Callable[[], Any]] = {
    "wan-clip": partial(wan_image, embedded=1),
    "wan-both": partial(wan_image, embedded=2),
}


def large_video(name: str) -> Row:
    """Return the row of a pipeline that makes a video of 32 x 32, the smallest that it takes, from an image."""
    asked = find_call(name)
    return Row(partial(build, name), ("image",), asked.call, asked.scale, frames=5, image=(32, 32), size=32)


ROWS: dict[str, Row] = {
    "kontext": Row(kontext, ("image",), {**SHORT, "max_area": 256, "_auto_resize": False}, 2.5),
    "kontext-guided": Row(
        kontext,
        ("image",),
        {**SHORT, "max_area": 256, "_auto_resize": False, "true_cfg_scale": 3.0, "negative_prompt": "bad"},
        2.5,
    ),
    "fill": Row(fill, ("image", "mask_image"), SHORT, 2.5),
    "control": Row(control, ("control_image",), SHORT, 2.5),
    "img2img": Row(image_to_image, ("image",), {**SHORT, "strength": 0.6}, 2.5),
    "sd3-img2img": Row(
        partial(image_to_image, "StableDiffusion3Img2ImgPipeline", sd3), ("image",), {**SHORT, "strength": 0.5}, 5.0
    ),
    "z-img2img": Row(
        partial(image_to_image, "ZImageImg2ImgPipeline", z_image),
        ("image",),
        STRENGTH,
        3.0,
    ),
    "qwen-img2img": Row(
        partial(image_to_image, "QwenImageImg2ImgPipeline", qwen_image),
        ("image",),
        STRENGTH,
        3.0,
    ),
    "chroma-img2img": Row(partial(build, "ChromaImg2ImgPipeline"), ("image",), STRENGTH, 3.0),
    "flux-controlnet": Row(partial(controlled, "FluxControlNetPipeline", flux), ("control_image",), SHORT, 2.5),
    "sd3-controlnet": Row(partial(controlled, "StableDiffusion3ControlNetPipeline", sd3), ("control_image",), SHORT, 5.0),
    "qwen-controlnet": Row(
        partial(controlled, "QwenImageControlNetPipeline", qwen_image), ("control_image",), {"max_sequence_length": 32}, 3.0
    ),
    "longcat": Row(
        partial(build, "LongCatImagePipeline"),
        (),
        {**find_call("LongCatImagePipeline").call, "enable_prompt_rewrite": False},
        3.0,
    ),
    "fibo": Row(partial(build, "BriaFiboPipeline"), (), find_call("BriaFiboPipeline").call, 3.0),
    "lumina": Row(partial(build, "LuminaPipeline"), (), {**find_call("LuminaPipeline").call, "negative_prompt": "bad"}, 3.0),
    "prx": Row(partial(build, "PRXPipeline"), (), find_call("PRXPipeline").call, 3.0),
    "ideogram": Row(
        partial(build, "Ideogram4Pipeline"), (), {**find_call("Ideogram4Pipeline").call, "guidance_schedule": None}, 3.0
    ),
    "flux2": Row(flux2, ("image",), {"max_sequence_length": 32, "text_encoder_out_layers": [0, 1, 2]}, 4.0, image=(64, 64)),
    "qwen-edit": Row(qwen_edit, ("image",), {"max_sequence_length": 128}, 3.0),
    "qwen-edit-plus": Row(partial(qwen_edit, plus=True), ("image",), {"max_sequence_length": 128}, 3.0),
    "wan": Row(wan_image, ("image",), SHORT, 3.0, frames=5),
    "wan-experts": Row(partial(wan_image, experts=True), ("image",), {**SHORT, "guidance_scale_2": 2.0}, 3.0, frames=5),
    "wan-video": Row(partial(wan_video, "WanVideoToVideoPipeline"), ("video",), {**SHORT, "strength": 0.6}, 3.0, frames=5),
    "lucy": Row(partial(wan_video, "LucyEditPipeline"), ("video",), SHORT, 3.0, frames=5),
    "vace": Row(partial(wan_video, "WanVACEPipeline"), ("video",), SHORT, 3.0, frames=5),
    "sound-to-sound": Row(
        partial(build, "StableAudio3AudioToAudioPipeline"),
        ("audio",),
        find_call("StableAudio3AudioToAudioPipeline").call,
        1.0,
    ),
    "sound-inpaint": Row(
        partial(build, "StableAudio3InpaintPipeline"), ("audio",), find_call("StableAudio3InpaintPipeline").call, 1.0
    ),
    "reference-sound": Row(partial(build, "AceStepPipeline"), ("reference_audio",), {"audio_duration": 0.32}, 1.0),
    "kandinsky-video": Row(
        partial(build, "Kandinsky5I2VPipeline"), ("image",), {**SHORT, "negative_prompt": "bad"}, 3.0, frames=17
    ),
    "kandinsky-text": Row(partial(build, "Kandinsky5T2VPipeline"), (), {**SHORT, "negative_prompt": "bad"}, 3.0, frames=5),
    "kandinsky-image": Row(
        partial(build, "Kandinsky5I2IPipeline"),
        ("image",),
        {**find_call("Kandinsky5I2IPipeline").call, "negative_prompt": "bad"},
        3.5,
        image=(32, 32),
        size=32,
    ),
    "hunyuan-video": Row(partial(build, "HunyuanVideo15ImageToVideoPipeline"), ("image",), {}, 1.0, frames=5),
    "sana-video": large_video("SanaImageToVideoPipeline"),
    "hunyuan-llava": large_video("HunyuanVideoImageToVideoPipeline"),
    "motif-video": large_video("MotifVideoImage2VideoPipeline"),
    "wan-first-frame": Row(partial(wan_image, first_frame=True), ("image",), SHORT, 3.0, frames=5),
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
    """Return diffusers' pipeline of a folder."""
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(folder, local_files_only=True, **read_processors(folder))


def save(name: str, folder: Path) -> Path:
    """Save a pipeline to a folder with random weights, unless it is there, and return the folder."""
    if not folder.exists():
        stored.copy_of(f"conditioned-{name}", folder, partial(_make, name))
    return folder


def _make(name: str, folder: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = (ADAPTED[name] if name in ADAPTED else ROWS[name].make)()
        parts = (getattr(pipeline, name, None) for name in ("transformer", "transformer_2", "vae", "controlnet"))
        for part in (part for part in parts if part is not None):
            for parameter in part.parameters():
                parameter.data += 0.2 * torch.randn_like(parameter)
    pipeline.save_pretrained(folder)
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace(processor_without_video.__module__, "transformers"))


def draw(folder: Path, name: str, argument: str, seed: int, row: Row) -> str:
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
    """Write an image of random pixels, and return its file."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)
    return file
