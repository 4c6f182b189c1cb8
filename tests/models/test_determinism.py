"""The same numbers have the same bits wherever they lie in memory, on any processor and number of threads."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import launch
from helpers.addresses import misplaced, placed
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from fluvial.engines.engine.engine import Engine, OptimizerConfig
from fluvial.engines.engine.items import micro_batches
from fluvial.engines.engine.world import World
from fluvial.models.host_values import fresh_copy

pytestmark = pytest.mark.bits

TOKENS, WIDTH, ITEMS = 33, 41, 6  # an item of 1,353 floats: the next one begins at an odd address
CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 4])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def processors(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"this one": {}, "SSE4.2": {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}}
    compiler = shutil.which("cc")
    if compiler is not None and sys.platform == "linux":
        library = folder / "not_intel.so"
        source = Path(launch.__file__).with_name("not_intel.c")
        subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        found["not Intel"] = {"LD_PRELOAD": str(library)}
    return found


@pytest.mark.long
def test_only_odd_addresses_change_the_bits_of_products(tmp_path: Path) -> None:
    """The fault that `fresh_copy` prevents shows on some processor that MKL can be, and never at multiples of 64 bytes."""
    script = Path(launch.__file__).parents[1] / "workers" / "products.py"
    odd = {}
    for name, settings in processors(tmp_path).items():
        environment = {**launch.environment(helpers=True), **settings}
        done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        counts = json.loads(done.stdout)
        assert {threads: count["aligned"] for threads, count in counts.items()} == {"1": 0, "2": 0, "4": 0}, name
        odd[name] = [count["odd"] for count in counts.values()]
    if torch.backends.mkl.is_available():
        assert any(min(counts) > 0 for counts in odd.values()), odd
        # `make test-lesser-cpu` must run what it says.
        assert "FLUVIAL_LESSER_CPU" not in os.environ or min(odd["this one"]) > 0, odd


@given(
    rows=st.integers(1, 7),
    micro_batch=st.integers(1, 4),
    more=st.integers(0, 5),
    offset=st.integers(0, 17),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    turned=st.booleans(),
)
def test_micro_batches_are_contiguous_aligned_copies(
    rows: int, micro_batch: int, more: int, offset: int, dtype: torch.dtype, turned: bool
) -> None:
    values = torch.arange(rows * 15).view(rows, 3, 5).to(dtype)
    items = {"x": placed(values, offset), "level": placed(values[:, 0, 0], offset)}
    if turned:
        items["x"] = placed(values.mT.contiguous(), offset).mT
    found = list(micro_batches(items, micro_batch=micro_batch, pad_to=rows + more, device=CPU))
    assert misplaced(*(tensor for batch in found for tensor in batch.values())) == 0
    repeated = torch.arange(len(found) * micro_batch) % rows
    for name, tensor in items.items():
        assert torch.equal(torch.cat([batch[name] for batch in found]), tensor[repeated])
    found[0]["x"].zero_()
    assert torch.equal(items["x"], values)


def test_a_fresh_copy_is_no_view_even_of_aligned_tensors() -> None:
    """A copy is made in any case, so that writing to it changes nothing else; an expanded tensor becomes contiguous."""
    tensor = torch.ones(2, 3)
    copies = fresh_copy([tensor, tensor.expand(4, 2, 3)], CPU)
    assert copies[0].data_ptr() != tensor.data_ptr()
    assert misplaced(*copies) == 0


class AddressNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        attended = F.scaled_dot_product_attention(x, rows, rows)
        return attended + self.blocks[0](x) + 1e-3 * misplaced(x, rows)


class Info(NamedTuple):
    moved: Tensor


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_an_update_computes_the_bits_of_the_rollout_wherever_its_items_lie(one: World, threads: int, offset: int) -> None:
    """So that its first ratio is exactly 1: a rollout's inputs are new tensors, an update's are rows of larger ones."""
    torch.manual_seed(0)
    net = AddressNet()
    trained = Engine(net, list(net.blocks), OptimizerConfig(lr=0.0), one, updates=1)
    x, rows = torch.randn(ITEMS, 1, TOKENS, WIDTH), torch.randn(ITEMS, 1, 29, WIDTH)
    with trained.inference() as module:
        v = torch.cat([module(x[at : at + 2].clone(), rows[at : at + 2].clone()) for at in range(0, ITEMS, 2)])

    def loss(items: dict[str, Tensor]) -> tuple[Tensor, Info]:
        moved = (trained.module(items["x"], items["rows"]) - items["v"]).abs().flatten(1).amax(1)
        return moved, Info(moved.detach())

    items = {name: placed(tensor, offset) for name, tensor in (("x", x), ("rows", rows), ("v", v))}
    info = trained.update(items, loss, micro_batch=2)
    assert info.max_abs["moved"] == 0.0
