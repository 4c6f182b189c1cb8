"""LoRA files of other programs: the same adapter, whatever its keys are called; nothing is left out in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.lora_files import load_lora, read_lora

RANK, ALPHA = 2, 6.0
LAYERS = ("blocks.0.to_q", "blocks.1.to_q", "blocks.1.to_out.0")


class Block(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.to_out[0](self.to_q(x)))


class Net(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def factors() -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each layer."""
    draws = torch.Generator().manual_seed(0)
    sizes = {"to_q": (4, 6), "0": (6, 4)}
    found = {}
    for layer in LAYERS:
        into, out = sizes[layer.rpartition(".")[2]]
        found[layer] = torch.randn(RANK, into, generator=draws), torch.randn(out, RANK, generator=draws)
    return found


def diffusers(folder: Path) -> Path:
    named: dict[str, Tensor] = {}
    for layer, (a, b) in factors().items():
        named |= {f"transformer.{layer}.lora_A.weight": a, f"transformer.{layer}.lora_B.weight": b}
    header = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})
    save_file(named, folder / "pytorch_lora_weights.safetensors", metadata={"lora_adapter_metadata": header})
    return folder


def peft(folder: Path) -> Path:
    named: dict[str, Tensor] = {}
    for layer, (a, b) in factors().items():
        named |= {f"base_model.model.{layer}.lora_A.weight": a, f"base_model.model.{layer}.lora_B.weight": b}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA}))
    return folder


def kohya(folder: Path) -> Path:
    named: dict[str, Tensor] = {}
    for layer, (a, b) in factors().items():
        flat = f"lora_unet_{layer.replace('.', '_')}"
        named |= {f"{flat}.lora_down.weight": a, f"{flat}.lora_up.weight": b, f"{flat}.alpha": torch.tensor(ALPHA)}
    save_file(named, folder / "kohya.safetensors")
    return folder / "kohya.safetensors"


def comfy(folder: Path) -> Path:
    """Write the same with dots, A as a convolution of one pixel, and scales multiplied into B."""
    named: dict[str, Tensor] = {}
    for layer, (a, b) in factors().items():
        name = f"diffusion_model.{layer}"
        named |= {f"{name}.lora_down.weight": a[..., None, None], f"{name}.lora_up.weight": b * ALPHA / RANK}
    save_file(named, folder / "any name.safetensors")
    return folder


