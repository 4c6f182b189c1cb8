"""A run's record: any run that can be built is read back as itself, also under older names of its settings."""

import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin

import pytest
from helpers import handwriting_jobs
from helpers.marks import long
from helpers.refusals import refuses
from helpers.settings import leaves
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fluvial.engines.cli.train import configure
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import Grpo
from fluvial.engines.methods.nft import Nft
from fluvial.engines.methods.table import METHODS
from fluvial.engines.run import saving, train, training
from fluvial.engines.run.config import TrainConfig, with_values
from fluvial.engines.run.jobs.settings import PipelineConfig
from fluvial.engines.run.jobs.weights import read_configuration
from fluvial.engines.run.log.records import flatten
from fluvial.engines.run.recipes import HANDWRITING, RECIPES, UNET
from fluvial.engines.run.record import TEXTS, PathFinder, as_record, locate_paths, read_record, with_absolute_paths
from fluvial.engines.run.renames import migrate
from fluvial.engines.sampling.samplers import SAMPLERS

WORD = st.text("abc/._=:é \n", min_size=1, max_size=8)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of a field's type, most of which are accepted."""
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(*(values_of(member) for member in get_args(kind)))
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if get_origin(kind) is tuple:
        members = get_args(kind)
        if members[1:] == (...,):
            return st.lists(values_of(members[0]), max_size=3).map(tuple)
        return st.tuples(*(values_of(member) for member in members))
    return {
        bool: st.booleans(),
        int: st.integers(0, 40),
        float: st.floats(0, 2),
        str: WORD,
        Path: WORD.map(Path),
        NoneType: st.none(),
        Any: st.sampled_from(list(SAMPLERS)),
    }[kind]


def changed(config: Any, path: tuple[str, ...], value: Any) -> Any:
    """Return a dataclass with one field changed."""
    first, *rest = path
    return replace(config, **{first: changed(getattr(config, first), tuple(rest), value) if rest else value})


@given(st.data(), st.sampled_from(sorted(RECIPES)), st.sampled_from([HANDWRITING, UNET, "someone/a-model"]))
@settings(max_examples=150)
@pytest.mark.long
def test_every_run_is_read_back(data: st.DataObject, recipe: str, model: str) -> None:
    """Every recipe, with any of its fields changed, through JSON text."""
    config = RECIPES[recipe](model)
    accepted = 0
    for path, kind in data.draw(st.lists(st.sampled_from(leaves(config)), max_size=6)):
        try:
            config = changed(config, path, data.draw(values_of(kind)))
            accepted += 1
        except (ValueError, TypeError):  # a combination without a meaning
            continue
    assume(accepted or data.draw(st.booleans()))
    record = as_record(config)
    text = json.dumps(record)
    assert read_record(json.loads(text)) == config
    assert json.loads(text) == record == as_record(read_record(record))


@pytest.mark.parametrize("name", METHODS)
def test_every_field_of_a_method_is_recorded(name: str) -> None:
    """Under the method's name."""
    record = as_record(next(config for recipe in RECIPES.values() if type((config := recipe()).method) is METHODS[name]))
    assert set(record["method"]) == {"name", *(field.name for field in fields(cast(Any, METHODS[name])))}
    assert record["method"]["name"] == name


LITERALS = [
    (path, get_args(literal), run)
    for run in (recipe() for recipe in RECIPES.values())
    for path, kind in leaves(run)
    for literal in ([kind] if get_origin(kind) is Literal else get_args(kind))
    if get_origin(literal) is Literal
]


def test_there_are_choices() -> None:
    """The next test is about all of them: settings of the run, of its parts and of objectives."""
    names = {".".join(path).removeprefix("method.") for path, *_ in LITERALS}
    assert {"train", "sampling.window.draw", "engine.comm", "mode", "weighting", "form", "optimizer.schedule"} <= names
    assert len(names) > 20


# Two objectives may have fields of one name with other choices.
CHOICES = {(".".join(path), choices): (path, choices, run) for path, choices, run in LITERALS}


