"""A fixture of the tests of first ratios."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2, pytest.param(4, marks=pytest.mark.long)])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads, restored afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
