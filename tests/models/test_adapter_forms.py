"""DoRA and LoKr: the functions of PEFT's own layers, started without effect, trained, exported, merged and read again."""

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from diffusers.loaders import lora_conversion_utils as theirs
from helpers import lora_model, tiny_pipelines
from helpers.lora_model import MODEL, inputs, loss_of, run
from helpers.marks import long
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.export.formats import COMFY_LORA, write
from fluvial.engines.export.model_folder import write_lora
from fluvial.engines.files import LORA, read_weights
from fluvial.engines.gathered import gather, gather_weights, layout
from fluvial.engines.run.jobs.weights import make_converter
from fluvial.models.lora import (
    Dora,
    Form,
    Lokr,
    LoraConfig,
    LowRank,
    add_lora,
    describe_lora,
    find_adapter_parameters,
    find_lora_layers,
    is_adapter,
    map_adapter_names,
    merge_lora,
    read_form,
    restore_lora,
    use_adapter,
)
from fluvial.models.lora_files import load_lora, read_lora
from fluvial.models.lora_layer import MAGNITUDE, compute_growth, merge_weight, multiply_lokr
from fluvial.models.original.layout import LAYOUTS
from fluvial.models.pipelines.open import list_adapters
from fluvial.models.quantised import Base, dequantise, find_quantised, quantise_linear

FORMS: tuple[Form, ...] = (Dora(), Lokr(), Lokr(factor=4))
each = pytest.mark.parametrize("form", FORMS, ids=str)
every = pytest.mark.parametrize("form", [LowRank(), *FORMS], ids=str)
RANK, ALPHA = 3, 4.5  # alpha / rank is no power of two


def config(form: Form) -> LoraConfig:
    return LoraConfig(rank=RANK, alpha=ALPHA, form=form)


def layers(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.Linear(40, 16, bias=bias)).to(dtype)


def perturbed(module: nn.Module, seed: int = 1, adapter: str = "default") -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in find_adapter_parameters(module, adapter).values():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return module


def adapted(form: Form, **given: Any) -> nn.Module:
    module = layers(**given)
    add_lora(module, config(form), ["0", "1"])
    return perturbed(module)


def of_peft(form: Form, module: nn.Module) -> nn.Module:
    plain: nn.Module = layers()
    given: dict[str, Any] = {"r": RANK, "target_modules": ["0", "1"]}
    if isinstance(form, Lokr):
        settings: Any = peft.LoKrConfig(alpha=ALPHA, decompose_factor=form.factor or -1, **given)
    else:
        settings = peft.LoraConfig(lora_alpha=ALPHA, use_dora=True, **given)
    peft.inject_adapter_in_model(settings, plain)
    tensors = dict(gather_weights(module, adapter="default"))
    peft.set_peft_model_state_dict(plain, tensors)
    return plain


@each
def test_it_is_the_function_and_the_gradients_of_peft(form: Form) -> None:
    """With the tensors of an export in PEFT's own layers; the lengths of a DoRA's rows count as constants in both."""
    module = adapted(form)
    theirs = of_peft(form, module)
    x = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(2))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = module(mine), theirs(other)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for out in (found, expected):
        out.square().sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    names = map_adapter_names(module, "default")
    assert set(names.values()) == set(gradients)
    for short, parameter in find_adapter_parameters(module, "default").items():
        torch.testing.assert_close(parameter.grad, gradients[names[short]], rtol=1e-4, atol=1e-4)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_new_adapter_changes_nothing(form: Form, dtype: torch.dtype, bias: bool) -> None:
    module = layers(dtype, bias=bias)
    x = torch.randn(2, 7, 24).to(dtype)
    add_lora(module, config(form), ["0", "1"], adapters=("default", "old"))
    with use_adapter(module, None):
        reference = module(x)
    assert torch.equal(module(x), reference)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == set(map_adapter_names(module, "default").values())
    assert all(is_adapter(name) for name in trained)


def test_small_lengths_keep_their_digits_and_a_row_of_zeros_stays_finite() -> None:
    """A row 0.1 % longer than that of W, which PEFT's length in bfloat16 would round away; for zeros PEFT divides 0 by 0."""
    weight, b = torch.randn(8, 24), torch.zeros(8, RANK)
    longer = 1e-3 * weight.norm(dim=1)
    found = compute_growth(weight.bfloat16(), torch.randn(RANK, 24).bfloat16(), b.bfloat16(), longer.bfloat16(), 1.5)
    torch.testing.assert_close(found, torch.full((8,), 1e-3), rtol=0.01, atol=0.0)
    module: nn.Module = layers()
    with torch.no_grad():
        module.get_submodule("0").weight[3] = 0  # type: ignore[operator]
    add_lora(module, config(Dora()), ["0"])
    module(torch.randn(2, 24)).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in find_adapter_parameters(module, "default").values() if p.grad is not None)