@pytest.mark.parametrize(("path", "choices", "config"), CHOICES.values(), ids=[name for name, _ in CHOICES])
def test_a_wrong_choice_is_refused(path: Any, choices: Any, config: Any) -> None:
    """In Python as on the command line, with the accepted values and the nearest match."""
    near = next((choice for choice in choices if isinstance(choice, str) and len(choice) > 3), None)
    wrong = f"{near}x" if near else "nonsense"
    with pytest.raises(ValueError, match=rf"{path[-1]} is '{wrong}', expected ") as refused:
        changed(config, path, wrong)
    message = str(refused.value)
    assert all(repr(choice) in message for choice in choices), message
    place = ".".join(path).removeprefix("method.")  # of several that the command line tells apart
    assert message.startswith((place, "optimizer.", "trained.")), message
    assert near is None or f"did you mean {near!r}?" in message


# Settings of text that name no file, beside those of `record.TEXTS`.
NAMES = {"tracker", "pipeline.sizes", "pipeline.call", "pipeline.media", "method.sampling.guidance.negative"}
NAMES |= {"rollout.servers.key_env", "rollout.servers.admin_env", "method.advantage.floors"}
NAMES |= {"lora.targets", "engine.attention", "engine.fit", "method.guidance"}


def test_it_is_known_of_every_text_whether_it_is_a_path() -> None:
    """A new setting of text is either moved with the run or named here."""
    texts = {
        ".".join(path)
        for recipe in ("grpo", "distill")
        for path, kind in leaves(RECIPES[recipe](HANDWRITING))
        if {str, tuple[str, ...]} & {kind, *get_args(kind)}
    }
    assert texts == NAMES | set(TEXTS)


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In settings as in a shell, which leaves `--out=~/run` as it is; other texts stay, and a path may not be empty."""
    monkeypatch.setenv("HOME", str(tmp_path))
    words = [
        "--model=~/m",
        "--out=~/run",
        "--checkpoint.folder=~/c",
        "--prompts",
        "~/a.txt=2",
        "b~.txt",
        "--rewards",
        "x:weights=~/w",
    ]
    found = configure("train", ["grpo", *words])
    assert (found.model, found.out, found.checkpoint.folder) == (f"{tmp_path}/m", tmp_path / "run", f"{tmp_path}/c")
    assert (found.prompts, found.rewards) == ((f"{tmp_path}/a.txt=2", "b~.txt"), (f"x:weights={tmp_path}/w",))
    (tmp_path / "lr.toml").write_text('recipe = "grpo"\nout = "~/sweep"\noptimizer.lr = [1.0]\n')
    assert configure("train", [str(tmp_path / "lr.toml")]).out == tmp_path / "sweep" / "lr=1"
    refuses(f"{tmp_path}/run holds no run to resume", configure, "train", ["grpo", "--out=~/run", "--resume"])
    refuses(r"checkpoint\.folder is '', expected a folder or a URL", configure, "train", ["grpo", "--checkpoint.folder", ""])


def test_a_run_opens_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its paths are found from where it began, from elsewhere and after a move with what is beside it; old records, too.

    They are absolute in the record and relative where they are shown. Names that are no paths stay.
    """
    home = tmp_path / "home"
    for folder in ("models/tiny", "weights", "pick", "stored", "other"):
        (home / folder).mkdir(parents=True)
    for file in ("a/p.txt", "b/p.txt", "held=out.txt"):
        (home / file).parent.mkdir(exist_ok=True)
        (home / file).write_text("0427\n")
    monkeypatch.chdir(home)
    asked = with_values(
        TrainConfig(Path("runs/x"), model="models/tiny", method=Grpo(), pipeline=PipelineConfig(weights=Path("weights"))),
        {
            "prompts": ("a/p.txt=2", "b/p.txt", "@codes"),
            "rewards": ("pickscore:device=cuda:1,weights=pick=0.5", "mine:score=2"),
            "pipeline.heldout": ("held=out.txt",),
            "rollout.source": "replayed:stored",
        },
    )
    (home / "runs" / "x").mkdir(parents=True)
    record = as_record(with_absolute_paths(asked))
    assert record["model"] == f"{home}/models/tiny"
    assert record["prompts"] == [f"{home}/a/p.txt=2", f"{home}/b/p.txt", "@codes"]
    assert record["rewards"] == [f"pickscore:device=cuda:1,weights={home}/pick=0.5", "mine:score=2"]
    assert record["rollout"]["source"] == f"replayed:{home}/stored"
    places, elsewhere = PathFinder(Path("runs/x"), Path("runs/x")), [f"{home}/a/p.txt=2", f"{home}/a/p.txt"]
    assert places.is_same("data.images", ["a/p.txt=2", "b/p.txt"], record["prompts"][:2])
    assert not places.is_same("data.images", ["a/p.txt=2", "b/p.txt"], elsewhere)
    assert places.is_same("teacher", "weights", record["pipeline"]["weights"])
    assert places.is_same("method.teacher", "weights", [f"{home}/weights"])  # of a run before there were several
    assert places.is_same("method.teacher", ["one=weights"], [f"one={home}/weights"])
    assert not places.is_same("method.teacher", ["one=weights"], [f"two={home}/weights"])
    assert not places.is_same("optimizer.lr", 0.1, 0.2)
    for text in (record, as_record(asked)):
        for place in (home, home / "other", tmp_path):
            monkeypatch.chdir(place)
            found = locate_paths(read_record(text), Path(os.path.relpath(home / "runs" / "x")))
            assert with_absolute_paths(found) == with_absolute_paths(read_record(record))
            assert (found.model == "models/tiny") == (place == home)
    home.rename(tmp_path / "moved")
    moved = locate_paths(read_record(record), tmp_path / "moved" / "runs" / "x")
    assert moved.prompts == ("moved/a/p.txt=2", "moved/b/p.txt", "@codes")
    assert as_record(moved)["pipeline"]["weights"] == "moved/weights"


