"""A run of post-training as one frozen dataclass. Combinations without a meaning raise when it is built."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from fluvial.core.checks import check_fields
from fluvial.core.gaussian import Form
from fluvial.engines.data.sizes import Size, parse_size
from fluvial.engines.engine.config import EngineConfig, OptimizerConfig
from fluvial.engines.errors import UsageError
from fluvial.engines.methods.grpo import Clipped
from fluvial.engines.methods.losses import KLConfig
from fluvial.engines.methods.protocol import Objective
from fluvial.engines.methods.table import check_objective
from fluvial.engines.run.declared import Follower, Networks, find_followers
from fluvial.engines.run.evaluation.config import EvaluationConfig
from fluvial.engines.run.validate import DEFAULT_MAX_LOG_RATIO, config_problems
from fluvial.engines.sampling.config import AsyncConfig, RolloutConfig
from fluvial.engines.sampling.correction import CorrectionConfig
from fluvial.engines.sampling.generate import Guidance
from fluvial.engines.sampling.noising import NoisingConfig
from fluvial.engines.scoring.advantages import AdvantageConfig
from fluvial.kernels import Implementation
from fluvial.models import LoraConfig


@dataclass(frozen=True)
class PipelineConfig:
    """Settings of a pipeline of diffusers, from a folder or the Hub.

    Args:
        height: Height of the images, in pixels.
        width: Width of the images, in pixels.
        sizes: Sizes of training samples as WIDTHxHEIGHT, e.g. 1024x1024 832x1216, in place of height and width. An image is
            scaled and cut to the one with the nearest aspect ratio; a rollout has the size that the records of its prompts
            name (columns `size`, or `width` and `height`), or one that is drawn. Evaluations have the first.
        frames: Number of frames of a video; 1 for images.
        call: Further arguments of a pipeline without an adapter, as name=value, e.g. max_sequence_length=128; a value is
            JSON, or else text.
        media: Columns of the prompts' records that are images, videos or sounds for a pipeline without an adapter, as
            argument=column, e.g. image=source mask_image=hole video=clip. A column with the name of an argument maps itself.
        heldout: Files of prompts to evaluate on, one for all or one for each of `prompts`; by default every tenth training
            prompt of each file is held out.
        text_cache: Folder for prompt embeddings. All prompts are encoded before training and the text encoders dropped;
            without a folder the encoders stay, and encode each batch.
        text_tokens: Number of tokens that a prompt is padded to, and cut at; by default that of diffusers' pipeline.
        shift: Shift s of the noise levels, sigma -> s sigma / (1 + (s - 1) sigma); by default the scheduler's own.
        latents: Sample of an image that is learnt from: mean (of the VAE's distribution) or sample (one draw per image).
        frozen: Dtype of text encoders and VAE; auto is bfloat16 on CUDA, and without an adapter where the network computes
            in it, else float32.
        text_base: Format of the text encoders' linear layers, as `engine.base` of the network's; auto is `frozen`.
        vae_dtype: Dtype of the VAE; auto is `frozen`.
        vae_tile: Side in pixels of the tiles that the VAE decodes and encodes, one image at a time; by default whole images.
            Tiles overlap by a quarter and are blended, so images differ slightly.
        vae_offload: Keep the VAE on the host, and move it to the device only while it works.
        trust_remote_code: Run code that comes with the model's folder.
    """

    height: int = 512
    width: int = 512
    sizes: tuple[str, ...] = ()
    frames: int = 1
    call: tuple[str, ...] = ()
    media: tuple[str, ...] = ()
    heldout: tuple[str, ...] = ()
    text_cache: Path | None = None
    text_tokens: int | None = None
    shift: float | None = None
    latents: Literal["mean", "sample"] = "mean"
    frozen: Literal["auto", "float32", "bfloat16"] = "auto"
    text_base: Literal["auto", "int8", "int4", "nf4", "fp8"] = "auto"
    vae_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    vae_tile: int | None = None
    vae_offload: bool = False
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        size = (1, 2**20)
        check_fields(self, height=size, width=size, frames=size, text_tokens=size, shift=(1e-6, 1e6), vae_tile=(64, 2**20))
        if self.vae_tile is not None and self.vae_tile % 64:
            raise UsageError("pipeline.vae_tile", self.vae_tile, "a multiple of 64")
        if self.sizes and (self.height, self.width) != (PipelineConfig.height, PipelineConfig.width):
            raise UsageError("`pipeline.height` and `pipeline.width` have no effect with `pipeline.sizes`; remove them")
        try:
            if len(set(map(parse_size, self.sizes))) < len(self.sizes):
                raise ValueError(f"{' '.join(self.sizes)} names a size twice: name each once")
        except ValueError as error:
            raise UsageError(f"`pipeline.sizes` has a wrong value: {error}") from error
        if wrong := [word for word in self.call if not word.partition("=")[0].isidentifier() or "=" not in word]:
            raise UsageError(f"`pipeline.call` holds {wrong[0]!r}, expected name=value")
        if wrong := [word for word in self.media if not word.partition("=")[0].isidentifier() or not word.partition("=")[2]]:
            raise UsageError(f"`pipeline.media` holds {wrong[0]!r}, expected argument=column")

    @property
    def size(self) -> Size:
        """Size of evaluations, and of all samples unless there are several sizes."""
        return parse_size(self.sizes[0]) if self.sizes else Size(self.height, self.width)


@dataclass(frozen=True)
class TrainConfig:
    """One run of post-training.

    Args:
        out: Folder of the run: its settings, metrics, samples, checkpoints and weights.
        model: Model that is trained: handwriting (the built-in flow), handwriting-unet (the built-in model that predicts
            epsilon), words (the built-in flow of words), a pipeline of diffusers by its folder or its id on the Hub
            (`fluvial models` lists them), or the folder of another run, whose exported weights it starts from.
        seed: Seed of everything random; the same seed gives the same bits on the same machine with as many processes.
        data_seed: Seed of the order of the prompts; None is `seed`.
        updates: Number of optimizer updates in the whole run.
        epochs: Number of passes over the samples of a rollout.
        minibatches: Number of optimizer updates per pass, each on its share of the samples.
        train: What is trained: full (all weights) or lora (low-rank adapters).
        weights: Folder of base weights to start from, as diffusers saves a network, and as `fluvial pretrain` and a run's
            export write them; by default those of the model.
        prompts: Files of prompts to train on, each with or without a weight, e.g. a.jsonl=2 b.txt: text with a prompt per
            line, or .jsonl, .json, .csv or .parquet with a column prompt, whose other columns reach the rewards. By default
            all training codes of the built-in models.
        prompt_order: Order of the prompts: epochs (each prompt once per epoch, shuffled), draws (at random, with
            replacement) or distinct (at random for each rollout, without a repeat in it, as Flow-GRPO's sampler).
        data: Images with captions to learn from without a rollout (sft, and raft that compares them), each with or without a
            weight: folders of images, or files of records with a column image.
        data_cache: Folder of encoded images and captions; by default `encoded` in `out`. Runs on the same model, size and
            images may share one.
        data_errors: What an image that cannot be read does: refuse (ends the run) or skip (is left out).
        rewards: Rewards to learn from, each with or without a weight, e.g. characters mymodule:neat=0.5: names of the job's
            rewards, of reward models and clients with their options (pickscore:device=cuda:1,weights=FOLDER=0.5), or
            functions of (images, prompts) -> [B], or classes, as module:name. By default the first of the built-in
            model, or of the job; a pipeline has none.
        max_invalid: Largest share of the groups of a rollout that may be left out, because a reward raised or gave NaN for
            one of their samples, and of the samples of an evaluation; the run stops above it.
        micro_batch: Number of samples per forward pass, in rollout and update; it decides the memory, and changes results
            only by rounding. auto tries 1, 2, 4, ... before training, as far as the memory goes and until the time per
            sample falls by less than 5 %; the run's config.json and checkpoints hold the number, which a resumption takes.
        update_micro_batch: Number of (sample, step) pairs per forward and backward pass of an update. auto tries multiples
            of `micro_batch` before training, as far as the memory goes, and takes the fastest of those that give each row
            the bits of the rollout's, so that first ratios are exactly 1. Pairs that do not fill such a pass go in smaller
            ones that were proven too. A checkpoint holds the number; a resumption on another processor, or with another
            number of ranks or threads, finds its own. rollout takes `micro_batch`, as auto does where blocks are compiled. A
            number of your own changes results by rounding, first ratios too.
        init: How base weights are loaded: sharded (each rank reads its own shards, so that none holds the whole model) or
            whole (every rank loads the model and then shards it, as a model that is not read from a folder needs).
        implementation: Implementation of log-probabilities and losses: auto (Triton on an accelerator, else the reference),
            triton, compiled or reference.
        max_log_ratio: Largest |log ratio| of a first pass, in the unit of the log-probability; the run stops above it,
            because rollout and update then compute different policies.
        eval_every: Number of updates between evaluations on held-out prompts; 0 evaluates only before and after.
        eval_samples: Number of samples per evaluation during the run.
        stop_when_gamed: Number of evaluations in a row at which the score of the unseen evaluator has to fall, while the
            reward rises, for the run to end early, with its weights and the checkpoint of its best evaluation kept; 0 never
            ends it. The unseen evaluator is the one named heldout, or else the last.
        final_samples: Number of samples of the evaluations before and after the run; with `evaluation.seeds` they take every
            prompt instead.
        checkpoint_every: Number of updates between checkpoints.
        checkpoint_async: Write checkpoints in the background, from a copy on the host.
        checkpoints: Folder of the checkpoints, or a URL that fsspec opens (s3://bucket/run); by default in `out`, which also
            takes those that cannot be saved there.
        keep_checkpoints: Number of checkpoints that are kept.
        export_dtype: Dtype of the weights that are exported.
        export_every: Number of updates between exports to `exports` in `out`; 0 exports at the end alone.
        export_as: Format of these exports: lora, merged, full or comfyui (see `fluvial export`); auto is lora where an
            adapter is trained, else merged.
        tracker: Where numbers, images and settings go besides the run folder: tensorboard (its folder tensorboard), wandb,
            trackio, swanlab (each needs the extra of its name, and is offline without a login), none, or your own as
            module:name.
        collective_timeout: Seconds that processes wait for each other in a collective before they give up on one that died
            or hangs.
        resume: Continue the run in `out` from its newest whole checkpoint, with its recorded settings where none is given. A
            continued run may change what does not change an update: `updates` (fewer, too; not more while the learning rate
            depends on their number), engine, evaluation, checkpoints, exports, tracker, max_invalid and where rollouts are
            made. Any other change makes it another run, and is refused.
        resume_from: Continue from this checkpoint, a folder or a URL.
        objective: Loss that the policy is trained with, and its hyper-parameters; a frozen dataclass of your own too.
        rollout: How samples are generated.
        advantage: How rewards become advantages.
        noising: Noise levels at which clean samples are trained on.
        kl: KL term that keeps the policy near the one that training starts from.
        correction: Weights that correct for a rollout made by another program than the update.
        asynchronous: Rollouts made ahead of the updates; on the command line also --async.
        optimizer: Optimizer, learning rate and moving average.
        lora: Rank, scale and layers of the adapters.
        engine: Sharding, precision, activation checkpointing and offloading.
        pipeline: What a pipeline of diffusers is asked for.
        evaluation: What is evaluated, and how it is sampled where that differs from the rollout.
    """

    out: Path
    model: str = "handwriting"
    seed: int = 0
    data_seed: int | None = None
    updates: int = 100
    epochs: int = 1
    minibatches: int = 1
    train: Literal["full", "lora"] = "full"
    weights: Path | None = None
    prompts: tuple[str, ...] = ()
    prompt_order: Literal["epochs", "draws", "distinct"] = "epochs"
    data: tuple[str, ...] = ()
    data_cache: Path | None = None
    data_errors: Literal["refuse", "skip"] = "refuse"
    rewards: tuple[str, ...] = ()
    max_invalid: float = 0.25
    micro_batch: int | Literal["auto"] = 64
    update_micro_batch: int | Literal["auto", "rollout"] = "auto"
    init: Literal["sharded", "whole"] = "sharded"
    implementation: Implementation = "auto"
    max_log_ratio: float = DEFAULT_MAX_LOG_RATIO
    eval_every: int = 20
    eval_samples: int = 200
    stop_when_gamed: int = 0
    final_samples: int = 1000
    checkpoint_every: int = 20
    checkpoint_async: bool = False
    checkpoints: str | None = None
    keep_checkpoints: int = 2
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    export_every: int = 0
    export_as: Literal["auto", "lora", "merged", "full", "comfyui"] = "auto"
    tracker: str = "tensorboard"
    collective_timeout: float = 600.0
    resume: bool = False
    resume_from: str | None = None
    objective: Objective = field(default_factory=Clipped)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    noising: NoisingConfig = field(default_factory=NoisingConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        count, not_negative = (1, 2**31), (0, 2**31)
        check_fields(
            self,
            "",
            **dict.fromkeys(("updates", "epochs", "minibatches", "micro_batch", "update_micro_batch"), count),
            **dict.fromkeys(("eval_samples", "final_samples", "checkpoint_every", "keep_checkpoints"), count),
            **dict.fromkeys(("eval_every", "stop_when_gamed", "export_every"), not_negative),
            **dict.fromkeys(("seed", "data_seed"), (0, 2**63 - 1)),
            max_invalid=(0, 0.999),
            max_log_ratio=(0, 1e30),
            collective_timeout=(1, 1e6),
        )
        check_objective(self.objective)
        for problem in config_problems(self):
            raise problem

    @property
    def checkpoint_folder(self) -> Path | str:
        """Where checkpoints are: a folder, or a URL as text."""
        if self.checkpoints is None:
            return self.out / "checkpoints"
        return self.checkpoints if "://" in self.checkpoints else Path(self.checkpoints)

    @property
    def checkpoint_folders(self) -> tuple[Path | str, ...]:
        """The folder of checkpoints, and that in the run folder, which takes those that could not be saved there."""
        own = self.out / "checkpoints"
        return (self.checkpoint_folder,) if self.checkpoint_folder == own else (self.checkpoint_folder, own)

    @property
    def samples_per_pass(self) -> int:
        """Number of samples per forward pass of a rollout, no more than it has; ValueError while `micro_batch` is auto."""
        return min(self.largest_pass, self.rollout.batch)

    @property
    def largest_pass(self) -> int:
        """Number of samples per forward pass that the memory holds; ValueError while `micro_batch` is auto."""
        if isinstance(self.micro_batch, str):
            raise UsageError("`micro_batch` is auto, expected a number: a Trainer's `config` has the one that it chose")
        return self.micro_batch

    def pass_sizes(self, count: int, pairs: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the numbers of items per pass of an update, falling; the last is for the items that are left.

        Args:
            count: number of items; a number of pairs that was set is no larger.
            pairs: numbers of pairs that were chosen, if `update_micro_batch` is auto.
        """
        each = 2 if self.objective.traits.trains_on == "preferences" else 1  # pairs of an item
        rows = max(self.samples_per_pass // each, 1)
        if isinstance(self.update_micro_batch, str):
            return (*(size // each for size in pairs if size // each > rows), rows)
        most = max(self.update_micro_batch // each, 1)
        return (min(most, count), rows) if min(most, count) > rows else (min(most, rows),)

    def update_forwards(self, pairs: int) -> Literal["one", "two"]:
        """Return the number of forward passes for the two halves of guidance at `pairs` (sample, step) pairs of an update.

        Two where the unconditional half has no gradient, because one pass would propagate zeros back through it. Pairs that
        are no more than a rollout's samples per pass take the rollout's own pass, whose bits they have on every device.
        """
        guidance = self.rollout.guidance
        if guidance.gradient == "both" or isinstance(self.micro_batch, str) or pairs <= self.samples_per_pass:
            return guidance.forwards
        return "two"

    @property
    def updates_per_rollout(self) -> int:
        """Number of optimizer updates on the samples of one rollout."""
        return self.epochs * self.minibatches

    @property
    def makes_samples(self) -> bool:
        """Whether there is a rollout; with given data there is none."""
        return not self.objective.traits.offline

    @property
    def scores_samples(self) -> bool:
        """Whether rewards score the samples: those of a rollout, or given ones that the objective compares."""
        return self.makes_samples or self.objective.traits.groups != "prompt"

    @property
    def evaluation_pass(self) -> int:
        """Number of samples per forward pass of evaluations; ValueError while `micro_batch` is auto and they have no own."""
        return self.evaluation.micro_batch or self.largest_pass

    @property
    def evaluation_steps(self) -> int:
        """Number of steps of the schedule in evaluations."""
        return self.evaluation.steps or self.rollout.steps

    @property
    def evaluation_guidance(self) -> Guidance:
        """Guidance of evaluations, with the negative prompt of the rollout's."""
        guidance, scale = self.rollout.guidance, self.evaluation.guidance
        return guidance if scale is None else replace(guidance, scale=scale)

    @property
    def is_guided(self) -> bool:
        """Whether rollouts, evaluations or the reference need the conditioning of the negative prompt."""
        scales = self.rollout.guidance.scale, self.evaluation_guidance.scale, self.kl.guidance
        return any(scale not in (None, 1) for scale in scales)

    @property
    def takes_ratios(self) -> bool:
        """Whether the objective compares log-probabilities of recorded steps."""
        return self.objective.traits.has_ratio and self.objective.traits.trains_on == "steps"

    @property
    def networks(self) -> Networks:
        """Networks beside the policy, by name."""
        return self.objective.networks(self.kl)

    @property
    def followers(self) -> dict[str, Follower]:
        """Policies that lag behind the trained one, by name; each is an adapter of its own."""
        return find_followers(self.networks)

    @property
    def recorded_form(self) -> Form:
        """Form of the log-probabilities that a rollout records."""
        record = self.objective.record
        return self.rollout.form if record is None or record.form is None else record.form
