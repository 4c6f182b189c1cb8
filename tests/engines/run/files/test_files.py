"""Files of settings: what differs from a recipe, over it and below the flags; sweeps; names of other trainers."""

import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers.marks import long

from fluvial.engines.cli import main as cli
from fluvial.engines.cli.parse import list_fields
from fluvial.engines.cli.train import configure, configure_all
from fluvial.engines.run import recipes
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.files.hints import ALIASES, load_foreign_settings
from fluvial.engines.run.files.read import read_settings
from fluvial.engines.run.files.write import write_all, write_differences

YAML = """
recipe: grpo
lr: 1e-4                     # the last part of a name
sampling:
  group: 4
  window: {kind: random, size: 2, high: 5}
method.kl.coef: 0.1
lora-rank: 3
rewards: characters
prompts: [a.txt, 0427]
lora.targets: null
"""
TOML = """
recipe = "grpo"
lr = 1e-4
sampling.group = 4
sampling.window.kind = "random"
sampling.window.size = 2
sampling.window.high = 5
method.kl.coef = 0.1
lora.rank = 3
rewards = "characters"
prompts = ["a.txt", "0427"]
lora.targets = "None"
"""


def written(tmp_path: Path, text: str, suffix: str = ".yaml") -> Path:
    """Return a file with a text."""
    path = tmp_path / f"my{suffix}"
    path.write_text(text)
    return path


def test_a_file_stands_over_its_recipe_and_below_the_flags(tmp_path: Path) -> None:
    """YAML, TOML and JSON say the same; a recipe may be typed or stand in the file."""
    yaml = written(tmp_path, YAML.replace("lora-rank", "lora.rank"))
    base, found = recipes.grpo(), configure("train", [str(yaml)])
    yaml.write_text(yaml.read_text(), encoding="utf-8-sig")  # as editors of Windows write it
    assert configure("train", [str(yaml)]) == found
    assert (found.optimizer.lr, found.method.sampling.group, found.lora.rank) == (1e-4, 4, 3)
    assert (found.rewards, found.prompts, found.lora.targets) == (("characters",), ("a.txt", "0427"), None)
    assert found.method.kl.coef == 0.1  # type: ignore[attr-defined]
    window: Any = found.method.sampling.window
    assert (window.kind, window.size, window.high) == ("random", 2, 5)
    assert (found.optimizer.schedule, found.updates) == (base.optimizer.schedule, base.updates)
    toml = written(tmp_path, TOML, ".toml")
    as_json = written(tmp_path, json.dumps(read_settings(toml)), ".json")
    assert configure("train", ["grpo", "--config", str(toml)]) == configure("train", [str(as_json)]) == found
    typed = configure("train", [str(yaml), "--lr", "3e-4", "--lora.rank", "5"])
    assert (typed.optimizer.lr, typed.lora.rank, typed.method.sampling.group) == (3e-4, 5, 4)


