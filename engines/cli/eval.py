"""`fluvial eval MODEL`: generate samples with a model, a run or a checkpoint, and score them with evaluators."""

import json
from contextlib import ExitStack
from dataclasses import replace

from fluvial.engines.cli.brief import EVAL, asks_for_help
from fluvial.engines.cli.eval_models import EvalConfig, apply_run_settings, apply_suite_settings, find_source, open_networks
from fluvial.engines.cli.listing import JSON, drop_flag, may_be_model
from fluvial.engines.cli.listing import choose_defaults as defaults_of
from fluvial.engines.cli.parse import console, find_values, flags_in_errors, parse_config, parse_name
from fluvial.engines.engine.world import init_world
from fluvial.engines.named_models import MODELS
from fluvial.engines.run.evaluation.evaluate import evaluate
from fluvial.engines.run.evaluation.folder import BASE, IMAGES, EvaluationFolder, find_suite
from fluvial.engines.run.evaluation.table import as_records, format_tables, list_rows
from fluvial.engines.run.process.heap import keep_freed_memory
from fluvial.engines.run.process.run_folder import without_infinities
from fluvial.engines.run.record import CONVERTER
from fluvial.engines.sampling.generate import move_schedule
from fluvial.engines.sampling.solvers import serving_solver

# Fields of a run's evaluation whose flags have other names in this command.
FLAGS = {f"evaluation.{name}": name for name in ("prompts", "rewards", "seeds")} | {
    f"evaluation.{name}": f"pipeline.{name}" for name in ("height", "width")
}


def run(args: list[str]) -> None:
    """Print the scores of each evaluator, as JSON with --json, and write the folder of `out`."""
    args, as_json = drop_flag(args, JSON)
    if asks_for_help(args):
        parse_config(EvalConfig(), "fluvial eval MODEL_OR_RUN", args[:1], brief=EVAL)
    name = parse_name(
        "eval", args, tuple(MODELS), "a model, or a folder of a pipeline, run or checkpoint", fits=may_be_model
    )
    config = parse_config(find_defaults(name, args[1:]), f"fluvial eval {name}", args[1:], brief=EVAL)
    with flags_in_errors(config, FLAGS):
        score(name, config, as_json=as_json)


def find_defaults(name: str, args: list[str]) -> EvalConfig:
    """Return the default settings of an evaluation: those of the suite, of the run, or of the kind of model."""
    preset = defaults_of(name)
    config = EvalConfig(
        seeds=1 if preset.samples is None else None,
        samples=preset.samples,
        steps=preset.steps,
        micro_batch=preset.micro_batch,
    )
    config = apply_run_settings(name, config)
    if suites := find_values(args, "--suite"):
        compared = find_source(name) is not None or bool(find_values(args, "--weights") or find_values(args, "--lora"))
        return apply_suite_settings(name, find_suite(suites[-1]), config, compared=compared)
    # With a file of prompts, or several samples per prompt, every prompt is sampled instead of random ones.
    if find_values(args, "--prompts") or find_values(args, "--seeds"):
        config = replace(config, seeds=config.seeds or 1, samples=None)
    return config


def score(name: str, config: EvalConfig, *, as_json: bool = False) -> None:
    """Generate samples, score them, print the table or its rows as JSON, and write the folder."""
    keep_freed_memory()
    with init_world() as world, ExitStack() as stack:
        subjects = open_networks(name, config, world, stack)
        folder = None if config.out is None else EvaluationFolder(config.out, world)
        results = {}
        for kind, subject in ((BASE, subjects.base), (IMAGES, subjects.ours)):
            if subject is None:
                continue
            model, shape = subject.job.model, subject.job.shape
            with subject.network() as module:
                results[kind] = evaluate(
                    subject.job,
                    module,
                    samples=config.samples,
                    seeds=config.seeds,
                    micro_batch=config.micro_batch,
                    schedule=move_schedule(model.schedule(config.steps, shape), world.device),
                    world=world,
                    guidance=subjects.guidance,
                    solver=serving_solver(config.solver, model),
                    keep=None if folder is None else folder.keep(kind),
                )
        ours, base = results[IMAGES], results.get(BASE)
        table = list_rows(ours.scores, None if base is None else base.scores)
        title, settings = subjects.ours.title, without_infinities(CONVERTER.unstructure(config))
        if folder is not None:
            folder.finish(table, ours, base, title=title, settings=settings)
        if world.is_main and as_json:
            print(json.dumps({"model": title, "settings": settings, "rows": as_records(table)}, indent=1, allow_nan=False))
        elif world.is_main:
            versus = "" if subjects.base is None else f", base {subjects.base.title}"
            sampling = f"{config.steps} steps, guidance {config.guidance:g}"
            prompts = subjects.prompts if config.suite is None else f"suite {config.suite}"
            for part in format_tables(f"{prompts}, {ours.samples} samples of {title}, {sampling}{versus}", table):
                console().print(part, highlight=False)
            if config.out is not None:
                print(f"images, scores and table: {config.out}")
