"""Layouts of sglang: latents of its pipelines, images that they return, and arguments of their networks."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fluvial.models.pipelines.base import Pipeline, pack, unpack
from fluvial.models.pipelines.qwen_image_edit import QwenEditCond, QwenImageEdit
from fluvial.models.protocol import Cond, DiffusionModel

# Names of the conditioning's fields among the arguments of sglang's networks; the others keep theirs.
NAMES = {"tokens": "encoder_hidden_states", "pooled": "pooled_projections"}
EMBEDDED = "guidance"  # field of a distilled network's guidance, which is not one of these arguments
CAPTION_MULTIPLE = 32  # Z-Image's prompts are padded to a multiple of it, in tokens


def name_arguments(cond: Cond, event: tuple[int, ...]) -> dict[str, Any]:
    """Return the conditioning of one sample under sglang's names."""
    if isinstance(cond, Tensor):
        return {NAMES["tokens"]: cond}
    fields = cond if isinstance(cond, Mapping) else cond._asdict() if hasattr(cond, "_asdict") else {"cond": cond}
    return {NAMES.get(name, str(name)): value for name, value in fields.items() if value is not None and name != EMBEDDED}


def _get_qwen_arguments(cond: Any, event: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of Qwen-Image: tokens without padding, which need no mask, and their number."""
    count = int(cond.mask.sum())
    return {
        "encoder_hidden_states": [cond.tokens[:count]],
        "encoder_hidden_states_mask": None,
        "txt_seq_lens": [count],
        "img_shapes": [[(1, event[-2] // 2, event[-1] // 2)]],
    }


def _name_edit_arguments(model: QwenImageEdit, cond: QwenEditCond, event: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of Qwen-Image-Edit: those of Qwen-Image with the sizes of the images, without their latents."""
    batch = cond._replace(image=cond.image[None], grid=None if cond.grid is None else cond.grid[None])
    arguments = _get_qwen_arguments(cond, event)
    return {**arguments, "img_shapes": [[*arguments["img_shapes"][0], *model.list_image_grids(batch)]]}


def _get_z_image_arguments(cond: Any, event: tuple[int, ...]) -> dict[str, Any]:
    """Return the arguments of Z-Image: the last token is repeated up to a multiple of 32 tokens."""
    tokens = cond.tokens[: int(cond.lengths)]
    fill = tokens[-1:].repeat(-len(tokens) % CAPTION_MULTIPLE, 1)
    return {"encoder_hidden_states": [torch.cat([tokens, fill])], "caption_valid_lens": cond.lengths}


class ServerLayout(NamedTuple):
    """Layout of a model's samples and conditioning in sglang.

    Args:
        from_event: function from latents `[..., *event]` to this layout.
        to_event: its inverse, which also takes the shape of the event.
        arguments: function from the conditioning of one sample, without the batch dimension, to the arguments of the
            network, by name. Tables of rotary embeddings are left out, since they follow from the sizes.
        framed: whether images are videos of one frame, `[C, 1, H, W]`.
    """

    from_event: Callable[[Tensor], Tensor]
    to_event: Callable[[Tensor, tuple[int, ...]], Tensor]
    arguments: Callable[[Any, tuple[int, ...]], dict[str, Any]] = name_arguments
    framed: bool = False

    def get_shape(self, event: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's latents in this layout."""
        return tuple(self.from_event(torch.empty(event, device="meta")).shape)


PLAIN = ServerLayout(lambda x: x, lambda latents, event: latents)
TOKENS = ServerLayout(pack, lambda latents, event: unpack(latents, event[-2]))  # [H W / 4, 4 C]
FRAMED_TOKENS = TOKENS._replace(arguments=_get_qwen_arguments, framed=True)
# [C, 1, H, W]
FRAME = ServerLayout(lambda x: x.unsqueeze(-3), lambda latents, event: latents.squeeze(-3), arguments=_get_z_image_arguments)
# By diffusers' pipeline: sglang 0.5.23, multimodal_gen/configs/pipeline_configs, `maybe_pack_latents`,
# `prepare_latent_shape`, `prepare_pos_cond_kwargs`, `get_pos_prompt_embeds` and `post_denoising_loop`. Stable Diffusion 3
# and Wan have the layout of diffusers.
LAYOUTS = {"FluxPipeline": TOKENS, "QwenImagePipeline": FRAMED_TOKENS, "ZImagePipeline": FRAME}


def find_layout(model: DiffusionModel) -> ServerLayout:
    """Return the layout in which sglang denoises the samples of a model."""
    if isinstance(model, QwenImageEdit):
        return FRAMED_TOKENS._replace(arguments=partial(_name_edit_arguments, model))
    return LAYOUTS.get(model.pipeline, PLAIN) if isinstance(model, Pipeline) else PLAIN


def embed_guidance(cond: Cond) -> Tensor | None:
    """Return the guidance input of a distilled network as sglang gives it to FLUX, 1000 times the scale, or None."""
    scale = getattr(cond, EMBEDDED, None)
    return 1000 * scale if isinstance(scale, Tensor) else None