def test_yaml_has_the_scalars_of_version_1_2(tmp_path: Path) -> None:
    found = read_settings(
        written(tmp_path, "a: 1e-4\nb: 0427\nc: on\nd: 12:30\ne: -3\nf: .5\ng: true\nh: null\ni: 1e5\nj: 2024-01-01")
    )
    expected = {
        "a": 1e-4,
        "b": "0427",
        "c": "on",
        "d": "12:30",
        "e": -3,
        "f": 0.5,
        "g": True,
        "h": None,
        "i": 1e5,
        "j": "2024-01-01",
    }
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "recipe: grpo\nlearning_rate: 1e-4",
            "my.yaml: there is no setting learning_rate: here it is optimizer.lr; the name is that of",
        ),
        ("lr: 1e-4", "my.yaml names no recipe: write recipe: grpo into it, or type"),
        long("recipe: nft\nclip_low: 1", "there is no setting clip_low: this method has none, and"),
        ("recipe: grpo\nsampling.sampler: {kind: flow_sdee}", "did you mean 'flow_sde'?"),
        long("recipe: grpo\nsampling.sampler: {kind: ode, etaa: 1}", "has unknown fields etaa"),
        ("recipe: grpo\noptimizer.lr: fast", "optimizer.lr is a str, expected a number"),
        long("recipe: grpo\noptimizer.lr: []", "optimizer.lr is an empty list, expected a value, or several for a sweep"),
        ("recipe: grpo\noptimizer.lrr: 1", "there is no setting optimizer.lrr; did you mean 'optimizer.lr'?"),
        long("recipe: grpo\nevery: 3", "every is ambiguous: name one of evaluation.every, checkpoint.every, export.every"),
        ("recipe: grpo\nlr: 1\noptimizer: {lr: 2}", "is set twice"),
        ("recipe: grpo\noptimizer.lr: 1\noptimizer: {lr: 2}", "is set twice"),
        long("recipe: grpo\nmethod.name: nft", "method.name is 'nft': this run has the method grpo"),
        long("recipe: grpo\neval_every: 3", "it is evaluation.every now"),
        ("recipe: [grpo, nft]", "recipe is ['grpo', 'nft'], expected the name of one"),
        ("recipe: grpoo", "did you mean 'grpo'?"),
        ("- a", "holds list, expected a table of settings"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(text: str, says: str, tmp_path: Path, fluvial: Any) -> None:
    assert says in fluvial("config", written(tmp_path, text), code=2)


def test_a_recipe_that_is_typed_must_be_that_of_the_file(tmp_path: Path, fluvial: Any) -> None:
    path = written(tmp_path, "recipe: grpo")
    for words, says in (
        (["nft", "--config", path], "is for the recipe grpo, but nft was typed"),
        (["grpo", "--config", path, "--config", path], "--config names 2 files"),
        (["grpo", "--config"], "--config names no file"),
    ):
        assert says in fluvial("config", *words, code=2)


RUNS = (
    *(f"{name} --model a/b" for name in ("grpo", "nft --beta 3", "sft --data x", "spo", "branchgrpo", "rtdmd --teacher x")),
    "dmd2 --teacher x --lr 1e-3",
    "flow_grpo/qwen-image/pickscore --preset 1gpu --lora.targets to_q",
    "grpo --lora.form lokr --sampling.window moving --sampling.window.size 2 --evaluation.seeds 2 --advantage.clip None",
)


@pytest.mark.parametrize("words", [*map(long, RUNS)])
def test_what_is_written_is_read_as_the_same_run(words: str, tmp_path: Path) -> None:
    """What differs, all settings, and a whole run without a recipe, but for what is None there and not by default."""
    ((recipe, base, config, _),) = configure_all("config", words.split())
    assert recipe is not None
    texts = [write_differences(recipe, config, base), write_all(recipe, config)]
    texts += [] if "None" in words else [write_all(None, config)]
    for text in texts:
        tomllib.loads(text)
        assert configure("train", [str(written(tmp_path, text, ".toml"))]) == config


def test_config_prints_what_differs_and_all_has_a_help_for_each(fluvial: Any) -> None:
    found = fluvial("config", "grpo", "--sampling.group", 4)
    assert found == 'recipe = "grpo"\nmodel = "handwriting"\nsampling.group = 4\n'
    lines = fluvial("config", "grpo", "--all").splitlines()
    names = [line.partition(" = ")[0].removesuffix(".kind") for line in lines if " = " in line and not line.startswith("#")]
    assert sorted(names) == sorted(["recipe", *list_fields(recipes.grpo())])
    for before, line in itertools.pairwise(lines):
        if " = " in line and not line.startswith(("#", "recipe")):
            assert before.startswith("# "), line
    assert "# Sampler of the steps. One of flow_sde, dance_sde, cps, ddim, wan_sde, ode, sa_solver." in lines


def test_a_list_is_a_run_of_each_value_unless_the_setting_is_a_list(tmp_path: Path) -> None:
    text = "recipe: grpo\noptimizer.lr: 3e-4\nsampling.window: [all, {kind: random, size: 2, high: 5}]\n"
    text += "prompts: [a.txt, b.txt]\nrewards: [[characters], [machine=0.5, likeness]]\ncheckpoint.folder: s3://b/c/\n"
    found = configure_all("train", [str(written(tmp_path, text)), "--out", str(tmp_path / "runs")])
    assert len(found) == len({each.config.out for each in found}) == 4
    first, last = found[0], found[-1]
    assert [each.config.method.sampling.window.kind for each in (first, last)] == ["all", "random"]
    assert first.name == "window=all,rewards=characters"
    assert last.config.out == tmp_path / "runs" / "window=random+2+5,rewards=machine-0.5+likeness"
    assert last.config.checkpoint.folder == "s3://b/c/window=random+2+5,rewards=machine-0.5+likeness"
    assert (last.config.optimizer.lr, last.config.rewards) == (3e-4, ("machine=0.5", "likeness"))
    assert {each.config.prompts for each in found} == {("a.txt", "b.txt")}


@pytest.mark.long
def test_a_sweep_trains_each_run_and_goes_on_where_it_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fluvial: Any
) -> None:
    """The first run is done, the second one has stopped: it is resumed, and the third begins."""
    from fluvial.engines import run as training
    from fluvial.engines.run.record import as_record

    trained = list[TrainConfig]()

    def train(config: TrainConfig, *, console: Any) -> dict[str, Any]:
        trained.append(config)
        return {"updates": 1}

    monkeypatch.setattr(training, "train", train)
    path = written(tmp_path, "recipe: grpo\noptimizer.lr: [1e-4, 2e-4, 3e-4]")
    words = ["train", path, "--out", tmp_path / "runs"]
    fluvial(*words)
    assert [config.optimizer.lr for config in trained] == [1e-4, 2e-4, 3e-4]
    for config in trained[:2]:
        config.out.mkdir(parents=True)
        (config.out / "config.json").write_text(json.dumps(as_record(config)))
    (trained[0].out / "summary.json").write_text('{"updates": 100}')
    del trained[:]
    said = fluvial(*words, "--resume")
    assert [(config.optimizer.lr, config.resume) for config in trained] == [(2e-4, True), (3e-4, False)]
    assert f"fluvial report {tmp_path / 'runs'}/*" in said
    del trained[:]
    fluvial(*words, "--resume", "--updates", "200")
    assert [config.updates for config in trained] == [200, 200, 200]
    assert "describes 3 runs" in fluvial("train", path, "--dry-run", code=2)


