"""Combinations of settings that have no meaning in a run. Each problem is one line: which fields, why, what to use."""

from collections.abc import Iterator

from fluvial.engines.objectives.advantages import AdvantageConfig
from fluvial.engines.objectives.losses import KLConfig
from fluvial.engines.objectives.protocol import RunSettings
from fluvial.engines.objectives.table import name_of
from fluvial.engines.rollout.after import AfterWindow
from fluvial.engines.rollout.config import REPLAYED
from fluvial.engines.rollout.noising import NoisingConfig
from fluvial.engines.rollout.samplers import SAMPLERS
from fluvial.models import Prediction

DEFAULT_MAX_LOG_RATIO = 1e-3


def config_problems(config: RunSettings) -> Iterator[str]:
    """Yield what has no meaning in a run."""
    yield from config.objective.traits.refuses(config)  # the objective's own words come first
    yield from _counts(config)
    if config.micro_batch == "auto" and (reason := fixed_micro_batch(config)) is not None:
        yield f"micro_batch is auto, and {reason}: set micro_batch to a number"
    yield from _rewards(config)
    yield from _ratios(config)
    if config.objective.traits.trains_on == "steps":
        yield from _recorded_steps(config)
    else:
        yield from _clean_samples(config)
    if not config.makes_samples:
        yield from _given_samples(config)
    yield from _images(config)
    yield from _policies(config)
    yield from _kl(config)
    yield from _model(config)
    yield from _implementation(config)
    yield from _step_cache(config)
    if config.asynchronous.ahead:
        yield from _ahead(config)


def check_model(config: RunSettings, prediction: Prediction, *, recorded: bool = False) -> None:
    """Raise ValueError if a run does not fit its model.

    Args:
        config: the run.
        prediction: what the model predicts.
        recorded: whether the model is a pipeline without an adapter, which is replayed at the levels of its schedule.
    """
    rollout = config.rollout
    if rollout.rule.prediction not in (prediction, None):
        fitting = [name for name, other in SAMPLERS.items() if other.prediction in (prediction, None)]
        raise ValueError(
            f"rollout.sampler is {rollout.sampler_name}, which is for models that predict {rollout.rule.prediction}, and "
            f"{config.model} predicts {prediction}: use {' or '.join(fitting)}"
        )
    if prediction == "epsilon" and "sa_solver" in (rollout.solver, config.evaluation_solver):
        raise ValueError(
            f"rollout.solver or evaluation.solver is sa_solver, which is for flows, and {config.model} predicts epsilon: "
            "use dpmpp_2m"
        )
    if prediction == "epsilon" and config.objective.traits.flows_only:
        raise ValueError(
            f"objective {name_of(config.objective)} is defined for flows, and {config.model} predicts epsilon: use another "
            "objective or model"
        )
    if recorded and (config.evaluation_steps != rollout.steps or config.evaluation_guidance != rollout.guidance):
        raise ValueError(
            f"evaluation.steps or evaluation.guidance is not the rollout's, and {config.model} has no adapter and knows "
            "only the steps and the guidance of the rollout: leave them as they are"
        )
    if rollout.after != AfterWindow() and (prediction == "epsilon" or recorded):
        raise ValueError(
            f"rollout.after is set, and {config.model} predicts epsilon or has no adapter, so that it knows only the levels "
            "of its schedule: leave it"
        )
    if recorded and config.kl.guidance is not None:
        raise ValueError(
            f"kl.guidance is {config.kl.guidance:g}, and {config.model} has no adapter, so that its guidance is that of the "
            "pipeline: leave it"
        )
    if recorded and "sa_solver" in (rollout.solver, config.evaluation_solver):
        raise ValueError(
            f"rollout.solver or evaluation.solver is sa_solver, which visits levels of its own, and {config.model} has no "
            "adapter and knows only those of its schedule: use dpmpp_2m"
        )
    if (prediction == "epsilon" or recorded) and config.noising.levels not in ("schedule", "stratified"):
        raise ValueError(
            f"noising.levels is {config.noising.levels}, and {config.model} knows only the levels of its schedule: use "
            "schedule or stratified"
        )


def fixed_micro_batch(config: RunSettings) -> str | None:
    """Return why another micro-batch would change more than rounding, or could not be tried; None if neither is so."""
    if config.rollout.window_draw == "call":
        return "rollout.window_draw is call, which draws a window for the samples of each micro-batch"
    if config.noising.draw == "call":
        return "noising.draw is call, which draws levels for the samples of each micro-batch"
    if config.objective.traits.through is not None:
        return f"{name_of(config.objective)} computes gradients through decoder and rewards, whose memory is not tried"
    return None


