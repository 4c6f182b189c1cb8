"""LoRA: it starts without effect, is the only part trained, can be switched and copied, sharded or not, and merged."""

from dataclasses import replace
from typing import Any, Literal

import peft
import pytest
import torch
from helpers import lora_model
from helpers.lora_model import LORA, MODEL, perturb, run
from helpers.refusals import refuses
from torch import Tensor, nn

from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.engine.engine import Engine
from fluvial.engines.engine.world import World
from fluvial.engines.gathered import gather
from fluvial.models import LoraConfig, add_lora
from fluvial.models.lora import (
    Dora,
    Form,
    Lokr,
    LowRank,
    blend_adapter,
    copy_adapter,
    find_adapter_parameters,
    find_lora_layers,
    is_adapter,
    map_adapter_names,
    merge_lora,
    use_adapter,
)

ALL = ("default", "old", "ref")


def values(module: nn.Module, adapter: str) -> dict[str, Tensor]:
    return {name: gather(parameter).detach().clone() for name, parameter in find_adapter_parameters(module, adapter).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert list(left) == list(right)
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_seed_decides_the_adapter_and_others_begin_as_it() -> None:
    before = torch.random.get_rng_state()
    one, same_seed, other = (values(lora_model.adapted(seed=seed), "default") for seed in (1, 1, 2))
    assert same(one, same_seed)
    assert not same(one, other)
    assert torch.equal(before, torch.random.get_rng_state())
    module = lora_model.adapted(*ALL)
    assert same(values(module, "default"), values(module, "old"))
    assert same(values(module, "default"), values(module, "ref"))
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == set(map_adapter_names(module, "default").values())


def test_the_adapter_is_what_peft_makes_and_calls_it() -> None:
    plain = MODEL.build()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        targets = list(MODEL.lora_targets)
        peft.inject_adapter_in_model(peft.LoraConfig(r=LORA.rank, target_modules=targets, lora_dropout=0.0), plain)
    want = {name: tensor for name, tensor in plain.state_dict().items() if ".lora_" in name}
    for adapters in (("default",), ALL):
        module = lora_model.adapted(*adapters, seed=5)
        names, found = map_adapter_names(module, "default"), values(module, "default")
        assert same(want, {names[name]: tensor for name, tensor in found.items()})
    module = lora_model.adapted(*ALL)
    for adapter in ALL:
        perturb(module, adapter, seed=ALL.index(adapter))
        assert same(values(module, adapter), peft.get_peft_model_state_dict(module, adapter_name=adapter))


def test_the_initial_distribution_of_a() -> None:
    """The default is bounded by 1 / sqrt(inputs); gaussian has a standard deviation of 1 / rank."""
    drawn = {}
    inits: tuple[Literal["default", "gaussian"], ...] = ("default", "gaussian")
    for init in inits:
        module = torch.nn.ModuleDict({"to_q": torch.nn.Linear(400, 8)})
        add_lora(module, LoraConfig(rank=4, form=LowRank(init)), ["to_q"])
        drawn[init] = dict(module.named_parameters())["to_q.lora_A.default.weight"].detach()
        assert not dict(module.named_parameters())["to_q.lora_B.default.weight"].any()
    assert float(drawn["default"].abs().max()) <= 1 / 400**0.5 * 1.8  # sqrt(3): uniform of the same variance, and rounding
    assert float(drawn["gaussian"].std()) == pytest.approx(1 / 4, rel=0.1)


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(LowRank(), torch.float32), (LowRank(), torch.bfloat16), (Dora(), torch.float32), (Lokr(), torch.float32)],
)
def test_on_meta_the_adapters_are_real_and_the_same(form: Form, dtype: torch.dtype) -> None:
    real, meta = MODEL.build().to(dtype), MODEL.build(empty=True).to(dtype)
    before = dict(meta.named_parameters())
    for module in (real, meta):
        add_lora(module, replace(LORA, form=form), MODEL.lora_targets, adapters=ALL, seed=3)
    for adapter in ALL:
        assert same(values(real, adapter), values(meta, adapter))
    for name, parameter in meta.named_parameters():
        if is_adapter(name):
            assert not parameter.is_meta
        else:
            assert parameter is before[name.replace(".base_layer.", ".")]
            assert parameter.is_meta
    want = [(name, parameter.dtype, parameter.requires_grad) for name, parameter in real.named_parameters()]
    assert [(name, parameter.dtype, parameter.requires_grad) for name, parameter in meta.named_parameters()] == want


def test_each_adapter_is_active_in_its_context() -> None:
    """With the output of a module that has only this adapter; also nested and after an exception; requires_grad stays."""
    module, want = lora_model.adapted(*ALL), {}
    for seed, adapter in enumerate(ALL):
        perturb(module, adapter, seed=seed)
        alone = lora_model.adapted()
        perturb(alone, seed=seed)
        want[adapter] = run(alone)
    trained = [parameter.requires_grad for parameter in module.parameters()]
    with use_adapter(module, "old"):
        assert torch.equal(run(module), want["old"])
        with use_adapter(module, None):
            with use_adapter(module, "ref"):
                assert torch.equal(run(module), want["ref"])
                assert [parameter.requires_grad for parameter in module.parameters()] == trained
            assert torch.equal(run(module), run(MODEL.build()))
        with use_adapter(module, "default"):
            assert torch.equal(run(module), want["default"])
        with pytest.raises(KeyError), use_adapter(module, "default"):
            raise KeyError
        assert torch.equal(run(module), want["old"])
    assert torch.equal(run(module), want["default"])
    assert [parameter.requires_grad for parameter in module.parameters()] == trained


