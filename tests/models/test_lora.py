"""LoRA: it starts as nothing, trains alone, can be left out, and folds into the weights."""

import pytest
import torch
from torch import nn

from fluvial.models import LoraConfig, add_lora
from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import merge_lora, without_lora


def adapted(*, seed: int = 0) -> tuple[Handwriting, nn.Module]:
    """The handwriting model with adapters."""
    model = Handwriting()
    module = model.build()
    add_lora(module, LoraConfig(rank=2, alpha=4.0), model.lora_targets, seed=seed)
    return model, module


def run(model: Handwriting, module: nn.Module) -> torch.Tensor:
    """Its velocity of two fixed samples."""
    x = torch.linspace(-2, 2, 2 * 8 * 32).reshape(2, 1, 8, 32)
    with torch.no_grad():
        return model.velocity(module, x, torch.tensor([0.9, 0.4]), model.encode(["0427", "1999"]))


def perturb(module: nn.Module) -> None:
    """Move the adapters from where they are nothing."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)


def test_a_new_adapter_changes_nothing() -> None:
    """To the bit; only the adapters are trained; every target has one."""
    model, module = adapted()
    assert torch.equal(run(model, module), run(model, model.build()))
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    for target in model.lora_targets:
        assert any(f".{target}.lora_A" in name for name in trained), target


def test_the_seed_decides_the_adapter() -> None:
    """And torch's global generator is left alone."""
    before = torch.random.get_rng_state()
    one, same, other = (
        torch.cat([p.flatten() for p in adapted(seed=seed)[1].parameters() if p.requires_grad]) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_lora_is_the_reference() -> None:
    """Inside the context the base computes, after it the adapters do again."""
    model, module = adapted()
    perturb(module)
    base, with_adapters = run(model, model.build()), run(model, module)
    assert not torch.allclose(base, with_adapters, atol=1e-3)
    with without_lora(module):
        assert torch.equal(run(model, module), base)
    assert torch.equal(run(model, module), with_adapters)


def test_merged_is_the_same_function_without_adapters() -> None:
    """And has the names of the plain model."""
    model, module = adapted()
    perturb(module)
    before = run(model, module)
    merge_lora(module)
    torch.testing.assert_close(run(model, module), before, rtol=1e-4, atol=1e-4)
    assert set(module.state_dict()) == set(model.build().state_dict())


def test_a_target_that_is_not_there_is_an_error() -> None:
    """PEFT names it."""
    model = Handwriting()
    with pytest.raises(ValueError, match="nowhere"):
        add_lora(model.build(), LoraConfig(), ["nowhere"])


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0.0}, {"alpha": float("nan")}])
def test_a_wrong_setting_is_refused(wrong: dict) -> None:
    """When the config is built."""
    with pytest.raises(ValueError, match=r"lora\."):
        LoraConfig(**wrong)
