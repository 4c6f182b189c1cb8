"""Two ranks, with separate samples or sharing each sample, take the update of one process, for every model."""

import json
from collections.abc import Iterator
from pathlib import Path

import launch
import pipeline_ranks
import pytest
import torch
from safetensors.torch import load_file

from fluvial.engines.fsdp.world import World, init_world

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of every pipeline, with the results of two ranks in `two`."""
    folder = tmp_path_factory.mktemp("ranks")
    pipeline_ranks.save(folder)
    (folder / "two").mkdir()
    launch.on_ranks(2, "pipeline_ranks:updates", folder, folder / "two", timeout=400)
    return folder


@pytest.fixture(scope="module")
def one() -> Iterator[World]:
    """Return the world of this process."""
    with init_world() as world:
        yield world


@pytest.mark.parametrize(("name", "shared"), pipeline_ranks.RUNS)
def test_two_ranks_take_the_update_of_one_process(folder: Path, one: World, name: str, shared: int) -> None:
    """Velocities, log-probabilities, loss and gradients agree; ranks that share a sample have the same bits."""
    expected = pipeline_ranks.update(folder, name, one)
    found = load_file(folder / "two" / f"{name}-{shared}.safetensors")
    losses = json.loads((folder / "two" / "losses.json").read_text())
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


@pytest.mark.parametrize("name", pipeline_ranks.SPLIT[:3])
def test_tokens_that_do_not_divide_are_refused(folder: Path, name: str) -> None:
    """Two ranks cannot share three tokens, wherever in the network they are split."""
    refused = json.loads((folder / "two" / "refused.json").read_text())
    tokens = "a sample has a number of tokens" if name == "wan" else "hidden_states has 3 tokens"
    assert f"context_parallel is 2, but {tokens}, which it does not divide" in refused[name]
