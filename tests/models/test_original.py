"""The original layout of each architecture: diffusers' own converters turn it back into the same tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders import single_file_utils as theirs
from helpers import tiny_conditioned, tiny_pipelines
from helpers.refusals import refuses
from safetensors.torch import save_file
from torch import Tensor, nn

from fluvial.engines.run.jobs.weights import make_converter
from fluvial.models.lora_files import read_lora
from fluvial.models.original.convert import (
    adapter_from_original,
    adapter_to_original,
    from_original,
    swap_halves,
    to_original,
)
from fluvial.models.original.layout import ARCHITECTURES, LAYOUTS, OriginalNames
from fluvial.models.pipelines.open import list_adapters

RANK, ALPHA = 2, 4.0  # a scale of 2, by which every number is multiplied without rounding
PIPELINES = {
    "sd3": "StableDiffusion3Pipeline",
    "flux": "FluxPipeline",
    "qwen-image": "QwenImagePipeline",
    "wan": "WanPipeline",
    "wan-image": "WanImageToVideoPipeline",
    "z-image": "ZImagePipeline",
    "sdxl": "StableDiffusionXLPipeline",
}
CONVERTERS: dict[str, Any] = {
    "sd3": theirs.convert_sd3_transformer_checkpoint_to_diffusers,
    "flux": theirs.convert_flux_transformer_checkpoint_to_diffusers,
    "qwen-image": lambda tensors, **_: tensors,  # its original layout is that of diffusers
    "wan": theirs.convert_wan_transformer_to_diffusers,
    "wan-image": theirs.convert_wan_transformer_to_diffusers,
    "z-image": theirs.convert_z_image_transformer_checkpoint_to_diffusers,
    "sdxl": theirs.convert_ldm_unet_checkpoint,
}
each = pytest.mark.parametrize("name", PIPELINES)


@pytest.fixture(scope="module")
def networks() -> dict[str, Any]:
    found = {}
    for name in PIPELINES:
        if name == "flux":  # its converter knows no other number of rows
            with torch.device("meta"):
                found[name] = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
            continue
        pipeline = tiny_conditioned.wan_image(embedded=1) if name == "wan-image" else tiny_pipelines.ROWS[name].make()
        found[name] = pipeline.unet if name == "sdxl" else pipeline.transformer
    return found


def drawn(network: nn.Module) -> dict[str, Tensor]:
    """Return random tensors of a network; of matrices on the meta device the first two columns, for converters move rows."""
    source = torch.Generator().manual_seed(0)
    shapes = {key: list(tensor.shape) for key, tensor in network.state_dict().items()}
    thin = next(network.parameters()).is_meta
    return {
        key: torch.randn([*shape[:1], 2] if thin and len(shape) > 1 else shape, generator=source)
        for key, shape in shapes.items()
    }


def factors(network: nn.Module, layers: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    found = {}
    source = torch.Generator().manual_seed(1)
    for layer in layers:
        linear: Any = network.get_submodule(layer)
        a, b = (RANK, linear.in_features), (linear.out_features, RANK)
        found[layer] = torch.randn(a, generator=source), torch.randn(b, generator=source)
    return found


def adapted(name: str, network: nn.Module) -> list[str]:
    further = ("add_k_proj", "add_v_proj") if name == "wan-image" else ()
    targets = (*list_adapters()[PIPELINES[name]].lora_targets, *further)
    return [key for key, layer in network.named_modules() if isinstance(layer, nn.Linear) and key.endswith(targets)]


@each
def test_diffusers_converts_the_weights_back_to_the_bit(name: str, networks: dict[str, Any]) -> None:
    network = networks[name]
    tensors, config = drawn(network), network.config
    original = to_original(OriginalNames(PIPELINES[name], config), tensors)
    back = CONVERTERS[name]({key: tensor.clone() for key, tensor in original.items()}, config=dict(config))
    assert set(back) == set(tensors)
    assert all(torch.equal(back[key], tensors[key]) for key in tensors)
    assert (set(original) == set(tensors)) == (name == "qwen-image")
    for prefix in ("", "model.diffusion_model.") if name != "qwen-image" else ("", "transformer."):
        file = {prefix + key.removeprefix("model.diffusion_model."): tensor for key, tensor in original.items()}
        ours = from_original(PIPELINES[name], {**file, "vae.x": tensors[min(tensors)]}, network)
        assert ours.keys() == tensors.keys()
        assert all(torch.equal(ours[key], tensors[key]) for key in tensors)
    with pytest.raises(ValueError, match=r"^it lacks .*, which is .* of diffusers'"):
        from_original(PIPELINES[name], dict(list(original.items())[1:]), network)


@each
def test_the_adapter_changes_the_original_weights_as_it_changes_ours(name: str, networks: dict[str, Any]) -> None:
    """As ComfyUI adds it: W + alpha / rank B A at the original name; for SD3, too, which diffusers has no converter for."""
    network: Any = tiny_pipelines.flux().transformer if name == "flux" else networks[name]
    tensors, names = drawn(network), OriginalNames(PIPELINES[name], network.config)
    found = factors(network, adapted(name, network))
    ours = {
        key: tensor + (ALPHA / RANK) * (found[layer][1] @ found[layer][0])
        if (layer := key.removesuffix(".weight")) in found
        else tensor
        for key, tensor in tensors.items()
    }
    original = to_original(names, tensors)
    file = adapter_to_original(names, found, network, alpha=ALPHA)
    down, up = ("lora_down", "lora_up") if names.layout.kohya else ("lora_A", "lora_B")
    for stem in {key.removesuffix(".alpha") for key in file if key.endswith(".alpha")}:
        a, b = file[f"{stem}.{down}.weight"], file[f"{stem}.{up}.weight"]
        key = comfy_key(stem, original, names)
        rows = slice(None)
        if key not in original:  # ComfyUI maps diffusers' names of joined layers to their rows
            place = names.find_tensor(stem.removeprefix("diffusion_model.") + ".weight")
            key, rows = names.layout.prefix + place.name, slice(place.part * len(b), (place.part + 1) * len(b))
        original[key][rows] += float(file[f"{stem}.alpha"]) / len(a) * (b @ a)
    expected = to_original(names, ours)
    for key, tensor in expected.items():
        torch.testing.assert_close(original[key], tensor, rtol=1e-5, atol=1e-5)


def comfy_key(stem: str, original: dict[str, Tensor], names: OriginalNames) -> str:
    prefix = names.layout.prefix
    if stem.startswith("lora_unet_"):
        flat = {f"lora_unet_{key.removeprefix(prefix).removesuffix('.weight').replace('.', '_')}": key for key in original}
        return flat[stem]
    return f"{prefix}{stem.removeprefix('diffusion_model.')}.weight"


@each
def test_diffusers_converts_the_adapter_back_to_the_bit(name: str, networks: dict[str, Any], tmp_path: Path) -> None:
    """Of all layers that a run adapts by default. Its converters multiply A by the scale. SD3 has none, and is read here."""
    network, pipeline = networks[name], PIPELINES[name]
    found = factors(network, adapted(name, network))
    file = adapter_to_original(OriginalNames(pipeline, network.config), found, network, alpha=ALPHA)
    if name != "sd3":
        back = loaded(pipeline, file, network)
        for layer, (a, b) in found.items():
            assert torch.equal(back.pop(f"{layer}.lora_A.weight"), a * (ALPHA / RANK))
            assert torch.equal(back.pop(f"{layer}.lora_B.weight"), b)
        assert not any(tensor.any() for tensor in back.values())  # of joined layers without an adapter
    save_file(file, tmp_path / "ours.safetensors")
    ours = read_lora(tmp_path / "ours.safetensors", network, convert=make_converter(pipeline, network))
    assert (ours.rank, ours.alpha, set(ours.layers)) == (RANK, ALPHA, set(found))
    for layer, (a, b) in found.items():
        assert torch.equal(ours.tensors[f"{layer}.lora_A.weight"], a)
        assert torch.equal(ours.tensors[f"{layer}.lora_B.weight"], b)


def loaded(pipeline: str, file: dict[str, Tensor], network: Any) -> dict[str, Tensor]:
    import diffusers
    from diffusers.utils import convert_unet_state_dict_to_peft

    given = {"unet_config": network.config} if pipeline == PIPELINES["sdxl"] else {}
    result: Any = getattr(diffusers, pipeline).lora_state_dict({key: each.clone() for key, each in file.items()}, **given)
    if not given:
        return {key.removeprefix("transformer."): tensor for key, tensor in result.items()}
    state, alphas = result
    scaled = {
        key: tensor * (alphas.get(f"{key}.alpha") or alphas[f"{key.partition('.lora.')[0]}.alpha"]) / len(tensor)
        if "down" in key.rpartition("lora")[2]
        else tensor
        for key, tensor in state.items()
    }
    plain = convert_unet_state_dict_to_peft(scaled).items()
    return {key.removeprefix("unet.").replace(".processor.", "."): tensor for key, tensor in plain}


def test_joined_and_exchanged_layers(networks: dict[str, Any]) -> None:
    """An adapter of queries alone has zeros for keys and values; factors that joined layers share are split by rows."""
    network, layer = networks["sd3"], "transformer_blocks.0.attn.to_q"
    original = OriginalNames(PIPELINES["sd3"], network.config)
    found = factors(network, [layer])
    file = adapter_to_original(original, found, network, alpha=ALPHA)
    stem = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    assert set(file) == {f"{stem}.{end}" for end in ("lora_down.weight", "lora_up.weight", "alpha")}
    assert file[f"{stem}.lora_down.weight"].shape[0] == 3 * RANK
    assert float(file[f"{stem}.alpha"]) == 3 * ALPHA
    back = adapter_from_original(PIPELINES["sd3"], file, network)
    assert {key.partition(".lora_")[0] for key in back if ".lora_" in key} == {layer}
    shared = {f"{stem}.lora_down.weight": torch.randn(RANK, 16), f"{stem}.lora_up.weight": torch.randn(48, RANK)}
    split = adapter_from_original(PIPELINES["sd3"], shared, network)
    for part, letter in enumerate("qkv"):
        start = f"transformer_blocks.0.attn.to_{letter}"
        assert torch.equal(split[f"{start}.lora_A.weight"], shared[f"{stem}.lora_down.weight"])
        assert torch.equal(split[f"{start}.lora_B.weight"], shared[f"{stem}.lora_up.weight"][16 * part : 16 * (part + 1)])
    network = networks["sd3"]
    found = factors(network, ["norm_out.linear"])
    file = adapter_to_original(OriginalNames(PIPELINES["sd3"], network.config), found, network, alpha=ALPHA)
    up = file["lora_unet_final_layer_adaLN_modulation_1.lora_up.weight"]
    assert torch.equal(up, swap_halves(found["norm_out.linear"][1]))
    assert not torch.equal(up, found["norm_out.linear"][1])
    back = adapter_from_original(PIPELINES["sd3"], file, network)
    assert torch.equal(back["norm_out.linear.lora_B.weight"], found["norm_out.linear"][1])


def test_what_has_no_original_name_is_named(networks: dict[str, Any]) -> None:
    names = OriginalNames(PIPELINES["wan"], networks["wan"].config)
    refuses(r"blocks\.0\.extra\.weight has no original name", to_original, names, {"blocks.0.extra.weight": torch.zeros(1)})
    for keys, says in (
        (("lora_unet_elsewhere.lora_down.weight",), "belongs to no layer of WanPipeline"),
        (("diffusion_model.blocks.0.self_attn.q.lora_A.weight",), "has no factor B"),
    ):
        refuses(says, adapter_from_original, PIPELINES["wan"], {key: torch.zeros(2, 2) for key in keys}, networks["wan"])
    joined = {"lora_unet_joint_blocks_0_x_block_attn_qkv.lokr_w1": torch.zeros(2, 2)}
    refuses("attn_qkv is a LoKr of several layers", adapter_from_original, PIPELINES["sd3"], joined, networks["sd3"])
    refuses("StableDiffusionPipeline has no original", adapter_from_original, "StableDiffusionPipeline", {}, nn.Linear(1, 1))
    from_text = {name for name in LAYOUTS if not name.endswith(("ImageToVideoPipeline", "EditPipeline", "EditPlusPipeline"))}
    assert len(from_text) == len(ARCHITECTURES.replace(" and ", ", ").split(", "))
