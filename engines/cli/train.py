"""`fluvial train RECIPE`: post-train a model by a built-in recipe, an installed one, or a user-defined `module:name`."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fluvial.engines import plugins
from fluvial.engines.cli import listing
from fluvial.engines.cli.brief import HELP, HELP_ALL, TRAIN
from fluvial.engines.cli.parse import (
    console,
    expand_flags,
    field_names,
    find_values,
    flags_in_errors,
    parse_config,
    parse_name,
    split_flags,
)
from fluvial.engines.errors import LostProcessError, UsageError, convert_errors
from fluvial.engines.waits import wait_for

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig

DRY_RUN, PRESET, CONFIG = "--dry-run", "--preset", "--config"


def run(args: list[str]) -> None:
    """Train by a recipe, or print the list of recipes."""
    if args and args[0] in ("-h", "--help"):
        print(recipes_help(), end="")
        return
    if args and args[0] == HELP_ALL:
        args = ["grpo", HELP_ALL]
    if DRY_RUN in args:
        _dry_run(args)
        return
    with wait_for("importing PyTorch and diffusers"):
        runs = configure_all("train", args)
        from fluvial.engines.run import training  # noqa: F401

    say = partial(console().print, highlight=False, soft_wrap=True)
    for number, each in enumerate(runs, start=1):
        label = f"run {number}/{len(runs)}, {each.name}"
        if each.name and (each.config.out / "summary.json").exists():
            say(f"{label}: done already, in {each.config.out}")
            continue
        if each.name:
            say(label)
        if not _train(each.config) and each.name:  # stopped as asked
            return
    if len(runs) > 1:
        say(f"compare the {len(runs)} runs: fluvial report {runs[0].config.out.parent}/*")


def _train(config: "TrainConfig") -> bool:
    """Train a run, and return whether it came to its end."""
    from fluvial.engines.run import train

    with flags_in_errors(config):
        try:
            return bool(train(config, console=console()))
        except LostProcessError as error:
            advice = f"earlier checkpoints are unchanged, go on with --resume --out {config.out}"
            raise LostProcessError(f"{error}; {advice}") from error


def _dry_run(args: list[str]) -> None:
    """Simulate a training run, and print what it would do."""
    from fluvial.engines.extensions.dryrun import run as dryrun

    flags = {"--" + field.name.replace("_", "-") for field in fields(dryrun.DryRunConfig)}
    matched, others = split_flags(args, flags)
    asked = parse_config(dryrun.DryRunConfig(), f"fluvial train RECIPE {DRY_RUN}", matched)
    config = configure("train", [word for word in others if word != DRY_RUN], gpus=asked.as_gpus)
    with flags_in_errors(config):
        dryrun.run(asked, config, console=console())


class Configured(NamedTuple):
    """A run that was asked for.

    Args:
        recipe: name of its recipe; None for a file of a whole run.
        base: the recipe's run, or that of the file of a whole run.
        config: the run.
        name: its name in a sweep; empty without one.
    """

    recipe: str | None
    base: "TrainConfig"
    config: "TrainConfig"
    name: str = ""


def configure(command: str, args: list[str], *, gpus: int | None = None) -> "TrainConfig":
    """Return the one run that is asked for, see `configure_all`; UsageError for a sweep."""
    configured = configure_all(command, args, gpus=gpus)
    if len(configured) > 1:
        names = ", ".join(each.name for each in configured)
        raise UsageError(f"the file describes {len(configured)} runs ({names}), and {command} takes one: remove the lists")
    return configured[0].config


def configure_all(command: str, args: list[str], *, gpus: int | None = None) -> list[Configured]:
    """Return the runs that a recipe, a file of what differs, and the typed fields describe, each over the one before.

    Args:
        command: word that was typed before the arguments, for messages.
        args: name of the recipe, a file, or both with --config before the file; then flags.
        gpus: number of GPUs, for what is said of it; by default one per process.
    """
    from fluvial.engines.run.files import read

    if args and Path(args[0]).suffix in read.SUFFIXES:  # a file in place of a recipe
        args = ["--config", *args]
    files = find_values(args, CONFIG)
    if len(files) > 1 or (CONFIG in args and not files):
        what = "names no file" if not files else f"names {len(files)} files, expected one"
        raise UsageError(f"{CONFIG} {what}: fluvial {command} grpo {CONFIG} my.yaml")
    _, words = split_flags(args, {CONFIG})
    path = Path(files[0]) if files else None
    entries = {} if path is None else read.read_settings(path)
    typed = words[0] if words and not words[0].startswith("-") else None
    if path is not None and typed is None and read.is_whole(entries):
        from fluvial.engines.run.record import read_record

        wrong = ValueError, TypeError, AttributeError, KeyError
        with convert_errors(UsageError, *wrong, says=f"{path} is not a configuration, as fluvial config prints it"):
            config = read_record(entries)
        return [_complete(command, str(path), f"The run in {path}.", config, config, words, gpus=gpus)._replace(recipe=None)]
    stated = entries.get(read.RECIPE)
    if typed is None and path is not None:
        if not isinstance(stated, str | None):
            raise UsageError(f"{path}: recipe is {stated!r}, expected the name of one")
        if stated is None:
            hint = f"write recipe: grpo into it, or type fluvial {command} grpo {CONFIG} {path}"
            raise UsageError(f"{path} names no recipe: {hint}")
        typed, words = stated, [stated, *words]
    elif stated is not None and stated != typed:
        raise UsageError(f"{path} is for the recipe {stated}, and {typed} was typed: remove one of them")
    known = [*listing.recipes(), *listing.find_installed("recipes")]
    name = parse_name(command, words, known, "a recipe", fits=lambda word: ":" in word or "/" in word)
    return list(_configure_recipe(command, name, path, entries, words[1:], gpus=gpus))


def _configure_recipe(
    command: str, name: str, path: Path | None, entries: dict[str, Any], flags: list[str], *, gpus: int | None
) -> Iterator[Configured]:
    """Yield the runs of a recipe; a file may sweep some settings."""
    from fluvial.engines.run.files import read

    recipe = _recipe(name)
    about = inspect.getdoc(recipe) or f"The recipe {name}."
    preset = entries.pop("preset", None)
    flags = flags if preset is None or find_values(flags, PRESET) else [PRESET, str(preset), *flags]
    first = _build(name, recipe, flags)
    with convert_errors(UsageError, UsageError, says=str(path)):
        runs = read.expand_sweeps(first, entries, field_names(first))
    for label, values in runs:
        model = [] if "model" not in values else ["--model", str(values["model"])]
        plain = _build(name, recipe, [*model, *flags])
        base, others = _preset(plain, expand_flags(flags, field_names(plain)))
        with convert_errors(UsageError, UsageError, says=str(path)):
            config = read.apply_settings(base, values, field_names(base)) if values else base
        yield _complete(command, name, about, plain, config, others, label=label, gpus=gpus)


def _complete(
    command: str,
    name: str,
    about: str,
    base: "TrainConfig",
    config: "TrainConfig",
    flags: Sequence[str],
    *,
    label: str = "",
    gpus: int | None,
) -> Configured:
    """Return a run with the typed flags over its recipe and its file, and say what may not be expected of it.

    Args:
        name: what was typed for it: a recipe or a file.
        base, config: the recipe's run, and that with the preset and the file over it.
        label: name of the run in a sweep, whose folder lies in `out`.
    """
    flags = expand_flags(flags, field_names(config))
    # The defaults depend on the model, and on the run that is resumed, so both are looked for before all is parsed.
    resumes = "--resume" in flags or bool(find_values(flags, "--checkpoint.resume-from"))
    shows_help = bool({*HELP, HELP_ALL} & set(flags))
    asked, out = config, Path((find_values(flags, "--out") or [str(config.out)])[-1]) / label
    if label and resumes and not _is_recorded(out):  # a run of the sweep that has not begun
        flags, resumes = [word for word in flags if word != "--resume"], False
    if resumes and not shows_help:
        config = _read_recorded(out)
        typed, recorded = asked.method.method_name, config.method.method_name
        if typed != recorded:
            raise UsageError(
                f"{config.out} holds a run with the method {recorded}, and {name} has {typed}: resume it by its own recipe, "
                f"or with --config {config.out / 'config.json'}"
            )
    elif name == "distill" and not shows_help and not find_values(flags, "--teacher") and config.method == base.method:
        raise UsageError("--teacher is missing: name a folder of weights, such as runs/grpo/weights")
    config = parse_config(
        config, f"fluvial {command} {name}", flags, about=about, brief=TRAIN, unused=type(config).list_fixed
    )
    config = replace(config, out=out) if label else config
    gpus = int(os.environ.get("WORLD_SIZE", "1")) if gpus is None else gpus
    for line in _notes(name, asked, config, flags, resumes=resumes, gpus=gpus):
        print(f"fluvial: {line}", file=sys.stderr)
    return Configured(name, base, config, label)


def _preset(config: "TrainConfig", flags: Sequence[str]) -> tuple["TrainConfig", list[str]]:
    """Return a run on the number of GPUs that --preset names, and the other flags; rank 0 says what changes."""
    matched, others = split_flags(flags, {PRESET})
    if not matched:
        return config, others
    from fluvial.engines.run.recipes import fit_to_gpus

    if "--resume" in others or find_values(others, "--checkpoint.resume-from"):
        raise UsageError(f"{PRESET} has no effect with --resume, which keeps the settings that the run recorded; remove it")
    try:
        preset, said = fit_to_gpus(config, (find_values(flags, PRESET) or [""])[-1])
    except UsageError as error:
        raise UsageError(error.name_fields(lambda field: f"--{field}")) from error
    if os.environ.get("RANK", "0") == "0":
        print(f"fluvial: {said}", file=sys.stderr)
    return preset, others


def _notes(
    name: str, asked: "TrainConfig", config: "TrainConfig", flags: Sequence[str], *, resumes: bool, gpus: int
) -> Iterator[str]:
    """Yield what a person may not expect of the settings that she did not type; rank 0 says it."""
    if os.environ.get("RANK", "0") != "0":
        return
    if resumes:
        if asked.method.sampling.sampler.kind != config.method.sampling.sampler.kind:
            kinds = f"{config.method.sampling.sampler.kind} there, {asked.method.sampling.sampler.kind} in {name}"
            said = f"{config.out} keeps the settings that it recorded, which are not those of {name}"
            yield f"{said}: sampling.sampler {kinds}"
        return
    yield from _note_differences(name, config, gpus)
    lora = config.lora
    if (
        find_values(flags, "--lora.rank")
        and not find_values(flags, "--lora.alpha")
        and config.train == "lora"
        and lora.weights is None
    ):
        yield f"lora.alpha stays {lora.alpha:g}: at rank {lora.rank} the adapter's scale, alpha / rank, is {lora.scale:g}"
    if ":" in config.model and not Path(config.model).is_dir() and ":" not in name:
        chosen = {"optimizer.lr": config.optimizer.lr}
        chosen |= {"kl.coef": kl.coef} if (kl := getattr(config.method, "kl", None)) is not None else {}
        untuned = [f"{field} {value:g}" for field, value in chosen.items() if not find_values(flags, "--" + field)]
        if untuned:
            yield (
                f"{' and '.join(untuned)} of the recipe {name} were chosen for large published models, not for "
                f"{config.model}: set them for your own"
            )


def _note_differences(name: str, config: "TrainConfig", gpus: int) -> Iterator[str]:
    """Yield in what a published run differs here: the number of GPUs, and prompts that stand in for a file."""
    from fluvial.engines.extensions.published.resolve import resolve
    from fluvial.engines.extensions.published.runs import load_published
    from fluvial.engines.extensions.published.takes import choose_accumulation

    run = load_published().get(name)
    if run is None:
        return
    asked = resolve(run)
    same = [(each.method.sampling.batch, each.method.passes.minibatches) for each in (config, asked)]
    if run.gpus not in (0, gpus) and config.makes_samples and same[0] == same[1]:
        yield choose_accumulation(config, published=run.gpus, gpus=gpus)
    stated = run.published.get("prompts")
    if stated and config.prompts and config.prompts == asked.prompts:
        yield f"the prompts {' '.join(config.prompts)} stand in for {stated}: --prompts FILE takes the published file"


def recipes_help() -> str:
    """Return what each recipe is and where it comes from, for a person to choose."""
    lines = ["usage: fluvial train RECIPE [--field value ...]", ""]
    for name, about in {**listing.recipes(), **listing.find_installed("recipes")}.items():
        lines.append(f"  {name:<12} {about}")
    lines += [
        "  NAME         A published run, e.g. flow_grpo/sd3.5-medium/ocr: fluvial runs lists them.",
        "  module:name  Your own: a method, or a function that returns a TrainConfig, in a module that is found from here.",
        "",
        "--preset 1gpu (or 8gpu, ...) keeps the published hyper-parameters of each sample, with fewer groups per rollout.",
        "",
        "The defaults are the published numbers. For the built-in models (--model handwriting, the default, and",
        "handwriting-unet, words) they are those that were found on them. fluvial train RECIPE --help explains both, and",
        "lists all fields. With --dry-run --as-gpus 64 it says what the run would do on 64 GPUs, without one: whether it",
        "fits, what holds the memory, bytes on the wire, host reads (--gpu-memory-gib, --reserve-gib, --report FOLDER).",
    ]
    lines += ["", "Prompt sets, generated: a part to train on (--prompts) and a held-out part (--evaluation.prompts)"]
    lines += [
        f"  @{name:<15} {about}" for name, about in {**listing.prompt_sets(), **listing.find_installed("prompts")}.items()
    ]
    return "\n".join(lines) + "\n"


def _recipe(name: str) -> Callable[..., "TrainConfig"]:
    """Return the function of a recipe, built in, published, installed or user-defined."""
    if "/" in name:
        return _find_published(name)
    from fluvial.engines.run.recipes import RECIPES, make_method_recipe

    recipe: Any = plugins.load(name, "recipes", _explain_no_recipe, table=RECIPES)
    return make_method_recipe(recipe) if inspect.isclass(recipe) else recipe  # type: ignore[arg-type]


def _explain_no_recipe(recipe: Any) -> str | None:
    """Return what keeps an object from being a recipe, or a method that is trained with the defaults of the model."""
    from fluvial.engines.run.method import Method, explain_no_method

    if inspect.isclass(recipe) and issubclass(recipe, Method):
        return explain_no_method(recipe)
    return plugins.make_call_check()(recipe)


def _find_published(name: str) -> Callable[[], "TrainConfig"]:
    """Return the recipe of a published run."""
    from fluvial.engines.extensions.published.resolve import resolve
    from fluvial.engines.extensions.published.runs import find

    run = find(name)
    config, deviations = resolve(run), run.deviations

    def recipe() -> "TrainConfig":
        return config

    recipe.__doc__ = (
        f"{run.algorithm} on {run.model}, as {run.sources[-1].repo} publishes it; {len(deviations)} settings differ "
        f"(fluvial runs {name})."
    )
    return recipe


def _build(name: str, recipe: Callable[..., "TrainConfig"], args: list[str]) -> "TrainConfig":
    """Return the run that a recipe describes, for the model that is typed.

    A recipe that takes a model is called with it. The run folder of a recipe with a name is runs/NAME; a user-defined recipe
    says its own.
    """
    from fluvial.engines.run.config import TrainConfig
    from fluvial.engines.run.jobs.weights import find_base_model

    models = find_values(args, "--model")[-1:]
    takes_model = "model" in inspect.signature(recipe).parameters
    try:
        config = recipe(model=find_base_model(models[0])) if models and takes_model else recipe()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"recipe {name!r} raised {type(error).__name__}: {error}") from error
    if not isinstance(config, TrainConfig):
        raise UsageError(f"recipe {name!r} returned a {type(config).__name__}, expected a TrainConfig")
    return config if ":" in name else replace(config, out=Path("runs") / name)


def _is_recorded(out: Path) -> bool:
    """Return whether a folder holds a run."""
    from fluvial.engines.run.jobs.weights import RECORD

    return (out / RECORD).exists()


def _read_recorded(out: Path) -> "TrainConfig":
    """Return the configuration of the run in a folder."""
    from fluvial.engines.run.jobs.weights import read_configuration

    if not _is_recorded(out):
        raise UsageError(f"{out} holds no run to resume: start one without --resume, or name its folder with --out")
    return read_configuration(out)
