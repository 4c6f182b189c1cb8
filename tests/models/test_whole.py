"""A pipeline in one file, as ComfyUI and kohya's trainers save it, has the tensors of the folder that it was made of."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fluvial.models.original.convert import to_original
from fluvial.models.original.layout import OriginalNames
from fluvial.models.original.whole import find_pipeline_folder
from fluvial.models.pipelines.open import open_model
from fluvial.models.tiny import encoders
from fluvial.models.tiny.pipelines import save

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore:The configuration file of this scheduler:FutureWarning")]
CLIP_L, CLIP_G = "text_encoders.clip_l.transformer.", "text_encoders.clip_g.transformer."
# Prefix of each text encoder in the file, by part; the second of SDXL has OpenCLIP's names.
TEXT = {
    "StableDiffusionPipeline": {"text_encoder": "cond_stage_model.transformer."},
    "StableDiffusionXLPipeline": {
        "text_encoder": "conditioner.embedders.0.transformer.",
        "text_encoder_2": "conditioner.embedders.1.model.",
    },
    "StableDiffusion3Pipeline": {
        "text_encoder": CLIP_L,
        "text_encoder_2": CLIP_G,
        "text_encoder_3": "text_encoders.t5xxl.transformer.",
    },
    "FluxPipeline": {"text_encoder": CLIP_L, "text_encoder_2": "text_encoders.t5xxl.transformer."},
}
VAE = {
    r"mid_block\.resnets\.0": "mid.block_1",
    r"mid_block\.resnets\.1": "mid.block_2",
    r"mid_block\.attentions\.0\.group_norm": "mid.attn_1.norm",
    r"mid_block\.attentions\.0\.to_out\.0": "mid.attn_1.proj_out",
    r"mid_block\.attentions\.0\.to_([qkv])": r"mid.attn_1.\1",
    r"down_blocks\.(\d+)\.resnets": r"down.\1.block",
    r"down_blocks\.(\d+)\.downsamplers\.0": r"down.\1.downsample",
    r"up_blocks\.(\d+)\.resnets": r"up.\1.block",
    r"up_blocks\.(\d+)\.upsamplers\.0": r"up.\1.upsample",
    "conv_shortcut": "nin_shortcut",
    "conv_norm_out": "norm_out",
}
OPEN_CLIP = {
    r"text_model\.encoder\.layers": "transformer.resblocks",
    r"self_attn\.out_proj": "attn.out_proj",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"text_model\.final_layer_norm": "ln_final",
    "layer_norm": "ln_",
    r"text_model\.embeddings\.token_embedding": "token_embedding",
    r"text_model\.embeddings\.position_embedding\.weight": "positional_embedding",
}


def renamed(tensors: dict[str, Tensor], table: dict[str, str]) -> dict[str, Tensor]:
    for ours, theirs in table.items():
        tensors = {re.sub(ours, theirs, name): tensor for name, tensor in tensors.items()}
    return tensors


def vae_names(tensors: dict[str, Tensor], stages: int) -> dict[str, Tensor]:
    """The decoder's blocks are numbered from the other end, and the matrices of attention are convolutions of 1 x 1."""
    found = renamed(tensors, VAE)
    found = {re.sub(r"up\.(\d+)", lambda at: f"up.{stages - 1 - int(at[1])}", name): each for name, each in found.items()}
    return {name: each[..., None, None] if ".attn_1." in name and each.ndim == 2 else each for name, each in found.items()}


