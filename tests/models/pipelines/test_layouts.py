"""Layouts of latents in sglang: those of the pipelines' own functions, and back to the bit."""

from typing import Any

import diffusers
import pytest
import torch
from helpers.marks import Patch
from helpers.tiny_pipelines import ROWS

from fluvial.models.pipelines.base import TextCond
from fluvial.models.pipelines.flux import FluxCond
from fluvial.models.pipelines.layouts import FRAME, FRAMED_TOKENS, LAYOUTS, PLAIN, TOKENS, embed_guidance, find_layout
from fluvial.models.pipelines.qwen_image_edit import QwenEditCond, QwenImageEdit


def test_layouts_and_arguments_are_those_of_sglang() -> None:
    adapters: dict[str, Any] = {name: row.adapter for name, row in ROWS.items()}
    found = {name: find_layout(object.__new__(adapter)) for name, adapter in adapters.items()}
    packed = {"flux": TOKENS, "flux-schnell": TOKENS, "qwen-image": FRAMED_TOKENS, "z-image": FRAME}
    assert found == dict.fromkeys(ROWS, PLAIN) | packed
    cond = FluxCond(torch.ones(5, 2), torch.ones(3), torch.tensor(3.5))
    assert {*TOKENS.arguments(cond, (4, 6, 10))} == {"encoder_hidden_states", "pooled_projections"}
    assert embed_guidance(cond) == 3500
    assert embed_guidance(TextCond(cond.tokens)) is None
    assert {*PLAIN.arguments(TextCond(cond.tokens), (4, 6, 10))} == {*PLAIN.arguments(cond.tokens, (4, 6, 10))}
    assert {*PLAIN.arguments((cond.tokens, cond.pooled), (4, 6, 10))} == {"cond"}


def test_positions_of_an_edits_images_follow_those_of_the_sample(monkeypatch: Patch) -> None:
    """As `_prepare_edit_cond_kwargs` of sglang has them; a sample of 4 x 6 latents, and two images of 2 x 2 tokens."""
    model: Any = object.__new__(QwenImageEdit)
    monkeypatch.setattr(QwenImageEdit, "vae_scale", 2)
    model.size, model.scale_size = (16, 24), lambda *size: (8, 8)
    cond = QwenEditCond(torch.ones(5, 3), torch.arange(5) < 4, torch.ones(8, 16))
    layout = find_layout(model)
    found = layout.arguments(cond, (4, 4, 6))
    assert found["img_shapes"] == [[(1, 2, 3), (1, 2, 2), (1, 2, 2)]]
    assert found["txt_seq_lens"] == [4]
    assert layout.get_shape((4, 4, 6)) == (6, 16)
    assert layout.framed
    mixed = cond._replace(image=torch.ones(99, 16), grid=torch.tensor([3, 5]))  # padded
    assert layout.arguments(mixed, (4, 4, 6))["img_shapes"] == [[(1, 2, 3), (1, 3, 5)]]


@pytest.mark.parametrize("layout", [PLAIN, TOKENS, FRAME])
def test_latents_come_back_from_every_layout(layout: Any) -> None:
    latents = torch.randn(2, 3, 4, 6, 10)
    there = layout.from_event(latents)
    assert there.shape == (2, 3, *layout.get_shape((4, 6, 10)))
    assert torch.equal(layout.to_event(there, (4, 6, 10)), latents)


@pytest.mark.parametrize("name", ["FluxPipeline", "QwenImagePipeline"])
def test_tokens_are_those_of_the_pipelines_own_functions(name: str) -> None:
    kind: Any = getattr(diffusers, name)
    latents = torch.randn(2, 4, 6, 10)
    framed = latents.unsqueeze(1) if name == "QwenImagePipeline" else latents  # [B, frames, C, H, W]
    tokens = kind._pack_latents(framed, 2, 4, 6, 10)
    assert torch.equal(LAYOUTS[name].from_event(latents), tokens)
    opened = kind._unpack_latents(tokens, height=48, width=80, vae_scale_factor=8)
    assert torch.equal(LAYOUTS[name].to_event(tokens, (4, 6, 10)), opened.reshape(latents.shape))
