"""Packages, prompts and caches of pipelines without an adapter, and networks whose output is guessed."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.arguments import arguments
from fluvial.models.replay.checks import foreign
from fluvial.models.replay.recipe import tails
from fluvial.models.replay.stand_in import stand_in
from fluvial.models.tiny import pipelines as tiny


def test_a_package_that_a_pipeline_uses_without_a_check_is_named() -> None:
    """diffusers' Cosmos resizes a mask by torchvision, which it imports if it is there."""
    named = r"^APipeline needs torchvision, which is not installed: pip install torchvision$"
    with pytest.raises(ValueError, match=named), foreign("APipeline", "be called"):
        transforms.functional.resize(0)  # type: ignore[name-defined]


def test_a_pipeline_without_a_prompt_is_refused_and_no_step_reuses_another_ones_numbers() -> None:
    def call(self: Any, task_prompt: str = "", image: Any = None) -> None: ...

    def caching(
        self: Any, prompt: str, num_inference_steps: int, output_type: str, return_dict: bool, use_kv_cache: bool = True
    ) -> None: ...

    rest: Any = ((32, 32, 1), 3, 1.0, "", {}, False)
    with pytest.raises(ValueError, match=r"^APipeline takes no prompt, it takes task_prompt, image$"):
        arguments("APipeline", inspect.signature(call).parameters, *rest)
    assert arguments("APipeline", inspect.signature(caching).parameters, *rest)["use_kv_cache"] is False


class Reads(nn.Module):
    """Reads a value, as networks with experts do."""

    config = {"in_channels": 4, "out_channels": 2}  # noqa: RUF012

    def forward(self, hidden_states: Tensor) -> Any:
        return (hidden_states[:, : int(hidden_states.sum()) + 1],)


def test_the_output_of_a_network_that_reads_values_is_guessed_by_its_input() -> None:
    """Tokens as many as channels are no channels."""
    network = stand_in(Reads(), torch.device("cpu"), torch.float32, guess=True)
    assert network(hidden_states=torch.ones(3, 4, 8))[0].shape == (3, 4, 8)
    assert network(hidden_states=torch.ones(3, 4, 8, 8))[0].shape == (3, 2, 8, 8)


def test_tokens_of_text_before_those_of_the_sample_are_left_out() -> None:
    """As Qwen-Image 2.1 returns both in one sequence; parts of another kind stay."""
    x, part = torch.zeros(2, 4, 3), torch.arange(2 * 6 * 3.0).view(2, 6, 3)
    assert torch.equal(tails([part], x)[0], part[:, 2:])
    assert tails([x], x)[0] is x
    wider = torch.zeros(2, 6, 5)
    assert tails([wider], x)[0] is wider


@pytest.mark.long
@pytest.mark.parametrize("name", ["Kandinsky5T2IPipeline", "BriaFibo2Pipeline", "QwenImage21Pipeline"])
def test_pipelines_with_positions_of_the_text_are_replayed(name: str, tmp_path: Path) -> None:
    """Prompts of unlike lengths, with guidance, against the pipeline's own images."""
    asked = tiny.asked_of(name)
    with tiny.surroundings(name, asked.size):
        folder = tiny.save(name, tmp_path / "model")
        model = AnyPipeline(
            folder, height=asked.size, width=asked.size, steps=2, scale=asked.scale, negative=asked.negative, call=asked.call
        ).given(["an owl", "a red fox on a chair"])
        assert model.check(model.build().eval(), ["an owl", "a red fox on a chair"]) < 1e-5
