"""Items without advantage are not computed, and the others are shared out, however they fell on the ranks."""

from typing import Any

import pytest
import torch
from helpers import launch


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Return the result of the updates by the number of ranks."""
    return {
        ranks: launch.on_ranks(ranks, "workers.uneven:updates", tmp_path_factory.mktemp("uneven"))[0] for ranks in (1, 2)
    }


def test_forwards_are_counted(found: dict[int, dict[str, Any]]) -> None:
    """16 samples of 2 steps, of which 8 have an advantage: 16 pairs, 4 micro-batches, 2 on each of 2 ranks."""
    assert found[1]["0.0"]["pairs"] == found[2]["0.0"]["pairs"] == 16
    assert found[1]["0.0"]["forwards"] == [4]
    assert found[2]["0.0"]["forwards"] == [2, 2]
    # A KL to the reference pulls on every pair.
    assert found[1]["0.1"]["pairs"] == found[2]["0.1"]["pairs"] == 32
    assert found[1]["0.1"]["forwards"] == [8]
    assert found[2]["0.1"]["forwards"] == [4, 4]


@pytest.mark.parametrize("kl_coef", ["0.0", "0.1"])
def test_the_gradient_is_that_of_one_process(found: dict[int, dict[str, Any]], kl_coef: str) -> None:
    """To the order of float32 sums; and a pair that was moved is still on policy, to the bit."""
    one, two = (torch.tensor(found[ranks][kl_coef]["gradient"]) for ranks in (1, 2))
    assert float(one.norm()) > 0
    assert float((one - two).norm() / one.norm()) < 1e-5
    assert found[1][kl_coef]["ratio"] == found[2][kl_coef]["ratio"] == 0.0