@each
def test_lengths_and_products_are_the_formulas(form: Form) -> None:
    """In float64, from the definition: |row| = n + d, or W + s kron(w1, w2)."""
    module = adapted(form)
    for name, layer in find_lora_layers(module).items():
        parts = {
            key.removeprefix(f"{name}.").removesuffix(".weight"): p.detach()
            for key, p in find_adapter_parameters(module, "default").items()
            if key.startswith(f"{name}.")
        }
        weight = layer.base_layer.weight.detach()
        wide = {part: tensor.double() for part, tensor in parts.items()}
        if isinstance(form, Dora):
            total = weight.double() + ALPHA / RANK * wide["lora_B"] @ wide["lora_A"]
            lengths = weight.double().norm(dim=1) + wide[MAGNITUDE]
            expected = total * (lengths / total.norm(dim=1))[:, None]
        else:
            second = wide["lokr_w2"] if "lokr_w2" in wide else wide["lokr_w2_a"] @ wide["lokr_w2_b"]
            expected = weight.double() + ALPHA / RANK * torch.kron(wide["lokr_w1"], second)
            x = torch.randn(4, weight.shape[1], dtype=torch.float64)
            torch.testing.assert_close(
                multiply_lokr(x, wide, ALPHA / RANK), x @ (expected - weight.double()).T, rtol=1e-9, atol=1e-9
            )
        torch.testing.assert_close(merge_weight(weight, parts, ALPHA / RANK).double(), expected, rtol=1e-5, atol=1e-5)


@every
def test_a_float64_module_keeps_its_digits(form: Form) -> None:
    module, single = adapted(form, dtype=torch.float64), adapted(form)
    x = torch.randn(5, 24, dtype=torch.float64)
    expected = module(x)
    torch.testing.assert_close(single(x.float()).double(), expected, rtol=1e-4, atol=1e-4)
    plain = layers(torch.float64)
    plain.load_state_dict(dict(gather_weights(module, merge=True)))
    exported = {tensor.dtype for tensor in dict(gather_weights(module, adapter="default")).values()}
    assert exported == {torch.float64} == {tensor.dtype for tensor in layout(module, adapter="default").values()}
    merge_lora(module)
    for merged in (module, plain):
        torch.testing.assert_close(merged(x), expected, rtol=1e-11, atol=1e-11)


@every
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_merged_over_a_quantised_base_is_the_same_function(form: Form, base: Base) -> None:
    """In place, and by the export, which has the names of the plain module."""
    module, plain, x = adapted(form), layers(), torch.randn(5, 24)
    assert quantise_linear(module, base, torch.float32) == len(find_quantised(module)) == 2
    before = module(x)
    plain.load_state_dict(dict(gather_weights(module, merge=True)))
    merge_lora(module)
    for merged in (module, plain):
        torch.testing.assert_close(merged(x), before, rtol=1e-4, atol=1e-4)
    assert set(module.state_dict()) == set(plain.state_dict())


@every
def test_a_quantised_base_counts_by_its_dequantised_weight(form: Form) -> None:
    module = adapted(form)
    quantise_linear(module, "nf4", torch.float32)
    plain = adapted(form)
    for name, layer in find_lora_layers(plain).items():
        own: Any = module.get_submodule(name).base_layer
        layer.base_layer.weight.data = dequantise(own.quantised, "nf4", (own.out_features, own.in_features), torch.float32)
    x = torch.randn(4, 24)
    for each_module in (module, plain):
        each_module(x).square().sum().backward()
    expected = find_adapter_parameters(plain, "default")
    for name, parameter in find_adapter_parameters(module, "default").items():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-5)


SHARDINGS: list[dict[str, Any]] = [
    {},
    {"comm": "reshard", "checkpointing": "block"},
    {"checkpointing": "selective", "grad_sync": "every"},
    {"offload": "always"},
    {"compute": "bfloat16"},
]
# The last block drops its text stream, so one adapter has no effect.
UNUSED = ("transformer_blocks.3.attn.add_q_proj.lora_", "transformer_blocks.3.attn.add_q_proj.lokr_")


# Every form, and every way of sharding; the other pairs are long.
PAIRS = [(form, way) if not way or form == Dora() else long(form, way) for form in (LowRank(), *FORMS) for way in SHARDINGS]


