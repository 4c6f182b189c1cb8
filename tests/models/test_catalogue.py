"""The catalogue of published models: it imports without torch, and every entry has an adapter."""

import subprocess
import sys

import fluvial.models as models
from fluvial.models.catalogue import KNOWN
from fluvial.models.pipelines.open import built_in


def test_the_catalogue_imports_without_torch() -> None:
    code = "import sys, fluvial.models.catalogue as c; print(len(c.KNOWN), {'torch', 'diffusers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split(maxsplit=1) == [str(len(KNOWN)), "set()\n"]


def test_every_published_model_has_an_adapter() -> None:
    adapters = built_in()
    own = {name for name in adapters if not name.endswith(("Img2ImgPipeline", "InpaintPipeline"))}
    assert {known.pipeline for known in KNOWN} == own
    for known in KNOWN:
        assert adapters[known.pipeline].prediction == known.prediction
        assert 0.5 < known.gibibytes / known.billions / 2 < 1


def test_the_public_names_of_models_exist() -> None:
    assert {name for name in models.__all__ if getattr(models, name) is None} == set()
