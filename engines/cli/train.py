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
    find_values,
    flags_in_errors,
    list_fields,
    parse_config,
    parse_name,
    split_flags,
)
from fluvial.engines.errors import LostProcessError, UsageError, convert_errors
from fluvial.engines.waits import wait_for

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig

DRY_RUN, PRESET, CONFIG = "--dry-run", "--preset", "--config"
CHOSEN = {"out", "checkpoint.folder", "engine.fit", "engine.micro_batch"}  # a run may record others than its file states


def run(args: list[str]) -> None:
    """Train a recipe, or print the list of recipes."""
    if args and args[0] in ("-h", "--help"):
        print(format_recipes(), end="")
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
        if each.name and _is_done(each.config.out, updates=each.config.updates):
            say(f"{label}: done already, in {each.config.out}")
            continue
        if each.name:
            say(label)
        if not _train(each.config) and each.name:  # stopped as asked
            return
    if len(runs) > 1:
        say(f"compare the {len(runs)} runs: fluvial report {runs[0].config.out.parent}/*")


def _is_done(out: Path, *, updates: int) -> bool:
    """Return whether a run of a sweep has ended, with all updates that are planned now or because its reward was gamed."""
    from fluvial.engines.run.log.records import read_json

    summary = read_json(out / "summary.json")
    return summary is not None and ("stopped_when_gamed" in summary or summary.get("updates", 0) >= updates)


def _train(config: "TrainConfig") -> bool:
    """Train a run, and return whether it was completed."""
    from fluvial.engines.run import train

    with flags_in_errors(config):
        try:
            return bool(train(config, console=console()))
        except LostProcessError as error:
            advice = f"earlier checkpoints are unchanged, continue with --resume --out {config.out}"
            raise LostProcessError(f"{error}; {advice}") from error


def _dry_run(args: list[str]) -> None:
    """Simulate a training run, and print its report."""
    from fluvial.engines.extensions.dryrun import run as dryrun

    flags = {"--" + field.name.replace("_", "-") for field in fields(dryrun.DryRunConfig)}
    matched, others = split_flags(args, flags)
    options = parse_config(dryrun.DryRunConfig(), f"fluvial train RECIPE {DRY_RUN}", matched)
    config = configure("train", [word for word in others if word != DRY_RUN], gpus=options.as_gpus)
    with flags_in_errors(config):
        dryrun.run(options, config, console=console())


class ConfiguredRun(NamedTuple):
    """Run as configured by the command line.

    Args:
        recipe: name of its recipe; None for a file of a whole run.
        base: configuration of the recipe, or of the file of a whole run.
        config: configuration of the run.
        name: name in a sweep; empty without one.
    """

    recipe: str | None
    base: "TrainConfig"
    config: "TrainConfig"
    name: str = ""


def configure(command: str, args: list[str], *, gpus: int | None = None) -> "TrainConfig":
    """Return the configuration of a single run, see `configure_all`; UsageError for a sweep."""
    configured = configure_all(command, args, gpus=gpus)
    if len(configured) > 1:
        names = ", ".join(each.name for each in configured)
        raise UsageError(f"the file describes {len(configured)} runs ({names}), and {command} takes one: remove the lists")
    return configured[0].config


def configure_all(command: str, args: list[str], *, gpus: int | None = None) -> list[ConfiguredRun]:
    """Return the runs of a command line: a recipe, overridden by a file, overridden by flags.

    Args:
        command: word before the arguments, for messages.
        args: name of the recipe, a file, or both with --config before the file; then flags.
        gpus: number of GPUs, for notes about it; by default one per process.
    """
    from fluvial.engines.run.files import read

    if args and Path(args[0]).suffix in read.SUFFIXES:  # a file in place of a recipe
        args = ["--config", *args]
    files = find_values(args, CONFIG)
    if len(files) > 1 or (CONFIG in args and not files):
        problem = "names no file" if not files else f"names {len(files)} files, expected one"
        raise UsageError(f"{CONFIG} {problem}: fluvial {command} grpo {CONFIG} my.yaml")
    _, words = split_flags(args, {CONFIG})
    path = Path(files[0]) if files else None
    entries = {} if path is None else read.read_settings(path)
    typed = words[0] if words and not words[0].startswith("-") else None
    if path is not None and typed is None and read.is_whole(entries):
        from fluvial.engines.run.record import read_record

        wrong = ValueError, TypeError, AttributeError, KeyError
        with convert_errors(UsageError, *wrong, says=f"{path} is not a configuration, as printed by fluvial config"):
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
        raise UsageError(f"{path} is for the recipe {stated}, but {typed} was typed: remove one of them")
    known = [*listing.list_recipes(), *listing.find_installed("recipes")]
    name = parse_name(command, words, known, "a recipe", fits=lambda word: ":" in word or "/" in word)
    return list(_configure_recipe(command, name, path, entries, words[1:], gpus=gpus))


