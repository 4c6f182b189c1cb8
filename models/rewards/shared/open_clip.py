"""Conversion of a state dict of open_clip to a CLIPModel of transformers."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fluvial.models.rewards.shared.loading import LoadingError, check_complete, frozen

# Names of tensors that differ, by the beginning; those of the blocks follow below.
NAMES = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.": "vision_model.pre_layrnorm.",
    "visual.ln_post.": "vision_model.post_layernorm.",
    "visual.proj": "visual_projection.weight",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.": "text_model.final_layer_norm.",
    "text_projection": "text_projection.weight",
    "logit_scale": "logit_scale",
}
BLOCKS = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "attn.out_proj.": "self_attn.out_proj.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
}
TRANSPOSED = ("visual.proj", "text_projection")  # open_clip multiplies by them from the right
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}  # of vision towers by width (H, g, bigG); 64 in all others


def to_clip_model(reward: str, tensors: Mapping[str, Tensor], source: str | Path, *, heads: tuple[int, int] | None) -> Any:
    """Return a CLIPModel with the weights of a state dict of open_clip, in float32.

    Args:
        reward: name of the reward, for messages.
        tensors: state dict of a CLIP model with a vision transformer.
        source: file that the tensors come from, for messages.
        heads: number of attention heads of the vision and of the text tower; by default those of the published models.

    Raises:
        LoadingError: it is the state dict of another model, or tensors are missing.
    """
    from transformers import CLIPModel

    if not {"visual.conv1.weight", "visual.proj", "text_projection", "token_embedding.weight"} <= set(tensors):
        raise LoadingError(
            f"{reward}: the weights {source} hold {', '.join(sorted(tensors)[:3])} ..., expected a state dict of open_clip "
            "with visual.conv1.weight, visual.proj, text_projection and token_embedding.weight"
        )
    model = CLIPModel(config_of(tensors, heads))
    converted = {name: tensor.float() for key, value in tensors.items() for name, tensor in _converted(key, value)}
    try:
        report = model.load_state_dict(converted, strict=False)
    except RuntimeError as error:  # a tensor of another shape
        lines = str(error).splitlines()
        raise LoadingError(f"{reward}: the weights {source} do not fit together: {lines[-1].strip()}") from error
    check_complete(reward, source, missing=report.missing_keys)
    if report.unexpected_keys:
        raise LoadingError(
            f"{reward}: the weights {source} hold {report.unexpected_keys[0]}, which a CLIP model does not have"
        )
    return frozen(model)


def config_of(tensors: Mapping[str, Tensor], heads: tuple[int, int] | None) -> Any:
    """Return the CLIPConfig that the shapes of a state dict of open_clip tell."""
    from transformers import CLIPConfig

    width, _, patch, _ = tensors["visual.conv1.weight"].shape
    vocabulary, text_width = tensors["token_embedding.weight"].shape
    side = round((len(tensors["visual.positional_embedding"]) - 1) ** 0.5)
    vision_heads, text_heads = heads or (width // HEAD_WIDTHS.get(width, 64), text_width // 64)
    common = {"hidden_act": "gelu", "projection_dim": tensors["visual.proj"].shape[1]}
    return CLIPConfig(
        projection_dim=common["projection_dim"],
        vision_config={
            **common,
            "hidden_size": width,
            "intermediate_size": _inner(tensors, "visual."),
            "patch_size": patch,
            "num_hidden_layers": _layers(tensors, "visual."),
            "num_attention_heads": vision_heads,
            "image_size": patch * side,
        },
        text_config={
            **common,
            "hidden_size": text_width,
            "intermediate_size": _inner(tensors, ""),
            "vocab_size": vocabulary,
            "num_hidden_layers": _layers(tensors, ""),
            "num_attention_heads": text_heads,
            "max_position_embeddings": len(tensors["positional_embedding"]),
            # open_clip takes the output at the largest token, which is the last of its vocabulary.
            "eos_token_id": vocabulary - 1,
            "bos_token_id": vocabulary - 2,
            "pad_token_id": vocabulary - 1,
        },
    )


def _layers(tensors: Mapping[str, Tensor], tower: str) -> int:
    """Return the number of blocks of a tower."""
    pattern = re.compile(rf"{re.escape(tower)}transformer\.resblocks\.(\d+)\.")
    return 1 + max((int(found[1]) for key in tensors if (found := pattern.match(key))), default=-1)


def _inner(tensors: Mapping[str, Tensor], tower: str) -> int:
    """Return the width of the hidden layers of a tower's blocks."""
    found = tensors.get(f"{tower}transformer.resblocks.0.mlp.c_fc.weight")
    return 1 if found is None else len(found)


def _converted(key: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Return the tensors of transformers, with their names, that a tensor of open_clip becomes."""
    if key == "attn_mask":  # the causal mask, which older versions saved
        return []
    if found := re.match(r"(visual\.)?transformer\.resblocks\.(\d+)\.(.+)", key):
        tower = "vision_model" if found[1] else "text_model"
        prefix, rest = f"{tower}.encoder.layers.{found[2]}.", found[3]
        if rest.startswith("attn.in_proj_"):
            part = rest.removeprefix("attn.in_proj_")
            thirds = zip("qkv", value.chunk(3), strict=True)
            return [(f"{prefix}self_attn.{letter}_proj.{part}", third) for letter, third in thirds]
        for old, new in BLOCKS.items():
            if rest.startswith(old):
                return [(prefix + new + rest.removeprefix(old), value)]
    for old, new in NAMES.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return [(new + key.removeprefix(old), value.T if key in TRANSPOSED else value)]
    return [(key, value)]
