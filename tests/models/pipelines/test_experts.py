"""Wan 2.2's two experts on two ranks."""

from pathlib import Path

import experts
import launch
import pytest
import torch
from safetensors.torch import load_file
from tiny_pipelines import ROWS, save

from fluvial.engines.fsdp.world import init_world
from fluvial.models.pipelines.wan import EXPERTS


@pytest.mark.slow
def test_ranks_on_two_sides_take_the_step_of_one_process(tmp_path: Path) -> None:
    """They agree to run both experts, or one would wait for the other; each expert learns, and is exported to a folder."""
    folder = save(ROWS["wan-experts"], tmp_path / "wan")
    launch.on_ranks(2, "experts:exported", folder, tmp_path / "two")
    found = load_file(tmp_path / "two" / "gradients.safetensors")
    with init_world() as one:
        expected = experts.update(folder, tmp_path / "one", one)
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
    for part in EXPERTS:
        base, *after = (
            load_file(place / part / "diffusion_pytorch_model.safetensors")
            for place in (folder, tmp_path / "one", tmp_path / "two")
        )
        for tensors in after:
            assert set(tensors) == set(base)
            assert not any(torch.equal(tensors[name], base[name]) for name in base)