@pytest.mark.parametrize(("form", "sharding"), PAIRS, ids=str)
def test_an_update_is_that_of_plain_torch(one: World, form: Form, sharding: dict[str, Any]) -> None:
    plain, module = MODEL.build().eval(), MODEL.build().eval()
    for network in (plain, module):
        add_lora(network, config(form), MODEL.lora_targets, adapters=("default", "old"), seed=3)
        perturbed(network, 1, "default")
        perturbed(network, 2, "old")
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01, weight_decay=0.0)
    (loss_of(plain, ("old", None))(inputs(4))[0].sum() / 4).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    sharded = EngineConfig(**sharding)
    engine = Engine(module, MODEL.blocks(module), OptimizerConfig(lr=0.01), one, updates=2, sharding=sharded)
    before = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    engine.update(inputs(4), loss_of(module, ("old", None)), torch.ones(4), count=4, micro_batch=2, pad_to=4)
    moved = {name for name, tensor in module.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in map_adapter_names(module, "default").values() if not name.startswith(UNUSED)}
    if "compute" in sharding:
        return
    # Adam's first step is as long for a gradient of pure rounding, which the forms have more of.
    most, mean = (0.001, 1e-6) if isinstance(form, LowRank) else (0.002, 1e-4)
    want = dict(plain.named_parameters())
    for name, tensor in module.state_dict().items():
        if name in moved:
            error = (gather(tensor) - want[name]).abs()
            assert error.max() <= most, name
            assert error.mean() <= mean, name


