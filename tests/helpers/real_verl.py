"""The real verl of one version, without its dependencies: its engine modules import with empty parent packages.

`load` installs the wheel in a folder of its own, `build/verl-VERSION`, once per clone. verl's own `__init__` wants Ray and
more, so the packages above the modules that are tested are stand-ins, which only know where their modules lie.
"""

import importlib
import importlib.machinery
import os
import shutil
import subprocess
import sys
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest

VERSION = "0.9.1"
FOLDER = Path(__file__).parents[2] / "build" / f"verl-{VERSION}"
# Modules that configs name types of, and that want packages which are not here: the name of the type in each.
NAMED = {"verl.utils.profiler": "ProfilerConfig", "verl.workers.config.model": "HFModelConfig"}
PARENTS = ("verl", "verl.trainer", "verl.utils", "verl.workers", "verl.workers.config", "verl.workers.engine")


@cache
def install() -> str | None:
    """Install the wheel if it is not there yet; return why that fails, else None."""
    if FOLDER.exists():
        return None
    draft = FOLDER.with_name(f"{FOLDER.name}-{os.getpid()}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-compile"]
    done = subprocess.run(
        [*pip, "--target", str(draft), f"verl=={VERSION}"], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode != 0:
        shutil.rmtree(draft, ignore_errors=True)
        return f"verl {VERSION} cannot be installed: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
    for other in draft.iterdir():  # the wheel also holds packages named tests and scripts
        if not other.name.startswith("verl"):
            shutil.rmtree(other)
    try:
        draft.rename(FOLDER)
    except OSError:  # another process was faster
        shutil.rmtree(draft)
    return None


@cache
def load() -> Any:
    """Return verl's module `verl.workers.engine.base`; skip the test if the package index has no such wheel."""
    pytest.importorskip("tensordict")
    if (problem := install()) is not None:
        pytest.skip(problem)
    sys.path.append(str(FOLDER))  # for its metadata
    for name in PARENTS:
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(FOLDER / name.replace(".", "/"))]
        package = types.ModuleType(name)
        package.__spec__, package.__path__ = spec, spec.submodule_search_locations
        sys.modules[name] = package
    for name, kind in NAMED.items():
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], kind, Any)
    sys.modules["verl.trainer.config"].__dict__["CheckpointConfig"] = part("verl.trainer.config.config").CheckpointConfig
    return part("verl.workers.engine.base")


def part(name: str) -> Any:
    """Return a module of verl, after `load`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of packages that verl imports
        return importlib.import_module(name)