@pytest.mark.parametrize("write", [diffusers, peft, kohya, comfy])
def test_the_same_adapter_by_any_keys(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """The network computes W + (alpha / rank) B A at each layer of the file, and at no other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, x = Net(), torch.randn(3, 4)
    found = read_lora(write(tmp_path), module)
    assert (found.rank, found.layers) == (RANK, tuple(sorted(LAYERS)))
    if write is not comfy:
        assert found.alpha == ALPHA
    merged = Net()
    merged.load_state_dict(module.state_dict())
    for layer, (a, b) in factors().items():
        linear: Any = merged.get_submodule(layer)
        linear.weight.data += ALPHA / RANK * b @ a
    add_lora(module, LoraConfig(rank=found.rank, alpha=found.alpha), found.layers, adapters=("default", "start"))
    for name in ("default", "start"):
        load_lora(module, found.tensors, name)
    torch.testing.assert_close(module(x), merged(x), rtol=1e-5, atol=1e-5)


def test_layers_of_different_ranks_and_scales(tmp_path: Path) -> None:
    """Smaller factors are filled up with zeros, and scales multiplied into B: the products stay the same."""
    named: dict[str, Tensor] = {}
    products: dict[str, Tensor] = {}
    for number, (layer, (a, b)) in enumerate(factors().items()):
        rank, alpha = 1 + number % 2, 1.0 + number
        flat = f"lora_transformer_{layer.replace('.', '_')}"
        named |= {
            f"{flat}.lora_down.weight": a[:rank].clone(),
            f"{flat}.lora_up.weight": b[:, :rank].contiguous(),
            f"{flat}.alpha": torch.tensor(alpha),
        }
        products[layer] = alpha / rank * b[:, :rank] @ a[:rank]
    save_file(named, tmp_path / "mixed.safetensors")
    found = read_lora(tmp_path / "mixed.safetensors", Net())
    assert found.rank == 2
    for layer, product in products.items():
        a, b = (found.tensors[f"{layer}.lora_{factor}.weight"] for factor in "AB")
        torch.testing.assert_close(found.alpha / found.rank * b @ a, product)


def test_several_networks_have_a_folder_each(tmp_path: Path) -> None:
    for name in ("high", "low"):
        (tmp_path / name).mkdir()
        diffusers(tmp_path / name)
    found = read_lora(tmp_path, nn.ModuleDict({"high": Net(), "low": Net()}))
    assert len(found.layers) == 6
    assert torch.equal(found.tensors["low.blocks.0.to_q.lora_A.weight"], factors()["blocks.0.to_q"][0])
    assert (found.rank, found.alpha) == (RANK, ALPHA)


def test_a_converter_is_asked_where_keys_match_nothing(tmp_path: Path) -> None:
    """For layouts in which layers have other names altogether."""
    save_file({f"double.{name}": tensor for name, tensor in _plain().items()}, tmp_path / "a.safetensors")

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix("double."): tensor for name, tensor in tensors.items()}

    assert read_lora(tmp_path, Net(), convert=convert).layers == tuple(sorted(LAYERS))
    with pytest.raises(ValueError, match=r"match no linear layer of the Net: double\.blocks"):
        read_lora(tmp_path, Net(), convert=lambda tensors: 1 / 0)  # type: ignore[arg-type, return-value]


def _plain() -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer, (a, b) in factors().items():
        found |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    return found


WRONG: list[tuple[dict[str, Tensor | None], str]] = [
    ({"text_encoder.q.lora_A.weight": torch.zeros(2, 4)}, "match no linear layer of the Net: text_encoder.q.lora_A.weight"),
    ({"blocks.0.to_q.lora_magnitude_vector": torch.zeros(6)}, "layers of different ranks, scales or forms, expected those"),
    ({f"{name}.lora_magnitude_vector": torch.zeros(9) for name in LAYERS}, r"has 9 lengths of rows, expected 6"),
    ({"blocks.0.to_q.lokr_w1": torch.zeros(2, 2)}, "is no LoKr of one rank and factor for this architecture"),
    ({"blocks.0.norm.lora_A.weight": torch.zeros(2, 4)}, "match no linear layer of the Net: blocks.0.norm.lora_A.weight"),
    ({"blocks.0.to_q.lora_B.weight": None}, "is incomplete: blocks.0.to_q has no factor B"),
    ({"blocks.0.to_q.lora_A.weight": torch.zeros(2, 5)}, r"of another architecture: blocks.0.to_q has factors of \[2, 5\]"),
    ({"blocks.0.to_q.lora_B.weight": torch.zeros(6, 3)}, "of another architecture: blocks.0.to_q"),
    (dict.fromkeys(_plain()), "match no linear layer of the Net: it holds none"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Tensor | None], says: str) -> None:
    """In one line, with the file; an adapter is never loaded in part."""
    named = {name: tensor for name, tensor in {**_plain(), **changes}.items() if tensor is not None}
    save_file(named, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=says) as error:
        read_lora(tmp_path / "a.safetensors", Net())
    assert "a.safetensors" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "text.safetensors").write_text("no tensors")
    for path, says in (
        (tmp_path / "nowhere", "is neither a file nor a folder"),
        (tmp_path / "text.safetensors", "cannot be read as an adapter"),
    ):
        with pytest.raises(ValueError, match=says):
            read_lora(path, Net())
    save_file(_plain(), tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="holds 2 safetensors files, expected pytorch_lora_weights"):
        read_lora(tmp_path, Net())
    folder = tmp_path / "peft"
    folder.mkdir()
    peft(folder)
    for setting, says in (
        ({"use_rslora": True}, "rsLoRA"),
        ({"alpha_pattern": {"to_q": 1}}, "has the setting alpha_pattern"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps({"r": RANK, "lora_alpha": ALPHA, **setting}))
        with pytest.raises(ValueError, match=says):
            read_lora(folder, Net())


def test_the_original_names_of_wan_are_converted_by_its_pipeline(tmp_path: Path) -> None:
    """ComfyUI's layout of Wan, where layers have other names than in diffusers."""
    import tiny_pipelines

    from fluvial.engines.train.jobs.weights import converter

    module = tiny_pipelines.wan().transformer
    names = {
        f"{kind}.{letter}": f"{ours}.{theirs}"
        for kind, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for letter, theirs in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    } | {"ffn.0": "ffn.net.0.proj", "ffn.2": "ffn.net.2"}
    named, expected = {}, {}
    for block in range(2):
        for theirs, ours in names.items():
            layer = module.get_submodule(f"blocks.{block}.{ours}")
            a, b = torch.randn(2, layer.in_features), torch.randn(layer.out_features, 2)
            named[f"diffusion_model.blocks.{block}.{theirs}.lora_A.weight"] = a
            named[f"diffusion_model.blocks.{block}.{theirs}.lora_B.weight"] = b
            expected[f"blocks.{block}.{ours}"] = a
    save_file(named, tmp_path / "wan.safetensors")
    found = read_lora(tmp_path, module, convert=converter("WanPipeline"))
    assert set(found.layers) == set(expected)
    assert all(torch.equal(found.tensors[f"{layer}.lora_A.weight"], a) for layer, a in expected.items())
    with pytest.raises(ValueError, match="match no linear layer of the WanTransformer3DModel"):
        read_lora(tmp_path, module)