def _counts(config: RunSettings) -> Iterator[str]:
    """Yield numbers of samples and updates that do not divide."""
    if config.rollout.batch % config.minibatches:
        yield f"minibatches is {config.minibatches}, expected a divisor of the {config.rollout.batch} samples of a rollout"
    if config.updates % config.updates_per_rollout:
        yield (
            f"updates is {config.updates}, expected a multiple of epochs x minibatches = {config.updates_per_rollout}, the "
            "number of updates per rollout"
        )


def _rewards(config: RunSettings) -> Iterator[str]:
    """Yield what does not fit what rewards are to the objective."""
    objective, rollout, name = config.objective, config.rollout, name_of(config.objective)
    compares = objective.traits.rewards in ("advantages", "order") and not config.advantage.history
    if compares and config.scores_samples and rollout.group < 2:
        yield (
            f"rollout.group is {rollout.group}, expected at least 2: {name} compares a sample with the others of its group, "
            "and there is nothing to be learnt from a group of one"
        )
    if 2 * config.advantage.extremes > rollout.compared:
        yield (
            f"advantage.extremes is {config.advantage.extremes}, and a group has {rollout.compared} samples: use at most "
            "half of them"
        )
    if objective.traits.rewards != "advantages" and config.advantage != AdvantageConfig(combine=config.advantage.combine):
        yield f"advantage is set, and {name} takes no advantages: leave it as it is"
    if config.stop_when_gamed and not (
        config.eval_every and config.scores_samples and objective.traits.rewards != "nothing"
    ):
        yield (
            f"stop_when_gamed is {config.stop_when_gamed}, and eval_every is 0 or {name} learns from no rewards: use "
            "stop_when_gamed 0"
        )
    if not config.scores_samples and config.rewards:
        yield f"rewards is set, and {name} generates no samples that could be scored: leave it as it is"


def _ratios(config: RunSettings) -> Iterator[str]:
    """Yield what has no meaning with, or without, a ratio of log-probabilities."""
    rollout, name = config.rollout, name_of(config.objective)
    if config.takes_ratios and rollout.is_deterministic:
        yield (
            f"rollout.sampler is {rollout.sampler_name}, and {name} needs the log-probability of each step, which "
            "deterministic steps have not: use flow_sde"
        )
    if not config.takes_ratios and config.correction.mode != "none":
        yield (
            f"correction.mode is {config.correction.mode}, which weights log-probabilities of recorded steps, and {name} "
            "takes none: use correction.mode none"
        )
    if config.correction.mode != "none" and rollout.form == "unscaled":
        yield "rollout.form is unscaled, and correction takes a ratio of densities, which it is not: use density or no_const"
    if config.takes_ratios and rollout.autocast and config.correction.mode == "none":
        yield (
            "rollout.autocast makes the rollout compute other numbers than the update, so that ratios are wrong from the "
            "start: use correction.mode truncate as well, or no autocast"
        )
    if not config.objective.traits.has_ratio and config.max_log_ratio != DEFAULT_MAX_LOG_RATIO:
        yield f"max_log_ratio is {config.max_log_ratio:g}, and {name} has no ratio: leave it as it is"


def _recorded_steps(config: RunSettings) -> Iterator[str]:
    """Yield what has no meaning for an objective that trains on recorded steps."""
    rollout, name = config.rollout, name_of(config.objective)
    deterministic_end = rollout.rule.last_step_is_deterministic
    if rollout.guidance.update == "conditional":
        yield (
            f"rollout.guidance.update is conditional, and {name} trains on the steps of guided rollouts: use update guided"
        )
    if config.noising != NoisingConfig():
        yield f"noising is set, and {name} trains on the steps of its rollouts: leave it as it is"
    if rollout.solver != "euler":
        yield f"rollout.solver is {rollout.solver}, whose steps are no transition, and {name} trains on steps: use euler"
    if rollout.pick == "first" and rollout.fraction == 1:
        yield "rollout.pick is first, and rollout.fraction is 1, which takes all recorded steps: use a fraction below 1"
    if not config.takes_ratios and (rollout.form, rollout.reduction) != ("density", "mean"):
        yield f"rollout.form or rollout.reduction is set, and {name} takes no log-probability: leave them as they are"
    if deterministic_end and config.recorded_form != "unscaled" and rollout.may_be_last_alone:
        yield (
            f"the last step of {rollout.sampler_name} is deterministic and has no log-probability, and a window of 1 may be "
            f"just that step: use a longer rollout.window, rollout.window_high <= {rollout.steps - 1} or form unscaled"
        )
    holds_end = deterministic_end and config.recorded_form != "unscaled" and rollout.window_range[1] == rollout.steps
    if rollout.windows_differ and holds_end:
        yield (
            f"rollout.window_draw or branches is set, and the last step of {rollout.sampler_name} has no "
            "log-probability, so that samples would differ in their number of recorded steps: use rollout.window_high <= "
            f"{rollout.steps - 1} or form unscaled"
        )
    all_recorded = rollout.pick == "random" or rollout.trained_of(rollout.window_size) == rollout.window_size
    trains_on_end = deterministic_end and config.recorded_form == "unscaled" and rollout.window_range[1] == rollout.steps
    if config.takes_ratios and config.kl.is_on and trains_on_end and all_recorded:
        yield (
            f"the last step of {rollout.sampler_name} is deterministic and has no KL, and form unscaled trains on it: "
            f"use kl.coef 0, rollout.window_high <= {rollout.steps - 1} or another form"
        )


