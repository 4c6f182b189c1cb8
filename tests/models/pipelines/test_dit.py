"""DiT: a prompt is a class by its number or name, in training as in sampling; the network may have its old name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.marks import Folders
from helpers.tiny_pipelines import opened, start

REFUSED = {
    "1000": "'1000' is no class: expected a number from 0 to 999, or a name",
    "tow cats": "or a name, such as two cats",
    "-1": "'-1' is no class",
}


def test_a_prompt_is_a_class_for_networks_of_the_old_name_too(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("dit"), tmp_path / "old"))
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace("DiTTransformer2DModel", "Transformer2DModel"))
    model = opened("dit", folder)
    cond = model.encode(["207", "two cats", "cats", "1", ""])
    assert cond.classes.tolist() == [207, 1, 1, 1, 1000]
    for prompt, says in REFUSED.items():
        with pytest.raises(ValueError, match=says):
            model.check_prompt(prompt)
    with pytest.raises(ValueError, match="the size is 16x24, expected 16x16"):
        model.latent_shape(16, 24)
    module, x, level = model.build().eval(), start(model, 5, (16, 16)), torch.tensor([0.1, 0.5, 0.5, 0.5, 0.9])
    expected = model.predict(module, x, level, cond)
    for layer in module.modules():  # a class that training dropped would change this
        if hasattr(layer, "num_classes"):
            assert layer.train().dropout_prob == 0
    assert torch.equal(model.predict(module.train(), x, level, cond), expected)
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_embeds_ada_norm": 10}))
    with pytest.raises(ValueError, match="has 10 classes, expected 1000"):
        opened("dit", folder)
