"""The entry point of the installed wheels, as `import verl` finds it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import real_verl

ROOT = Path(__file__).parents[4]
TESTS = ROOT / "tests" / "shared"
# verl's whole `__init__` runs. Packages that it imports besides ours, and that are not installed here, are stand-ins.
IMPORT = """
import json, sys
from helpers import wheels

sys.meta_path.append(wheels.StandIns("codetiming", "datasets", "dill", "pandas", "ray", "transfer_queue", "wandb"))
import verl
plugin = sys.modules.get("fluvial.engines.extensions.verl.plugin")
from verl.workers.engine.base import EngineRegistry
found = {kind: [*backends] for kind, backends in EngineRegistry._engines.items()}
print(json.dumps([verl.__file__, plugin and plugin.__file__, found]))
"""


@pytest.mark.long
def test_import_verl_finds_the_entry_point_of_both_wheels(tmp_path: Path) -> None:
    """verl logs at the level debug alone what fails in a plug-in, so nothing else would say that it is missing."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, cwd=tmp_path, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (site, real_verl.FOLDER, TESTS)))}
    command = [sys.executable, "-P", "-W", "ignore", "-c", IMPORT]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    verl, plugin, found = json.loads(done.stdout.splitlines()[-1])
    assert Path(verl).is_relative_to(real_verl.FOLDER)
    assert Path(plugin).is_relative_to(site)
    for kind in ("diffusion_model", "diffusion_nft_model", "diffusion_dpo_model"):
        assert "fluvial" in found[kind]
