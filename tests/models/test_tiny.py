"""Tiny pipelines: weights that only a checkpoint would fill."""

from collections.abc import Iterator

import pytest
import torch

from fluvial.models.tiny import pipelines as tiny


@pytest.fixture
def _uninitialised_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of shapes that a tiny one lacks
@pytest.mark.usefixtures("_uninitialised_is_nan")
def test_no_weight_is_what_the_memory_held() -> None:
    network = tiny.build_random(lambda: tiny.build("NucleusMoEImagePipeline"), 0.2).transformer
    experts = [weight for name, weight in network.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    assert experts
    assert all(weight.isfinite().all() and weight.std() > 0.1 for weight in network.parameters() if weight.numel() > 50)
    assert all(weight.isfinite().all() for weight in network.parameters())
