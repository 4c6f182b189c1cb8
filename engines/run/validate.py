"""Combinations of settings that have no meaning in a run."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fluvial.engines.errors import UsageError, no_effect
from fluvial.engines.methods.losses import KLConfig
from fluvial.engines.methods.table import name_of
from fluvial.engines.run.declared import Teacher
from fluvial.engines.sampling.config import REPLAYED
from fluvial.engines.sampling.noising import knows_its_schedule_only
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.tail import Tail
from fluvial.models import Prediction

if TYPE_CHECKING:
    from fluvial.engines.run.config import TrainConfig

DEFAULT_MAX_LOG_RATIO = 1e-3


def config_problems(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield what has no meaning in a run, the objective's own problems first."""
    for problem in config.objective.traits.refuses(config):
        yield problem if isinstance(problem, UsageError) else UsageError(problem)
    for has_no_effect, fields, why in _effects(config):
        yield from (no_effect(field, why) for field in fields.split() if has_no_effect and _is_set(config, field))
    yield from _counts(config)
    yield from _steps(config) if config.objective.traits.trains_on == "steps" else _clean_samples(config)
    yield from _policies(config)
    yield from _programs(config)


def _effects(config: "TrainConfig") -> Iterator[tuple[bool, str, str]]:
    """Yield whether fields have no effect, their names, and why."""
    traits, kl, with_name = config.objective.traits, config.kl, f"with {name_of(config.objective)}"
    on_steps, given, ratios = traits.trains_on == "steps", not config.makes_samples, config.takes_ratios
    pairs, from_data = traits.preferences is not None, f"{with_name}, which learns from data without a rollout"
    learns, adds_kl = traits.rewards != "nothing", traits.takes_kl
    compares_ref = "ref" in config.objective.networks(KLConfig())
    computes = traits.takes_implementation or ratios or (adds_kl and kl.is_on)
    advantage = "scale eps clip ddof drop_zero rescale extremes history floors"
    scored = config.scores_samples

    yield on_steps, "noising", f"{with_name}, which trains on the steps of its rollouts"
    yield not on_steps, "rollout.trained", f"{with_name}, which trains on no recorded steps"
    no_noise = not on_steps and config.rollout.sampler.is_deterministic
    yield no_noise, "rollout.window", "with a sampler that has no stochastic steps"
    fields = "rollout.form rollout.reduction correction.mode"
    yield not ratios, fields, f"{with_name}, which takes no log-probability of recorded steps"
    yield not traits.has_ratio, "max_log_ratio", f"{with_name}, which has no ratio"
    fields = " ".join(f"advantage.{field}" for field in advantage.split())
    yield traits.rewards != "advantages", fields, f"{with_name}, which takes no advantages"
    yield not scored, "rewards", f"{with_name}, which generates no samples that could be scored"
    yield not (config.eval_every and scored and learns), "stop_when_gamed", "without rewards to learn from and eval_every"
    yield given, "rollout.shared_noise rollout.autocast rollout.reuse_prompt rollout.source rollout.store", from_data
    yield given, "asynchronous.ahead", from_data
    yield config.rollout.source.startswith(REPLAYED), "asynchronous.ahead", "with rollouts that are stored already"
    yield not given or pairs, "data", f"{with_name}, which learns from rollouts or preferences here (sft learns from images)"
    yield bool(config.data) or pairs, "prompts", "with data or preferences, which have their own"
    yield not (config.data or pairs), "data_cache data_errors", f"{with_name} here, which learns from no images"
    yield kl.ema_coef == 0, "kl.ema_cap kl.ema_rise", "with `kl.ema_coef` 0"
    yield not kl.is_on, "kl.weight", "with `kl.coef` 0"
    yield not ratios, "kl.weight", f"{with_name}, whose KL term is mean |v - v_ref|^2"
    yield kl.coef == 0 and not compares_ref, "kl.guidance", f"{with_name} and `kl.coef` 0, without a reference"
    unguided = config.rollout.guidance.update == "conditional"
    yield unguided, "kl.guidance", "with `rollout.guidance.update` conditional, where the policy has none"
    yield not adds_kl, "kl.ema_coef", f"{with_name}, whose loss adds no KL"
    added = "whose loss adds no KL (one that adds a KL has traits.takes_kl)"
    yield not (adds_kl or compares_ref), "kl.coef", f"{with_name}, {added}"
    yield config.train == "full", "lora.weights", "with `train` full, which has no adapter"
    yield config.train == "lora", "engine.masters", "with `train` lora, whose adapters are held in float32"
    yield config.train == "full", "engine.base", "with `train` full, which freezes no weights"
    yield not computes, "implementation", f"{with_name} and these settings, in which no kernel takes part"


