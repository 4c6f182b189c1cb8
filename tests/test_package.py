"""The package as it is installed: what is importable under which name, and what must not be there."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    """Every file is under fluvial/, the base weights and type markers with them; tests are not."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        cwd=tmp_path,
        timeout=300,
    )
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"fluvial"}
    for name in (
        *("fluvial/core/py.typed", "fluvial/kernels/dispatch.py", "fluvial/models/handwriting/recognisers.py"),
        "fluvial/models/handwriting/base/diffusion_pytorch_model.safetensors",
    ):
        assert name in names
    assert not any("test" in name for name in names)


def test_a_python_in_the_repository_is_not_fooled() -> None:
    """Hugging Face's package `kernels` is looked for by diffusers and transformers; our folder must not answer."""
    sees = "import importlib.util as u; print(u.find_spec('kernels') is None)"
    assert python(sees, "-P") == "True"
    # Without -P our folder stands on the path; the command line takes it off before anything is imported.
    run = f"import fluvial.engines.cli.main as cli\ncli.exit_with(lambda args: exec({sees!r}) or 0, [])"
    assert python(sees) == "False"
    assert python(run) == "True"
    answers = (
        "from diffusers.utils import is_kernels_available as d\nfrom transformers.utils import is_kernels_available as t\n"
        "print(d(), t())"
    )
    assert (
        python(f"import fluvial.engines.cli.main as cli\ncli.exit_with(lambda args: exec({answers!r}) or 0, [])")
        == "False False"
    )


def test_tests_are_not_fooled() -> None:
    """The import mode of the suite keeps the repository's root off the path."""
    assert str(ROOT) not in sys.path
    assert importlib.util.find_spec("kernels") is None


def test_torchvision_is_absent_and_not_needed() -> None:
    """Beside a CPU build of torch it breaks diffusers and transformers."""
    assert importlib.util.find_spec("torchvision") is None
    requirements = importlib.metadata.requires("fluvial") or []
    assert not any(requirement.startswith("torchvision") for requirement in requirements)


def test_the_command_is_quick_to_answer() -> None:
    """Help and version import neither torch nor diffusers."""
    code = (
        "import sys, fluvial.engines.cli.main as cli\ncode = cli.run(['--help'])\n"
        "print(code, {'torch', 'diffusers', 'peft'} & set(sys.modules))"
    )
    assert python(code, "-P").endswith("0 set()")


def test_importing_the_core_imports_no_model_library() -> None:
    """Research code that takes one formula does not pay for diffusers or PEFT."""
    assert (
        python("import sys, fluvial.core; print({'diffusers', 'peft', 'transformers'} & set(sys.modules))", "-P") == "set()"
    )


def test_the_readme_runs() -> None:
    """Its Python example, as a doctest."""
    import doctest

    results = doctest.testfile(str(ROOT / "README.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert results.attempted >= 8
    assert results.failed == 0


def test_pinned_versions_satisfy_the_ranges() -> None:
    """Every dependency has a pin in the constraints file, and it is what is installed."""
    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for text in importlib.metadata.requires("fluvial") or []:
        requirement = Requirement(text)
        name = requirement.name.lower()
        assert requirement.specifier.contains(pins[name]), name
        assert importlib.metadata.version(name).split("+")[0] == pins[name], name
