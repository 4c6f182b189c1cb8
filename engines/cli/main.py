"""The command line: `fluvial train|pretrain|eval|sample|plan NAME --field value`, generated from dataclasses."""

import contextlib
import io
import itertools
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fluvial.engines.errors import ElsewhereError, FluvialError, LostProcessError, UsageError

USAGE = """usage: fluvial COMMAND NAME [--field value ...]

  train RECIPE        post-train a model (fluvial train --help lists the recipes)
  pretrain MODEL      make a built-in model's base weights
  eval MODEL          score weights on held-out prompts
  sample MODEL        draw images of prompts into a PNG
  preferences MODEL   draw samples, and write the better and the worse of each prompt to a folder, for dpo
  plan MODEL          work out the memory of training, and what to turn so that it fits
  models              list the models that can be trained, and the memory of their weights

MODEL is handwriting (a small SD3 transformer that writes 4-digit codes) or handwriting-unet (a UNet of epsilon that does);
for sample a pipeline's folder or id on the Hub too. plan knows sd3.5-medium, flux.1-dev and qwen-image, and no UNet.
fluvial COMMAND NAME --help lists its fields. With several processes: torchrun --nproc-per-node 2 -m fluvial.engines ...
"""
MODELS = ("handwriting", "handwriting-unet")


class HelpPrintedError(Exception):
    """The person asked for help and has it: there is nothing left to do."""


