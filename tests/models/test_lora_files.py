"""LoRA files of other programs: the same adapter, whatever its keys are called; nothing is left out in silence."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import Patch
from helpers.refusals import refuses
from safetensors.torch import save_file
from torch import Tensor, nn

from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.lora_files import load_lora, read_lora

RANK, ALPHA = 2, 6.0
LAYERS = ("blocks.0.to_q", "blocks.1.to_q", "blocks.1.to_out.0")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_out = nn.Linear(4, 6), nn.ModuleList([nn.Linear(6, 4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.to_out[0](self.to_q(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def factors() -> dict[str, tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    sizes = {"to_q": (4, 6), "0": (6, 4)}
    found = {}
    for layer in LAYERS:
        into, out = sizes[layer.rpartition(".")[2]]
        found[layer] = torch.randn(RANK, into, generator=draws), torch.randn(out, RANK, generator=draws)
    return found


def _plain(prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for layer, (a, b) in factors().items():
        found |= {f"{prefix}{layer}.lora_A.weight": a, f"{prefix}{layer}.lora_B.weight": b}
    return found


def test_several_networks_have_a_folder_each(tmp_path: Path) -> None:
    header = json.dumps({"transformer.r": RANK, "transformer.lora_alpha": ALPHA})
    for name in ("high", "low"):
        (tmp_path / name).mkdir()
        file = tmp_path / name / "pytorch_lora_weights.safetensors"
        save_file(_plain("transformer."), file, metadata={"lora_adapter_metadata": header})
    found = read_lora(tmp_path, nn.ModuleDict({"high": Net(), "low": Net()}))
    assert len(found.layers) == 6
    assert torch.equal(found.tensors["low.blocks.0.to_q.lora_A.weight"], factors()["blocks.0.to_q"][0])
    assert (found.rank, found.alpha) == (RANK, ALPHA)


def test_a_converter_is_asked_and_not_believed(tmp_path: Path, monkeypatch: Patch) -> None:
    """For layouts in which layers have other names altogether; diffusers' pipelines leave out parts with a warning."""
    import diffusers

    from fluvial.engines.run.jobs.weights import make_converter

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {key.removeprefix("double."): tensor for key, tensor in tensors.items() if "dora" not in key}

    plain = _plain("double.")
    save_file(plain, tmp_path / "a.safetensors")
    assert read_lora(tmp_path, Net(), convert=convert).layers == tuple(sorted(LAYERS))
    refuses(r"match no linear layer of the Net: double\.blocks", read_lora, tmp_path, Net(), convert=lambda tensors: 1 / 0)
    lengths = {f"double.{name}.dora_scale": torch.ones(4 if name.endswith("0") else 6, 1) for name in LAYERS}
    save_file(plain | lengths, tmp_path / "a.safetensors")
    refuses(r"match no linear layer of the Net: double\.\S+dora_scale", read_lora, tmp_path, Net(), convert=convert)
    some = {key: tensor for key, tensor in _plain().items() if "blocks.0" in key}
    monkeypatch.setattr(diffusers.FluxPipeline, "lora_state_dict", lambda tensors, **_: some)
    refuses("diffusers leaves out layers of an adapter of FluxPipeline", make_converter("FluxPipeline"), _plain())


def test_text_encoders_are_left_out_and_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of files of diffusers and of kohya: the network's own layers are read as they are without them."""
    save_file(_plain(), tmp_path / "a.safetensors")
    alone = read_lora(tmp_path, Net())
    others = {"text_encoder.q.lora_A.weight": torch.ones(2, 4), "lora_te1_mlp_fc1.alpha": torch.ones(())}
    save_file(_plain() | others, tmp_path / "a.safetensors")
    both = read_lora(tmp_path, Net())
    assert both.layers == alone.layers
    assert all(torch.equal(both.tensors[name], tensor) for name, tensor in alone.tensors.items())
    assert "2 tensors of text encoders are left out" in capfd.readouterr().err


