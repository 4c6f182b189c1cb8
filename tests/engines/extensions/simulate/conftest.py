"""The simulated device is registered before the first backward pass of the process."""

import pytest

from fluvial.engines.extensions.simulate import device


@pytest.fixture(autouse=True, scope="session")
def registered() -> None:
    device.register()
