"""Two ranks, with separate samples or sharing each sample, take the update of one process, for every model."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers import launch
from helpers.marks import long
from safetensors.torch import load_file
from workers import pipeline_ranks
from workers.pipeline_ranks import SHORT

from fluvial.engines.engine.world import World

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers' own parts
RUNS = [run if run in SHORT else long(*run) for run in pipeline_ranks.RUNS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder: Path) -> Callable[[bool], Path]:
    @cache
    def updated(short: bool) -> Path:
        runs = [run for run in pipeline_ranks.RUNS if (run in SHORT) == short]
        to = folder / f"two-{short}"
        to.mkdir()
        for name, _ in runs:
            pipeline_ranks.save(folder, name)
        launch.on_ranks(2, "workers.pipeline_ranks:updates", folder, to, runs, timeout=400)
        return to

    return updated


@pytest.mark.parametrize(("name", "shared"), RUNS)
def test_two_ranks_take_the_update_of_one_process(
    folder: Path, two: Callable[[bool], Path], one: World, name: str, shared: int
) -> None:
    """Velocities, log-probabilities, loss and gradients agree; ranks that share a sample have the same bits."""
    results = two((name, shared) in SHORT)
    expected = pipeline_ranks.update(folder, name, one)
    found = load_file(results / f"{name}-{shared}.safetensors")
    losses = json.loads((results / "losses.json").read_text())
    for what in ("velocity", "log_prob"):
        copies = found.pop(what)
        assert len(copies) == shared
        assert all(torch.equal(copy, copies[0]) for copy in copies)
        torch.testing.assert_close(copies[0], getattr(expected, what)[0], rtol=1e-4, atol=1e-5)
    assert losses[f"{name}-{shared}"] == pytest.approx(expected.loss, rel=1e-5)
    assert set(found) == set(expected.gradients)
    assert sum(bool(gradient.any()) for gradient in expected.gradients.values()) > 0.7 * len(found)
    for parameter, gradient in expected.gradients.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", [name if (name, 2) in SHORT else long(name) for name in pipeline_ranks.SPLIT[:3]])
def test_tokens_that_do_not_divide_are_refused(two: Callable[[bool], Path], name: str) -> None:
    """Two ranks cannot share three tokens, wherever in the network they are split."""
    refused = json.loads((two((name, 2) in SHORT) / "refused.json").read_text())
    tokens = "a sample has a number of tokens" if name == "wan" else "hidden_states has 3 tokens"
    assert f"engine.context_parallel is 2: {tokens}, which it does not divide" in refused[name]
