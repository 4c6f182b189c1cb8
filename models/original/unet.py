"""Original names of the UNet of Stable Diffusion XL."""

from typing import Any

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}


def unet_names(config: Any) -> dict[str, str]:
    """Return the table of a UNet's tensors and layers.

    The original numbers the blocks of all resolutions in one list, each with its resnet, its attention and its resampling as
    submodules 0, 1 and 2.

    Args:
        config: settings of the network.
    """
    names = {
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
    }
    each, stages = config["layers_per_block"], len(config["block_out_channels"])
    depths = config["transformer_layers_per_block"]
    deepest = depths if isinstance(depths, int) else max(depths)
    for stage in range(stages):
        attends = "CrossAttn" in config["down_block_types"][stage]
        for layer in range(each):
            place = f"input_blocks.{1 + stage * (each + 1) + layer}"
            names |= _resnet(f"down_blocks.{stage}.resnets.{layer}", f"{place}.0")
            if attends:
                names |= _attention(f"down_blocks.{stage}.attentions.{layer}", f"{place}.1", deepest)
        names[f"down_blocks.{stage}.downsamplers.0.conv"] = f"input_blocks.{(stage + 1) * (each + 1)}.0.op"
    for part in (0, 1):
        names |= _resnet(f"mid_block.resnets.{part}", f"middle_block.{2 * part}")
    names |= _attention("mid_block.attentions.0", "middle_block.1", deepest)
    for stage in range(stages):
        attends = "CrossAttn" in config["up_block_types"][stage]
        for layer in range(each + 1):
            place = f"output_blocks.{stage * (each + 1) + layer}"
            names |= _resnet(f"up_blocks.{stage}.resnets.{layer}", f"{place}.0")
            if attends:
                names |= _attention(f"up_blocks.{stage}.attentions.{layer}", f"{place}.1", deepest)
        last = f"output_blocks.{stage * (each + 1) + each}.{2 if attends else 1}"
        names[f"up_blocks.{stage}.upsamplers.0.conv"] = f"{last}.conv"
    return names


def _resnet(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{layer}": f"{theirs}.{original}" for layer, original in RESNET.items()}


def _attention(ours: str, theirs: str, depth: int) -> dict[str, str]:
    """Return the rows of the transformer of a block, whose layers have the same names in both."""
    inner = ["norm1", "norm2", "norm3", "ff.net.0.proj", "ff.net.2"]
    inner += [f"{kind}.{layer}" for kind in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")]
    layers = [
        "norm",
        "proj_in",
        "proj_out",
        *(f"transformer_blocks.{block}.{layer}" for block in range(depth) for layer in inner),
    ]
    return {f"{ours}.{layer}": f"{theirs}.{layer}" for layer in layers}
