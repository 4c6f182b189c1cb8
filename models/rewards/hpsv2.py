"""HPSv2.1: a score of human preference from a CLIP ViT-H/14 finetuned on human rankings.

Source: arXiv 2306.09341. The published weights are a state dict of open_clip; they are converted to a CLIPModel.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from fluvial.models.rewards.clip import VIT_H, ImageTowers
from fluvial.models.rewards.shared.convert import count_layers, fill_model, rename_prefix
from fluvial.models.rewards.shared.loading import LoadingError, find_processor, find_weight_file, read_tensors
from fluvial.models.rewards.shared.pixels import CLIP_MEAN, CLIP_STD, normalise, pad_to_square, to_bytes
from fluvial.models.rewards.table import REWARD_MODELS

FILE = "HPS_v2.1_compressed.pt"
BLOCK = r"transformer\.resblocks\.(\d+)\."  # name of a tower's block
# Prefixes of names that differ between open_clip and transformers, without those in blocks.
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
TRANSPOSED = ("visual.proj", "text_projection")  # open_clip multiplies by these from the right
HEAD_WIDTHS = {1280: 80, 1408: 88, 1664: 104}  # width of a head by width of the vision tower (H, g, bigG); 64 in others


@dataclass(eq=False)
class Hpsv2(ImageTowers):
    """Score cos(f(x), g(p)) of an image x and a prompt p, with HPSv2.1's CLIP model.

    The longer edge of an image is resized to 224 pixels and padded with black, as in the published evaluation, so that
    nothing is cropped.

    Args:
        weights: file of the state dict, folder with `HPS_v2.1_compressed.pt`, or id on the Hub.
        processor: folder or id of the tokenizer; by default that of the ViT-H/14 that HPSv2 was finetuned from.
        heads: number of attention heads of the vision and of the text tower; by default those of published models.
    """

    facts = REWARD_MODELS["hpsv2"]
    weights: str | Path = facts.weights
    _: KW_ONLY
    heads: tuple[int, int] | None = None

    def load(self, commit: str | None) -> Any:
        """Return the converted model; see `ModelReward.load`."""
        file = find_weight_file(self.weights, FILE, commit)
        model = to_clip_model(read_tensors(file), file, heads=self.heads)
        side = model.config.vision_config.image_size

        def preprocess(images: Tensor) -> Tensor:
            """Return the input of the vision model; the padding is black before normalisation."""
            return normalise(pad_to_square(to_bytes(images) / 255, side), CLIP_MEAN, CLIP_STD)

        self.preprocess = preprocess
        self.load_tokenizer(model, *find_processor(file.parent, self.processor, VIT_H))
        return model

    def tokenize(self, prompts: list[str]) -> dict[str, Tensor]:
        """Return the input of the text tower, for prompts cleaned as by open_clip's tokenizer."""
        return super().tokenize([clean_prompt(prompt) for prompt in prompts])


def clean_prompt(text: str) -> str:
    """Return a text with plain quotes, fixed encoding errors, unescaped HTML entities, and single blanks.

    Source: hpsv2 1.2.0, `src/open_clip/tokenizer.py`; the tokenizer itself lowers the case.
    """
    fixed = html.unescape(html.unescape(import_module("ftfy").fix_text(text)))
    return re.sub(r"\s+", " ", fixed.strip()).strip()


def to_clip_model(tensors: Mapping[str, Tensor], source: Path, *, heads: tuple[int, int] | None) -> Any:
    """Return a CLIPModel in float32 with the weights of open_clip's CLIP with a vision transformer.

    Raises:
        LoadingError: the state dict belongs to another model, or tensors are missing.
    """
    from transformers import CLIPModel

    if not {"visual.conv1.weight", "visual.proj", "text_projection", "token_embedding.weight"} <= set(tensors):
        raise LoadingError(
            f"the weights {source} hold {', '.join(sorted(tensors)[:3])} ..., expected a state dict of open_clip with "
            "visual.conv1.weight, visual.proj, text_projection and token_embedding.weight"
        )
    converted = {name: tensor for key, value in tensors.items() for name, tensor in _convert(key, value)}
    return fill_model(CLIPModel(infer_config(tensors, heads)), converted, source, kind="a CLIP model")


def infer_config(tensors: Mapping[str, Tensor], heads: tuple[int, int] | None) -> Any:
    """Return the CLIPConfig inferred from the shapes of a state dict of open_clip."""
    from transformers import CLIPConfig

    width, _, patch, _ = tensors["visual.conv1.weight"].shape
    vocabulary, text_width = tensors["token_embedding.weight"].shape
    side = round((len(tensors["visual.positional_embedding"]) - 1) ** 0.5)
    vision_heads, text_heads = heads or (width // HEAD_WIDTHS.get(width, 64), text_width // 64)
    out = tensors["visual.proj"].shape[1]

    def infer_tower(prefix: str, width: int, heads: int) -> dict[str, Any]:
        inner = tensors.get(f"{prefix}transformer.resblocks.0.mlp.c_fc.weight", ())
        return {
            "hidden_act": "gelu",
            "projection_dim": out,
            "hidden_size": width,
            "intermediate_size": max(len(inner), 1),
            "num_hidden_layers": count_layers(tensors, re.escape(prefix) + BLOCK),
            "num_attention_heads": heads,
        }

    text_config = {
        **infer_tower("", text_width, text_heads),
        "vocab_size": vocabulary,
        "max_position_embeddings": len(tensors["positional_embedding"]),
        # open_clip takes the output at the largest token, the last of the vocabulary.
        "eos_token_id": vocabulary - 1,
        "bos_token_id": vocabulary - 2,
        "pad_token_id": vocabulary - 1,
    }
    vision_config = {**infer_tower("visual.", width, vision_heads), "patch_size": patch, "image_size": patch * side}
    return CLIPConfig(projection_dim=out, vision_config=vision_config, text_config=text_config)


def _convert(key: str, value: Tensor) -> list[tuple[str, Tensor]]:
    """Convert a tensor of open_clip to named tensors of transformers."""
    if key == "attn_mask":  # the causal mask, which older versions saved
        return []
    if not (match := re.match(rf"(visual\.)?{BLOCK}(.+)", key)):
        return [(rename_prefix(key, NAMES), value.T if key in TRANSPOSED else value)]
    tower = "vision_model" if match[1] else "text_model"
    prefix, rest = f"{tower}.encoder.layers.{match[2]}.", match[3]
    if not rest.startswith("attn.in_proj_"):
        return [(prefix + rename_prefix(rest, BLOCKS), value)]
    part = rest.removeprefix("attn.in_proj_")
    thirds = zip("qkv", value.chunk(3), strict=True)
    return [(f"{prefix}self_attn.{letter}_proj.{part}", third) for letter, third in thirds]
