"""The catalogue of published models: it imports without torch, and every entry has an adapter."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fluvial.models as models
from fluvial.models import handwriting, words
from fluvial.models.catalogue import KNOWN
from fluvial.models.pipelines.open import list_adapters


def test_the_catalogue_imports_without_torch() -> None:
    code = "import sys, fluvial.models.catalogue as c; print(len(c.KNOWN), {'torch', 'diffusers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == [str(len(KNOWN)), "set()\n"]


def test_every_published_model_has_an_adapter() -> None:
    adapters = list_adapters()
    own = {name for name in adapters if not name.endswith(("Img2ImgPipeline", "InpaintPipeline"))}
    assert {known.pipeline for known in KNOWN} == own
    for known in KNOWN:
        assert adapters[known.pipeline].prediction == known.prediction
        assert 0.5 < known.gibibytes / known.billions / 2 < 1


@pytest.mark.parametrize(
    ("base", "job", "half", "ranges"),
    [
        (handwriting.BASE, "handwriting", False, {"exact reward": (0.3, 0.55), "score heldout": (0.75, 0.9)}),
        (handwriting.BASE_UNET, "handwriting-unet", False, {"exact reward": (0.3, 0.6), "score heldout": (0.75, 0.9)}),
        (words.BASE, "words", True, {"exact heldout": (0.5, 0.6)}),
        (words.EDIT_BASE, "edit-words", True, {"exact heldout": (0.6, 0.75), "score unchanged": (0.8, 0.95)}),
    ],
)
def test_shipped_models_are_small_and_have_something_left_to_learn(
    base: Path, job: str, half: bool, ranges: dict[str, tuple[float, float]]
) -> None:
    """At most 4 MB, of float16 or float32; the record says how many held-out prompts are right."""
    assert sum(path.stat().st_size for path in base.iterdir()) <= 4e6
    stored = load_file(base / "diffusion_pytorch_model.safetensors").values()
    assert {tensor.dtype for tensor in stored} == ({torch.float16} if half else {torch.float32})
    record = json.loads((base / "made-by.json").read_text())
    assert record["command"] == f"python -P -m fluvial.bench pretrain-{job}"
    assert record["eval_samples"] >= 350
    for name, (low, high) in ranges.items():
        kind, evaluator = name.split()
        assert low <= record[f"heldout_{kind}"][evaluator] <= high


def test_the_public_names_of_models_exist() -> None:
    assert {name for name in models.__all__ if getattr(models, name) is None} == set()