@each
def test_a_file_is_read_again_and_by_diffusers(one: World, form: Form, tmp_path: Path) -> None:
    """`write_lora`'s file: the same function in a new network, and in diffusers' own loader."""
    tiny = tiny_pipelines.ROWS["sd3"].make().transformer
    plain, network = copy.deepcopy(tiny), copy.deepcopy(tiny)
    targets = list_adapters()["StableDiffusion3Pipeline"].lora_targets
    add_lora(network, config(form), targets)
    perturbed(network)
    write_lora(network, tmp_path, world=one)
    found = read_lora(tmp_path, plain)
    assert (found.rank, found.alpha, found.form) == (RANK, ALPHA, form)
    again = copy.deepcopy(plain)
    add_lora(again, LoraConfig(rank=found.rank, alpha=found.alpha, form=found.form), found.layers)
    load_lora(again, found.tensors, "default")
    assert read_form(again) == form
    held = find_adapter_parameters(network, "default")
    for name, parameter in find_adapter_parameters(again, "default").items():
        torch.testing.assert_close(parameter, held[name], rtol=1e-6, atol=1e-6)
    if isinstance(form, Lokr):  # by the shapes alone, with a scale of 1
        save_file(load_file(tmp_path / LORA), tmp_path / "bare.safetensors")
        bare = read_lora(tmp_path / "bare.safetensors", tiny)
        assert (bare.alpha, bare.layers) == (bare.rank, found.layers)
        # Another factor may give these layers the same shapes.
        assert all(torch.equal(bare.tensors[name], held[name]) for name in held)
    plain.load_lora_adapter(str(tmp_path), weight_name=LORA, prefix="transformer")
    x = {
        "hidden_states": torch.randn(1, plain.config.in_channels, 8, 8),
        "encoder_hidden_states": torch.randn(1, 4, plain.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, plain.config.pooled_projection_dim),
        "timestep": torch.tensor([500.0]),
        "return_dict": False,
    }
    with torch.no_grad():
        expected = network(**x)[0]
        torch.testing.assert_close(plain(**x)[0], expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(tiny(**x)[0], expected, atol=1e-3)


def comfy_weights(pipeline: str, network: Any, file: dict[str, Tensor], plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights that ComfyUI computes from a file of an adapter, by diffusers' names of layers.

    By the formulas of comfy/weight_adapter/lora.py, lokr.py and base.py (`weight_decompose`, v0.3.77), where a scale of the
    rows is divided by the norms of the frozen rows, and comfy/lora.py (`model_lora_keys_unet`), which finds a layer by its
    original name, or by diffusers' own after `lycoris_`.
    """
    from fluvial.models.original.convert import _group_layers
    from fluvial.models.original.layout import OriginalNames

    groups, out = _group_layers(OriginalNames(pipeline, network.config), network), dict[str, Tensor]()
    for layer, weight in plain.items():
        stem = f"lycoris_{layer.replace('.', '_')}"
        names = {key.rpartition(".lokr_")[0] for key in file}
        own = stem if stem in names else next(name for name, held in groups.items() if layer in held)
        if f"{own}.lokr_w1" in file:
            second = file.get(f"{own}.lokr_w2")
            second = file[f"{own}.lokr_w2_a"] @ file[f"{own}.lokr_w2_b"] if second is None else second
            assert f"{own}.alpha" not in file  # ComfyUI's scale is 1 then
            out[layer] = weight + torch.kron(file[f"{own}.lokr_w1"], second)
        elif (up := file.get(f"{own}.lora_up.weight", file.get(f"{own}.lora_B.weight"))) is not None:
            down = file.get(f"{own}.lora_down.weight", file.get(f"{own}.lora_A.weight"))
            assert down is not None
            joined = groups[own]
            frozen = torch.cat([plain[name] for name in joined])
            total = frozen + up @ down * file[f"{own}.alpha"] / len(down)
            if f"{own}.dora_scale" in file:
                scale = file[f"{own}.dora_scale"]
                assert scale.shape == (len(frozen), 1)
                total = total * scale / frozen.norm(dim=1, keepdim=True)
            sizes = [len(plain[name]) for name in joined]
            out.update(zip(joined, total.split(sizes), strict=True))
    return out


@every
@pytest.mark.parametrize("name", ["flux", *map(long, ("sd3", "qwen-image", "wan", "z-image", "sdxl"))])
def test_comfyui_computes_the_merged_weights(one: World, form: Form, name: str, tmp_path: Path) -> None:
    """And so does the next run from the files of an export, for layers that the original joins, too."""
    made = tiny_pipelines.ROWS[name].make()
    pipeline, network = type(made).__name__, made.unet if name == "sdxl" else made.transformer
    assert pipeline in LAYOUTS
    model: Any = type("Model", (), {"pipeline": pipeline})()
    plain = {key: layer.weight.detach().clone() for key, layer in network.named_modules() if isinstance(layer, nn.Linear)}
    again = {kind: copy.deepcopy(network) for kind in ("lora", "comfyui")}
    add_lora(network, config(form), list_adapters()[pipeline].lora_targets)
    perturbed(network)
    merged = dict(gather_weights(network, merge=True))
    for kind, other in again.items():
        write(kind, network, model, tmp_path / kind, world=one)  # type: ignore[arg-type]
        held = read_lora(tmp_path / kind, other, convert=make_converter(pipeline, other))
        assert (held.layers, type(held.form)) == (tuple(sorted(find_lora_layers(network))), type(form))
        add_lora(other, LoraConfig(rank=held.rank, alpha=held.alpha, form=held.form), held.layers)
        load_lora(other, held.tensors, "default")
        for key, tensor in gather_weights(other, merge=True):
            torch.testing.assert_close(tensor, merged[key], rtol=1e-5, atol=1e-5)
    write("merged", network, model, tmp_path / "merged", world=one)
    assert all(torch.equal(tensor, merged[key]) for key, tensor in read_weights(tmp_path / "merged"))
    file = load_file(tmp_path / "comfyui" / COMFY_LORA)
    found = comfy_weights(pipeline, network, file, plain)
    assert set(found) >= set(find_lora_layers(network))
    for layer in found:
        torch.testing.assert_close(found[layer], merged[f"{layer}.weight"], rtol=1e-4, atol=1e-4)
    if name == "z-image" and isinstance(form, Lokr):  # diffusers reads these keys, too
        read = theirs._convert_non_diffusers_lokr_to_diffusers(dict(file))
        assert {key.rpartition(".lokr_")[0].removeprefix("transformer.") for key in read} == set(find_lora_layers(network))


@each
def test_the_settings_are_those_that_were_given(form: Form) -> None:
    module = lora_model.adapted()
    merge_lora(module)
    add_lora(module, config(form), MODEL.lora_targets)
    record = json.loads(json.dumps(describe_lora(module)))
    assert restore_lora(record) == config(form)
    assert record["layers"] == sorted(find_lora_layers(module))
    assert run(module).isfinite().all()


def test_a_lokr_has_fewer_numbers() -> None:
    counts = {}
    forms: tuple[Form, ...] = (LoraConfig().form, Dora(), Lokr(), Lokr(factor=16))
    for form in forms:
        module = nn.Sequential(nn.Linear(3072, 3072))
        add_lora(module, LoraConfig(rank=16, form=form), ["0"])
        counts[str(form)] = sum(parameter.numel() for parameter in find_adapter_parameters(module, "default").values())
    lora = 2 * 16 * 3072
    assert list(counts.values()) == [lora, lora + 3072, 48 * 48 + 2 * 16 * 64, 16 * 16 + 2 * 16 * 192]
