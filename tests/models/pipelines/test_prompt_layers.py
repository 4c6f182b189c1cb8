"""Layers that see the prompt alone compute once per rollout: counted, and the bits of a rollout stay."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers.lora_model import perturb
from helpers.marks import Folders, Patch
from helpers.tiny_pipelines import ROWS, STEPS, each_text_row, opened
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fluvial.core.random import key
from fluvial.engines.data.records import as_prompts
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate
from fluvial.models import prompt_layers
from fluvial.models.handwriting import Handwriting
from fluvial.models.handwriting.model import HandwritingUNet
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.prompt_layers import PromptLayers

# Linear layers that see the prompt alone, and how many of them are outside of the repeated blocks.
LINEARS = {
    "sd3": (3, 3),  # the tokens' projection, and two of the pooled embedding
    "sd3-without-t5": (3, 3),
    "flux": (3, 3),
    "flux-schnell": (3, 3),
    "qwen-image": (1, 1),
    "z-image": (8, 1),  # the embedding, and a refining block: four of attention, three of its feed-forward
    "sd1": (8, 0),  # keys and values of each cross-attention
    "sd2-v": (8, 0),
    "sdxl": (18, 2),
    "wan": (6, 2),
    "wan-experts": (6, 2),
}


class Linears(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is nn.functional.linear
        return func(*args, **(kwargs or {}))


def made(
    model: Any, module: nn.Module, prompts: tuple[str, ...], shape: tuple[int, ...], **options: Any
) -> tuple[Tensor, int]:
    sampling = Sampling(shape, model.schedule(STEPS, shape), **options)
    requests, linears = Requests(as_prompts(prompts), range(len(prompts)), key(3)), Linears()
    predict = model.predict

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        with linears:
            return predict(*args, **kwargs)

    model.predict = counted
    try:
        found = [chunk.trajectory.final for chunk in generate(model, module, requests, sampling, micro_batch=2)]
    finally:
        del model.predict
    return torch.cat(found), linears.count


@each_text_row
def test_a_rollout_computes_them_once(name: str, folders: Folders) -> None:
    """Once per chunk and half of guidance instead of at each of 3 steps; the next chunk has other prompts."""
    row = ROWS[name]
    model = opened(name, folders(name))
    module = model.build().eval()
    prompts, shape = (row.prompts[0], row.prompts[1], row.prompts[1], row.prompts[0]), model.latent_shape(*row.sizes[0])
    for guidance, forwards in ((Guidance(), 1), (Guidance(3.0), 1), (Guidance(3.0, forwards="two"), 2)):
        expected, whole = made(model, module, prompts, shape, guidance=guidance)
        for reuse, linears in zip(("all", "outside_blocks"), LINEARS[name], strict=True):
            found, count = made(model, module, prompts, shape, guidance=guidance, reuse=reuse)
            assert torch.equal(found, expected)
            # Of the two networks of Wan 2.2 each computes its own, at its own steps.
            steps = STEPS - (2 if name == "wan-experts" else 1)
            assert whole - count == 2 * forwards * steps * linears
    assert not any("forward" in part.__dict__ for part in module.modules())


@pytest.mark.parametrize(("kind", "more"), [(Handwriting, ("context_embedder", "linear_1")), (HandwritingUNet, ())])
def test_adapters_of_these_layers_take_part(kind: Any, more: tuple[str, ...]) -> None:
    """LoRA on them: the results are those of the adapted layer, and the next rollout sees the weights of its time."""
    model = kind()
    module = model.build().eval()
    add_lora(module, LoraConfig(rank=2, alpha=3.0, targets=(*more, "to_k", "to_v")), model.lora_targets)
    shape, prompts = model.latent_shape(), ("0427", "1234", "0427", "9999")
    before, _ = made(model, module, prompts, shape, reuse="all")
    perturb(module)
    after, _ = made(model, module, prompts, shape, reuse="all")
    expected, _ = made(model, module, prompts, shape)
    assert len(PromptLayers(model, module)._layers) >= 2
    assert torch.equal(after, expected)
    assert not torch.equal(before, after)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, texts: list[Tensor], *, fail: bool = False) -> Tensor:
        out = self.image(x) + sum(self.text(text) for text in texts)
        if fail:
            raise RuntimeError("failed")
        return out


class Named:
    prompt_layers = ("text",)


@contextmanager
def counting(layer: nn.Module) -> Iterator[list[int]]:
    calls = [0]
    real = nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        calls[0] += weight is layer.weight
        return real(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "linear", linear)
        yield calls


def test_layers_are_looked_up_once_and_again_after_one_was_replaced(monkeypatch: Patch) -> None:
    walks, matching = [], prompt_layers._match_layers

    def counted(*args: Any, **kwargs: Any) -> Any:
        walks.append(args)
        return matching(*args, **kwargs)

    monkeypatch.setattr(prompt_layers, "_match_layers", counted)
    net = Twice()
    model: Any = Named()
    for _ in range(3):
        assert PromptLayers(model, net)._layers == [net.text]
    assert len(walks) == 1
    add_lora(net, LoraConfig(rank=2), ["text"])
    assert PromptLayers(model, net)._layers == [net.text]
    assert len(walks) == 2


def test_calls_are_told_apart_and_failures_leave_nothing() -> None:
    net, texts = Twice(), [torch.ones(1, 2), 2 * torch.ones(1, 2)]
    known = PromptLayers(Named(), net)  # type: ignore[arg-type]
    with torch.no_grad(), counting(net.text) as calls:
        for x in (torch.zeros(1, 2), torch.ones(1, 2), 3 * torch.ones(1, 2)):
            expected = net(x, texts)
            with known.prediction():
                assert torch.equal(net(x, texts), expected)
        assert calls == [3 * 2 + 2]
        with pytest.raises(RuntimeError, match="failed"), known.prediction():
            net(x, texts, fail=True)
        with known.prediction():  # a step that leaves the layer out frees its results
            pass
        with known.prediction():
            net(x, texts)
        assert calls == [3 * 2 + 2 + 2]
    assert "forward" not in net.text.__dict__
    with pytest.raises(ValueError, match="prompt layers: gradients are enabled"), known.prediction():
        pass