WRONG: list[tuple[dict[str, Tensor | None], str]] = [
    ({"vae.q.lora_A.weight": torch.zeros(2, 4)}, "match no linear layer of the Net: vae.q.lora_A.weight"),
    ({"blocks.0.to_q.lora_magnitude_vector": torch.zeros(6)}, r"blocks.1.\S+ has no lengths of rows"),
    ({f"{name}.lora_magnitude_vector": torch.zeros(9) for name in LAYERS}, r"has lengths of \[9\] at .*, expected .* \[6\]"),
    # LyCORIS with wd_on_out=False, and OneTrainer: lengths of columns
    ({f"{name}.dora_scale": torch.ones(1, 4) for name in LAYERS}, r"has lengths of \[1, 4\] at .*, expected one per row"),
    ({"blocks.0.to_q.lokr_w1": torch.zeros(2, 2)}, "not only a LoKr: blocks.0.to_q has A, B, lokr_w1"),
    ({"blocks.0.to_q.lokr_t2": torch.zeros(2, 2)}, "match no linear layer of the Net: blocks.0.to_q.lokr_t2"),
    ({"blocks.0.to_q.hada_w1_a": torch.zeros(2, 2)}, "match no linear layer of the Net: blocks.0.to_q.hada_w1_a"),
    ({"blocks.0.to_q.diff_b": torch.zeros(6)}, "match no linear layer of the Net: blocks.0.to_q.diff_b"),
    ({"blocks.0.to_q.alpha": torch.tensor(0.0)}, "has the alpha 0.0 at blocks.0.to_q, expected a finite number above 0"),
    ({"blocks.0.to_q.alpha": torch.tensor(-1.0)}, "has the alpha -1.0 at blocks.0.to_q, expected a finite number above 0"),
    ({"blocks.0.to_q.alpha": torch.tensor(torch.nan)}, "has numbers that are not finite: blocks.0.to_q.alpha"),
    ({"blocks.0.to_q.alpha": torch.ones(2)}, r"has the alpha \[2\] at blocks.0.to_q, expected a finite number above 0"),
    ({"blocks.0.to_out.0.alpha": torch.tensor(1.0)}, "is incomplete: blocks.0.to_out.0 has no factor A"),
    ({"blocks.0.to_q.lora_B.weight": torch.full((6, 2), torch.inf)}, "not finite: blocks.0.to_q.lora_B.weight"),
    (
        {"blocks.0.to_q.lora_A.weight": torch.ones(2, 4).char()},
        "has numbers of torch.int8, expected real ones: blocks.0.to_q",
    ),
    ({"transformer.blocks.0.to_q.lora_B.weight": torch.zeros(6, 2)}, "has several keys for one part of blocks.0.to_q"),
    ({"blocks.0.to_q.lora_A.weight": torch.zeros(0, 4), "blocks.0.to_q.lora_B.weight": torch.zeros(6, 0)}, "has the rank 0"),
    ({"blocks.0.norm.lora_A.weight": torch.zeros(2, 4)}, "match no linear layer of the Net: blocks.0.norm.lora_A.weight"),
    ({"blocks.0.to_q.lora_B.weight": None}, "is incomplete: blocks.0.to_q has no factor B"),
    ({"blocks.0.to_q.lora_A.weight": torch.zeros(2, 5)}, r"of another architecture: blocks.0.to_q has factors of \[2, 5\]"),
    ({"blocks.0.to_q.lora_B.weight": torch.zeros(6, 3)}, "of another architecture: blocks.0.to_q"),
    (dict.fromkeys(_plain()), "match no linear layer of the Net: it holds none"),
]


@pytest.mark.parametrize(("changes", "says"), WRONG)
def test_what_does_not_fit_is_named(tmp_path: Path, changes: dict[str, Tensor | None], says: str) -> None:
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
        refuses(says, read_lora, path, Net())
    save_file(_plain(), tmp_path / "other.safetensors")
    refuses("holds 2 safetensors files, expected pytorch_lora_weights", read_lora, tmp_path, Net())