@dataclass(frozen=True)
class EvalConfig:
    """Score weights on held-out prompts with the ODE.

    Args:
        weights: folder of the weights, e.g. the `weights` of a run folder; the shipped base by default.
        samples: how many.
        steps: of the schedule.
        micro_batch: samples a forward pass.
    """

    weights: Path | None = None
    samples: int = 400
    steps: int = 10
    micro_batch: int = 64

    def __post_init__(self) -> None:
        _at_least_one(samples=self.samples, steps=self.steps, micro_batch=self.micro_batch)


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0 done (or stopped as asked), 1 failed, 2 asked for wrongly."""
    exit_with(_command, list(sys.argv[1:] if args is None else args))


def exit_with(command: Callable[[list[str]], int], args: list[str]) -> NoReturn:
    """Run a command line and leave the process with its exit code."""
    # A Python started in the repository's root must not take its folders `core`, `kernels`, ... for packages.
    sys.path[:] = [entry for entry in sys.path if not _holds_sources(entry)]
    if not _holds_sources(os.getcwd()):
        sys.path.append(os.getcwd())  # for a person's own rewards; last, so that nothing there hides a package
    code = run(args, command)
    # All is written, and the process group is gone. Left to itself the interpreter now and then aborts here, over a thread
    # of gloo's that is still running (torch 2.13: about one exit in ten of several processes under load, and seen with one),
    # and a run that is done is taken for one that failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(args: list[str], command: Callable[[list[str]], int] | None = None) -> int:
    """Run a command line and return its exit code; errors that a person can mend are printed in one line."""
    try:
        return (command or _command)(args)
    except HelpPrintedError:
        return 0
    except ElsewhereError:
        return 1
    except UsageError as error:
        # What was typed is wrong on every rank alike; one of them says so.
        if os.environ.get("RANK", "0") == "0":
            _complain(error)
        return 2
    except (FluvialError, OSError) as error:  # OSError: a full disk or a lost one, wherever it was noticed
        _complain(error)
        return 1
    except KeyboardInterrupt:
        print("fluvial: stopped at once; what was saved before stays as it is", file=sys.stderr)
        return 130


def _complain(error: Exception) -> None:
    print(f"fluvial: {' '.join(str(error).split())}", file=sys.stderr)


def _command(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if args[0] == "--version":
        from importlib.metadata import version

        print(f"fluvial {version('fluvial')}")
        return 0
    if args == ["models"]:
        _models()
        return 0
    commands: dict[str, Callable[[str, str, list[str]], None]] = {
        "train": _train,
        "pretrain": _pretrain,
        "eval": _eval,
        "sample": _sample,
        "preferences": _preferences,
        "plan": _plan,
    }
    if args[0] not in commands:
        raise UsageError(f"unknown command {args[0]!r}, expected one of {', '.join(commands)}, models (fluvial --help)")
    if len(args) > 1 and args[1] in ("-h", "--help"):
        print(_recipes() if args[0] == "train" else USAGE, end="")
        return 0
    if args[0] == "train":
        from fluvial.engines.train.recipes import RECIPES

        names: Sequence[str] = list(RECIPES)
        what = "a recipe"
    else:
        names, what = (_planned() if args[0] == "plan" else MODELS), "a model"
    named = len(args) > 1 and (args[1] in names or (args[0] == "sample" and _is_pipeline(args[1])))
    if not named:
        given = repr(args[1]) if len(args) > 1 else "nothing"
        raise UsageError(
            f"{args[0]} needs the name of {what}, got {given}, expected one of {', '.join(names)} (fluvial {args[0]} --help)"
        )
    commands[args[0]](args[1], f"fluvial {args[0]} {args[1]}", args[2:])
    return 0


def _is_pipeline(name: str) -> bool:
    """Whether a name is that of a folder, or may be that of a model on the Hub."""
    return "/" in name or os.path.isdir(name)


def _models() -> None:
    """Print the models that can be trained, a line each."""
    from fluvial.models.catalogue import KNOWN

    print("--model                                          makes     predicts  network, its weights in bfloat16")
    print("handwriting                                      codes     velocity  0.6 million parameters, built in")
    print("handwriting-unet                                 codes     epsilon   0.7 million parameters, built in")
    for known in KNOWN:
        size = f"{known.billions:g} billion, {known.gibibytes:.0f} GiB ({known.pipeline})"
        print(f"{known.example:<48} {known.makes:<9} {known.prediction:<9} {size}")
    print()
    print("A model is named by its id on the Hub or by its folder; others of the same pipelines serve as well. Models of")
    print("epsilon take the sampler ddim (recipe ddpo), models of a velocity the others. Text encoders and VAE come on top;")
    print("fluvial plan works out the rest.")
    print()
    print("Any other flow pipeline of diffusers with a transformer can be named too: without an adapter its calls are")
    print("recorded and replayed, and it is refused, in words, where that does not give the same velocity.")


def _planned() -> Sequence[str]:
    """Return the models that `plan` knows."""
    from fluvial.engines.plan.plan import MODELS as known

    return list(known)


def _recipes() -> str:
    """Return what each recipe is and where it comes from, for a person to choose."""
    import inspect

    from fluvial.engines.train.recipes import RECIPES

    lines = ["usage: fluvial train RECIPE [--field value ...]", ""]
    for name, recipe in RECIPES.items():
        lines.append(f"  {name:<12} {inspect.getdoc(recipe).splitlines()[0]}")  # type: ignore[union-attr]
    lines += [
        "",
        "Numbers are the published ones; for the built-in models (--model handwriting, the default, or handwriting-unet)",
        "those that were found on them. fluvial train RECIPE --help says which, and lists all fields.",
    ]
    return "\n".join(lines) + "\n"


def _train(name: str, program: str, args: list[str]) -> None:
    import inspect
    from dataclasses import replace

    from fluvial.engines.train.config import TrainConfig
    from fluvial.engines.train.recipes import RECIPES
    from fluvial.engines.train.trainer import train

    recipe = RECIPES[name]
    # The defaults depend on the model, or on the run that goes on, so these are looked for before all is parsed.
    default = replace(recipe(*_typed(args, "--model")[-1:]), out=Path("runs") / name)
    resumes = "--resume" in args or _typed(args, "--resume-from")
    if resumes and not {"-h", "--help"} & set(args):
        default = _recorded(Path((_typed(args, "--out") or [str(default.out)])[-1]))
    config = parsed(TrainConfig, lambda: default, program, args, about=inspect.getdoc(recipe))
    try:
        train(config, console=_console())
    except LostProcessError as error:
        advice = f"earlier checkpoints are as they were, go on with --resume --out {config.out}"
        raise LostProcessError(f"{error}; {advice}") from error


def _typed(args: list[str], flag: str) -> list[str]:
    """Return the values that a flag is given, as `flag value` or `flag=value`."""
    words = [arg.replace("_", "-") if arg.startswith("--") and "=" not in arg else arg for arg in args]
    spaced = [value for word, value in itertools.pairwise(words) if word == flag]
    return spaced + [arg.partition("=")[2] for arg in args if arg.startswith(f"{flag}=")]


def _recorded(out: Path) -> Any:
    """Return the configuration of the run in a folder.

    Raises:
        UsageError: there is none.
    """
    import json
    from dataclasses import replace

    from fluvial.engines.train import recipes

    try:
        return replace(
            recipes.recorded(json.loads((out / "config.json").read_text())), out=out, resume=False, resume_from=None
        )
    except FileNotFoundError:
        message = f"{out} holds no run to resume: start one without --resume, or name its folder with --out"
        raise UsageError(message) from None
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"{out / 'config.json'} is not the record of a run of this version: {error}") from error


def _pretrain(name: str, program: str, args: list[str]) -> None:
    from fluvial.engines.train.pretrain import (
        PretrainConfig,
        handwriting_pretraining,
        handwriting_unet_pretraining,
        pretrain,
    )

    recipe = handwriting_unet_pretraining if name == "handwriting-unet" else handwriting_pretraining
    config = parsed(PretrainConfig, recipe, program, args)
    if config.model != name:
        raise UsageError(f"--model is {config.model}, and {name} is to be pretrained: fluvial pretrain {config.model}")
    pretrain(config, console=_console())


def _eval(name: str, program: str, args: list[str]) -> None:
    config = parsed(EvalConfig, EvalConfig, program, args)
    from fluvial.engines.fsdp.world import init_world
    from fluvial.engines.report.progress import table
    from fluvial.engines.rollout.generate import on_device
    from fluvial.engines.train import job as jobs
    from fluvial.engines.train.evaluate import evaluate

    job = jobs.named(name, weights=config.weights)
    with init_world() as world:
        module = jobs.build(job).to(world.device).eval()
        schedule = on_device(job.model.schedule(config.steps, job.shape), world.device)
        result = evaluate(
            job, module, schedule=schedule, samples=config.samples, micro_batch=config.micro_batch, world=world
        )
        if world.is_main:
            rows = {
                evaluator: (f"{result.exact[evaluator]:.4f}", f"{result.score[evaluator]:.4f}")
                for evaluator in job.evaluators
            }
            title = f"held-out prompts, {result.samples} samples of {config.weights or 'the shipped base'}"
            _console().print(table(title, ("exactly right", "characters right"), rows), highlight=False)


def _sample(name: str, program: str, args: list[str]) -> None:
    from fluvial.engines.cli.sample import PipelineSampleConfig, SampleConfig, sample, sample_pipeline

    if name in MODELS:
        said = sample(name, parsed(SampleConfig, SampleConfig, program, args))
    else:
        said = sample_pipeline(name, parsed(PipelineSampleConfig, PipelineSampleConfig, program, args))
    _console().print(said, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class PreferencesConfig:
    """Draw samples of training prompts, and write the best and the worst of each prompt's to a folder, by a reward.

    Args:
        out: folder for preferences.jsonl and its images.
        weights: folder of the model's weights; the shipped base by default.
        prompts: how many prompts; one whose samples all get the same reward gives no preference.
        group: samples a prompt.
        rewards: names of the job's rewards, each with a weight or without; the first by default.
        steps: of the schedule.
        seed: of prompts and noise.
        micro_batch: samples a forward pass.
    """

    out: Path
    weights: Path | None = None
    prompts: int = 400
    group: int = 8
    rewards: tuple[str, ...] = ()
    steps: int = 10
    seed: int = 0
    micro_batch: int = 128

    def __post_init__(self) -> None:
        _at_least_one(prompts=self.prompts, steps=self.steps, micro_batch=self.micro_batch)
        if self.group < 2:
            raise UsageError(f"group is {self.group}, expected at least 2: a preference is of two samples")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}, expected 0 <= seed < 2^63")


def _preferences(name: str, program: str, args: list[str]) -> None:
    config = parsed(PreferencesConfig, lambda: PreferencesConfig(Path("runs") / "preferences"), program, args)
    import torch

    from fluvial.core.dpo import best_and_worst
    from fluvial.core.random import fold_in, key, uniform
    from fluvial.engines.rewards import runner as rewards
    from fluvial.engines.rollout.generate import generate, on_device
    from fluvial.engines.rollout.streams import Stream
    from fluvial.engines.train import job as jobs

    job = jobs.named(name, weights=config.weights)
    jobs.claim_preferences(config.out)
    weighted = rewards.chosen(job.rewards, config.rewards)
    root, batch = key(config.seed), config.prompts * config.group
    places = (uniform(fold_in(root, Stream.PREFERENCE_PROMPTS), (config.prompts,)) * len(job.train_prompts)).long().tolist()
    prompts = [job.train_prompts[places[i // config.group]] for i in range(batch)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chunks = generate(
        job.model,
        jobs.build(job).to(device).eval(),
        prompts,
        range(batch),
        shape=job.shape,
        schedule=on_device(job.model.schedule(config.steps, job.shape), device),
        key=fold_in(root, Stream.PREFERENCE_SAMPLES),
        micro_batch=config.micro_batch,
    )
    drawn = torch.cat([chunk.images.cpu() for chunk in chunks])
    reward = sum(weight * evaluator(drawn, prompts) for evaluator, weight in weighted.values())
    found = best_and_worst(torch.as_tensor(reward), torch.arange(batch) // config.group)
    pairs = [(prompts[i], drawn[found.win[i]], drawn[found.lose[i]]) for i in torch.nonzero(found.valid).flatten().tolist()]
    jobs.write_preferences(config.out, pairs)
    _console().print(
        f"{len(pairs)} preferences of {config.prompts} prompts: {config.out}; train on them with\n"
        f"fluvial train dpo --model {name} --objective.preferences {config.out}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _plan(name: str, program: str, args: list[str]) -> None:
    from fluvial.engines.plan.check import check
    from fluvial.engines.plan.plan import PlanConfig, check_known, show, show_table

    check_known(name)
    config = parsed(PlanConfig, PlanConfig, program, args)
    {(False, False): show, (True, False): show_table, (False, True): check}[config.table, config.check](
        name, config, console=_console()
    )


def parsed(kind: type, default: Callable[[], Any], program: str, args: list[str], *, about: str | None = None) -> Any:
    """Return the configuration that the arguments ask for.

    Raises:
        UsageError: a flag or a value is wrong; one line, where the library would draw a box.
        HelpPrintedError: help was asked for, and printed.
    """
    import tyro

    base, boxed = default(), io.StringIO()
    args = ["--rewards" if word == "--reward" else word for word in args]  # a person has one, mostly
    try:
        with contextlib.redirect_stderr(boxed):
            return tyro.cli(
                kind, prog=program, description=about or default.__doc__ or kind.__doc__, default=base, args=args,
                # Of the objectives there is the recipe's, with its fields, not a choice of them.
                config=(tyro.conf.AvoidSubcommands,),
            )  # fmt: skip
    except SystemExit as done:
        if not done.code:
            raise HelpPrintedError from None
        raise UsageError(f"{_unboxed(boxed.getvalue())} ({program} --help)") from None


def _unboxed(box: str) -> str:
    """Return what a box of the argument parser says, in one line: its first section, and the flag it would suggest."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│ \t") for line in plain.splitlines() if line.startswith("│")]
    sections = [" ".join(section.split()) for section in re.split(r"─{3,}", "\n".join(lines))]
    message = re.sub(r"^Error parsing [\w.]+: (?=[a-z_]+: )", "", sections[0])
    suggested = re.search(r"--[\w.-]+", sections[1]) if len(sections) > 2 and "you meant" in sections[1] else None
    return f"{message}; did you mean {suggested[0]}?" if suggested else message


def _console() -> Any:
    from rich.console import Console

    return Console()


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name} is {number}, expected at least 1")


def _holds_sources(entry: str) -> bool:
    """Whether a sys.path entry is the root of fluvial's sources, where `kernels` would hide Hugging Face's package."""
    root = os.path.abspath(entry or os.getcwd())
    return all(os.path.isfile(os.path.join(root, name, "__init__.py")) for name in ("core", "engines", "kernels")) and (
        os.path.isfile(os.path.join(root, "kernels", "dispatch.py"))
    )
