"""`fluvial rewards`: the table, one reward and its options, and names that are not there."""

import inspect

import pytest

from fluvial.engines.cli import main as cli
from fluvial.models.rewards.table import ELSEWHERE, REWARD_MODELS


def test_every_reward_is_listed_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    """Formula, weights and commit, memory, licence and source; and why others are not there."""
    assert cli.run(["rewards"]) == 0
    shown = capsys.readouterr().out
    for model in REWARD_MODELS.values():
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{model.name} ")]
        assert model.formula in line
        assert model.source in shown
        if model.weights:
            commit = f" @ {model.revision[:8]}" if model.revision else ""
            assert f"{model.weights}{commit}, licence: {model.licence}" in shown
            assert f"{model.gibibytes:.1f} GiB" in line
    for name, reason in ELSEWHERE.items():
        assert f"{name} " in shown
        assert reason in shown
    assert max(map(len, shown.splitlines())) <= 160


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_a_reward_is_described_with_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["rewards", name]) == 0
    shown = capsys.readouterr().out
    model = REWARD_MODELS[name]
    assert shown.startswith(f"{name}: {model.formula}")
    assert (inspect.getdoc(model.make) or "?").splitlines()[0] in shown
    for option in inspect.signature(model.make).parameters.values():
        assert option.default is not option.empty
        assert f"{option.name}={option.default}" in shown


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pikscore"], "unknown reward 'pikscore', expected one of pickscore, hpsv2"),
        (["pikscore"], "did you mean 'pickscore'?"),
        (["geneval"], "geneval is not a reward model of fluvial: its detector needs mmdet"),
        (["pickscore", "x"], "rewards takes one name at most, got 'x' after 'pickscore'"),
        (["vote", "--rounds", "0"], "--rounds is 0, expected"),
        (["vote", "--port", "70000"], "--port is 70000, expected"),
        (
            ["vote", "--host", "0.0.0.0", "--port", "0"],
            "--host is 0.0.0.0, which other machines reach, and there is no API key",
        ),
        (["vote", "--port", "0", "--out", "/dev/null"], "votes cannot be written to /dev/null"),
    ],
)
def test_wrong_names_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["rewards", *args]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1


def test_what_has_to_be_installed_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fluvial.models.rewards.table.find_spec", lambda name: None)
    assert cli.run(["rewards", "siglip"]) == 0
    assert "needs pip install 'fluvial[rewards]' (sentencepiece)" in capsys.readouterr().out


def test_memory_is_that_of_the_networks() -> None:
    """Parameters of CLIP's published shapes: blocks of 12 w^2 + 13 w, embeddings, layer norms and projections."""

    def blocks(width: int, layers: int) -> int:
        return layers * (12 * width**2 + 13 * width)

    def clip(vision: int, layers: int, text: int, text_layers: int, out: int) -> int:
        eyes = blocks(vision, layers) + vision * (3 * 14**2 + 1 + 257 + 4 + out)
        return eyes + blocks(text, text_layers) + text * (49408 + 77 + 2 + out) + 1

    assert REWARD_MODELS["clipscore"].parameters == pytest.approx(clip(1024, 24, 768, 12, 768) / 1e6, abs=0.06)
    assert REWARD_MODELS["hpsv2"].parameters == pytest.approx(clip(1280, 32, 1024, 24, 1024) / 1e6, abs=0.06)
    assert REWARD_MODELS["clipscore"].gibibytes == pytest.approx(1.59, abs=0.01)
