"""Names of diffusers' tensors in the original checkpoints of their architectures.

A table has a row per layer: `diffusers' name: original name`, where `*` is the number of a block. After the original name,
`1/3` marks the second of three tensors that are joined along the rows, as in a fused projection of queries, keys and values.
`swapped` marks tensors whose halves are exchanged, because scale and shift have the other order.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")  # number of a block, the first in a name


class OriginalTensor(NamedTuple):
    """Name and part of a tensor in the original checkpoint."""

    name: str
    part: int = 0  # position among the tensors that are joined along the rows
    parts: int = 1  # number of joined tensors
    swapped: bool = False  # whether the halves of the rows are exchanged


Names = Mapping[str, str]


class WeightLayout(NamedTuple):
    """Original names of an architecture.

    Args:
        names: function from the settings of the network to its table.
        prefix: prefix of the names in files of weights.
        same: whether tensors without a row in the table have the same name in both.
        kohya: whether adapters are named by kohya's trainers, `lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight`;
            otherwise by ComfyUI, `diffusion_model.blocks.0.self_attn.q.lora_A.weight`.
        adapters_renamed: whether adapters use the original names of layers; otherwise diffusers', as for Z-Image, which
            ComfyUI maps to the joined layers itself.
    """

    names: Callable[[Any], Names]
    prefix: str = ""
    same: bool = False
    kohya: bool = False
    adapters_renamed: bool = True


class OriginalNames:
    """Original names of the tensors of one network.

    Args:
        pipeline: class of diffusers' pipeline, one of `LAYOUTS`.
        config: settings of the network.
    """

    def __init__(self, pipeline: str, config: Any) -> None:
        self.layout = LAYOUTS[pipeline]
        self.names = self.layout.names(config)

    def find_tensor(self, name: str) -> OriginalTensor:
        """Return the name and part of a tensor in the original checkpoint.

        Args:
            name: name in the state dict of diffusers' network.

        Raises:
            ValueError: the architecture has no such tensor.
        """
        layer, _, leaf = name.rpartition(".")
        tensor = self._look_up(name)
        if tensor is not None:
            return tensor
        if leaf in ("weight", "bias") and (tensor := self._look_up(layer)) is not None:
            return tensor._replace(name=f"{tensor.name}.{leaf}")
        if self.layout.same:
            return OriginalTensor(name)
        raise ValueError(f"{name} has no original name")

    def find_adapter(self, layer: str) -> OriginalTensor:
        """Return the original name of a linear layer's adapter, the part of its keys before the factor."""
        weight = f"{layer}.weight"
        tensor = self.find_tensor(weight) if self.layout.adapters_renamed else OriginalTensor(weight)
        name = tensor.name.removesuffix(".weight")
        if self.layout.kohya:
            return tensor._replace(name=f"lora_unet_{name.replace('.', '_')}")
        return tensor._replace(name=f"diffusion_model.{name}")

    def _look_up(self, name: str) -> OriginalTensor | None:
        """Return the table's entry of a tensor or a layer."""
        number = NUMBER.search(name)
        row = self.names.get(name) or self.names.get(NUMBER.sub("*", name, count=1))
        if row is None:
            return None
        original, *words = row.split(" ")
        part, parts = next((map(int, word.split("/")) for word in words if "/" in word), (0, 1))
        return OriginalTensor(original.replace("*", number[0] if number else "*"), part, parts, "swapped" in words)


def _name_embedder(original: str, diffusers: str, *, first: str, second: str) -> dict[str, str]:
    """Return the rows of an embedder of two layers."""
    return {f"{diffusers}.linear_1": f"{original}.{first}", f"{diffusers}.linear_2": f"{original}.{second}"}


def _name_sd3(config: Any) -> Names:
    block, first = "transformer_blocks.*.", "joint_blocks.*."
    last = f"transformer_blocks.{config['num_layers'] - 1}.norm1_context.linear"
    names = {
        "pos_embed.pos_embed": "pos_embed",
        "pos_embed.proj": "x_embedder.proj",
        "context_embedder": "context_embedder",
        **_name_embedder("t_embedder", "time_text_embed.timestep_embedder", first="mlp.0", second="mlp.2"),
        **_name_embedder("y_embedder", "time_text_embed.text_embedder", first="mlp.0", second="mlp.2"),
        last: f"joint_blocks.{config['num_layers'] - 1}.context_block.adaLN_modulation.1 swapped",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1 swapped",
    }
    attentions = (
        ("attn", "x_block.attn", "to_q to_k to_v norm_q norm_k to_out.0"),
        ("attn", "context_block.attn", "add_q_proj add_k_proj add_v_proj norm_added_q norm_added_k to_add_out"),
        ("attn2", "x_block.attn2", "to_q to_k to_v norm_q norm_k to_out.0"),
    )
    for ours, theirs, layers in attentions:
        originals = ("qkv 0/3", "qkv 1/3", "qkv 2/3", "ln_q", "ln_k", "proj")
        for layer, original in zip(layers.split(), originals, strict=True):
            names[f"{block}{ours}.{layer}"] = f"{first}{theirs}.{original}"
    for ours, theirs in (("", "x_block"), ("_context", "context_block")):
        names[f"{block}norm1{ours}.linear"] = f"{first}{theirs}.adaLN_modulation.1"
        names[f"{block}ff{ours}.net.0.proj"] = f"{first}{theirs}.mlp.fc1"
        names[f"{block}ff{ours}.net.2"] = f"{first}{theirs}.mlp.fc2"
    return names


