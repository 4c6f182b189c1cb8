"""The package as it is installed: what is importable under which name, and what must not be there."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from helpers import torch_names
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "kernels", "engines", "models", "bench")


def python(code: str, *flags: str, cwd: Path = ROOT) -> str:
    """Run Python and return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}  # that is -P
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_importable_without_its_namespace() -> None:
    """No bare `core` or `kernels`, wherever Python is started with -P."""
    found = f"[n for n in {FOLDERS} if u.find_spec(n)], u.find_spec('fluvial.core') is not None"
    code = f"import importlib.util as u; print({found})"
    assert python(code, "-P") == "[] True"


@pytest.mark.slow
def test_the_wheel_holds_the_namespace_alone(tmp_path: Path) -> None:
    """Every module is in it under fluvial/, and the base weights and type markers are; tests are not."""
    shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)  # modules of an earlier tree
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True, cwd=tmp_path, timeout=300)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"fluvial"}
    modules = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    modules |= {f"testing/{path.name}" for path in (ROOT / "tests" / "properties").glob("*.py")}
    assert {name.removeprefix("fluvial/") for name in names if name.endswith(".py")} == modules
    assert {"fluvial/core/py.typed", "fluvial/models/handwriting/base/diffusion_pytorch_model.safetensors"} <= set(names)
    assert "fluvial/engines/extensions/judges/templates/yes_no.txt" in names
    assert "fluvial/models/rewards/prompts/hpsv3.txt" in names
    assert "fluvial/engines/extensions/votes/page.html" in names
    assert not any("test" in name.removeprefix("fluvial/testing/") for name in names)


def test_a_python_in_the_repository_does_not_take_our_kernels_for_hugging_faces() -> None:
    """diffusers and transformers look for the package `kernels`; our folder must not be found."""
    sees = "import importlib.util as u; print(u.find_spec('kernels') is None)"
    asks = (
        "from diffusers.utils import is_kernels_available as d\nfrom transformers.utils import is_kernels_available as t\n"
        "print(d(), t())"
    )
    assert python(sees, "-P") == "True"
    # Without -P our folder stands on the path; the command line takes it off before anything is imported.
    assert python(sees) == "False"
    code = f"{sees}\n{asks}"
    run = f"import fluvial.engines.cli.main as cli\ncli.exit_with(lambda args: exec({code!r}) or 0, [])"
    assert python(run).split() == ["True", "False", "False"]


def test_tests_do_not_take_our_kernels_for_hugging_faces() -> None:
    """The import mode of the suite keeps the repository's root off the path."""
    assert str(ROOT) not in sys.path
    assert importlib.util.find_spec("kernels") is None


def test_torchvision_is_absent_and_not_needed() -> None:
    """Beside a CPU build of torch it breaks diffusers and transformers."""
    assert importlib.util.find_spec("torchvision") is None
    requirements = importlib.metadata.requires("fluvial") or []
    assert not any(requirement.startswith("torchvision") for requirement in requirements)


def test_the_public_surface_is_imported_on_first_use() -> None:
    """All names are there and listed, and the package itself imports no torch."""
    code = (
        "import sys, fluvial.engines as engines\n"
        "assert 'torch' not in sys.modules and set(engines.__all__) <= set(dir(engines))\n"
        "from fluvial.engines import *\n"
        "import fluvial.engines.run.config as config\n"
        "assert config.TrainConfig is TrainConfig is engines.TrainConfig\n"
        "from fluvial.engines.run import train\n"
        "print(all(callable(getattr(engines, name)) for name in set(engines.__all__) - {'recipes'}) and callable(train))\n"
        "print(callable(recipes.grpo), hasattr(engines, 'nothing'))"
    )
    assert python(code, "-P").split() == ["True", "True", "False"]


def test_importing_the_core_or_a_built_in_model_imports_no_library_that_it_does_not_call() -> None:
    """Research code that takes one formula does not pay for diffusers, PEFT, scikit-learn or FSDP2."""
    heavy = {"diffusers", "peft", "transformers", "sklearn", "torch.distributed.fsdp"}
    code = f"import sys, fluvial.core, fluvial.models.handwriting, fluvial.models.lora; print({heavy!r} & set(sys.modules))"
    assert python(code, "-P") == "set()"


def test_pinned_versions_satisfy_the_ranges() -> None:
    """Every dependency has a pin in the constraints file, and it is what is installed (an optional extra need not be)."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for text in importlib.metadata.requires("fluvial") or []:
        requirement = Requirement(text)
        name = requirement.name.lower()
        assert requirement.specifier.contains(pins[name]), name
        marker = requirement.marker
        optional = marker is not None and "extra ==" in str(marker) and not marker.evaluate({"extra": "test"})
        if not optional or importlib.util.find_spec(name.replace("-", "_")):
            assert importlib.metadata.version(name).split("+")[0] == pins[name], name


def test_the_container_has_the_pinned_torch_before_fluvial() -> None:
    """A layer of its own, so that a change of fluvial downloads no torch; every copied file and named extra is there."""
    text = (ROOT / "engines" / "run" / "process" / "Dockerfile").read_text(encoding="utf-8")
    steps = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert " ".join(line.split()[0] for line in steps) == "FROM ARG RUN COPY RUN COPY RUN WORKDIR ENTRYPOINT"
    constraints, torch, tree, package = steps[3:7]
    assert "grep '^torch==' /fluvial/constraints.txt | xargs pip install" in torch
    assert any(line.startswith("torch==") for line in (ROOT / constraints.split()[1]).read_text().splitlines())
    assert tree == "COPY . /fluvial"
    assert "-c /fluvial/constraints.txt '/fluvial[" in package
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(package.split("[")[1].split("]")[0].split(",")) <= set(known)
    assert "torchvision" not in text


def test_a_visit_brings_what_the_machine_lacks() -> None:
    """Every dependency that torch, transformers, peft, accelerate and the tests do not bring new enough."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    there = [
        "torch",
        "triton",
        "transformers",
        "peft",
        "accelerate",
        "safetensors",
        "fsspec",
        "einops",
        "jaxtyping",
        "matplotlib",
        "pillow",
        "rich",
    ]
    there += [
        "scikit-learn",
        "tensorboard",
        "jinja2",
        "pyyaml",
    ]  # jinja2 by torch, which may bring a filelock without leases
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    packed = {canonicalize_name(name) for name in makefile.partition("GPU_LACKS := ")[2].splitlines()[0].split()}
    assert needed - {*there} - packed == set()


def test_the_oldest_torch_has_all_that_is_used_of_it() -> None:
    """Names and keywords, beside those that were recorded with it; `helpers/torch_names.py` says how."""
    recorded = json.loads(torch_names.RECORD.read_text(encoding="utf-8"))
    used = torch_names.find_used()
    assert len(used) > 250
    assert [name for name in used if name not in recorded] == []
    unknown = {name: words - set(recorded[name]) for name, words in used.items() if recorded[name] is not None}
    assert {name: words for name, words in unknown.items() if words} == {}