def _is_set(config: Any, field: str) -> bool:
    """Return whether a field, by its dotted name, has another value than its default."""
    *parents, name = field.split(".")
    for parent in parents:
        config = getattr(config, parent)
    declared = next(each for each in dataclasses.fields(config) if each.name == name)
    default = declared.default if declared.default_factory is dataclasses.MISSING else declared.default_factory()
    return bool(getattr(config, name) != default)


def _counts(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield numbers of samples and updates that do not divide, and groups that are too small."""
    rollout, traits, name = config.rollout, config.objective.traits, name_of(config.objective)
    if rollout.batch % config.minibatches:
        yield UsageError("minibatches", config.minibatches, f"a divisor of the {rollout.batch} samples of a rollout")
    if config.updates % config.updates_per_rollout:
        expected = f"a multiple of epochs x minibatches = {config.updates_per_rollout}, the number of updates per rollout"
        yield UsageError("updates", config.updates, expected)
    if config.micro_batch == "auto" and (reason := explain_fixed_micro_batch(config)) is not None:
        yield UsageError("micro_batch", "auto", "a number", reason)
    compares = traits.rewards in ("advantages", "order") and not config.advantage.history
    if compares and config.scores_samples and rollout.group < 2:
        yield UsageError("rollout.group", rollout.group, "at least 2", f"{name} compares a sample with others of its group")
    compared = rollout.window.count_compared(rollout.group)
    if 2 * config.advantage.extremes > compared:
        yield UsageError(
            "advantage.extremes", config.advantage.extremes, f"at most half of the {compared} that are compared"
        )


def _steps(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield what has no meaning for an objective that trains on recorded steps."""
    rollout, sampler, name = config.rollout, config.rollout.sampler, name_of(config.objective)
    corrected, high, unscaled = config.correction.mode != "none", rollout.steps - 1, config.recorded_form == "unscaled"
    if config.takes_ratios and sampler.is_deterministic:
        hint = f"{name} needs the log-probability of each step, which deterministic steps do not have"
        yield UsageError("rollout.sampler", sampler.kind, "a stochastic one, e.g. flow_sde", hint)
    elif sampler.solver != "euler":
        yield UsageError("rollout.sampler.solver", sampler.solver, "euler", f"{name} trains on steps, which are transitions")
    if corrected and rollout.form == "unscaled":
        yield UsageError("rollout.form", "unscaled", "density or no_const", "a correction takes a ratio of densities")
    if config.takes_ratios and rollout.autocast and not corrected:
        hint = "rollout and update compute different numbers, so that ratios are wrong from the start"
        yield UsageError("rollout.autocast", True, "False, or `correction.mode` truncate", hint)
    if rollout.guidance.update == "conditional":
        yield UsageError("rollout.guidance.update", "conditional", "guided", f"{name} trains on steps of guided rollouts")
    if not (sampler.rule.last_step_is_deterministic and rollout.window.range(rollout.steps)[1] == rollout.steps):
        return
    if not unscaled and (rollout.window.differs or rollout.window.count(rollout.steps) == 1):
        hint = f"the last step of {sampler.kind} has no log-probability, except in `rollout.form` unscaled"
        yield UsageError("rollout.window.high", rollout.window.high, f"at most {high}", hint)
    recorded = rollout.window.count(rollout.steps)
    left_out = rollout.trained.kind == "first" and rollout.trained.count(recorded) < recorded
    if unscaled and config.takes_ratios and config.kl.is_on and not left_out:
        hint = f"the last step of {sampler.kind} has no KL, and form unscaled trains on it"
        yield UsageError("rollout.window.high", rollout.window.high, f"at most {high}, or another form, or kl.coef 0", hint)


def _clean_samples(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield what has no meaning for an objective that trains on clean samples."""
    config.noising.check_steps(config.rollout.steps)
    sampler, given = config.rollout.sampler, not config.makes_samples
    if given and (sampler.kind, sampler.solver) != ("ode", "euler"):
        hint = f"{name_of(config.objective)} learns from data without a rollout"
        yield UsageError("rollout.sampler", sampler.kind, "ode with solver euler", hint)


def _policies(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield which of the policies that the objective compares with do not exist."""
    traits, name = config.objective.traits, name_of(config.objective)
    if any(isinstance(network, Teacher) and network.weights is None for network in config.networks.values()):
        yield UsageError("objective.teacher", None, "a folder of weights", f"{name} compares with a teacher")
    if config.followers and config.train == "full":
        kept = ", ".join(config.followers)
        yield UsageError("train", "full", "lora", f"{name} keeps policies that lag behind ({kept}) as LoRA adapters")
    if traits.offline and traits.trains_on == "preferences" and traits.preferences is None:
        yield UsageError("traits.preferences", None, "a folder", f"{name} is offline and trains on preferences")


def _programs(config: "TrainConfig") -> Iterator[UsageError]:
    """Yield what cannot be computed together: blocks that are left out, and rollouts ahead of the updates."""
    engine, ahead = config.engine, config.asynchronous.ahead
    if config.rollout.step_cache and engine.compile is not False:
        hint = "`rollout.step_cache` leaves out blocks, which compiled ones cannot be"
        yield UsageError("engine.compile", engine.compile, "False", hint)
    if config.rollout.step_cache and engine.context_parallel > 1:
        hint = "with `rollout.step_cache`, ranks that share a sample would leave out different blocks"
        yield UsageError("engine.context_parallel", engine.context_parallel, "1", hint)
    if engine.base != "auto" and config.rollout.is_served:
        hint = "servers make rollouts with weights that are not quantised, so that ratios are wrong from the start"
        yield UsageError("engine.base", engine.base, "auto", hint)
    form = config.lora.form.kind
    if config.train == "lora" and form != "lora" and config.rollout.is_served and config.rollout.servers.weights == "auto":
        hint = f"servers take no adapters of `lora.form` {form}, and merged weights do"
        yield UsageError("rollout.servers.weights", "auto", "disk or shared_memory", hint)
    if ahead and config.takes_ratios and config.correction.mode == "none":
        hint = f"with `asynchronous.ahead` {ahead}, older weights make the rollouts, and ratios need a correction"
        yield UsageError("correction.mode", "none", "truncate, reject or mask", hint)
    if ahead and engine.offload == "phases":
        hint = f"with `asynchronous.ahead` {ahead}, rollout and update happen at once"
        yield UsageError("engine.offload", "phases", "none or always", hint)


def check_model(config: "TrainConfig", prediction: Prediction, *, recorded: bool = False, conditioned: bool = False) -> None:
    """Raise UsageError if a run does not fit its model.

    Args:
        prediction: what the model predicts.
        recorded: whether the model is a pipeline without an adapter, which is replayed at the levels of its schedule.
    """
    rollout, sampler, model = config.rollout, config.rollout.sampler, config.model
    own_levels = f"{model} predicts epsilon or has no adapter, and knows only the levels of its schedule"
    on_schedule = knows_its_schedule_only(prediction, recorded=recorded)
    if sampler.rule.prediction not in (prediction, None):
        fitting = [name for name, rule in SAMPLERS.items() if rule.prediction in (prediction, None)]
        raise UsageError("rollout.sampler", sampler.kind, " or ".join(fitting), f"{model} predicts {prediction}")
    for field, solver in (("rollout.sampler", sampler.solver), ("evaluation.solver", config.evaluation.solver)):
        if on_schedule and solver == "sa_solver":
            raise UsageError(field, solver, "dpmpp_2m", own_levels)
    if prediction == "epsilon" and config.objective.traits.flows_only:
        raise UsageError("objective", name_of(config.objective), "one for epsilon", f"{model} does not predict a velocity")
    if recorded and config.evaluation_steps != rollout.steps:
        raise UsageError("evaluation.steps", config.evaluation.steps, "that of the rollout", own_levels)
    if recorded and config.evaluation_guidance != rollout.guidance:
        raise UsageError("evaluation.guidance", config.evaluation.guidance, "that of the rollout", f"{model} has no adapter")
    if on_schedule and rollout.window.tail != Tail():
        raise UsageError("rollout.window.tail", rollout.window.tail.solver, "its default", own_levels)
    if recorded and config.kl.guidance is not None:
        raise UsageError("kl.guidance", config.kl.guidance, "None", f"{model} has no adapter, and its pipeline's guidance")
    if conditioned and config.kl.guidance not in (None, 1) and rollout.guidance.scale == 1:
        hint = "prompts have images, and so has the negative prompt of a guided rollout only: guide the rollout, too"
        raise UsageError("kl.guidance", config.kl.guidance, "None or 1", hint)
    noising = config.noising.choose_levels(on_schedule=on_schedule)
    if noising != config.noising:
        noising.check_steps(rollout.steps)
    if on_schedule and noising.levels.kind not in ("schedule", "stratified"):
        raise UsageError("noising.levels", noising.levels.kind, "auto, schedule or stratified", own_levels)


def explain_fixed_micro_batch(config: "TrainConfig") -> str | None:
    """Return why another micro-batch would change more than rounding, or could not be tried; None if neither is so."""
    if config.rollout.window.draw == "call":
        return "rollout.window.draw call draws a window for the samples of each micro-batch"
    if config.noising.draw == "call":
        return "noising.draw call draws levels for the samples of each micro-batch"
    if config.objective.traits.rewards == "gradients":
        return f"{name_of(config.objective)} computes gradients through decoder and rewards, whose memory is not tried"
    return None