def _name_flux(config: Any) -> Names:
    double, single = "transformer_blocks.*.", "single_transformer_blocks.*."
    ends = {"first": "in_layer", "second": "out_layer"}
    names = {
        **_name_embedder("time_in", "time_text_embed.timestep_embedder", **ends),
        **_name_embedder("vector_in", "time_text_embed.text_embedder", **ends),
        **_name_embedder("guidance_in", "time_text_embed.guidance_embedder", **ends),
        "context_embedder": "txt_in",
        "x_embedder": "img_in",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1 swapped",
        f"{single}norm.linear": "single_blocks.*.modulation.lin",
        f"{single}attn.to_q": "single_blocks.*.linear1 0/4",
        f"{single}attn.to_k": "single_blocks.*.linear1 1/4",
        f"{single}attn.to_v": "single_blocks.*.linear1 2/4",
        f"{single}proj_mlp": "single_blocks.*.linear1 3/4",
        f"{single}proj_out": "single_blocks.*.linear2",
        f"{single}attn.norm_q.weight": "single_blocks.*.norm.query_norm.scale",
        f"{single}attn.norm_k.weight": "single_blocks.*.norm.key_norm.scale",
    }
    layers = {
        "img": "to_q to_k to_v norm_q norm_k to_out.0",
        "txt": "add_q_proj add_k_proj add_v_proj norm_added_q norm_added_k to_add_out",
    }
    for theirs, ours in (("img", ""), ("txt", "_context")):
        q, k, v, norm_q, norm_k, out = layers[theirs].split()
        start = f"double_blocks.*.{theirs}"
        names |= {f"{double}attn.{layer}": f"{start}_attn.qkv {part}/3" for part, layer in enumerate((q, k, v))}
        names[f"{double}attn.{norm_q}.weight"] = f"{start}_attn.norm.query_norm.scale"
        names[f"{double}attn.{norm_k}.weight"] = f"{start}_attn.norm.key_norm.scale"
        names[f"{double}attn.{out}"] = f"{start}_attn.proj"
        names[f"{double}norm1{ours}.linear"] = f"{start}_mod.lin"
        names[f"{double}ff{ours}.net.0.proj"] = f"{start}_mlp.0"
        names[f"{double}ff{ours}.net.2"] = f"{start}_mlp.2"
    return names


def _name_wan(config: Any) -> Names:
    names = {
        "patch_embedding": "patch_embedding",
        **_name_embedder("time_embedding", "condition_embedder.time_embedder", first="0", second="2"),
        **_name_embedder("text_embedding", "condition_embedder.text_embedder", first="0", second="2"),
        "condition_embedder.time_proj": "time_projection.1",
        "scale_shift_table": "head.modulation",
        "proj_out": "head.head",
        "blocks.*.scale_shift_table": "blocks.*.modulation",
        "blocks.*.norm2": "blocks.*.norm3",
        "blocks.*.ffn.net.0.proj": "blocks.*.ffn.0",
        "blocks.*.ffn.net.2": "blocks.*.ffn.2",
    }
    if config.get("image_dim") is not None:  # Wan 2.1 from images
        embedder = {
            "norm1": "proj.0",
            "ff.net.0.proj": "proj.1",
            "ff.net.2": "proj.3",
            "norm2": "proj.4",
            "pos_embed": "emb_pos",
        }
        names |= {f"condition_embedder.image_embedder.{ours}": f"img_emb.{theirs}" for ours, theirs in embedder.items()}
        for ours, theirs in (("add_k_proj", "k_img"), ("add_v_proj", "v_img"), ("norm_added_k", "norm_k_img")):
            names[f"blocks.*.attn2.{ours}"] = f"blocks.*.cross_attn.{theirs}"
    for ours, theirs in (("attn1", "self_attn"), ("attn2", "cross_attn")):
        for layer, original in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o")):
            names[f"blocks.*.{ours}.{layer}"] = f"blocks.*.{theirs}.{original}"
        for norm in ("norm_q", "norm_k"):
            names[f"blocks.*.{ours}.{norm}"] = f"blocks.*.{theirs}.{norm}"
    return names