PEFT_SETTINGS = {"r": RANK, "lora_alpha": ALPHA}
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"lora_alpha": 0}, "has the alpha 0 at blocks.0.to_q, expected a finite number above 0"),
    ({"lora_alpha": float("nan")}, "has the alpha nan at blocks.0.to_q"),
    ({"lora_alpha": "16"}, "has the alpha 16 at blocks.0.to_q"),
    ({"lora_alpha": None}, "has the alpha None at blocks.0.to_q"),
    ({"r": None}, "has rank 2 at blocks.0.to_q, and its settings .* say None"),
    ({"rank_pattern": ["to_q"]}, "has the setting rank_pattern, expected a mapping"),
    ({"use_dora": True}, "is incomplete: its settings say use_dora, and no layer has lengths of rows"),
    ({"r": 8}, r"has rank 2 at blocks.0.to_q, and its settings \(header or adapter_config.json\) say 8"),
    ({"rank_pattern": {"to_q": 4}}, "has rank 2 at blocks.0.to_q, and its settings .* say 4"),
    ({"init_lora_weights": "pissa_niter_4"}, "is initialised by pissa_niter_4, which changes the base weights"),
    ({"alora_invocation_tokens": [1]}, "has the setting alora_invocation_tokens, with which a layer is not W"),
]


HEADERS = [
    ({"alpha": "None"}, "has the alpha None in its header, expected a number"),
    ({"lora_alpha": "0"}, "has the alpha 0.0 at blocks.0.to_q, expected a finite number above 0"),
    ({"alpha": "inf"}, "numbers that are not finite: blocks.0.to_q.alpha"),
    ({"ss_network_alpha": "16"}, "has rank 2 and the ss_network_alpha 16 in its header"),
    ({"lora_adapter_metadata": '{"lora_alpha": 0}'}, "has the alpha 0 at blocks.0.to_q, expected a finite number above 0"),
    ({"lora_adapter_metadata": "[1]"}, "cannot be read as an adapter: its settings are a list"),
]


@pytest.mark.parametrize(
    ("setting", "says", "place"),
    [
        *((*row, place) for row in SETTINGS for place in ("header", "prefixed header", "beside")),
        *((*row, "whole header") for row in HEADERS),
    ],
)
def test_settings_of_peft_that_do_not_fit_are_named(tmp_path: Path, setting: dict[str, Any], says: str, place: str) -> None:
    settings = {**PEFT_SETTINGS, **setting}
    header = {f"transformer.{name}" if place == "prefixed header" else name: value for name, value in settings.items()}
    metadata = None if place == "beside" else {"lora_adapter_metadata": json.dumps(header)}
    metadata = setting if place == "whole header" else metadata
    save_file(_plain(), tmp_path / "a.safetensors", metadata=metadata)
    if place == "beside":
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    refuses(says, read_lora, tmp_path / "a.safetensors", Net())


# The table of engines/export/README.md: each writer changes a network and writes the file of it.

Writer = Callable[[nn.Module, Path], None]
FLUX_LAYERS = {"transformer_blocks.0.attn.to_q": (16, 16), "transformer_blocks.0.ff.net.0.proj": (64, 16)}


def randomise(module: nn.Module) -> None:
    draws = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_magnitude" in name:
                parameter.mul_(1.2)
            elif ".lora_" in name or ".lokr_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draws))


def of_diffusers(config: Callable[[Any], Any]) -> Writer:
    def write(net: Any, folder: Path) -> None:
        import peft

        net.add_adapter(config(peft))
        randomise(net)
        net.save_lora_adapter(folder)

    return write


def of_pipeline(*, metadata: bool) -> Writer:
    def write(net: Any, folder: Path) -> None:
        import peft
        from diffusers import FluxPipeline
        from diffusers.training_utils import _collate_lora_metadata

        net.add_adapter(peft.LoraConfig(r=2, lora_alpha=6 if metadata else 2, target_modules=["to_q", "to_k"]))
        randomise(net)
        given = _collate_lora_metadata({"transformer": net}) if metadata else {}
        FluxPipeline.save_lora_weights(folder, transformer_lora_layers=peft.get_peft_model_state_dict(net), **given)

    return write


