"""Checks of a run against its model, once that is known."""

from fluvial.engines.errors import UsageError
from fluvial.engines.run.config import TrainConfig
from fluvial.engines.run.method import NoisedRows
from fluvial.engines.sampling.config import ScoutedGroups
from fluvial.engines.sampling.noising import knows_its_schedule_only
from fluvial.engines.sampling.samplers import SAMPLERS
from fluvial.engines.sampling.tail import NO_TAIL
from fluvial.models import Prediction
from fluvial.models.step_cache import GuidanceCache


def check_model(
    config: TrainConfig,
    prediction: Prediction,
    *,
    recorded: bool = False,
    any_level: bool = False,
    conditioned: bool = False,
) -> None:
    """Raise UsageError if a run does not fit its model.

    Args:
        prediction: what the model predicts.
        recorded: whether the model is a pipeline without an adapter.
        any_level: whether that pipeline's velocity is known at levels between those of its schedule.
    """
    method, sampling, model = config.method, config.method.sampling, config.model
    sampler = sampling.sampler
    own_levels = f"{model} predicts epsilon or has no adapter, and knows only the levels of its schedule"
    on_schedule = knows_its_schedule_only(prediction, recorded=recorded and not any_level)
    if sampler.rule.prediction not in (prediction, None):
        fitting = [name for name, rule in SAMPLERS.items() if rule.prediction in (prediction, None)]
        raise UsageError("sampling.sampler", sampler.kind, " or ".join(fitting), f"{model} predicts {prediction}")
    for field, solver in (("sampling.sampler", sampler.solver), ("evaluation.solver", config.evaluation.solver)):
        if on_schedule and solver in ("sa_solver", "consistency"):
            raise UsageError(field, solver, "dpmpp_2m", own_levels)
    if method.needs.prediction not in (prediction, None):
        raise UsageError("method", method.method_name, f"one for {prediction}", f"{model} does not predict a velocity")
    if method.needs.off_schedule and on_schedule:
        raise UsageError("method", method.method_name, "one that trains on recorded steps", own_levels)
    if recorded and config.evaluation_steps != sampling.steps:
        raise UsageError("evaluation.steps", config.evaluation.steps, "that of the rollout", own_levels)
    groups = sampling.groups
    if on_schedule and isinstance(groups, ScoutedGroups) and groups.steps != sampling.steps:
        raise UsageError("sampling.groups.steps", groups.steps, f"that of the rollout, {sampling.steps}", own_levels)
    if recorded and isinstance(config.rollout.step_cache, GuidanceCache):
        raise UsageError("rollout.step_cache", "guidance", "none", f"{model} has no adapter, and its pipeline's guidance")
    if recorded and config.evaluation_guidance != sampling.guidance:
        raise UsageError("evaluation.guidance", config.evaluation.guidance, "that of the rollout", f"{model} has no adapter")
    if on_schedule and sampling.window.tail != NO_TAIL:
        raise UsageError("sampling.window.tail", sampling.window.tail.solver, "its default", own_levels)
    for name, scale in config.own_guidance.items():
        field = "ref_guidance" if hasattr(method, "ref_guidance") else "kl.guidance" if name == "ref" else "guidance"
        if recorded:
            raise UsageError(field, scale, "None", f"{model} has no adapter, and its pipeline's guidance")
        if conditioned and scale != 1 and sampling.guidance.scale == 1:
            hint = "prompts have images, and so has the negative prompt of a guided rollout only: guide the rollout, too"
            raise UsageError(field, scale, "None or 1", hint)
    if not isinstance(method.rows, NoisedRows):
        return
    noising = method.rows.noising.choose_levels(on_schedule=on_schedule)
    if noising != method.rows.noising:
        noising.check_steps(sampling.steps)
    if on_schedule and noising.levels.kind not in ("schedule", "stratified"):
        raise UsageError("noising.levels", noising.levels.kind, "auto, schedule or stratified", own_levels)
