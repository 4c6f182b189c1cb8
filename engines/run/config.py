"""A run of post-training as one frozen dataclass. Invalid combinations raise in its constructor."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_type_hints

from fluvial.core.checks import check_fields, type_of
from fluvial.engines.choices import BARE, find_variant, list_required, list_unused, list_variants, refuse_unused
from fluvial.engines.engine.config import OptimizerConfig
from fluvial.engines.errors import UsageError
from fluvial.engines.named_models import MODELS
from fluvial.engines.plugins import suggest
from fluvial.engines.run.declared import Follower, Networks, Teacher, Trained, find_followers, find_heads, list_single
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.jobs.settings import (
    CheckpointConfig,
    DataConfig,
    ExportConfig,
    MachineConfig,
    PipelineConfig,
)
from fluvial.engines.run.method import Method, NoisedRows, Preferences, check_method
from fluvial.engines.sampling.config import REPLAYED, RolloutConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.models import LoraConfig
from fluvial.models.step_cache import FirstBlockCache, GuidanceCache, NoCache


@dataclass(frozen=True)
class TrainConfig:
    """One run of post-training.

    Args:
        out: Folder of the run: its settings, metrics, samples, checkpoints and weights.
        method: Training method and its hyper-parameters; a built-in one, or your own frozen dataclass.
        model: Model that is trained: handwriting (the built-in flow), handwriting-unet (the built-in model that predicts
            epsilon), words (the built-in flow of words), a pipeline of diffusers by its folder or its id on the Hub
            (`fluvial models` lists them), or the folder of another run, whose exported weights it starts from.
        seed: Random seed; the same seed gives the same bits on the same machine with the same number of processes.
        updates: Number of optimizer updates in the whole run.
        train: What is trained: full (all weights) or lora (low-rank adapters).
        prompts: Files of prompts to train on, each with or without a weight, e.g. a.jsonl=2 b.txt: text with a prompt per
            line, or .jsonl, .json, .csv or .parquet with a column prompt, whose other columns reach the rewards. By default
            all training codes of the built-in models.
        rewards: Rewards to learn from, each with or without a weight, e.g. characters mymodule:neat=0.5: names of the job's
            rewards, of reward models and clients with their options (pickscore:device=cuda:1,weights=FOLDER=0.5), or
            functions of (images, prompts) -> [B], or classes, as module:name. By default the first of the built-in
            model, or of the job; a pipeline has none.
        tracker: Where numbers, images and settings go besides the run folder: tensorboard (its folder tensorboard), wandb,
            trackio, swanlab, mlflow (each needs the extra of its name, and is offline without a login), none, or your own as
            module:name; several with commas between them.
        resume: Continue the run in `out` from its newest whole checkpoint, with its recorded settings by default. Settings
            that do not change an update may change: `updates` (fewer or more; not more while the learning rate depends on
            their number), engine, evaluation, checkpoint, export, tracker, `rollout.max_invalid` and the source of rollouts.
            Any other change raises an error.
        data: Order of the prompts, and images to learn from without a rollout.
        rollout: Source of the rollouts, and their timing.
        optimizer: Optimizer, learning rate and moving average.
        lora: Rank, scale and layers of the adapters.
        engine: Sharding, precision, activation checkpointing, offloading and micro-batches.
        pipeline: Base weights, and settings of a diffusers pipeline.
        evaluation: Evaluators, schedule, and sampling where it differs from the rollout's.
        checkpoint: When and where checkpoints are written.
        export: Interval and format of exports.
    """

    out: Path
    method: Method = dataclasses.field(metadata=BARE)
    model: str = "handwriting"
    seed: int = 0
    updates: int = 100
    train: Literal["full", "lora"] = "full"
    prompts: tuple[str, ...] = ()
    rewards: tuple[str, ...] = ()
    tracker: str = "tensorboard"
    resume: bool = False
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    engine: MachineConfig = MachineConfig()
    pipeline: PipelineConfig = PipelineConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()

    def __post_init__(self) -> None:
        for name in ("prompts", "rewards"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) or callable(value) else tuple(value))
            for word in getattr(self, name):
                if not isinstance(word, str):
                    hint = f"pass it to the job, Job(model, prompts=[...], rewards=...), or name a function as module:{name}"
                    raise UsageError(f"{name} has {type_of(word)}, expected texts: {hint}")
        check_fields(self, "", updates=(1, 2**31), seed=(0, 2**63 - 1))
        check_method(self.method)
        self.rollout.check_sampling(self.method.sampling)
        refuse_unused(self)
        for problem in (*self._check_method_on_machine(), *self._check_machine()):
            raise problem

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield the settings that have no effect, and why."""
        return ((name, why) for is_unused, name, why in self._unused() if is_unused)

    def list_unused_by_built_in(self) -> Iterator[tuple[str, str]]:
        """Yield the settings of diffusers pipelines that have no effect with the built-in model, and why."""
        names = [f"pipeline.{each.name}" for each in dataclasses.fields(self.pipeline) if each.name != "weights"]
        names += ["evaluation.height", "evaluation.width", "engine.attention", "engine.context_parallel"]
        yield from ((name, f"with model {self.model}") for name in names if self.model in MODELS)

    def list_fixed(self) -> Iterator[str]:
        """Yield the dotted names of settings that accept only their default in this configuration."""
        yield from list_unused(self)
        yield from (name for name, _ in self.list_unused_by_built_in())
        yield from ("rollout.autocast",) if self.compares_exactly else ()

    def _unused(self) -> Iterator[tuple[bool, str, str]]:
        """Yield whether a field has no effect, its name, and why."""
        method, needs, from_data = self.method, self.method.needs, self.method.source is not None
        name, pairs = f"with {method.method_name}", isinstance(method.source, Preferences)
        for field in ("autocast", "reuse", "step_cache", "source", "store", "ahead"):
            yield from_data, f"rollout.{field}", f"{name}, which learns from data without a rollout"
        cache, sampling = self.rollout.step_cache, method.sampling
        window = not sampling.sampler.is_deterministic or method.recorded is not None
        noisy = sampling.sampler.is_deterministic and sampling.sampler.eta > 0
        whole = noisy or (window and sampling.window.count(sampling.steps) == sampling.steps)
        yield whole, "rollout.step_cache", "without deterministic steps that are not recorded"
        unguided = isinstance(cache, GuidanceCache) and sampling.guidance.scale == 1
        yield unguided, "rollout.step_cache", "of kind guidance in a rollout without guidance"
        yield not needs.ratio, "rollout.max_log_ratio", f"{name}, which has no ratio"
        yield not method.is_scored, "rewards", f"{name}, which generates no samples that could be scored"
        learns = method.is_scored and needs.rewards is not None
        watches = self.evaluation.every and learns
        yield not watches, "evaluation.stop_when_gamed", "without rewards to learn from and `evaluation.every`"
        hint = f"{name}, which learns from rollouts or preferences here (sft learns from images)"
        yield not (from_data or needs.images) or pairs, "data.images", hint
        yield bool(self.data.images) or pairs, "prompts", "with data or preferences, which have their own"
        for field in ("data.cache", "data.errors"):
            yield not (self.data.images or pairs), field, f"{name} here, which learns from no images"
        for field in ("negative", "forwards", "gradient"):
            yield not self.is_guided, f"sampling.guidance.{field}", "in a run without guidance, as with a scale of 1"
        yield self.train == "full", "lora.weights", "with `train` full, which has no adapter"
        merges = self.train == "full" and self.rollout.reuse == "merged"
        yield merges, "rollout.reuse", "of kind merged with `train` full, which has no adapter"
        yield self.train == "lora", "engine.masters", "with `train` lora, whose adapters are held in float32"
        yield self.train == "full", "engine.base", "with `train` full, which freezes no weights"

    def _check_method_on_machine(self) -> Iterator[UsageError]:
        """Yield conflicts between the method and the machine's settings."""
        method, rollout, name = self.method, self.rollout, self.method.method_name
        if self.updates % self.updates_per_rollout:
            count = self.updates_per_rollout
            expected = f"a multiple of epochs x minibatches = {count}, the number of updates per rollout"
            yield UsageError("updates", self.updates, expected)
        if self.engine.micro_batch == "auto" and (reason := explain_fixed_micro_batch(method)) is not None:
            yield UsageError("engine.micro_batch", "auto", "a number", reason)
        otherwise = "" if method.correction is None else ", or `correction` truncate"
        if self.compares_exactly and rollout.autocast:
            hint = "rollout and update compute different numbers, so that ratios are wrong from the start"
            yield UsageError("rollout.autocast", True, f"False{otherwise}", hint)
        rounded = {"merged": "merged weights are rounded", "keys": "sums over kept keys round differently"}
        if self.compares_exactly and rollout.reuse in rounded and self.engine.compute != "float32":
            hint = f"{rounded[rollout.reuse]} in half precision, and ratios need a correction"
            yield UsageError("rollout.reuse", rollout.reuse, f"exact{otherwise}", hint)
        if self.compares_exactly and rollout.ahead:
            hint = f"with `rollout.ahead` {rollout.ahead}, older weights make the rollouts, and ratios need a correction"
            if method.correction is None:
                yield UsageError("rollout.ahead", rollout.ahead, "0", f"{name} has no correction of its ratios")
            yield UsageError("correction", "none", "truncate, reject or mask", hint)
        groups = method.sampling.groups.kind
        if rollout.ahead and groups != "all":
            hint = f"`sampling.groups` {groups} waits for the rewards of a rollout before it makes the next samples"
            yield UsageError("rollout.ahead", rollout.ahead, "0", hint)
        if groups == "scouted" and (rollout.store is not None or rollout.source.startswith(REPLAYED)):
            name, value = ("store", rollout.store) if rollout.store is not None else ("source", rollout.source)
            hint = (
                "stored rollouts are found by key, and scouts have the same key as the samples that start from their noise"
            )
            yield UsageError(f"rollout.{name}", value, "its default", hint)
        if any(isinstance(network, Teacher) and network.weights is None for network in self.networks.values()):
            yield UsageError("teacher", None, "a folder of weights", f"{name} compares with a teacher")
        if find_heads(self.networks) and self.engine.context_parallel > 1:
            hint = (
                f"a head of {name} reads all tokens of a sample, and ranks that share a sample hold only a part of them each"
            )
            yield UsageError("engine.context_parallel", self.engine.context_parallel, "1", hint)
        for network in self.networks.values():
            if isinstance(network, Trained):
                settings = next(at for at, each in _list_optimizers(method) if each is network.optimizer)
                yield from network.problems(settings)
        if self.followers and self.train == "full":
            followers = ", ".join(self.followers)
            hint = f"{name} keeps policies that lag behind ({followers}) as LoRA adapters"
            yield UsageError("train", "full", "lora", hint)

    def _check_machine(self) -> Iterator[UsageError]:
        """Yield conflicts between settings of the machine."""
        engine, rollout = self.engine, self.rollout
        if isinstance(rollout.step_cache, FirstBlockCache) and engine.context_parallel > 1:
            hint = "with `rollout.step_cache` first_block, ranks that share a sample would leave out different blocks"
            yield UsageError("engine.context_parallel", engine.context_parallel, "1", hint)
        merges, graphs = rollout.reuse == "merged", engine.compile == "reduce-overhead"
        changed = "`rollout.reuse` merged changes whole weights that are not quantised"
        here = "with `engine.compile` reduce-overhead, this process launches whole passes of the current weights as graphs"
        whole = {"engine.comm": "keep", "engine.replicas": "auto", "engine.context_parallel": 1}
        alone = {"rollout.source": "", "rollout.ahead": 0, "rollout.autocast": False, "rollout.step_cache": NoCache()}
        needs = [({**whole, "engine.base": "auto"}, changed)] * merges + [({**whole, **alone}, here)] * graphs
        for name, fits, hint in ((*each, hint) for values, hint in needs for each in values.items()):
            if (value := attrgetter(name)(self)) != fits:
                yield UsageError(name, getattr(value, "kind", value), str(getattr(fits, "kind", fits)) or "nothing", hint)
        if (merges or graphs) and (engine.offload == "always" or engine.swaps_blocks):
            hint = "`rollout.reuse` merged keeps all weights on the device" if merges else here
            yield UsageError("engine.offload", engine.offload, "none or phases", hint)
        if rollout.reuse == "keys" and graphs:
            hint = "with `engine.compile` reduce-overhead a graph holds no results of earlier passes"
            yield UsageError("rollout.reuse", "keys", "exact or none", hint)
        if rollout.reuse == "keys" and engine.context_parallel > 1:
            hint = "`rollout.reuse` keys keeps those of whole sequences on a rank"
            yield UsageError("engine.context_parallel", engine.context_parallel, "1", hint)
        if graphs and not self.makes_samples:
            yield UsageError("engine.compile", engine.compile, "True", "there is no rollout, whose passes would be graphs")
        if engine.base != "auto" and rollout.is_served:
            hint = "servers make rollouts with weights that are not quantised, so that ratios are wrong from the start"
            yield UsageError("engine.base", engine.base, "auto", hint)
        if rollout.ahead and engine.offload == "phases":
            hint = f"with `rollout.ahead` {rollout.ahead}, rollout and update happen at once"
            yield UsageError("engine.offload", "phases", "none, blocks or always", hint)

    @property
    def checkpoint_folder(self) -> Path | str:
        """The folder of checkpoints, or their URL as text."""
        folder = self.checkpoint.folder
        if folder is None:
            return self.out / "checkpoints"
        return folder if "://" in folder else Path(folder)

    @property
    def checkpoint_folders(self) -> tuple[Path | str, ...]:
        """The storage of checkpoints, and the run folder's, the fallback when saving fails there."""
        folder = self.out / "checkpoints"
        return (self.checkpoint_folder,) if self.checkpoint_folder == folder else (self.checkpoint_folder, folder)

    @cached_property
    def samples_per_pass(self) -> int:
        """Micro-batch size of a rollout, at most its number of samples; UsageError while it is auto."""
        return min(self.largest_pass, self.method.sampling.batch)

    @cached_property
    def largest_pass(self) -> int:
        """Micro-batch size `engine.micro_batch`; UsageError while it is auto."""
        if isinstance(self.engine.micro_batch, str):
            raise UsageError(
                "`engine.micro_batch` is auto, expected a number: a Trainer's `config` has the one that it chose"
            )
        return self.engine.micro_batch

    def choose_pass_sizes(self, count: int, pairs: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the micro-batch sizes of an update, largest first; the last one takes the remainder.

        Args:
            count: number of items, the largest useful size.
            pairs: sizes in (sample, step) pairs that `engine.update_micro_batch` auto chose.
        """
        each = 2 if self.method.is_paired else 1  # samples per item
        rows = max(self.samples_per_pass // each, 1)
        if isinstance(self.engine.update_micro_batch, str):
            return (*(size // each for size in pairs if size // each > rows), rows)
        most = max(self.engine.update_micro_batch // each, 1)
        return (min(most, count), rows) if min(most, count) > rows else (min(most, rows),)

    def choose_forwards(self, pairs: int) -> Literal["one", "two"]:
        """Return the number of forward passes for the two halves of guidance in an update's micro-batch of `pairs` pairs.

        Two if the unconditional half has no gradient, because a joint pass would propagate zeros back through it. A
        micro-batch no larger than the rollout's has the rollout's number, to give the same bits on every device.
        """
        guidance = self.method.sampling.guidance
        if guidance.gradient == "both" or isinstance(self.engine.micro_batch, str) or pairs <= self.samples_per_pass:
            return guidance.forwards
        return "two"

    @cached_property
    def updates_per_rollout(self) -> int:
        """Number of optimizer updates on the samples of one rollout."""
        return self.method.passes.updates

    @property
    def makes_samples(self) -> bool:
        """Whether the run generates rollouts, instead of reading a dataset."""
        return self.method.source is None

    @property
    def evaluation_pass(self) -> int:
        """Micro-batch size of evaluations, by default the run's; UsageError while that is auto."""
        return self.evaluation.micro_batch or self.largest_pass

    @property
    def evaluation_steps(self) -> int:
        """Number of steps of the schedule in evaluations."""
        return self.evaluation.steps or self.method.sampling.steps

    @property
    def evaluation_guidance(self) -> Guidance:
        """Guidance of evaluations, with the negative prompt of the rollout's."""
        guidance, scale = self.method.sampling.guidance, self.evaluation.guidance
        return guidance if scale is None else replace(guidance, scale=scale)

    @property
    def is_guided(self) -> bool:
        """Whether rollouts, evaluations or another network use guidance, and so the negative prompt."""
        scales = self.method.sampling.guidance.scale, self.evaluation_guidance.scale, *self.own_guidance.values()
        return any(scale != 1 for scale in scales)

    @property
    def own_guidance(self) -> dict[str, float]:
        """Guidance scale of each network with its own, by name."""
        scales = {name: getattr(network, "guidance", None) for name, network in self.networks.items()}
        return {name: scale for name, scale in scales.items() if scale is not None}

    @cached_property
    def compares_exactly(self) -> bool:
        """Whether the method compares log-probs of rollout and update without a correction, so that both must agree."""
        method = self.method
        corrects = method.correction is not None and method.correction.kind != "none"
        return method.needs.ratio and method.recorded is not None and not corrects

    @property
    def networks(self) -> Networks:
        """Networks beside the policy, by name; each teacher of several has its own name."""
        return list_single(self.method.networks())

    @property
    def followers(self) -> dict[str, Follower]:
        """Policies that lag behind the trained one, by name; each is a LoRA adapter."""
        return find_followers(self.networks)


def _list_optimizers(config: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the optimizers among the settings of a method, by their dotted names."""
    for each in dataclasses.fields(config):
        value, name = getattr(config, each.name), f"{place}{each.name}"
        if isinstance(value, OptimizerConfig):
            yield name, value
        elif dataclasses.is_dataclass(value):
            yield from _list_optimizers(value, f"{name}.")


def explain_fixed_micro_batch(method: Method) -> str | None:
    """Return why `engine.micro_batch` cannot be auto: the size changes more than rounding, or cannot be tried; else None."""
    if method.sampling.window.draw == "call":
        return "sampling.window.draw call draws a window for the samples of each micro-batch"
    if isinstance(method.rows, NoisedRows) and method.rows.noising.draw == "call":
        return "noising.draw call draws levels for the samples of each micro-batch"
    if method.needs.rewards == "gradients":
        return f"{method.method_name} computes gradients through decoder and rewards, whose memory is not tried"
    return None


def with_values(config: TrainConfig, values: Mapping[str, Any]) -> TrainConfig:
    """Return a run with other values of fields, by their dotted names, e.g. {"sampling.group": 8, "optimizer.lr": 1e-4}.

    Names of the method's fields may leave out `method.`; with a new method they are fields of that one.

    Raises:
        UsageError: there is no such field, or a value is not accepted.
    """
    run_fields = {each.name for each in dataclasses.fields(TrainConfig)}
    names = {name if name.partition(".")[0] in run_fields else f"method.{name}": value for name, value in values.items()}
    changed: TrainConfig = _with_values(config, names, "")
    return changed


def _with_values(config: Any, values: Mapping[str, Any], owner: str) -> Any:
    """Return a dataclass with other values of its fields; a choice may be named by its kind."""
    known, changes = {each.name for each in dataclasses.fields(config)}, dict[str, Any]()
    for first in dict.fromkeys(name.partition(".")[0] for name in values):
        if first not in known:
            raise UsageError(f"there is no field {owner}{first}{suggest(first, known)}")
        inner = {name.partition(".")[2]: value for name, value in values.items() if name.partition(".")[0] == first}
        value = inner.pop("", getattr(config, first))
        if isinstance(value, str) and list_variants(union := get_type_hints(type(config))[first]):
            variant, make = find_variant(union, value, f"{owner}{first}")
            if missing := [name for name in list_required(variant) if name not in inner]:
                raise UsageError(f"{owner}{first}.{missing[0]} is missing: without a default, expected a value")
            value = make(**{name: inner.pop(name) for name in list_required(variant)})
        changes[first] = _with_values(value, inner, f"{owner}{first}.") if inner else value
    return replace(config, **changes)
