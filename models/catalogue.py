"""Published models with a built-in adapter: name, size and prediction.

This module does not import torch, so that `fluvial models` answers at once. Networks for `fluvial plan`, which need torch,
are in `models.shapes`.
"""

from typing import Literal, NamedTuple

GIB = 2**30


class PublishedModel(NamedTuple):
    """A published model."""

    pipeline: str  # class of diffusers' pipeline, as its model_index.json names it
    example: str  # id on the Hub
    billions: float  # parameters of the trained network, without text encoders and VAE
    prediction: Literal["velocity", "epsilon"]  # as models.protocol.Prediction
    makes: str

    @property
    def gibibytes(self) -> float:
        """Memory of the network's weights in bfloat16, in GiB."""
        return self.billions * 1e9 * 2 / GIB


# Sizes are the publishers' statements; DiT's is that of diffusers' network, in which each block embeds the class.
KNOWN = (
    PublishedModel("DiTPipeline", "facebook/DiT-XL-2-256", 0.75, "epsilon", "images of classes"),
    PublishedModel("StableDiffusionPipeline", "stable-diffusion-v1-5/stable-diffusion-v1-5", 0.86, "epsilon", "images"),
    PublishedModel("StableDiffusionXLPipeline", "stabilityai/stable-diffusion-xl-base-1.0", 2.6, "epsilon", "images"),
    PublishedModel("StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3.5-medium", 2.5, "velocity", "images"),
    PublishedModel("StableDiffusion3Pipeline", "stabilityai/stable-diffusion-3.5-large", 8.1, "velocity", "images"),
    PublishedModel("FluxPipeline", "black-forest-labs/FLUX.1-dev", 12.0, "velocity", "images"),
    PublishedModel("QwenImagePipeline", "Qwen/Qwen-Image", 20.0, "velocity", "images"),
    PublishedModel("QwenImageEditPipeline", "Qwen/Qwen-Image-Edit", 20.0, "velocity", "images from images"),
    PublishedModel("QwenImageEditPlusPipeline", "Qwen/Qwen-Image-Edit-2509", 20.0, "velocity", "images from images"),
    PublishedModel("ZImagePipeline", "Tongyi-MAI/Z-Image", 6.0, "velocity", "images"),
    PublishedModel("WanPipeline", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", 1.3, "velocity", "videos"),
    PublishedModel("WanPipeline", "Wan-AI/Wan2.1-T2V-14B-Diffusers", 14.0, "velocity", "videos"),
    PublishedModel("WanPipeline", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", 27.0, "velocity", "videos"),
    PublishedModel(
        "WanImageToVideoPipeline", "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 14.0, "velocity", "videos from images"
    ),
    PublishedModel("WanImageToVideoPipeline", "Wan-AI/Wan2.2-I2V-A14B-Diffusers", 27.0, "velocity", "videos from images"),
)
