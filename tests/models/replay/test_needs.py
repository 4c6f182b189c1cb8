"""Packages, prompts and caches of pipelines without an adapter, and networks whose output is guessed."""

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from helpers.refusals import refuses
from torch import Tensor, nn

from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.arguments import build_call_arguments, find_classes, list_call_forms
from fluvial.models.replay.checks import wrap_errors
from fluvial.models.replay.kinds import SOUND, Sound
from fluvial.models.replay.media import MediaPrompt
from fluvial.models.replay.recipe import cut_leading_tokens
from fluvial.models.replay.stand_in import make_stand_in
from fluvial.models.tiny import pipelines as tiny


def test_a_package_that_a_pipeline_uses_without_a_check_is_named() -> None:
    named = r"^APipeline needs torchvision, which is not installed: pip install torchvision$"
    with pytest.raises(ValueError, match=named), wrap_errors("APipeline", "be called"):
        transforms.functional.resize(0)  # type: ignore[name-defined]


def test_a_pipeline_without_a_prompt_is_refused_and_no_step_reuses_another_ones_numbers() -> None:
    def call(self: Any, task_prompt: str = "", image: Any = None) -> None: ...

    def caching(
        self: Any,
        prompt: str,
        num_inference_steps: int,
        output_type: str,
        return_dict: bool,
        use_kv_cache: bool = True,
        enable_prompt_rewrite: bool = True,
    ) -> None: ...

    rest: Any = ((32, 32, 1), 3, 1.0, "", {}, False)
    refuses("^APipeline takes no prompt", build_call_arguments, "APipeline", inspect.signature(call).parameters, *rest)
    takes = inspect.signature(caching).parameters
    asked = build_call_arguments("APipeline", takes, *rest)
    assert (asked["use_kv_cache"], asked["enable_prompt_rewrite"]) == (False, False)
    rewritten = build_call_arguments("APipeline", takes, (32, 32, 1), 3, 1.0, "", {"enable_prompt_rewrite": True}, False)
    assert rewritten["enable_prompt_rewrite"] is True  # and the check refuses it
    refuses("^the guidance scale is 4.5", build_call_arguments, "APipeline", takes, (32, 32, 1), 3, 4.5, "", {}, False)


@pytest.mark.parametrize(
    ("embedded", "scale", "call", "expected"),
    [
        (True, 1.0, {}, {"guidance_scale": 3.5}),
        (True, 2.0, {}, {"guidance_scale": 2.0}),
        (True, 1.0, {"guidance_scale": 1.0}, {"guidance_scale": 1.0}),
        (False, 1.0, {}, {"true_cfg_scale": 1.0}),
        (None, 1.0, {}, {"guidance_scale": 1.0}),
    ],
)
def test_a_distilled_network_keeps_the_scale_that_it_was_distilled_for(
    embedded: bool | None, scale: float, call: dict[str, Any], expected: dict[str, float]
) -> None:
    def distilled(
        self: Any,
        prompt: str,
        num_inference_steps: int,
        output_type: str,
        return_dict: bool,
        guidance_scale: float = 3.5,
        true_cfg_scale: float = 1.0,
    ) -> None: ...

    takes = inspect.signature(distilled).parameters
    asked = build_call_arguments("APipeline", takes, (32, 32, 1), 3, scale, "", call, embedded)
    assert {name: value for name, value in asked.items() if name.endswith("scale")} == expected


def test_a_sound_of_another_rate_than_the_pipelines_is_refused() -> None:
    prompt = MediaPrompt("rain", {"audio": SOUND.write(Sound(torch.zeros(1, 8), 800))})
    assert list_call_forms({"audio"}, prompt, 1, steps=[3], rate=800)
    says = r"^the audio of a prompt has 800 numbers per second, and the pipeline takes 400: resample it$"
    refuses(says, list_call_forms, {"audio"}, prompt, 1, steps=[3], rate=400)


