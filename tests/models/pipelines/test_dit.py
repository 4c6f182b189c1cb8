"""DiT: a prompt is a class by its number or name, in training as in sampling; the network may have its old name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.marks import Folders
from helpers.refusals import refuses
from helpers.tiny_pipelines import opened, start

from fluvial.models.pipelines.dit import DiT


def test_a_prompt_is_the_number_or_a_name_of_a_class() -> None:
    model = DiT.__new__(DiT)
    model.names, model.folder = {"two cats": 1, "cats": 1, "tench": 0}, Path("dit")
    classes = torch.tensor([model.find_class(each) for each in ("207", "two cats", "cats", "1", "")])
    assert model.build_cond({"classes": classes}).classes.tolist() == [207, 1, 1, 1, 1000]
    refuses("'1000' is not a class: expected a number from 0 to 999", model.check_prompt, "1000")
    refuses("as two cats", model.check_prompt, "tow cats")
    model.names = {}
    refuses("'tench' is not a class: .*: dit has no id2label with names", model.check_prompt, "tench")


@pytest.mark.long
def test_classes_are_never_dropped_and_networks_may_have_the_old_name(folders: Folders, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folders("dit"), tmp_path / "old"))
    config = folder / "transformer" / "config.json"
    config.write_text(config.read_text().replace("DiTTransformer2DModel", "Transformer2DModel"))
    model = opened("dit", folder)
    refuses("the size is 16x24, expected 16x16", model.latent_shape, 16, 24)
    module, x, level = model.build().eval(), start(model, 3, (16, 16)), torch.tensor([0.1, 0.5, 0.9])
    cond = model.encode(["207", "two cats", ""])
    expected = model.predict(module, x, level, cond)
    for layer in module.modules():  # what training drops at random
        assert getattr(layer, "dropout_prob", 0) == 0
    assert torch.equal(model.predict(module.train(), x, level, cond), expected)
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_embeds_ada_norm": 10}))
    refuses("has 10 classes, expected 1000", opened, "dit", folder)
