"""Tiny reward models with random weights, saved as their published ones are."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fluvial.core.random import key, normal, uniform
from fluvial.models.tiny.encoders import build_clip_tokenizer


def images(count: int = 3, height: int = 41, width: int = 53, *, seed: int = 0) -> Tensor:
    noise = uniform(key(seed), (count, 3, height, width))
    ramp = torch.linspace(0, 1, width) * torch.linspace(1, 0, height)[:, None]
    return ((noise * 0.5 + ramp * torch.linspace(0.2, 1, count)[:, None, None, None]).clamp(0, 1) * 255).round() / 255


def check_images(make: Callable[..., Any], prompts: list[str], before: Sequence[Tensor] = ()) -> None:
    """Check that gradients reach each image, that a batch changes no score, and that a video has the mean of its frames.

    Args:
        make: builds the reward with the options `batch` and `frames`.
        prompts: prompts of three images.
        before: images before an edit, of a reward that takes them.
    """
    samples, reward = images().requires_grad_(), make(batch=2)

    def score(reward: Any, samples: Tensor, *numbers: int) -> Tensor:
        edits = [[before[number] for number in numbers]] if before else []
        return reward(samples, [prompts[number] for number in numbers], *edits)

    scores = score(reward, samples, 0, 1, 2)
    (grad,) = torch.autograd.grad(scores.sum(), samples)
    assert grad.flatten(1).norm(dim=1).min() > 0
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())
    still = samples.detach()
    alone = torch.cat([score(reward, still[number : number + 1], number) for number in range(3)])
    torch.testing.assert_close(alone, scores.detach(), rtol=1e-5, atol=1e-6)
    for frames, chosen in ((3, [0, 1, 2]), (2, [0, 2])):  # the first and the last of two
        reward, video = make(frames=frames), still.transpose(0, 1)[None]
        mean = score(reward, still[chosen], *[0] * frames).mean()
        torch.testing.assert_close(score(reward, video, 0)[0], mean, rtol=1e-5, atol=1e-6)


def randomise(model: Any, *, seed: int = 0, scale: float = 0.3) -> Any:
    """Draw every parameter, so that no two outputs are alike and no bias is 0."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            drawn = normal(key(1000 * seed + number), tuple(parameter.shape)) * scale
            parameter.copy_(drawn + 1 if "norm" in name.lower() and name.endswith("weight") else drawn)
    return model.eval()


def word_tokenizer(words: list[str], first: str, last: str, **names: str) -> Any:
    """Return a tokenizer of words that puts each text between two of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=names["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(word, words.index(word)) for word in (first, last)]
    made.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def clip_settings() -> dict[str, Any]:
    from fluvial.models.rewards.shared.pixels import CLIP_MEAN, CLIP_STD

    return {
        "do_resize": True,
        "size": {"shortest_edge": 30},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": 30, "width": 30},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(CLIP_MEAN),
        "image_std": list(CLIP_STD),
    }


def clip(*, act: str = "quick_gelu") -> Any:
    from transformers import CLIPConfig, CLIPModel

    common = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "hidden_act": act,
        "projection_dim": 12,
    }
    config = CLIPConfig(
        projection_dim=12,
        vision_config={**common, "hidden_size": 16, "image_size": 30, "patch_size": 10},
        text_config={
            **common,
            "hidden_size": 20,
            "vocab_size": len(build_clip_tokenizer()),
            "max_position_embeddings": 24,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
        },
    )
    return randomise(CLIPModel(config))


def save_clip(folder: Path) -> Any:
    """Save a CLIPModel, its tokenizer and the settings of its image processor to a folder, and return the model."""
    model = clip()
    model.save_pretrained(folder)
    build_clip_tokenizer(24).save_pretrained(folder)
    write_settings(folder, {**clip_settings(), "image_processor_type": "CLIPImageProcessor"})
    return model


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