def _configure_recipe(
    command: str, name: str, path: Path | None, entries: dict[str, Any], flags: list[str], *, gpus: int | None
) -> Iterator[ConfiguredRun]:
    """Yield the runs of a recipe; the entries of a file may sweep settings."""
    from fluvial.engines.run.files import read

    recipe = _find_recipe(name)
    about = inspect.getdoc(recipe) or f"The recipe {name}."
    preset = entries.pop("preset", None)
    flags = flags if preset is None or find_values(flags, PRESET) else [PRESET, str(preset), *flags]
    first = _build(name, recipe, flags)
    with convert_errors(UsageError, UsageError, says=str(path)):
        runs = read.expand_sweeps(first, entries, list_fields(first))
    for label, values in runs:
        model = [] if "model" not in values else ["--model", str(values["model"])]
        plain = _build(name, recipe, [*model, *flags])
        base, others = _apply_preset(plain, expand_flags(flags, list_fields(plain)))
        with convert_errors(UsageError, UsageError, says=str(path)):
            config = read.apply_settings(base, values, list_fields(base)) if values else base
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
) -> ConfiguredRun:
    """Return a run with the typed flags over its recipe and its file, and print notes on settings that may surprise.

    Args:
        command: word before the arguments, for messages.
        name: recipe or file, as typed.
        about: text of the help.
        base, config: configuration of the recipe, without and with the preset and the file.
        flags: typed flags.
        label: name of the run in a sweep; its folder is within `out`.
        gpus: number of GPUs; None for one per process.
    """
    flags = expand_flags(flags, list_fields(config))
    # The defaults depend on the resumed run, so its folder is found before the flags are parsed.
    resumes = "--resume" in flags or bool(find_values(flags, "--checkpoint.resume-from"))
    shows_help = bool({*HELP, HELP_ALL} & set(flags))
    configured, out = config, Path((find_values(flags, "--out") or [str(config.out)])[-1]).expanduser() / label
    if label and resumes and not _is_recorded(out):  # a run of the sweep that has not begun
        flags, resumes = [word for word in flags if word != "--resume"], False
    if resumes and not shows_help:
        config = _read_recorded(out)
        typed, recorded = configured.method.method_name, config.method.method_name
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
    if label:
        config, folder = replace(config, out=out), config.checkpoint.folder
        if folder is not None and (not resumes or find_values(flags, "--checkpoint.folder")):  # not as recorded
            config = replace(config, checkpoint=replace(config.checkpoint, folder=f"{folder.rstrip('/')}/{label}"))
    gpus = int(os.environ.get("WORLD_SIZE", "1")) if gpus is None else gpus
    for line in _list_notes(name, base, configured, config, flags, resumes=resumes, gpus=gpus):
        print(f"fluvial: {line}", file=sys.stderr)
    return ConfiguredRun(name, base, config, label)


def _apply_preset(config: "TrainConfig", flags: Sequence[str]) -> tuple["TrainConfig", list[str]]:
    """Return a run adapted to the number of GPUs of --preset, and the other flags; rank 0 prints the changes."""
    matched, others = split_flags(flags, {PRESET})
    if not matched:
        return config, others
    from fluvial.engines.run.recipes import fit_to_gpus

    if "--resume" in others or find_values(others, "--checkpoint.resume-from"):
        raise UsageError(f"{PRESET} has no effect with --resume, which keeps the settings that the run recorded; remove it")
    try:
        preset, note = fit_to_gpus(config, (find_values(flags, PRESET) or [""])[-1])
    except UsageError as error:
        raise UsageError(error.name_fields(lambda field: f"--{field}")) from error
    if os.environ.get("RANK", "0") == "0":
        print(f"fluvial: {note}", file=sys.stderr)
    return preset, others


