"""Keys and values of a prompt that sees neither noise level nor sample: kept over steps, counted, and samples stay."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers import handwriting_jobs
from helpers.lora_model import perturb
from helpers.refusals import refuses
from helpers.tiny_conditioned import draw_image
from torch import Tensor, nn

from fluvial.core.random import key
from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.engine.world import World
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.job import open_configured
from fluvial.engines.run.passes.probe import RunPasses
from fluvial.engines.run.recipes import RECIPES
from fluvial.engines.run.trainer import Trainer
from fluvial.engines.sampling.config import SamplingConfig
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate
from fluvial.engines.sampling.window import AllSteps
from fluvial.models.flops import FlopCounter
from fluvial.models.lora import LoraConfig, add_lora
from fluvial.models.prompt_layers import PromptKeys
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.media import MediaPrompt
from fluvial.models.step_cache import FirstBlockCache, PassReuse
from fluvial.models.tiny import pipelines as tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
NAME, SIDE, STEPS, LAYERS, WIDTH, LATENT = "QwenImage21Pipeline", 32, 3, 3, 16, 4
TEXTS, IMAGE, SAMPLE = ("an owl", "a red fox on a chair"), (1, 2, 4), (1, 4, 4)
NEAR = 1e-6  # relative; on the machines so far the bits are the same, but sums may be taken in another order


def build_network(**settings: Any) -> nn.Module:
    network: nn.Module = tiny.build_network("QwenImage21Transformer2DModel", num_layers=LAYERS, **settings)
    torch.manual_seed(0)
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)
    return network.eval()


def inputs(sample: Tensor, level: float, *, words: int = 7, image: bool = True) -> dict[str, Any]:
    """Return the inputs of an edit: words, an image of 8 tokens, words of which the first prompt has two less."""
    slots, shapes = [False] * 3, [SAMPLE]
    if image:
        slots, shapes = [*slots, *[True] * (prod(IMAGE) // 4)], [IMAGE, SAMPLE]
    slots += [False] * (words - 3)
    torch.manual_seed(words)
    text, before = torch.randn(2, len(slots), WIDTH), torch.randn(2, prod(IMAGE) if image else 0, LATENT)
    mask = torch.ones(2, len(slots), dtype=torch.bool)
    mask[0, -2:] = False
    return {
        "hidden_states": torch.cat([before, sample], dim=1),
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": mask,
        "timestep": torch.full((2,), level),
        "img_shapes": [shapes] * 2,
        "img_mask": torch.tensor([slots + [True] * (prod(SAMPLE) // 4)] * 2),
        "return_dict": False,
    }


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= NEAR * expected.abs().max())


def samples() -> list[tuple[Tensor, float]]:
    torch.manual_seed(0)
    return [(torch.randn(2, prod(SAMPLE), LATENT), level) for level in (0.9, 0.5, 0.2)]


@torch.no_grad()
def test_the_first_step_keeps_keys_and_the_next_compute_the_sample_alone() -> None:
    """Outputs of each level, operations to the last one, and bytes; with an adapter, in an edit and without an image."""
    network: Any = build_network()
    add_lora(network, LoraConfig(rank=2), ["to_k", "to_v"])
    perturb(network)
    for image, tokens in ((True, 7 + prod(IMAGE)), (False, 7)):
        keys, operations = PromptKeys(network), list[int]()
        for step, (sample, level) in enumerate(samples()):
            asked = inputs(sample, level, image=image) | {"encoder_hidden_states_mask": None}
            with FlopCounter() as whole:
                expected = network(**asked)[0]
            with keys.prediction(), FlopCounter() as counter:
                output = network(**asked)[0]
            assert output.shape[1] == prod(SAMPLE) + (tokens if step == 0 else 0)
            assert near(output[:, -prod(SAMPLE) :], expected[:, -prod(SAMPLE) :])
            operations.append(whole.model - counter.model)
        # A token's products: queries, keys, values and output, three of the feed-forward with three times the width; then
        # the output's. (Adapters are merged.) Its queries see those before it, and its own segment.
        weights = LAYERS * (4 * WIDTH**2 + 3 * 3 * WIDTH**2) + WIDTH * LATENT
        segments = [(3, 3), (prod(IMAGE), 3 + prod(IMAGE)), (4, tokens)] if image else [(7, 7)]
        seen = LAYERS * 2 * WIDTH * sum(queries * end for queries, end in segments)
        assert operations == [0, *[2 * 2 * (tokens * weights + seen)] * 2]
        assert keys.nbytes == LAYERS * 2 * 2 * tokens * WIDTH * 4
    assert "forward" not in network.__dict__


@pytest.mark.long
@torch.no_grad()
def test_blocks_that_are_compiled_keep_keys_too() -> None:
    from torch._dynamo.testing import CompileCounter

    network: Any = build_network()
    expected = [network(**inputs(sample, level))[0] for sample, level in samples()]
    counter = CompileCounter()
    for block in network.transformer_blocks:
        block.forward = torch.compile(block.forward, backend=counter)
    keys, programs = PromptKeys(network), list[int]()
    for (sample, level), whole in zip(samples(), expected, strict=True):
        with keys.prediction():
            assert near(network(**inputs(sample, level))[0][:, -prod(SAMPLE) :], whole[:, -prod(SAMPLE) :])
        programs.append(counter.frame_count)
    assert programs[0] < programs[1] == programs[2]  # one that keeps, and one that reads, which trials before a run compile


@torch.no_grad()
def test_steps_leave_out_blocks_from_the_second_on_that_reads_keys() -> None:
    """The first step computes the prompt as well, so that its blocks return other shapes than those of the next ones."""
    network, called = build_network(), list[int]()
    model: Any = SimpleNamespace(blocks=lambda module: list(module.transformer_blocks))
    model.blocks(network)[-1].attn.register_forward_hook(lambda *_: called.append(len(called)))
    options: dict[str, Any] = {"layers": "none", "keys": True, "guided": False}
    reuse, counts = PassReuse(model, network, cache=FirstBlockCache(threshold=1e6), **options), list[int]()
    for sample, level in samples():
        with reuse.step(exact=False):
            output = network(**inputs(sample, level))[0]
        counts.append(len(called))
    assert counts == [1, 2, 2]
    assert output.shape[1] == prod(SAMPLE)
    assert bool(output.isfinite().all())


def test_what_would_be_wrong_is_refused() -> None:
    network: Any = build_network()
    keys, ((sample, level), *_) = PromptKeys(network), samples()
    with pytest.raises(ValueError, match="prompt keys: gradients are enabled"), keys.prediction():
        pass
    with torch.no_grad(), keys.prediction():
        network(**inputs(sample, level))
    for words in (8, 7):
        asked = inputs(sample, level, words=words)
        asked["encoder_hidden_states"] += words == 7
        with torch.no_grad(), keys.prediction():
            refuses("prompt keys: a call has another prompt than the first prediction's", network, **asked)
    sees = "does not keep its prompt apart from noise level and sample"
    refuses(f"prompt keys: QwenImage21Transformer2DModel {sees}", PromptKeys, build_network(causal_condition=False))
    refuses(f"prompt keys: Linear {sees}", PromptKeys, nn.Linear(1, 1))


def prompts_of(folder: Path, *, edit: bool) -> list[Prompt]:
    media: list[dict[str, Any]] = [{"image": draw_image(folder / f"{n}.png", n, (SIDE, SIDE))} for n in range(2 * edit)]
    return [Prompt(text, media=one) for text, one in zip(TEXTS, media or [{}, {}], strict=True)]


@pytest.mark.parametrize(("edit", "scale"), [(True, 3.0), pytest.param(False, 1.0, marks=pytest.mark.long)])
def test_a_rollout_makes_the_same_samples(edit: bool, scale: float, tmp_path: Path) -> None:
    """Of a recorded pipeline, whose prompts have passes of their own, with both halves of guidance; no other model can."""
    prompts = prompts_of(tmp_path, edit=edit)
    call = tiny.find_call(NAME).call | {"output_resolution": SIDE}
    with tiny.replace_surroundings(NAME, SIDE):
        folder = tiny.save(NAME, tmp_path / "model")
        shown: list[Any] = [MediaPrompt(one.text, one.media) if edit else one.text for one in prompts]
        size: dict[str, Any] = {"height": SIDE, "width": SIDE, "steps": STEPS, "scale": scale, "call": call}
        model = AnyPipeline(folder, **size, negative="bad" if scale != 1 else "", example=shown[1]).adapt_to(shown)
    module, shape = model.build().eval(), model.latent_shape(SIDE, SIDE)
    predict, counter = model.predict, FlopCounter()

    def count(*args: Any, **kwargs: Any) -> Tensor:
        with counter:
            return predict(*args, **kwargs)

    model.predict = count  # type: ignore[method-assign]
    sampling, requests = Sampling(shape, model.schedule(STEPS, shape)), Requests(prompts, range(2), key(3))

    def sample(**options: Any) -> tuple[Tensor, int]:
        counter.model = 0
        (chunk,) = generate(model, module, requests, replace(sampling, **options), micro_batch=2)
        return chunk.trajectory.final, counter.model

    (expected, whole), (found, fewer) = sample(), sample(keep_keys=True)
    assert near(found, expected)
    most = 0.7 if edit else 0.9
    assert fewer < most * whole
    refuses("keys: SD3Transformer", sample_handwriting)


def sample_handwriting() -> Any:
    model: Any = handwriting_jobs.job().model
    shape = model.latent_shape()
    sampling = Sampling(shape, model.schedule(STEPS, shape), keep_keys=True)
    return [*generate(model, model.build(), Requests([Prompt("0427")], range(1), key(0)), sampling, micro_batch=1)]


def edit_run(folder: Path, reuse: str) -> TrainConfig:
    """Return a run on edits of the tiny pipeline."""
    with tiny.replace_surroundings(NAME, SIDE):
        tiny.save(NAME, folder / "model")
    records = [{"prompt": one.text, "image": str(one.media["image"])} for one in prompts_of(folder, edit=True)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    config = replace(RECIPES["grpo"](str(folder / "model")), prompts=(str(folder / "prompts.jsonl"),), rewards=("jpeg",))
    sampling = SamplingConfig(prompts=2, group=2, steps=STEPS, window=AllSteps(), guidance=Guidance(3.0, negative="bad"))
    changes: dict[str, Any] = {"train": "lora", "sampling": sampling, "rollout.reuse": reuse, "out": folder / "run"}
    changes |= {"pipeline.height": SIDE, "pipeline.width": SIDE, "pipeline.call": (f"output_resolution={SIDE}",)}
    changes |= {
        "updates": 2,
        "passes.minibatches": 1,
        "engine.micro_batch": 2,
        "engine.compile": False,
        "engine.compute": "float32",
    }
    return with_values(config, {**changes, "evaluation.every": 0, "optimizer": OptimizerConfig(lr=0.1)})


@pytest.mark.long
def test_an_update_computes_the_whole_prompt_with_its_gradient(one: World, tmp_path: Path) -> None:
    """First ratios are 1 within rounding, also of an adapter that has an effect; the weights move.

    A trial before the run makes both passes of a rollout, so that it measures the memory of the kept keys, too.
    """
    config, tokens = edit_run(tmp_path, "keys"), list[int]()
    with Trainer(config, open_configured(config), one) as trainer:
        passes = RunPasses(config, trainer.job, trainer.engine, trainer.schedule).build(trainer.job.shape)
        with trainer.engine.inference() as module, torch.no_grad():
            first: Any = trainer.job.model.blocks(module)[0]
            counter = first.attn.to_q.register_forward_hook(lambda layer, args, made: tokens.append(args[0].shape[1]))
            cast(Any, passes.rollout)(module, 2)
            counter.remove()
        assert tokens[0] > tokens[-1] == prod(trainer.job.shape) // LATENT
        records = [trainer.update() for _ in range(2)]
    assert all(record["first_pass_max_abs_log_ratio"] < NEAR for record in records)
    assert all(record["grad_norm"] > 0 for record in records)