def _name_z_image(config: Any) -> Names:
    names = {f"all_final_layer.2-1.{layer}": f"final_layer.{layer}" for layer in ("linear", "adaLN_modulation.1")}
    names["all_x_embedder.2-1"] = "x_embedder"
    for blocks in ("layers", "noise_refiner", "context_refiner"):
        start = f"{blocks}.*.attention."
        names |= {f"{start}to_{letter}": f"{start}qkv {part}/3" for part, letter in enumerate("qkv")}
        names |= {f"{start}norm_q": f"{start}q_norm", f"{start}norm_k": f"{start}k_norm", f"{start}to_out.0": f"{start}out"}
    return names


def _name_sdxl(config: Any) -> Names:
    """Return the table of a UNet.

    The original numbers the blocks of all resolutions in one list, with resnet, attention and resampling as submodules 0, 1
    and 2.
    """
    names = {
        "conv_in": "input_blocks.0.0",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        **_name_embedder("time_embed", "time_embedding", first="0", second="2"),
        **_name_embedder("label_emb.0", "add_embedding", first="0", second="2"),
        **_name_attention("mid_block.attentions.0", "middle_block.1", config),
    }
    for part in (0, 1):
        names |= _name_resnet(f"mid_block.resnets.{part}", f"middle_block.{2 * part}")
    each, stages = config["layers_per_block"], len(config["block_out_channels"])
    # The down blocks follow the first convolution, and number the downsampling, too.
    for side, blocks, first, layers in (("down", "input_blocks", 1, each), ("up", "output_blocks", 0, each + 1)):
        for stage in range(stages):
            attends = "CrossAttn" in config[f"{side}_block_types"][stage]
            for layer in range(layers):
                ours, theirs = f"{side}_blocks.{stage}", f"{blocks}.{first + stage * (each + 1) + layer}"
                names |= _name_resnet(f"{ours}.resnets.{layer}", f"{theirs}.0")
                if attends:
                    names |= _name_attention(f"{ours}.attentions.{layer}", f"{theirs}.1", config)
            if side == "up":
                names[f"{ours}.upsamplers.0.conv"] = f"{theirs}.{2 if attends else 1}.conv"
            else:
                names[f"{ours}.downsamplers.0.conv"] = f"{blocks}.{(stage + 1) * (each + 1)}.0.op"
    return names


def _name_resnet(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{layer}": f"{theirs}.{original}" for layer, original in RESNET.items()}


def _name_attention(ours: str, theirs: str, config: Any) -> dict[str, str]:
    """Return the rows of a block's transformer, whose layers have the same names in both."""
    depths = config["transformer_layers_per_block"]
    depth = depths if isinstance(depths, int) else max(depths)
    inner = ["norm1", "norm2", "norm3", "ff.net.0.proj", "ff.net.2"]
    inner += [f"{kind}.{layer}" for kind in ("attn1", "attn2") for layer in ("to_q", "to_k", "to_v", "to_out.0")]
    layers = [
        "norm",
        "proj_in",
        "proj_out",
        *(f"transformer_blocks.{block}.{layer}" for block in range(depth) for layer in inner),
    ]
    return {f"{ours}.{layer}": f"{theirs}.{layer}" for layer in layers}


# By the class of diffusers' pipeline. Files of SD3 and SDXL contain the other networks, too, so their names have a prefix.
LAYOUTS: dict[str, WeightLayout] = {
    "StableDiffusion3Pipeline": WeightLayout(_name_sd3, prefix="model.diffusion_model.", kohya=True),
    "FluxPipeline": WeightLayout(_name_flux, kohya=True),
    "QwenImagePipeline": WeightLayout(lambda config: {}, same=True),
    "QwenImageEditPipeline": WeightLayout(lambda config: {}, same=True),
    "QwenImageEditPlusPipeline": WeightLayout(lambda config: {}, same=True),
    "WanPipeline": WeightLayout(_name_wan),
    "WanImageToVideoPipeline": WeightLayout(_name_wan),
    "ZImagePipeline": WeightLayout(_name_z_image, same=True, adapters_renamed=False),
    "StableDiffusionXLPipeline": WeightLayout(_name_sdxl, prefix="model.diffusion_model.", kohya=True),
}
ARCHITECTURES = "SD3, FLUX, Qwen-Image, Wan, Z-Image and SDXL"