def test_a_missing_adapter_is_named() -> None:
    module, plain = lora_model.adapted("default", "old"), MODEL.build()
    with pytest.raises(ValueError, match="there is no adapter ref: the module has default, old"), use_adapter(module, "ref"):
        pass
    refuses("there is no adapter ref", copy_adapter, module, "ref", "old")
    refuses("there is no adapter ref", blend_adapter, module, "default", "ref", 0.5)
    refuses("the module has none", find_adapter_parameters, plain, "default")
    with use_adapter(plain, None):
        assert run(plain).isfinite().all()


def test_copy_and_blend() -> None:
    module = lora_model.adapted(*ALL)
    for seed, adapter in enumerate(ALL):
        perturb(module, adapter, seed=seed)
    default, old, ref = (values(module, adapter) for adapter in ALL)
    parameters = find_adapter_parameters(module, "old")
    blend_adapter(module, "default", "old", 0.75)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.detach(), 0.75 * old[name] + 0.25 * default[name])
    copy_adapter(module, "default", "old")
    assert same(values(module, "old"), default)
    assert same(values(module, "default"), default)
    assert same(values(module, "ref"), ref)
    assert not any(parameter.requires_grad for parameter in parameters.values())
    refuses("decay", blend_adapter, module, "default", "old", 1.5)


def test_merged_is_the_same_function_without_adapters() -> None:
    """Only the given adapter is merged; then new ones can be added."""
    module = lora_model.adapted()
    perturb(module)
    before = run(module)
    merge_lora(module)
    torch.testing.assert_close(run(module), before, rtol=1e-4, atol=1e-4)
    assert set(module.state_dict()) == set(MODEL.build().state_dict())
    assert not find_lora_layers(module)
    assert "peft_config" not in vars(module)  # diffusers would take the adapter's name for taken
    module = lora_model.adapted("default", "old")
    perturb(module, "default", seed=0)
    perturb(module, "old", seed=1)
    with use_adapter(module, "old"):
        before = run(module)
    merge_lora(module, "old")
    torch.testing.assert_close(run(module), before, rtol=1e-4, atol=1e-4)
    add_lora(module, LORA, MODEL.lora_targets)
    torch.testing.assert_close(run(module), before, rtol=1e-4, atol=1e-4)


def test_the_config_may_choose_the_layers() -> None:
    module = MODEL.build()
    add_lora(module, LoraConfig(targets=("to_q", "transformer_blocks.1.ff.net.2")), MODEL.lora_targets)
    want = {f"transformer_blocks.{block}.attn.to_q" for block in range(4)} | {"transformer_blocks.1.ff.net.2"}
    assert set(find_lora_layers(module)) == want


def test_what_cannot_be_adapted_is_refused() -> None:
    """And the module is unchanged."""
    module = MODEL.build()
    for targets, says in (
        (["nowhere"], "no layer's name ends in nowhere"),
        (["to_q", "q"], "no layer's name ends in q"),  # a part of a name is not the end of one
        (["attn"], "expected a linear layer"),
    ):
        refuses(says, add_lora, module, LoraConfig(), targets)
    adapters: tuple[tuple[str, ...], ...] = (), ("old",), ("old", "default"), ("default", "old", "old")
    for names in adapters:
        refuses("expected default first", add_lora, module, LORA, MODEL.lora_targets, adapters=names)
    assert all(parameter.requires_grad for parameter in module.parameters())
    settings: list[dict[str, Any]] = [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}, {"targets": ()}]
    for wrong in settings:
        refuses(r"lora\.", LoraConfig, **wrong)


# ShardedModule.

SHARDINGS: list[dict[str, Any]] = [
    {},
    {"comm": "reshard", "checkpointing": "block"},
    {"checkpointing": "selective", "grad_sync": "every"},
    {"offload": "always"},
]


def engine_of(module: nn.Module, one: World, **sharding: Any) -> Engine:
    return Engine(module, MODEL.blocks(module), OptimizerConfig(lr=0.01), one, updates=2, sharding=EngineConfig(**sharding))


@pytest.mark.parametrize("sharding", SHARDINGS, ids=str)
def test_sharded_adapters_are_copied_and_blended(one: World, sharding: dict[str, Any]) -> None:
    """Also right after a forward pass, which leaves parameters gathered; the next pass uses the new values."""
    module = lora_model.adapted(*ALL)
    perturb(module, "default", seed=0)
    perturb(module, "old", seed=1)
    engine_of(module, one, **sharding)
    default, old = values(module, "default"), values(module, "old")
    first = run(module)
    with use_adapter(module, "ref"):
        assert not torch.equal(run(module), first)
    copy_adapter(module, "default", "ref")
    with use_adapter(module, "ref"):
        assert torch.equal(run(module), first)
    blend_adapter(module, "default", "old", 0.75)
    state = module.state_dict()  # the shards, and not what a forward pass gathered
    for short, name in map_adapter_names(module, "old").items():
        torch.testing.assert_close(gather(state[name]), 0.75 * old[short] + 0.25 * default[short])
    assert same(values(module, "ref"), default)
    assert same(values(module, "default"), default)