def of_peft(config: Callable[[Any], Any], name: str = "adapter_model.safetensors") -> Writer:
    def write(net: nn.Module, folder: Path) -> None:
        import peft

        model: Any = peft.get_peft_model(net, config(peft))
        randomise(model)
        model.save_pretrained(folder)
        (folder / "adapter_model.safetensors").rename(folder / name)

    return write


def by_layout(
    stem: Callable[[str], str],
    make: Callable[[Tensor, Callable[..., Tensor]], tuple[Tensor, dict[str, Tensor]]],
    **header: str,
) -> Writer:
    """Return a file of which the layout is written down here.

    Args:
        stem: function from the name of a layer to what precedes the parts.
        make: function of a weight and of a drawing function that returns the adapted weight and its parts.
        header: header of the file.
    """

    def write(net: nn.Module, folder: Path) -> None:
        source, tensors = torch.Generator().manual_seed(2), dict[str, Tensor]()
        for layer in FLUX_LAYERS:
            weight: Any = net.get_submodule(layer).weight
            weight.data, parts = make(weight.data, lambda *shape: 0.3 * torch.randn(shape, generator=source))
            tensors |= {f"{stem(layer)}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        save_file(tensors, folder / "adapter.safetensors", metadata=header or None)

    return write


def dotted(prefix: str) -> Callable[[str], str]:
    return lambda layer: f"{prefix}{layer}"


def flat(prefix: str) -> Callable[[str], str]:
    return lambda layer: f"{prefix}{layer.replace('.', '_')}"


def low_rank(
    weight: Tensor,
    draw: Callable[..., Tensor],
    *,
    scale: float,
    names: str = "lora_down lora_up",
    pixels: bool = False,
    **further: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    a, b, (down, up) = draw(2, weight.shape[1]), draw(len(weight), 2), names.split()
    a_file = a[..., None, None] if pixels else a  # as a convolution of one pixel
    parts = {f"{down}.weight": a_file, f"{up}.weight": b, **{name: torch.tensor(value) for name, value in further.items()}}
    return weight + scale * b @ a, parts


def dora(weight: Tensor, draw: Callable[..., Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    total, parts = low_rank(weight, draw, scale=1.5, alpha=3.0)
    lengths = 1.2 * weight.norm(dim=1, keepdim=True)
    return total * lengths / total.norm(dim=1, keepdim=True), {**parts, "dora_scale": lengths}


def lokr(
    weight: Tensor, draw: Callable[..., Tensor], *, rank: int, both: bool = False, full: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    (rows, long), (columns, wide) = ((8, 8) if size == 64 else (4, 4) for size in weight.shape)
    w1, w2, scale, alpha = draw(rows, columns), draw(long, wide), 1.0, 3.0 if full else float(rank)
    parts = {"lokr_w1": w1, "lokr_w2": w2}
    if both and rank < max(rows, columns) / 2:
        a, b, alpha = draw(rows, rank), draw(rank, columns), 3.0
        w1, scale = a @ b, alpha / rank
        parts = {"lokr_w1_a": a, "lokr_w1_b": b, "lokr_w2": w2}
    if not full and rank < max(long, wide) / 2:
        a, b, alpha = draw(long, rank), draw(rank, wide), 3.0
        w2, scale = a @ b, alpha / rank
        del parts["lokr_w2"]
        parts |= {"lokr_w2_a": a, "lokr_w2_b": b}
    return weight + scale * torch.kron(w1, w2), {**parts, "alpha": torch.tensor(alpha)}


TARGETS = {"target_modules": ["to_q", "to_k", "ff.net.0.proj"]}
A_B = "lora_A lora_B"
WRITERS: dict[str, Writer] = {
    "diffusers save_lora_adapter": of_diffusers(lambda peft: peft.LoraConfig(r=4, lora_alpha=16, **TARGETS)),
    "rsLoRA": of_diffusers(lambda peft: peft.LoraConfig(r=4, lora_alpha=16, use_rslora=True, **TARGETS)),
    "patterns": of_diffusers(
        lambda peft: peft.LoraConfig(r=4, rank_pattern={"to_q": 2}, alpha_pattern={"attn.to_k": 12}, **TARGETS)
    ),
    "rsLoRA with patterns, beside": of_peft(
        lambda peft: peft.LoraConfig(r=4, use_rslora=True, rank_pattern={"to_q": 2}, alpha_pattern={"to_k": 12}, **TARGETS)
    ),
    "DoRA": of_diffusers(
        lambda peft: peft.LoraConfig(r=4, lora_alpha=16, use_dora=True, rank_pattern={"to_q": 2}, **TARGETS)
    ),
    "LoKr": of_diffusers(lambda peft: peft.LoKrConfig(r=2, alpha=6, **TARGETS)),
    "LoKr with patterns": of_peft(
        lambda peft: peft.LoKrConfig(r=1, alpha=6, rank_pattern={"to_q": 4}, alpha_pattern={"to_k": 2}, **TARGETS)
    ),
    "LoKr of two pairs of factors": of_peft(lambda peft: peft.LoKrConfig(r=1, alpha=3, decompose_both=True, **TARGETS)),
    "pipeline with metadata": of_pipeline(metadata=True),
    "pipeline without metadata": of_pipeline(metadata=False),
    "PEFT": of_peft(lambda peft: peft.LoraConfig(r=2, lora_alpha=6, **TARGETS)),
    "PEFT under another name": of_peft(lambda peft: peft.LoraConfig(r=2, lora_alpha=6, **TARGETS), "my adapter.safetensors"),
    # kohya-ss/sd-scripts, networks/lora.py and lora_flux.py; rsLoRA is in LyCORIS' alpha
    "kohya": by_layout(flat("lora_unet_"), partial(low_rank, scale=3.0, alpha=6.0), ss_network_alpha="1"),
    "kohya, alpha in the header": by_layout(flat("lora_unet_"), partial(low_rank, scale=3.0), ss_network_alpha="6.0"),
    # ostris/ai-toolkit and musubi-tuner's convert_lora.py: the factors hold the scale
    "ComfyUI, convolutions": by_layout(dotted("diffusion_model."), partial(low_rank, scale=1.0, pixels=True)),
    "ComfyUI": by_layout(dotted("diffusion_model."), partial(low_rank, scale=1.0, names=A_B)),
    "alpha in the header": by_layout(dotted("transformer."), partial(low_rank, scale=3.0, names=A_B), alpha="6"),
    "lora_alpha in the header": by_layout(
        dotted(""), partial(low_rank, scale=0.5, names=A_B), lora_alpha="1", lora_rank="2"
    ),
    "LyCORIS DoRA": by_layout(flat("lycoris_"), dora),
    "LyCORIS LoKr": by_layout(flat("lycoris_"), partial(lokr, rank=1), ss_network_alpha="1"),
    "LyCORIS LoKr, a factor whole": by_layout(flat("lycoris_"), partial(lokr, rank=2)),
    "LyCORIS LoKr of two pairs": by_layout(dotted("diffusion_model."), partial(lokr, rank=1, both=True)),
    "LyCORIS LoKr of whole factors": by_layout(flat("lora_unet_"), partial(lokr, rank=1, full=True)),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_the_function_that_was_written(tmp_path: Path, name: str) -> None:
    from helpers import tiny_transformers

    theirs, ours, items = tiny_transformers.flux(), tiny_transformers.flux(), tiny_transformers.data()
    base = tiny_transformers.flux_velocity(ours, items)
    WRITERS[name](theirs, tmp_path)
    found = read_lora(tmp_path, ours)
    add_lora(ours, LoraConfig(rank=found.rank, alpha=found.alpha, form=found.form), found.layers)
    load_lora(ours, found.tensors, "default")
    expected = tiny_transformers.flux_velocity(theirs, items)
    assert not torch.allclose(base, expected, atol=1e-2)
    torch.testing.assert_close(tiny_transformers.flux_velocity(ours, items), expected, rtol=1e-4, atol=1e-5)
