"""Settings under older names: records, checkpoints and flags that hold them are read as the same runs, or said."""

import json
from pathlib import Path
from typing import Any

import pytest

from fluvial.engines.cli import main as cli
from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.log.records import flat
from fluvial.engines.run.recipes import HANDWRITING, RECIPES
from fluvial.engines.run.record import as_record, read_record
from fluvial.engines.run.renames import migrate

# Records of recipes as trees with old names wrote them: of grpo and dpo on handwriting and of crd and dgpo on x/y with
# `objective`, of nft and sft with `method`, and the machine's settings not in groups yet.
OLD: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "shared" / "helpers" / "old_records.json").read_text()
)


def run_of(name: str) -> TrainConfig:
    """Return the run of today that an old record is of."""
    return RECIPES[name](HANDWRITING if OLD[name]["model"] == HANDWRITING else "x/y")


@pytest.mark.parametrize("name", OLD)
def test_an_old_record_is_the_same_run(name: str) -> None:
    """Every setting has its place, those of single methods, too; what a method does not have had no effect."""
    assert read_record(OLD[name]) == run_of(name)
    changed = json.loads(json.dumps(OLD[name]))
    sampling = changed["rollout"] if "objective" in changed else changed["method"]["sampling"]
    sampling["steps"], changed["eval_every"] = 99, 3
    assert read_record(changed) == with_values(run_of(name), {"sampling.steps": 99, "evaluation.every": 3})


@pytest.mark.parametrize("name", OLD)
def test_the_settings_of_an_old_checkpoint_are_those_of_the_run(name: str) -> None:
    """A checkpoint has them by dotted names; those that it lacks have their defaults."""
    settings = flat(as_record(run_of(name)))
    newer = {"method.sampling.groups.kind": "all", "method.weighting": "none", "engine.ring": 1, "pipeline.settings": None}
    assert settings == {key: newer[key] for key in newer.keys() & settings.keys()} | flat(migrate(flat(OLD[name])))


@pytest.mark.parametrize(("number", "share", "now"), [(0, 0.0, 0), (3, 0.0, 3), (0, 0.25, 0.25)])
def test_a_warm_up_was_a_number_or_a_fraction(number: int, share: float, now: float) -> None:
    """In a record and in a checkpoint; one setting holds either."""
    record = as_record(run_of("grpo"))
    record["optimizer"] |= {"warmup": number, "warmup_ratio": share}
    assert read_record(record) == with_values(run_of("grpo"), {"optimizer.warmup": now})
    assert flat(migrate(flat(record)))["optimizer.warmup"] == now


def test_an_unknown_field_of_an_old_record_is_said() -> None:
    """Nothing of a run is passed over."""
    with pytest.raises(UsageError, match="unknown fields novel @ run"):
        read_record({**OLD["grpo"], "novel": 1})


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("grpo --rollout.group 4", "unknown flag --rollout.group: it is --sampling.group now"),
        ("grpo --objective.clip-low 1e-3", "unknown flag --objective.clip-low: it is --clip-low now"),
        ("nft --eval-every 1", "unknown flag --eval-every: it is --evaluation.every now"),
        ("sft --data-cache x", "unknown flag --data-cache: it is --data.cache now"),
        ("grpo --export-as lora", "unknown flag --export-as: it is --export.format now"),
        ("grpo --collective-timeout 9", "unknown flag --collective-timeout: it is --engine.timeout now"),
        ("grpo --optimizer.warmup-ratio 0.1", "unknown flag --optimizer.warmup-ratio: it is --optimizer.warmup now"),
        ("grpo --every 1", "--every is ambiguous: name one of --evaluation.every, --checkpoint.every, --export.every"),
        ("grpo --noising.each 4", "this method has none, and nft, awm, dgpo, crd, raft, sft, dpo, mapo, kto have it"),
        ("dgpo --passes.minibatches 2", "unknown flag --passes.minibatches: this method has none, and grpo"),
    ],
)
def test_an_old_flag_is_hinted(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And a flag that other methods have."""
    assert cli.run(["train", *flags.split()]) == 2
    line = capsys.readouterr().err
    assert says in line
    assert line.count("\n") == 1