def test_networks_that_change_in_a_call_or_in_training_are_refused(tmp_path: Path) -> None:
    """Perturbed attention guidance, unless its scale is 0; HiDream's experts, which have no gradient in samples; pixels."""

    def call(
        self: Any, prompt: str, num_inference_steps: int, output_type: str, return_dict: bool, pag_scale: float = 3.0
    ) -> None: ...

    takes = inspect.signature(call).parameters
    refuses(r"^A exchanges layers .* \(PAG\)", build_call_arguments, "A", takes, (32, 32, 1), 3, 1.0, "", {}, False)
    assert build_call_arguments("A", takes, (32, 32, 1), 3, 1.0, "", {"pag_scale": 0.0}, False)["pag_scale"] == 0
    parts = {"transformer": ["diffusers", "HiDreamImageTransformer2DModel"]}
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "HiDreamImagePipeline", **parts}))
    refuses("computes differently in training and in inference", find_classes, tmp_path, "transformer")
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "PRXPixelPipeline", "transformer": ["diffusers", "A"]})
    )
    refuses("it has no VAE, and generates pixels directly", find_classes, tmp_path, "transformer")


def test_a_network_that_takes_no_batch_is_told_from_one_that_reads_values() -> None:
    """PRX's guidance has times for one sample, whose broadcast fails for several; each sample has a pass of its own then."""

    class Adds(nn.Module):
        config: ClassVar[dict[str, int]] = {}

        def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor]:
            return (hidden_states + timestep[:, None],)

    network = make_stand_in(Adds(), torch.device("cpu"), torch.float32)
    network(hidden_states=torch.zeros(2, 3), timestep=torch.zeros(2))
    assert not network.unlike
    network(hidden_states=torch.zeros(6, 3), timestep=torch.zeros(2))
    assert network.unlike


class Reads(nn.Module):
    config = {"in_channels": 4, "out_channels": 2}  # noqa: RUF012

    def forward(self, hidden_states: Tensor) -> Any:
        return (hidden_states[:, : int(hidden_states.sum()) + 1],)


def test_outputs_of_unlike_networks() -> None:
    network = make_stand_in(Reads(), torch.device("cpu"), torch.float32)
    assert network(hidden_states=torch.ones(3, 4, 8))[0].shape == (3, 4, 8)
    assert network(hidden_states=torch.ones(3, 4, 8, 8))[0].shape == (3, 2, 8, 8)
    x, part = torch.zeros(2, 4, 3), torch.arange(2 * 6 * 3.0).view(2, 6, 3)
    assert torch.equal(cut_leading_tokens([part], x)[0], part[:, 2:])
    assert cut_leading_tokens([x], x)[0] is x
    wider = torch.zeros(2, 6, 5)
    assert cut_leading_tokens([wider], x)[0] is wider


@pytest.mark.long
@pytest.mark.parametrize("name", ["Kandinsky5T2IPipeline", "BriaFibo2Pipeline", "QwenImage21Pipeline"])
def test_pipelines_with_positions_of_the_text_are_replayed(name: str, tmp_path: Path) -> None:
    """Prompts of unlike lengths, with guidance, against the pipeline's own images."""
    asked = tiny.find_call(name)
    with tiny.replace_surroundings(name, asked.size):
        folder = tiny.save(name, tmp_path / "model")
        model = AnyPipeline(
            folder, height=asked.size, width=asked.size, steps=2, scale=asked.scale, negative=asked.negative, call=asked.call
        ).adapt_to(["an owl", "a red fox on a chair"])
        assert model.check(model.build().eval(), ["an owl", "a red fox on a chair"]) < 1e-5


@pytest.mark.parametrize(
    ("name", "network", "why"),
    [
        ("SkyReelsV2DiffusionForcingVideoToVideoPipeline", "SkyReelsV2Transformer3DModel", "each frame at a noise level"),
        ("WanAnimatePipeline", "WanAnimateTransformer3DModel", "in segments, each from the last frames of the one before"),
    ],
)
def test_samples_that_are_no_rollout_are_refused_in_words(name: str, network: str, why: str, tmp_path: Path) -> None:
    index = {"_class_name": name, "transformer": ["diffusers", network]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    refuses(f"^{name} cannot be trained without an adapter: .*{why}", find_classes, tmp_path, "transformer")
