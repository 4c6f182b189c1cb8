"""Every pipeline of diffusers that there is an adapter for, trained from its folder as a person would."""

from pathlib import Path

import pipelines
import pytest
import small
from safetensors.torch import load_file

from fluvial.engines import cli

PROMPTS = "a red fox\ntwo cats\nan owl\n9 owls in 1 barn\n"
ROWS = {name: row for name, row in pipelines.ROWS.items() if not row.variant}
REWARD = "def bright(pictures, prompts):\n    return pictures.flatten(1).mean(1)\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny pipelines with random weights, prompts, and a reward of one's own."""
    folder = tmp_path_factory.mktemp("pipelines")
    for name, row in ROWS.items():
        pipelines.save(row, folder / name)
    (folder / "prompts.txt").write_text(PROMPTS)
    (folder / "own_reward.py").write_text(REWARD)
    return folder


def flags(folder: Path, name: str, recipe: str) -> list[str]:
    """Two updates of the recipe, as small as it gets."""
    height, width, *frames = ROWS[name].sizes[0]
    size = ["--pipeline.height", str(height), "--pipeline.width", str(width)]
    size += ["--pipeline.frames", str(frames[0])] if frames else []
    rollout = "--rollout.prompts 2 --rollout.group 2 --rollout.steps 3 --micro-batch 2 --updates 2 --minibatches 1"
    rest = "--final-samples 2 --eval-every 0 --checkpoint-every 2"
    own = {
        "nft": ["--noising.each", "2"],
        "raft": ["--noising.each", "2"],
        "ddpo": ["--rollout.window", "1", "--rollout.window-high", "2"],
    }.get(recipe, [])
    return ["train", recipe, "--model", str(folder / name), "--prompts", str(folder / "prompts.txt"), *size,
            *rollout.split(), *rest.split(), "--pipeline.text-cache", str(folder / "texts"), *own]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["on steps", "on samples"])
@pytest.mark.parametrize("name", ROWS)
def test_two_updates_of_each(folder: Path, tmp_path: Path, name: str, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    """GRPO (DDPO for models of epsilon) and NFT (RAFT): on policy to the bit, and the weights move."""
    epsilon = ROWS[name].adapter.prediction == "epsilon"  # type: ignore[attr-defined]
    recipe = {("on steps", False): "grpo", ("on steps", True): "ddpo", ("on samples", False): "nft"}.get(
        (kind, epsilon), "raft"
    )
    code = cli.run([*flags(folder, name, recipe), "--out", str(tmp_path / "run")])
    assert code == 0, capfd.readouterr().err
    updates = [record for record in small.records(tmp_path / "run") if "grad_norm" in record]
    assert len(updates) == 2
    assert updates[0]["grad_norm"] > 0
    if kind == "on steps":
        assert updates[0]["first_pass_max_abs_log_ratio"] == 0.0
    adapter = next((tmp_path / "run" / "lora").rglob("*.safetensors"))
    assert any(tensor.any() for key, tensor in load_file(adapter).items() if "lora_B" in key or ".up." in key)
    assert list((tmp_path / "run" / "samples").glob("*.png"))


def test_a_reward_of_ones_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`module:callable` with a weight, beside the built-in one; both are logged."""
    monkeypatch.syspath_prepend(str(folder))
    typed = ["--rewards", "jpeg", "own_reward:bright=2", "--out", str(tmp_path / "run")]
    assert cli.run([*flags(folder, "sd3", "grpo"), *typed]) == 0
    record = next(record for record in small.records(tmp_path / "run") if "rewards" in record)
    assert record["reward"]["mean"] == pytest.approx(
        record["rewards"]["jpeg"] + 2 * record["rewards"]["own_reward:bright"], rel=1e-4
    )


WRONG = [
    ("--pipeline.height 17", "expected multiples of"),
    ("--rewards nowhere:f", "there is no module 'nowhere'"),
    ("--rewards math:nothing", "math has no 'nothing'"),
    ("--rewards math:pi", "pi is a float, expected a function"),
    ("--weights here", "a pipeline has its own"),
    ("--rollout.sampler ddim --rollout.eta 1", "use flow_sde or dance_sde or cps or ode"),
]


@pytest.mark.parametrize(("typed", "says"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_input_is_one_line(
    folder: Path, tmp_path: Path, typed: str, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before anything is computed."""
    assert cli.run([*flags(folder, "sd3", "grpo"), *typed.split(), "--out", str(tmp_path / "run")]) == 2
    assert says in small.one_line(capfd.readouterr().err)


def test_prompts_are_needed_and_a_folder_must_hold_a_pipeline(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each in one line."""
    assert cli.run(["train", "grpo", "--model", str(folder / "sd3")]) == 2
    assert "--prompts prompts.txt" in small.one_line(capfd.readouterr().err)
    assert cli.run(["train", "grpo", "--model", str(folder), "--prompts", str(folder / "prompts.txt")]) == 2
    assert "model_index.json" in small.one_line(capfd.readouterr().err)