def _clean_samples(config: RunSettings) -> Iterator[str]:
    """Yield what has no meaning for an objective that trains on clean samples."""
    rollout, name = config.rollout, name_of(config.objective)
    if (rollout.form, rollout.reduction) != ("density", "mean"):
        yield f"rollout.form or rollout.reduction is set, and {name} takes no log-probability: leave them as they are"
    if rollout.fraction != 1:
        yield f"rollout.fraction is {rollout.fraction:g}, and {name} trains on no recorded steps: use noising.each"
    if rollout.pick != "random":
        yield f"rollout.pick is {rollout.pick}, and {name} trains on no recorded steps: leave it as it is"
    if rollout.is_deterministic and (rollout.window is not None or rollout.window_low or rollout.window_high is not None):
        yield (
            f"rollout.window is set, and {rollout.sampler_name} has no stochastic steps: leave the window of {name} as it is"
        )
    if config.noising.highest is not None and config.noising.highest > rollout.steps:
        yield f"noising.highest is {config.noising.highest}, expected at most the {rollout.steps} steps of the schedule"
    if config.noising.skip >= rollout.steps:
        yield f"noising.skip is {config.noising.skip}, expected less than the {rollout.steps} steps of the schedule"
    if config.noising.levels == "schedule" and config.noising.each > rollout.steps - config.noising.skip:
        yield (
            f"noising.each is {config.noising.each}, expected at most the {rollout.steps - config.noising.skip} steps of "
            "the schedule: use fewer, or noising.levels continuous"
        )


def _given_samples(config: RunSettings) -> Iterator[str]:
    """Yield what has no meaning for an objective whose samples are given."""
    rollout, name = config.rollout, name_of(config.objective)
    changed = rollout.solver != "euler" or rollout.shared_noise or rollout.autocast or not rollout.reuse_prompt
    if rollout.sampler != "ode" or changed:
        yield (
            f"rollout.sampler, solver, shared_noise, autocast or reuse_prompt is set, and {name} learns from data without a "
            "rollout: use sampler ode and solver euler, and leave the others as they are"
        )
    if rollout.source or rollout.store is not None:
        yield f"rollout.source or rollout.store is set, and {name} learns from data without a rollout: leave them"
    if config.prompts and config.objective.traits.preferences is not None:
        yield "prompts is set, and a folder of preferences has its own: leave it as it is"


def _images(config: RunSettings) -> Iterator[str]:
    """Yield settings of images where a run learns from none."""
    traits, name = config.objective.traits, name_of(config.objective)
    if config.data and (not traits.offline or traits.preferences is not None):
        others = "its samples are made by rollouts" if not traits.offline else "it learns from a folder of preferences"
        yield f"data is set, and {name} takes none: {others}; use prompts, or the recipe sft"
    if config.data and config.prompts:
        yield "prompts is set, and data has captions, which are the prompts: leave it as it is"
    if (config.data_cache is not None or config.data_errors != "refuse") and not config.data and traits.preferences is None:
        yield f"data_cache or data_errors is set, and {name} here learns from no images: set data, or leave them as they are"


def _policies(config: RunSettings) -> Iterator[str]:
    """Yield which of the policies that the objective compares with cannot be had."""
    traits, name = config.objective.traits, name_of(config.objective)
    if "teacher" in traits.compares_with and traits.teacher is None:
        yield f"objective.teacher is not set, and {name} compares with a teacher: use the folder of its weights"
    if config.followers and config.train == "full":
        kept = ", ".join(follower.name for follower in config.followers)
        yield f"train is full, and {name} keeps policies that lag behind ({kept}) as further LoRA adapters: use train lora"
    if traits.offline and traits.trains_on == "preferences" and traits.preferences is None:
        yield f"{name} is offline and trains on preferences, and traits.preferences is None: expected a folder"


