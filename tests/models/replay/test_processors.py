"""Pipelines whose text part is a processor that needs torchvision."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from helpers import tiny_conditioned

from fluvial.models.pipelines.folder import silence
from fluvial.models.replay.any_pipeline import AnyPipeline
from fluvial.models.replay.media import MediaPrompt
from fluvial.models.tiny import pipelines as tiny


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="the processor opens with torchvision")
def test_the_tokenizer_takes_the_place_of_a_processor_of_text(tmp_path: Path) -> None:
    """FLUX.2 dev's folder has a PixtralProcessor, which its pipeline calls with text alone."""
    with silence():
        tiny.build("Flux2Pipeline").save_pretrained(tmp_path / "model")
    index = json.loads((tmp_path / "model/model_index.json").read_text())
    index["tokenizer"] = ["transformers", "PixtralProcessor"]
    (tmp_path / "model/model_index.json").write_text(json.dumps(index))
    image = tiny_conditioned.draw_image(tmp_path / "image.png", 0, (64, 64))
    prompt = MediaPrompt("a fox", {"image": image})
    call = {"max_sequence_length": 32, "text_encoder_out_layers": [0, 1, 2]}
    model = AnyPipeline(tmp_path / "model", height=64, width=64, steps=2, scale=3.0, call=call, example=prompt)
    assert model.check(model.build(), [prompt]) < 1e-5
    found = model.encode([prompt, prompt.change("image")])
    assert any(not torch.equal(row[0], row[1]) for row in found[0])
