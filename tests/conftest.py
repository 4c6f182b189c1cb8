"""Configure every session: hypothesis profiles, and run-time shape checks over fluvial.core."""

import atexit
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import ledger
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from fluvial.engines.engine.world import World

# The suite tests the CPU, whether or not there is a GPU (`make gpu-first` tests that). Set before torch looks for one.
if "FLUVIAL_TEST_DEVICE" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Lists are as wide as their rows, whatever terminal the tests are started in.
os.environ.pop("COLUMNS", None)

# One thread per process, as in the processes that tests start. Two workers of two threads each would wait for each other on
# two cores. Set before torch reads it.
os.environ["OMP_NUM_THREADS"] = "1"
assert "torch" not in sys.modules, "the number of threads must be set before torch is imported"

# Where tests store what they share (helpers/stored.py). The first process makes it, and its workers inherit the name.
if "FLUVIAL_TEST_STORE" not in os.environ:
    os.environ["FLUVIAL_TEST_STORE"] = tempfile.mkdtemp(prefix="fluvial-tests-")
    atexit.register(shutil.rmtree, os.environ["FLUVIAL_TEST_STORE"])

# No deadline and no slowness check: torch's first call of an operation is slow, and the machine may be shared.
settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
# pytest --hypothesis-profile=thorough
settings.register_profile("thorough", settings.get_profile("default"), max_examples=1000)
settings.load_profile("ci" if os.environ.get("CI") else "default")

BEFORE = pytest.StashKey[tuple[float, int]]()

# The hook breaks torch.compile(fullgraph=True) and answers a wrong type before the library's own message does, so some files
# run in a session without it (see sessions.py).
if os.environ.get("FLUVIAL_NO_TYPECHECK") != "1":
    assert "fluvial.core" not in sys.modules, "the hook must be installed before fluvial.core is imported"
    # PEP 484's tower: an int is a valid float, as for mypy.
    install_import_hook(
        ["fluvial.core", "fluvial.kernels.dispatch"], "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
    )


# Seconds since the epoch after which no long test is begun, so that CI ends in time on a slow machine.
LONG_UNTIL = float(os.environ.get("FLUVIAL_LONG_UNTIL", "inf"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a long test for which no time is left; those that sessions.py wants in a session of their own always run."""
    tests = Path(__file__).parent
    always = tests / "core", tests / "kernels", tests / "bench" / "test_kernels.py"
    is_long = item.get_closest_marker("long") is not None and not any(item.path.is_relative_to(path) for path in always)
    if is_long and time.time() > LONG_UNTIL:
        pytest.skip("long, and no time is left (FLUVIAL_LONG_UNTIL)")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note what has been spent before a test, and forget the module that it may have written and imported."""
    item.stash[BEFORE] = ledger.spent()
    try:
        return (yield)
    finally:
        sys.modules.pop("mine", None)  # many tests write one, each into a folder of its own


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Report what a test has spent, with its set-up, for the ledger."""
    if call.when == "teardown":
        before, now = item.stash[BEFORE], ledger.spent()
        long = float(item.get_closest_marker("long") is not None)
        item.user_properties += zip(ledger.PROPERTIES, (now[0] - before[0], now[1] - before[1], long), strict=True)
    return (yield)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give both workers the modules with slow tests first: what one takes over from the other at the end is then short."""
    if not hasattr(config, "workerinput"):
        return
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    slow = [module for module in modules.values() if any(item.get_closest_marker("slow") for item in module)]
    halves: tuple[list[pytest.Item], list[pytest.Item]] = ([], [])  # pytest-xdist gives each of two workers one half
    for number, module in enumerate(slow):
        halves[number % 2].extend(module)
    for module in modules.values():
        if module not in slow:
            min(halves, key=len).extend(module)
    items[:] = [*halves[0], *halves[1]]


@pytest.fixture(scope="module")
def one() -> Iterator["World"]:
    """Return the world of this process."""
    from fluvial.engines.engine.world import init_world

    with init_world() as world:
        yield world
