"""Passes as CUDA graphs, on a CPU: the same operations at the same addresses, where the host reads nothing."""

from dataclasses import replace

import pytest
import torch
from helpers.graphs import Graphs
from helpers.lora_model import perturb
from helpers.marks import Folders, Patch
from helpers.refusals import refuses
from helpers.tiny_pipelines import ROWS, STEPS, each_row, opened
from torch import Tensor

from fluvial.core.random import key
from fluvial.engines.data.records import as_prompts
from fluvial.engines.engine.config import EngineConfig
from fluvial.engines.extensions.plan.plan import PlanConfig, plan
from fluvial.engines.sampling import generate as generating
from fluvial.engines.sampling.generate import Guidance, Requests, Sampling, generate
from fluvial.engines.sampling.graphed import GraphedPass
from fluvial.models.handwriting import Handwriting
from fluvial.models.lora import LoraConfig, add_lora

REFUSED = {"z-image", "wan-experts"}  # they cut each prompt to its own length, and choose one of two networks


@pytest.fixture
def graphs(monkeypatch: Patch) -> Graphs:
    return Graphs(monkeypatch)


@pytest.mark.long
@each_row
def test_a_rollout_of_graphs_has_the_same_bits(name: str, folders: Folders, graphs: Graphs) -> None:
    """One graph for all steps and chunks."""
    row = ROWS[name]
    model = opened(name, folders(name))
    module = model.build().eval()
    add_lora(module, LoraConfig(rank=2), model.lora_targets)
    perturb(module)
    shape, (first, second, *_) = model.latent_shape(*row.sizes[0]), row.prompts
    requests = Requests(as_prompts([first, second, second, first]), range(4), key(3))
    sampling = Sampling(shape, model.schedule(STEPS, shape), Guidance(3.0))

    def sample(sampling: Sampling) -> Tensor:
        return torch.cat([chunk.trajectory.final for chunk in generate(model, module, requests, sampling, micro_batch=2)])

    if name in REFUSED:
        refuses("a pass of the network cannot be captured: operation not permitted", sample, replace(sampling, graphs=True))
    else:
        assert torch.equal(sample(sampling), sample(replace(sampling, graphs=True)))
        assert graphs.count == 1


def test_each_form_of_inputs_has_a_graph(graphs: Graphs) -> None:
    """Other tensors are read at their address."""
    graph, x, weight = GraphedPass(), torch.randn(3, 2), torch.randn(2)
    for rows in (x, x + 1, x[:2], x.double(), x):
        assert torch.equal(graph(lambda x, level: x * weight + level, rows, rows[0, 0]), rows * weight + rows[0, 0])
    weight += 1
    found = [graph(lambda x, level: x * weight + level, rows, x[0, 0]) for rows in (x, x + 1)]
    assert torch.equal(torch.stack(found), torch.stack([x, x + 1]) * weight + x[0, 0])
    assert graphs.count == 3


def test_a_plan_counts_what_a_graph_holds(graphs: Graphs, monkeypatch: Patch) -> None:
    """Its inputs with both halves of guidance, and the velocity; the pool is the activations of a pass."""
    made, model = GraphedPass(), Handwriting()
    monkeypatch.setattr(generating, "GraphedPass", lambda: made)
    shape, requests = model.latent_shape(), Requests(as_prompts(["0427", "1234", "9999"]), range(3), key(3))
    sampling = Sampling(shape, model.schedule(STEPS, shape), Guidance(3.0), graphs=True)
    assert len([*generate(model, model.build().eval(), requests, sampling, micro_batch=3)]) == graphs.count == 1
    ((held, _, velocity),) = made._graphs.values()
    config = PlanConfig(guidance=True, micro_batch=3, engine=EngineConfig(compile="reduce-overhead"))
    planned = plan("handwriting", config).rollout.graph
    assert planned == sum(tensor.untyped_storage().nbytes() for tensor in (*held, velocity))
