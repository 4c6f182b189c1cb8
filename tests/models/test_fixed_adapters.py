"""Adapters while weights stay: merged once per chunk, counted, with the bits of a rollout and of its update."""

from typing import Any

import pytest
import torch
from helpers.lora_model import perturb
from helpers.marks import Patch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fluvial.core.random import key
from fluvial.engines.data.records import as_prompts
from fluvial.engines.sampling.generate import Requests, Sampling, generate
from fluvial.models import fixed_adapters
from fluvial.models.fixed_adapters import FixedAdapters, merge_adapters
from fluvial.models.handwriting import Handwriting
from fluvial.models.handwriting.model import HandwritingUNet
from fluvial.models.lora import Dora, Lokr, LoraConfig, LowRank, add_lora, use_adapter


class Merges(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.addmm and "alpha" in (kwargs or {})
        return func(*args, **(kwargs or {}))


FORMS: dict[str, Any] = {
    "merged": LowRank(product="merged"),
    "auto": LowRank(),
    "factors": LowRank(product="factors"),
    "lokr": Lokr(),
    "dora": Dora(),
}


@pytest.mark.parametrize("kind", [Handwriting, pytest.param(HandwritingUNet, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "form", ["merged", "dora", *(pytest.param(name, marks=pytest.mark.long) for name in ("auto", "factors", "lokr"))]
)
def test_a_rollout_merges_once_per_chunk(kind: Any, form: str) -> None:
    model = kind()
    module = model.build().eval()
    add_lora(module, LoraConfig(rank=2, alpha=3.0, form=FORMS[form]), model.lora_targets)
    perturb(module)
    shape, prompts = model.latent_shape(), ("0427", "1234", "0427", "9999")
    requests, counts, found = Requests(as_prompts(prompts), range(4), key(3)), list[int](), list[Tensor]()
    for reuse in ("outside_blocks", "all"):
        sampling = Sampling(shape, model.schedule(3, shape), reuse=reuse)
        with Merges() as merges:
            chunks = [chunk.trajectory.final for chunk in generate(model, module, requests, sampling, micro_batch=2)]
        found.append(torch.cat(chunks))
        counts.append(merges.count)
    assert torch.equal(*found)
    assert (counts[0] > 0) == (form in ("merged", "auto"))
    # Layers that see the prompt alone are computed once already.
    assert counts[1] < counts[0] <= 3 * counts[1] or counts == [0, 0]
    assert not any("forward" in part.__dict__ for part in module.modules())


def adapted(width: int = 8) -> tuple[nn.Module, Tensor]:
    module = nn.Sequential(nn.Linear(width, width))
    add_lora(module, LoraConfig(rank=2, form=LowRank(product="merged")), ["0"], adapters=("default", "old"))
    perturb(module)
    return module.eval(), torch.randn(2, 5, width, generator=torch.Generator().manual_seed(1))


def test_only_calls_like_the_first_take_what_is_kept() -> None:
    """Another number of tokens, another adapter, no adapter, gradients: the layer computes by itself."""
    module, x = adapted()
    fixed = FixedAdapters(module)
    with torch.no_grad(), fixed.prediction():
        module(x)
        with Merges() as merges:
            module(x)
        assert merges.count == 0
        with Merges() as merges:
            module(x[:, :3])
        assert merges.count == 1
    perturb(module)  # what is kept is old now, so that whoever takes it is found out
    with torch.no_grad():
        expected = module(x[:, :3])
        with use_adapter(module, None):
            without = module(x)
    with fixed.prediction():
        with torch.no_grad():
            assert torch.equal(module(x[:, :3]), expected)
            with use_adapter(module, None):
                assert torch.equal(module(x), without)
            with use_adapter(module, "old"), Merges() as merges:
                module(x)
            assert merges.count == 1
        assert module(x).requires_grad


def test_large_weights_are_not_kept(monkeypatch: Patch) -> None:
    module, x = adapted()
    for most, merged in ((8 * 8 * 4, 0), (8 * 8 * 4 - 1, 1)):
        monkeypatch.setattr(fixed_adapters, "LARGEST", most)
        fixed = FixedAdapters(module)
        with torch.no_grad(), fixed.prediction():
            expected = module(x)
            with Merges() as merges:
                assert torch.equal(module(x), expected)
            assert merges.count == merged


class Launches(TorchDispatchMode):
    """Counts operations that compute, which are launches on a GPU; views and shapes are none."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and func is not torch.ops.aten._unsafe_view.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["factors", "dora", "lokr"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_merged_adapter_is_one_product_per_layer(form: str, dtype: torch.dtype) -> None:
    """It computes what the factors compute, to rounding, and afterwards every weight has its own bits."""
    module = nn.Sequential(nn.Linear(8, 8)).to(dtype)
    add_lora(module, LoraConfig(rank=2, alpha=3.0, form=FORMS[form]), ["0"])
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for parameter in (each for each in module.parameters() if each.requires_grad):
            parameter.add_(torch.rand_like(parameter) / 4)
    module.eval().to(dtype)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.no_grad():
        with Launches() as factors:
            expected = module(x)
        with merge_adapters(module), Launches() as merged:
            found = module(x)
        with use_adapter(module, None):
            assert not torch.allclose(module(x), expected, atol=0.1)
        again = module(x)
    assert merged.count == 1
    assert factors.count == 4 if form == "factors" else factors.count > 4
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(again, expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_networks_that_are_adapted_one_by_one_have_their_layers() -> None:
    """As two served experts; the module that holds them has no adapter of its own."""
    parts = nn.ModuleDict({name: nn.Sequential(nn.Linear(4, 4)) for name in ("a", "b")})
    for part in parts.values():
        add_lora(part, LoraConfig(rank=2), ("0",))
    assert len(FixedAdapters(parts)._layers) == 2
    assert FixedAdapters(nn.Sequential(nn.Linear(4, 4)))._layers == []
