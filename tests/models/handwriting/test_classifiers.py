"""The shipped classifiers of digits against scikit-learn's own, fitted again."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from fluvial.models.handwriting import load_digits, load_heldout_recogniser, load_reward_recogniser
from fluvial.models.handwriting.recognisers import FITTED, fit

pytestmark = pytest.mark.long  # fits; test_handwriting.py has the short cases
NAMES = "machine", "neighbours", "trees"


@cache
def theirs(name: str) -> Any:
    from sklearn.ensemble import ExtraTreesClassifier
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.svm import SVC

    made = {
        "machine": SVC(C=10.0, gamma=0.08),
        "neighbours": KNeighborsClassifier(3, weights="distance"),
        "trees": ExtraTreesClassifier(400, random_state=0),
    }[name]
    half = load_digits("evaluation" if name == "trees" else "training")
    return made.fit(pixels(half.pixels), half.labels.numpy())


def ours(name: str) -> Any:
    return (*load_reward_recogniser().classifiers, *load_heldout_recogniser().classifiers)[NAMES.index(name)]


def pixels(images: torch.Tensor) -> np.ndarray:
    return ((images + 1) / 2).reshape(-1, 64).numpy()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(seed=st.integers(0, 2**31), noise=st.sampled_from([0.0, 0.01, 0.1, 0.25, 0.5, 2.0]))
def test_classes_are_those_of_scikit_learn(name: str, seed: int, noise: float) -> None:
    """Digits of both halves with noise from none to nothing else, and blank images; of several rows and of one."""
    generator = torch.Generator().manual_seed(seed)
    known = torch.cat([load_digits(half).pixels for half in ("training", "evaluation")])
    chosen = known[torch.randint(len(known), (64,), generator=generator)]
    rows = pixels((chosen + noise * torch.randn(chosen.shape, generator=generator)).clamp(-1, 1))
    rows = np.concatenate([rows, np.zeros_like(rows[:1]), np.ones_like(rows[:1])])
    expected = theirs(name).predict(rows)
    found = ours(name).predict(rows)
    assert found.dtype == np.int64
    assert found.tolist() == expected.tolist()
    assert ours(name).predict(rows[:1]).tolist() == expected[:1].tolist()


def test_a_pixel_at_the_threshold_goes_left_and_the_next_float_right() -> None:
    fitted, trees = theirs("trees"), ours("trees")
    exact = np.concatenate([each.tree_.threshold for each in fitted.estimators_])
    inner = trees.feature.numpy() >= 0
    kept = trees.threshold.numpy()[inner]
    assert (kept <= exact[inner]).all()
    assert (np.nextafter(kept, np.float32(np.inf)) > exact[inner]).all()
    first = int(trees.roots[7])
    for value in (kept[inner[:first].sum()], np.nextafter(kept[inner[:first].sum()], np.float32(np.inf))):
        row = np.full((1, 64), 0.5, np.float32)
        row[0, int(trees.feature[first])] = value
        assert trees.predict(row).tolist() == fitted.predict(row).tolist()


def test_the_shipped_files_are_those_that_a_fit_writes(tmp_path: Path) -> None:
    """Trees to the bit; the machine's coefficients to the tolerance of its solver."""
    fit(tmp_path)
    for name in ("machine.safetensors", "trees.safetensors"):
        made, shipped = load_file(tmp_path / name), load_file(FITTED / name)
        assert made.keys() == shipped.keys()
        for key, tensor in made.items():
            torch.testing.assert_close(shipped[key], tensor, rtol=0, atol=0 if name.startswith("trees") else 1e-3)


def test_digits_are_those_of_scikit_learn() -> None:
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    both = [(pixels(load_digits(each).pixels) * 16, load_digits(each).labels.numpy()) for each in ("training", "evaluation")]
    found = sorted((int(label), *row) for rows, marks in both for row, label in zip(rows.tolist(), marks, strict=True))
    assert found == sorted((int(label), *row) for row, label in zip(images.tolist(), labels, strict=True))