def open_clip_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values are one matrix, and the projection is transposed."""
    found = dict(tensors)
    found["text_projection"] = found.pop("text_projection.weight").T.contiguous()
    for name in [name for name in found if "q_proj" in name]:
        parts = [found.pop(name.replace("q_proj", f"{letter}_proj")) for letter in "qkv"]
        found[name.replace("self_attn.q_proj.", "attn.in_proj_")] = torch.cat(parts)
    return renamed(found, OPEN_CLIP)


def write_whole(name: str, folder: Path, file: Path, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Tensor]]:
    """Write a tiny pipeline's folder, without its weights, and all of them to one file; return them by part."""
    save(name, folder)
    wide = encoders.build_clip_encoder(projected="Diffusion3" in name or "XL" in name, width=24)
    if "text_encoder_2" in TEXT[name] and "Flux" not in name:  # diffusers tells CLIPs by their widths
        wide.save_pretrained(folder / "text_encoder_2")
    parts, text = {}, TEXT[name]
    for part in (folder / "unet", folder / "transformer", folder / "vae", *(folder / part for part in text)):
        for weights in part.glob("*.safetensors"):
            parts[part.name] = {key: tensor.to(dtype) for key, tensor in load_file(weights).items()}
            weights.unlink()
    network = "unet" if "unet" in parts else "transformer"
    config = json.loads((folder / network / "config.json").read_text())
    layout = OriginalNames("StableDiffusionXLPipeline" if network == "unet" else name, config)  # of all UNets
    whole = {
        f"model.diffusion_model.{key.removeprefix('model.diffusion_model.')}": tensor
        for key, tensor in to_original(layout, parts[network]).items()
    }
    stages = len(json.loads((folder / "vae" / "config.json").read_text())["block_out_channels"])
    whole |= {f"first_stage_model.{key}": each for key, each in vae_names(dict(parts["vae"]), stages).items()}
    for encoder, prefix in text.items():
        tensors = dict(parts[encoder])
        if prefix.startswith("conditioner.embedders.1"):
            tensors = open_clip_names(tensors)
        elif prefix == CLIP_L or ("transformer" in prefix and "t5" not in prefix):  # flat today
            tensors = {key if key.startswith("text_") else f"text_model.{key}": each for key, each in tensors.items()}
        if prefix == CLIP_L and name == "StableDiffusion3Pipeline":
            del tensors["text_projection.weight"]  # the files of SD3 have none
            parts[encoder]["text_projection.weight"] = torch.eye(len(parts[encoder]["text_projection.weight"])).to(dtype)
        whole |= {prefix + key: tensor for key, tensor in tensors.items()}
    save_file({key: tensor.contiguous() for key, tensor in whole.items()}, file)
    return parts


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fluvial" / "pipelines"


@pytest.mark.parametrize("name", TEXT)
def test_a_whole_pipeline_is_read_from_one_file(name: str, tmp_path: Path, cache: Path) -> None:
    parts = write_whole(name, tmp_path / "settings", file := tmp_path / "whole.safetensors")
    folder = find_pipeline_folder(file, settings=str(tmp_path / "settings"))
    for part, tensors in parts.items():
        found = {key: each for weights in (folder / part).glob("*.safetensors") for key, each in load_file(weights).items()}
        assert found.keys() == tensors.keys(), part
        assert all(torch.equal(found[key], tensors[key]) for key in tensors), part
    assert open_model(folder).pipeline == name
    assert find_pipeline_folder(file, settings=str(tmp_path / "settings")) == folder == next(cache.glob("whole-*[!k]"))


def test_what_cannot_be_read_is_one_line(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the file and what to give; nothing stays in the cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    settings = tmp_path / "settings"
    write_whole("StableDiffusion3Pipeline", settings, file := tmp_path / "whole.safetensors")
    tensors, other = load_file(file), tmp_path / "other.safetensors"
    published = {"model.diffusion_model.joint_blocks.37.x_block.mlp.fc1.weight": torch.ones(1)}
    wrong: dict[str, tuple[dict[str, Tensor], str | None]] = {
        r"takes settings and tokenizers from stabilityai/stable-diffusion-3.5-large, .* set `pipeline.settings`": (
            published,
            None,
        ),
        "no names of a checkpoint that diffusers knows": ({"layer.lora_A.weight": torch.ones(1)}, None),
        "scaled float8": ({"model.diffusion_model.x.scale_weight": torch.ones(1)}, str(settings)),
        "it lacks 1 tensors of text_encoder_3": (
            {name: each for name, each in tensors.items() if "t5xxl.transformer.encoder.final" not in name},
            str(settings),
        ),
        "it lacks joint_blocks.* the network alone": (
            {name: each for name, each in tensors.items() if "joint_blocks.0.x_block.attn.qkv.weight" not in name},
            str(settings),
        ),
        "predicts v": ({**tensors, "v_pred": torch.ones(1)}, str(settings)),
    }
    for message, (held, given) in wrong.items():
        save_file(held, other)
        with pytest.raises(ValueError, match=message) as caught:
            find_pipeline_folder(other, settings=given)
        assert str(other) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not [path for path in cache.iterdir() if path.is_dir()]
    with pytest.raises(ValueError, match=r"`pipeline.settings` has no effect"):
        find_pipeline_folder(settings, settings=str(settings))