@pytest.mark.parametrize("old", [long(False), True])
def test_a_run_resumes_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """Checkpoints hold its settings: those of a run with absolute paths, and with paths as they were typed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "codes.txt").write_text("0427\n1999\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        if old:
            for module in (saving, training):
                patch.setattr(module, "with_absolute_paths", lambda config: config)
        asked = handwriting_jobs.config(Path("run"), prompts=("a/codes.txt", "b/codes.txt"), updates=1)
        train(asked)
    monkeypatch.chdir(tmp_path / "other")
    run = read_configuration(Path("../run"))
    assert train(replace(run, updates=2, resume=True))["updates"] == 2


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


@dataclass(frozen=True)
class OwnNft(Nft):
    """A method of one's own that extends a built-in one."""


def test_a_setting_that_a_method_no_longer_has_is_left_out_only_where_it_had_no_effect() -> None:
    """Of a method of one's own as well; a KL that had one is refused, whatever its name was."""
    record = as_record(with_values(RECIPES["nft"](HANDWRITING), {"method": OwnNft()}))
    window = {"kind": "all", "low": 0, "high": None}
    older = {**record, "method": {**record["method"], "sampling": {**record["method"]["sampling"], "window": window}}}
    assert read_record(older) == read_record(record)
    for kl in ({"kl": {"coef": 0.1}}, {"method": {"name": "sft", "kl": {"coef": 0.1}}}):
        old = {**as_record(RECIPES["sft"](HANDWRITING)), **kl}
        with pytest.raises(UsageError, match=r"unknown fields kl @ run[.]method"):
            read_record(old)


@pytest.mark.parametrize("name", OLD)
def test_the_settings_of_an_old_checkpoint_are_those_of_the_run(name: str) -> None:
    """A checkpoint has them by dotted names; those that it lacks have their defaults."""
    settings = flatten(as_record(run_of(name)))
    newer = {"method.sampling.groups.kind": "all", "method.weighting": "none", "engine.ring": 1, "pipeline.settings": None}
    assert settings == {key: newer[key] for key in newer.keys() & settings.keys()} | flatten(migrate(flatten(OLD[name])))


@pytest.mark.parametrize(("number", "share", "now"), [(0, 0.0, 0), (3, 0.0, 3), (0, 0.25, 0.25)])
def test_a_warm_up_was_a_number_or_a_fraction(number: int, share: float, now: float) -> None:
    """In a record and in a checkpoint; one setting holds either."""
    record = as_record(run_of("grpo"))
    record["optimizer"] |= {"warmup": number, "warmup_ratio": share}
    assert read_record(record) == with_values(run_of("grpo"), {"optimizer.warmup": now})
    assert flatten(migrate(flatten(record)))["optimizer.warmup"] == now


def test_an_unknown_field_of_an_old_record_is_said() -> None:
    """Nothing of a run is passed over."""
    refuses("unknown fields novel @ run", read_record, {**OLD["grpo"], "novel": 1})


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
def test_an_old_flag_is_hinted(flags: str, says: str, fluvial: Any) -> None:
    """And a flag that other methods have."""
    assert says in fluvial("train", *flags.split(), code=2)