def test_every_name_of_another_trainer_points_to_a_setting_that_there_is() -> None:
    """A command where it begins with `fluvial`, whose word is a command; at least 60 names of six trainers."""
    known = {name for recipe in recipes.RECIPES.values() for name in list_fields(recipe())}
    known |= {"lora.form.factor", "sampling.window.size", "sampling.sampler.eta"}
    rows = [row for rows in load_foreign_settings().values() for row in rows]
    assert [row for row in rows if not row.ours.startswith("fluvial ") and row.ours not in known] == []
    assert {row.ours.split()[1] for row in rows if row.ours.startswith("fluvial ")} <= {*cli.COMMANDS}
    assert len(rows) >= 60
    trainers = ("TRL", "diffusers' scripts", "kohya", "ai-toolkit", "flow_grpo", "Flow-Factory")
    assert all(sum(trainer in row.of for row in rows) >= 8 for trainer in trainers)
    assert {name for names in ALIASES.values() for name in names} - {"weights"} <= known


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("--num-generations 8", "--num-generations: here it is --sampling.group; the name is that of TRL"),
        ("--gradient_checkpointing", "here it is --engine.checkpointing (block); the name is that of diffusers' scripts"),
        ("--save-model-as x", "here it is fluvial export --as comfyui; the name is that of kohya"),
        ("--eval-every 3", "--eval-every: it is --evaluation.every now"),
    ],
)
def test_a_flag_of_another_trainer_is_answered_by_ours(typed: str, says: str, fluvial: Any) -> None:
    assert says in fluvial("train", "grpo", *typed.split(), code=2)


@pytest.mark.long
def test_an_ambiguous_last_part_that_people_type_has_one_meaning() -> None:
    found = configure("train", ["dmd2", "--lr", "3e-5", "--steps", "3", "--teacher", "x", "--model", "a/b"])
    assert (found.optimizer.lr, found.method.sampling.steps) == (3e-5, 3)
