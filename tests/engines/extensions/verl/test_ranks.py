"""Two ranks: the gradients of one, whether each has samples of its own or both share each sample."""

from pathlib import Path

import pytest
from helpers import real_verl, verl_runs
from helpers.launch import on_ranks
from safetensors.torch import load_file
from workers import verl_ranks

from fluvial.engines.engine.world import World

pytestmark = pytest.mark.slow


def test_two_ranks_have_the_gradients_of_one(world: World, tmp_path: Path) -> None:
    """Full fine-tuning and LoRA, with guidance; losses are averaged over verl's own group."""
    real_verl.load()
    verl_runs.folder("qwen-image")  # stored before the ranks ask for it: only the first of several ranks saves a config
    outs = {ranks: tmp_path / str(ranks) for ranks in (1, 2)}
    for out in outs.values():
        out.mkdir()
    first, second = on_ranks(2, "workers.verl_ranks:train", outs[2])
    alone = verl_ranks.train(world, str(outs[1]))
    for way in ("full", "lora", "shared"):
        expected, found = (load_file(out / f"{way}.safetensors") for out in outs.values())
        away = sum(float((found[name] - tensor).square().sum()) for name, tensor in expected.items())
        assert away**0.5 < 1e-6 * sum(float(tensor.square().sum()) for tensor in expected.values()) ** 0.5, way
        assert first[way]["norm"] == second[way]["norm"] == pytest.approx(alone[way]["norm"], rel=1e-5)
        assert first[way]["loss"] == second[way]["loss"] == pytest.approx(alone[way]["loss"], rel=1e-5)
        assert first[way]["sent"] == second[way]["sent"]
        assert first[way]["sent"] == pytest.approx(alone[way]["sent"], rel=1e-4, abs=1e-3)
    assert [run["full"]["dp"] for run in (first, second)] == [[0, 2], [1, 2]]
    assert [run["full"]["collects"] for run in (first, second)] == [True, True]
    assert [run["shared"]["dp"] for run in (first, second)] == [[0, 1], [0, 1]]
    assert [run["shared"]["collects"] for run in (first, second)] == [True, False]
    halves = first["full"]["log_probs"] + second["full"]["log_probs"]
    for row, whole in zip(halves, alone["full"]["log_probs"], strict=True):
        assert row == pytest.approx(whole, abs=2e-6)
    assert first["uneven"] == second["uneven"] == "ranks have 4 to 6 items, expected as many on every rank"