def _kl(config: RunSettings) -> Iterator[str]:
    """Yield settings of the KL term that do nothing."""
    traits, name = config.objective.traits, name_of(config.objective)
    if config.kl.ema_coef == 0 and (config.kl.ema_cap, config.kl.ema_rise) != (KLConfig.ema_cap, KLConfig.ema_rise):
        yield "kl.ema_cap or kl.ema_rise is set, and kl.ema_coef is 0, so that there is no average: use kl.ema_coef > 0"
    if not config.kl.is_on and config.kl.weight != "auto":
        yield f"kl.weight is {config.kl.weight}, and kl.coef is 0, so that there is no KL: use kl.coef > 0"
    elif config.kl.weight != "auto" and not config.takes_ratios:
        yield f"kl.weight is {config.kl.weight}, and the KL term of {name} is mean |v - v_ref|^2: leave it as it is"
    if config.kl.guidance is not None and config.kl.coef == 0 and "ref" not in traits.compares_with:
        yield f"kl.guidance is {config.kl.guidance:g}, and {name} compares with no reference: use kl.coef > 0, or leave it"
    if config.kl.guidance is not None and config.rollout.guidance.update == "conditional":
        yield (
            f"kl.guidance is {config.kl.guidance:g}, and rollout.guidance.update is conditional, so that neither policy nor "
            "reference is guided: leave kl.guidance"
        )
    if config.kl.ema_coef > 0 and not traits.takes_kl:
        yield f"kl.ema_coef is {config.kl.ema_coef:g}, and the loss of {name} adds no KL: use kl.ema_coef 0"
    if config.kl.coef > 0 and not traits.takes_kl and "ref" not in traits.compares_with:
        yield (
            f"kl.coef is {config.kl.coef:g}, and the loss of {name} adds no KL: use kl.coef 0 (a loss that adds one says so "
            "with traits.takes_kl)"
        )


def _model(config: RunSettings) -> Iterator[str]:
    """Yield settings of another kind of model."""
    if config.is_built_in and config.asks_of_pipeline:
        yield f"pipeline is set, and {config.model} is built in: leave it as it is, or use another model"
    if config.lora.weights is not None and config.train == "full":
        yield "lora.weights is set, and train is full, which has no adapter: use train lora"


def _implementation(config: RunSettings) -> Iterator[str]:
    """Yield a choice of kernels where none runs."""
    traits = config.objective.traits
    runs_one = traits.takes_implementation or config.takes_ratios or (traits.takes_kl and config.kl.is_on)
    if config.implementation != "auto" and not runs_one:
        yield (
            f"implementation is {config.implementation}, and no kernel takes part in {name_of(config.objective)} with these "
            "settings: use auto"
        )


def _step_cache(config: RunSettings) -> Iterator[str]:
    """Yield what blocks that are left out cannot go with."""
    if config.rollout.step_cache and config.engine.compile is not False:
        yield (
            f"rollout.step_cache is set, and engine.compile is {config.engine.compile}: compiled blocks cannot be left out; "
            "set engine.compile False, or rollout.step_cache 0"
        )
    if config.rollout.step_cache and config.engine.context_parallel > 1:
        yield (
            f"rollout.step_cache is set, and engine.context_parallel is {config.engine.context_parallel}: ranks that share "
            "a sample would leave out different blocks; set one of them back"
        )


def _ahead(config: RunSettings) -> Iterator[str]:
    """Yield what rollouts that are made ahead of the updates cannot go with."""
    name, ahead = name_of(config.objective), f"asynchronous.ahead is {config.asynchronous.ahead}"
    if not config.makes_samples:
        yield f"{ahead}, and {name} learns from given data, so that there are no rollouts: use asynchronous.ahead 0"
    if config.takes_ratios and config.correction.mode == "none":
        yield (
            f"{ahead}, so that older weights make the rollouts than the ones that are trained, and {name} takes ratios of "
            "log-probabilities: set correction.mode to truncate, reject or mask, or use asynchronous.ahead 0"
        )
    if config.rollout.source.startswith(REPLAYED):
        yield f"{ahead}, and rollout.source is {config.rollout.source}, whose rollouts are there: use asynchronous.ahead 0"
    if config.engine.offload == "phases":
        yield (
            f"{ahead}, and engine.offload is phases, which moves weights between a rollout and its update, and the two "
            "happen at once: use offload none or always"
        )