def _list_notes(
    name: str,
    base: "TrainConfig",
    configured: "TrainConfig",
    config: "TrainConfig",
    flags: Sequence[str],
    *,
    resumes: bool,
    gpus: int,
) -> Iterator[str]:
    """Yield notes on defaults that may surprise, on rank 0."""
    if os.environ.get("RANK", "0") != "0":
        return
    if resumes:
        from fluvial.engines.run.files.write import list_differences, list_settings
        from fluvial.engines.run.record import with_absolute_paths

        stated = {*list_differences(configured, base), "sampling.sampler"} - CHOSEN
        recorded = {field: value for field, value, _ in list_settings(config)}
        kept = [
            f"{field} {recorded.get(field)} there, {value} asked for"
            for field, value in list_differences(with_absolute_paths(configured), config).items()
            if field in stated and not find_values(flags, f"--{field}")
        ]
        if kept:
            yield f"{config.out} keeps its recorded settings, unless flags change them: {'; '.join(kept)}"
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
    """Yield notes on a published run: another number of GPUs, and prompts that replace a published file."""
    from fluvial.engines.extensions.published.requirements import describe_accumulation
    from fluvial.engines.extensions.published.resolve import resolve
    from fluvial.engines.extensions.published.runs import load_published

    run = load_published().get(name)
    if run is None:
        return
    recipe = resolve(run)
    batch, published_batch = ((each.method.sampling.batch, each.method.passes.minibatches) for each in (config, recipe))
    if run.gpus not in (0, gpus) and config.makes_samples and batch == published_batch:
        yield describe_accumulation(config, published=run.gpus, gpus=gpus)
    stated = run.published.get("prompts")
    if stated and config.prompts and config.prompts == recipe.prompts:
        yield f"the prompts {' '.join(config.prompts)} stand in for {stated}: --prompts FILE takes the published file"


def format_recipes() -> str:
    """Return the help of `fluvial train`, which lists the recipes and prompt sets."""
    lines = ["usage: fluvial train RECIPE [--field value ...]", ""]
    for name, about in {**listing.list_recipes(), **listing.find_installed("recipes")}.items():
        lines.append(f"  {name:<12} {about}")
    lines += [
        "  NAME         A published run, e.g. flow_grpo/sd3.5-medium/ocr: fluvial runs lists them.",
        "  module:name  Your own method, or function that returns a TrainConfig; the module is found from this folder.",
        "",
        "--preset 1gpu (or 8gpu, ...) keeps the published hyper-parameters per sample, with fewer groups per rollout.",
        "",
        "The defaults are the published numbers. For the built-in models (--model handwriting, the default, and",
        "handwriting-unet, words) they were tuned on these. fluvial train RECIPE --help explains both; --help-all lists all",
        "fields. --dry-run --as-gpus 64 reports the run on 64 simulated GPUs: whether it fits, the memory by line, bytes",
        "sent, and host reads (--gpu-memory-gib, --reserve-gib, --report FOLDER).",
    ]
    lines += ["", "Prompt sets, generated: a part to train on (--prompts) and a held-out part (--evaluation.prompts)"]
    sets = {**listing.list_prompt_sets(), **listing.find_installed("prompts")}
    lines += [f"  @{name:<15} {about}" for name, about in sets.items()]
    return "\n".join(lines) + "\n"


def _find_recipe(name: str) -> Callable[..., "TrainConfig"]:
    """Return the function of a built-in, published, installed or user-defined recipe."""
    if "/" in name:
        return _find_published(name)
    from fluvial.engines.run.recipes import RECIPES, make_method_recipe

    recipe: Any = plugins.load(name, "recipes", _explain_no_recipe, table=RECIPES)
    return make_method_recipe(recipe) if inspect.isclass(recipe) else recipe  # type: ignore[arg-type]


def _explain_no_recipe(recipe: Any) -> str | None:
    """Explain why an object is neither a recipe nor a method; None if it is one."""
    from fluvial.engines.run.method import Method, explain_no_method

    if inspect.isclass(recipe) and issubclass(recipe, Method):
        return explain_no_method(recipe)
    return plugins.make_call_check()(recipe)


def _find_published(name: str) -> Callable[[], "TrainConfig"]:
    """Return the recipe of a published run."""
    from fluvial.engines.extensions.published.resolve import resolve
    from fluvial.engines.extensions.published.runs import find_run

    run = find_run(name)
    config, deviations = resolve(run), run.deviations

    def recipe() -> "TrainConfig":
        return config

    recipe.__doc__ = (
        f"{run.algorithm} on {run.model}, as {run.sources[-1].repo} publishes it; {len(deviations)} settings differ "
        f"(fluvial runs {name})."
    )
    return recipe


def _build(name: str, recipe: Callable[..., "TrainConfig"], args: list[str]) -> "TrainConfig":
    """Return the run of a recipe, for the typed model.

    A recipe with a parameter `model` is called with it. The run folder of a named recipe is runs/NAME; a user-defined recipe
    sets its own.
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
