"""The site of the documentation: its navigation names every page of the tree, and it builds without a warning."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.pages import FOLDERS, READMES, ROOT

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))


def test_the_navigation_names_each_page_once() -> None:
    """All READMEs and no file that is missing; the packages of the reference have modules."""
    named = [*HOOKS["leaves"](CONFIG["nav"])]
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert sorted(named) == sorted({*READMES, "models/measured.md", "engines/extensions/verl/fields.md", "CHANGELOG.md"})
    assert [package for package in HOOKS["PACKAGES"] if not HOOKS["modules"](package)] == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="needs pip install 'fluvial[docs]'")
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors between pages lead somewhere, and each module has its reference."""
    for name in ("docs", "mkdocs.yml", "Makefile", "README.md", "CHANGELOG.md", *FOLDERS):
        (tmp_path / name).symlink_to(ROOT / name)
    subprocess.run(["make", "--silent", "build/types/fluvial"], cwd=tmp_path, check=True)  # as `make docs` does
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert built.returncode == 0, built.stderr
    for path in ("index.html", "engines/run/index.html", "api/core/gaussian/index.html"):
        assert (tmp_path / "site" / path).is_file()
    assert "fluvial.core.gaussian.log_prob" in (tmp_path / "site/api/core/gaussian/index.html").read_text(encoding="utf-8")
