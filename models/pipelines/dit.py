"""DiT: class-conditional transformers that predict epsilon. A prompt is a class."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fluvial.models.pipelines.folder import read_index
from fluvial.models.pipelines.unet import StableDiffusion
from fluvial.models.replay.media import TextPrompt, get_text

NULL = 1000  # class of the unconditional input, fixed in diffusers' pipeline; also the number of other classes


class ClassCond(NamedTuple):
    """Conditioning of a network by a class."""

    classes: Tensor  # [B] int64


class DiT(StableDiffusion):
    """The model protocol over a DiTPipeline (arXiv 2212.09748), an epsilon-prediction model of ImageNet.

    A prompt is the number of a class, or one of its names in the folder's `id2label`; the empty prompt is the unconditional
    input. The variance that the network learns beside epsilon is not used, as in diffusers' pipeline.

    Raises:
        ValueError: see `StableDiffusion`; or the network has another number of classes.
    """

    pipeline = "DiTPipeline"
    network = "DiTTransformer2DModel"
    former = ("Transformer2DModel",)
    part = "transformer"
    text_lengths = (1, 1)
    encoders: ClassVar[tuple[str, ...]] = ()
    conditioning = ClassCond
    prompt_layers: ClassVar[tuple[str, ...]] = ()
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0", "net.0.proj", "net.2")

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(folder, **options)
        if (count := self.config.get("num_embeds_ada_norm")) != NULL:
            raise ValueError(f"{self.folder / self.part} has {count} classes, expected {NULL}")
        names = read_index(self.folder).get("id2label") or {}
        self.names = {name.strip(): int(number) for number, known in names.items() for name in known.split(",")}

    def build_part(self, part: str, *, empty: bool) -> nn.Module:
        """Return the network, see `Pipeline.build`, without random dropping of classes in training."""
        network = super().build_part(part, empty=empty)
        for layer in network.modules():
            if type(layer).__name__ == "LabelEmbedding":
                layer.dropout_prob = 0.0  # type: ignore[assignment]
        return network

    def blocks(self, module: nn.Module) -> Sequence[nn.Module]:
        """Return the blocks after the first; the network uses the first one's class embedding again after the last."""
        return list(module.get_submodule("transformer_blocks").children())[1:]

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        """Return the shape of a sample; ValueError if the size is not the network's."""
        side = self.config["sample_size"] * self.vae_scale
        if (height, width) != (side, side):
            raise ValueError(f"the size is {height}x{width}, expected {side}x{side}: the network has one size")
        return super().latent_shape(height, width, frames)

    def find_class(self, prompt: str) -> int:
        """Return the class that a prompt names.

        Raises:
            ValueError: the prompt is not a class; the message names the closest ones.
        """
        if not prompt:
            return NULL
        if prompt.isascii() and prompt.isdigit() and int(prompt) < NULL:
            return int(prompt)
        if (number := self.names.get(prompt)) is None:
            close = get_close_matches(prompt, self.names, n=3, cutoff=0.4) or [*self.names][:3]
            hint = f", or a name, such as {', '.join(close)}" if close else f": {self.folder} has no id2label with names"
            raise ValueError(f"the prompt {prompt[:40]!r} is not a class: expected a number from 0 to {NULL - 1}{hint}")
        return number

    def check_prompt(self, prompt: TextPrompt) -> None:
        """Raise ValueError if a prompt is not a class, see `find_class`."""
        self.find_class(get_text(prompt))

    def _encode(self, prompt: TextPrompt) -> dict[str, Tensor]:
        return {"classes": torch.tensor([self.find_class(get_text(prompt))])}

    def call_network(self, module: nn.Module, x: Tensor, timestep: Tensor, cond: ClassCond) -> Tensor:
        """Return the network's output, without the variance."""
        output: Tensor = module(x, timestep=timestep, class_labels=cond.classes, return_dict=False)[0]
        return output[:, : x.shape[1]]
