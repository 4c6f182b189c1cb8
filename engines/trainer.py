"""Training: prompts -> rollout -> rewards -> advantages -> update -> log -> evaluate -> checkpoint."""

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import optree
import torch
from rich.console import Console
from torch import Tensor, nn

from fluvial.core.advantages import group_advantages
from fluvial.core.policy import PolicyInfo, guard_surrogate
from fluvial.core.random import fold_in, key, uniform
from fluvial.core.sigmas import sde_window
from fluvial.engines import checkpoint, flops, jobs, pairs, pictures, restart, runfolder
from fluvial.engines.determinism import deterministic
from fluvial.engines.distributed import World, world
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.evaluate import Evaluation, evaluate
from fluvial.engines.export import export, write_lora
from fluvial.engines.fsdp import Engine, UpdateInfo, micro_batches
from fluvial.engines.generate import Chunk, generate, sampling_grid, slots
from fluvial.engines.jobs import Job
from fluvial.engines.loading import fingerprint
from fluvial.engines.pairs import Pairs
from fluvial.engines.parallelize import DTYPES
from fluvial.engines.progress import RunProgress, table
from fluvial.engines.recipes import TrainConfig
from fluvial.engines.rewards import RewardRunner
from fluvial.engines.runfolder import RunFolder
from fluvial.engines.sharded import Sharded
from fluvial.engines.signals import StopRequest, stop_request
from fluvial.kernels import policy_loss, step_log_prob
from fluvial.models import Cond
from fluvial.models.guided import guided_velocity
from fluvial.models.lora import add_lora, without_lora

# Streams of an update's randomness, folded into the key of (seed, update).
WINDOW, PROMPTS, SAMPLES = 0, 1, 2
# What a run may change between its start and a resumption without becoming another run.
FREE = {
    "out", "prompts", "weights", "updates", "eval_every", "eval_samples", "final_samples", "checkpoint_every",
    "checkpoint_async", "checkpoints", "keep_checkpoints", "export_dtype", "collective_timeout", "resume", "resume_from",
    "engine",
}  # fmt: skip


def train(config: TrainConfig, job: Job | None = None, *, console: Console | None = None) -> dict[str, Any]:
    """Run a training job to its end, or until it is asked to stop, and return its summary (empty if stopped early).

    Args:
        config: the run.
        job: what is trained; the built-in handwriting job by default.
        console: where progress is shown; None is silent.

    Raises:
        UsageError: the run cannot be done as configured.
        RunError: it cannot go on.
    """
    deterministically = deterministic(config.engine.deterministic)
    with deterministically, world(timeout=config.collective_timeout) as processes, stop_request() as stop:
        config = restart.continued(config, processes, console=console)
        with processes.agreed():
            if job is None:
                job = jobs.handwriting(weights=config.weights, prompts=config.prompts)
            resume = config.resume or config.resume_from is not None
            if processes.is_main:
                runfolder.claim(config.out, resume=resume)
        trainer = Trainer(config, job, processes, console=console if processes.is_main else None)
        saved = checkpoint.listed(config.checkpoint_folder)
        if config.resume_from is not None:
            trainer.resume(config.resume_from)
        elif config.resume and saved:  # a run that died before its first checkpoint begins again
            trainer.resume(saved[-1])
        return trainer.run(stop)


class Trainer:
    """A training run on its processes: the engine, the job, and what has been counted so far."""

    def __init__(self, config: TrainConfig, job: Job, world: World, *, console: Console | None) -> None:
        self.config, self.job, self.console = config, job, console
        self.world = world = world.grouped(config.engine.context_parallel)
        weights = job.model.weights if config.init == "sharded" else None
        with world.agreed():
            module = self._build()
            self.base = _digest(module) if weights is None else fingerprint(weights)
        self.engine = Engine(
            module, job.model.blocks(module), config.optimizer, world,
            updates=config.updates, sharding=config.engine, weights=weights,
        )  # fmt: skip
        # With LoRA the reference is the module without its adapters, and costs no copy.
        self.reference: Sharded | None = None
        if config.policy.kl_coef > 0 and config.train == "full":
            with world.agreed():
                module = self._build().requires_grad_(False)
            self.reference = Sharded(module, job.model.blocks(module), world, config.engine, weights=weights)
        guidance = config.rollout.guidance
        if guidance.scale != 1 and guidance.negative:
            try:
                job.model.check_prompt(guidance.negative)
            except ValueError as error:
                raise UsageError(f"--rollout.guidance.negative: {error}") from error
        self.grid = sampling_grid(job.model, config.rollout.steps, device=world.device)
        self.sampler = config.rollout.bound_sampler(self.grid.sigmas)
        self.sigmas = self.grid.sigmas.to(world.device)
        self.key = key(config.seed)
        self.samples = 0
        self.seconds = {"rollout": 0.0, "reward": 0.0, "update": 0.0}
        self.max_log_ratio = 0.0
        self.before: dict[str, Any] | None = None
        self.saved_at = 0
        self.background = world.background() if config.checkpoint_async else None
        self.saving: Future[Any] | None = None

    def run(self, stop: StopRequest) -> dict[str, Any]:
        """Train until the last update or a request to stop; save, and at the end evaluate, export and sum up."""
        config = self.config
        folder = RunFolder(config.out, _as_json(config), update=self.engine.updates) if self.world.is_main else None
        runner = RewardRunner(self.job.reward)
        try:
            with RunProgress(self.console, total=config.updates, done=self.engine.updates) as progress:
                if self.before is None:
                    evaluation = self._evaluate(folder, "before", config.final_samples)
                    self.before = {"score": evaluation.score, "exact": evaluation.exact}
                    progress.say(_line("before training", evaluation))
                while self.engine.updates < config.updates:
                    record, stopping = self.update(runner, stop)
                    if folder:
                        folder.log(record)
                    progress.advance(
                        {
                            "reward": record["reward"]["mean"],
                            "ratio": record["policy"]["ratio"],
                            "KL": record["policy"]["kl_ref"],
                            "clipped": record["policy"]["clipped"],
                        },
                        record["seconds"],
                    )
                    done = self.engine.updates
                    if config.eval_every and done % config.eval_every == 0 and done < config.updates and not stopping:
                        evaluation = self._evaluate(folder, f"update {done:04d}", config.eval_samples)
                        progress.say(_line(f"after {done} updates", evaluation))
                    if stopping or done % config.checkpoint_every == 0 or done == config.updates:
                        self.save()
                    if stopping:
                        self.saved()
                        progress.say(
                            f"{stop.name or 'asked'}: stopped after update {done}, all saved; "
                            f"go on with --resume --out {config.out}"
                        )
                        return {}
                summary = self._finish(folder, progress)
                self.saved()
                return summary
        finally:
            runner.close()
            if folder:
                folder.close()
            if self.saving is not None:  # something else went wrong: what was being saved is still worth having
                wait([self.saving])

    def save(self, *, at_once: bool = False) -> None:
        """Write a checkpoint, or begin to if that is done in the background, unless this update's is already there."""
        self.saved()
        update = self.engine.updates
        if self.saved_at == update:
            return
        self.saved_at = update
        meta = {
            "engine": self.engine.counters(),
            "samples": self.samples,
            "seconds": self.seconds,
            "max_log_ratio": self.max_log_ratio,
            "before": self.before,
            "runs_on": self._runs_on(),
        }
        written: dict[str, Any] = {
            "update": update, "fingerprint": self._fingerprint(), "keep": self.config.keep_checkpoints,
        }  # fmt: skip
        where, state = self.config.checkpoint_folder, self.engine.state()
        if self.background is None or at_once:
            checkpoint.save(where, state, meta, **written, world=self.world)
        else:
            self.saving = checkpoint.save_async(where, state, meta, **written, world=self.background)

    def saved(self) -> None:
        """Wait until the checkpoint that is written in the background is there; if that failed, save the present state.

        Raises:
            RunError: neither could be written.
        """
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        try:
            saving.result()
        except RunError as error:
            self.saved_at = 0
            self.save(at_once=True)
            if self.console:
                self.console.print(
                    f"{error}; saved after update {self.engine.updates} instead", highlight=False, soft_wrap=True
                )

    def _runs_on(self) -> dict[str, Any]:
        """Return what a run's bits depend on besides its settings."""
        engine = {f"engine.{name}": value for name, value in dataclasses.asdict(self.config.engine).items()}
        return {**versions(), "ranks": self.world.size, "threads": torch.get_num_threads(), **engine}

    def resume(self, path: Path | str) -> None:
        """Continue from a checkpoint. What comes next is the same to the bit as if the run had not been interrupted."""
        state = optree.tree_map(torch.empty_like, self.engine.state())
        meta = checkpoint.load(path, state, fingerprint=self._fingerprint(), world=self.world)
        self.engine.restore(state, meta["engine"])
        self.samples, self.seconds = meta["samples"], meta["seconds"]
        self.max_log_ratio, self.before = meta["max_log_ratio"], meta["before"]
        self.saved_at = self.engine.updates
        if self.config.updates < self.engine.updates:
            raise UsageError(
                f"--updates is {self.config.updates}, but {path} is after update {self.engine.updates}: give at least that"
            )
        now = self._runs_on()
        changed = [
            f"{name} {was} then, {now.get(name)} now" for name, was in meta["runs_on"].items() if now.get(name) != was
        ]
        if self.console and changed:
            self.console.print(f"resumed with {', '.join(changed)}: bits may differ", highlight=False, soft_wrap=True)
        if self.console:
            self.console.print(f"resumed {path} after update {self.engine.updates}", highlight=False, soft_wrap=True)

    def update(self, runner: RewardRunner, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """Make one rollout and one optimizer update of it: (its record, whether any rank was asked to stop)."""
        config, rollout = self.config, self.config.rollout
        root = fold_in(self.key, self.engine.updates)
        window = sde_window(fold_in(root, WINDOW), rollout.steps, rollout.window_size, *rollout.window_range)
        places = (uniform(fold_in(root, PROMPTS), (rollout.prompts,)) * len(self.job.train_prompts)).long().tolist()
        ids, _ = slots(rollout.batch, micro_batch=config.micro_batch, world=self.world)
        prompts = [self.job.train_prompts[places[i // rollout.group]] for i in ids]
        seconds: dict[str, float] = {}

        if config.engine.offload == "phases":
            self.engine.offload(parameters=False)
            if self.reference is not None:
                self.reference.offload()
        with _timed(seconds, "rollout"), self.engine.inference() as module:
            chunks = []
            for chunk in generate(
                self.job.model, module, prompts, ids,
                initial=[i // rollout.group for i in ids] if rollout.shared_noise else None,
                grid=self.grid, key=fold_in(root, SAMPLES),
                micro_batch=config.micro_batch, transition=self.sampler, window=window, form=rollout.form,
                reduction=rollout.reduction,
                keep_velocity=config.policy.objective == "guard", implementation=config.implementation,
                guidance=rollout.guidance,
            ):  # fmt: skip
                runner.submit(chunk.pictures, chunk.prompts)
                chunks.append(chunk._replace(pictures=chunk.pictures[:0].clone()))  # the reward has them
        with _timed(seconds, "reward"):
            if config.engine.offload == "phases":
                self.engine.offload()
            with self.world.agreed():
                rewards = runner.collect()
            # The request to stop travels with the rewards, so that all ranks stop after the same update.
            local = torch.cat([rewards, torch.tensor([float(bool(stop))])]).to(self.world.device)
            gathered = self.world.gather(local[None]).cpu()
            stopping = bool(gathered[:, -1].any())
            reward = gathered[:: self.world.sequence, :-1].flatten()[: rollout.batch]  # ranks of a group have the same
            group = torch.arange(rollout.batch) // rollout.group
            advantage = group_advantages(reward, group, scale=config.policy.advantage, eps=config.policy.advantage_eps)
            self.engine.onload()
            if self.reference is not None:
                self.reference.onload()
        with _timed(seconds, "update"):
            info = self._optimize(chunks, advantage)
        self.samples += rollout.batch
        for phase, spent in seconds.items():
            self.seconds[phase] += spent
        self._watch_ratio(info)
        return self._record(info, reward, seconds), stopping

    def _optimize(self, chunks: list[Chunk], advantage: Tensor) -> UpdateInfo:
        """Take one optimizer step on this rank's chunks, given the advantages of all samples."""
        rollout, policy, device = self.config.rollout, self.config.policy, self.world.device
        micro_batch = self.config.micro_batch
        slots_a_rank = sum(len(chunk.prompts) for chunk in chunks)
        spread = torch.zeros(2, self.world.data_size, slots_a_rank)
        spread.view(2, -1)[:, : rollout.batch] = torch.stack([advantage, torch.ones(rollout.batch)])
        mine, weight = spread[:, self.world.data_rank]
        trajectory = pairs.concatenate([chunk.trajectory for chunk in chunks])
        recorded = trajectory.log_prob.shape[1]
        cond = optree.tree_map(lambda *parts: torch.cat(parts), *(chunk.cond for chunk in chunks))
        chunks.clear()
        flat = pairs.flatten(trajectory, mine.to(device), weight.to(device))
        del trajectory  # one copy of what was stored is enough
        # What a pair adds to the loss: its advantage times something, and with a KL term that as well.
        adds = spread[1] if policy.kl_coef > 0 else spread[0]
        held = [int(count) * recorded for count in (adds != 0).sum(1)]
        first: Pairs = optree.tree_map(lambda tensor: tensor[:1].clone(), flat)
        flat = pairs.kept(flat, adds[self.world.data_rank].repeat(recorded))
        longest = -(-sum(held) // len(held))
        if -(-max(held) // micro_batch) > -(-longest // micro_batch):
            flat, cond = pairs.balanced(flat, cond, held, self.world)
        else:  # moving pairs would save no forward pass
            longest = max(held)
        if not len(flat.step):  # there has to be something to run
            flat = first._replace(weight=torch.zeros_like(first.weight))
        if policy.kl_coef > 0:
            flat = flat._replace(v_ref=self._reference_velocity(flat, cond, max(longest, 1)))
        return self.engine.update(
            flat,
            flat.weight,
            lambda batch: self._loss(batch, cond),
            count=rollout.batch * recorded,
            micro_batch=micro_batch,
            pad_to=max(longest, 1),
        )

    def _loss(self, batch: Pairs, cond: Cond) -> tuple[Tensor, PolicyInfo]:
        """Return the policy objective of a micro-batch of pairs, with the KL to the reference in it if asked for."""
        rollout, policy = self.config.rollout, self.config.policy
        sigma, sigma_next = self.sigmas[batch.step], self.sigmas[batch.step + 1]
        transition, v = self.sampler(sigma, sigma_next), self._velocity(self.engine.module, batch, cond)
        step = (v, batch.x, batch.x_next, transition)
        options: dict[str, Any] = {
            "v_ref": batch.v_ref, "form": rollout.form, "reduction": rollout.reduction,
            "implementation": self.config.implementation,
        }  # fmt: skip
        if batch.v_old is None:
            loss, info = policy_loss(
                *step, batch.log_prob_old, batch.advantage, clip_low=policy.clip_low, clip_high=policy.clip_high,
                kl_coef=policy.kl_coef, kl_weight=policy.kl_weight, dt=sigma_next - sigma, **options,
            )  # fmt: skip
        else:
            log_prob, kl = step_log_prob(*step, **options)
            probs = (log_prob, batch.log_prob_old, batch.advantage)
            loss, info = guard_surrogate(*probs, transition, v, batch.v_old, sigma_next - sigma, clip=policy.clip_low)
            if kl is not None:
                scale = sigma - sigma_next if policy.kl_weight == "rate" else 1.0
                loss, info = loss + policy.kl_coef * scale * kl, info._replace(kl_ref=kl.detach())
        return loss, info

    def _velocity(self, module: nn.Module, batch: Pairs, cond: Cond) -> Tensor:
        guidance = self.config.rollout.guidance
        return guided_velocity(
            self.job.model,
            module,
            batch.x,
            self.sigmas[batch.step],
            optree.tree_map(lambda table: table[batch.sample], cond),
            timestep=self.grid.timesteps[batch.step],
            forwards=guidance.forwards,
            gradient=guidance.gradient,
        )

    def _reference_velocity(self, flat: Pairs, cond: Cond, pad_to: int) -> Tensor:
        """Return the reference policy's velocity of every pair; two means differ by b (v - v_ref), so this is all of it."""
        if self.reference is None:
            with self.engine.inference() as module, without_lora(module):
                return self._velocities(module, flat, cond, pad_to)
        with self.reference.inference() as module:
            return self._velocities(module, flat, cond, pad_to)

    def _velocities(self, module: nn.Module, flat: Pairs, cond: Cond, pad_to: int) -> Tensor:
        """Return the velocity of every pair, in the update's own micro-batches: the same bits, and as many on every rank."""
        chunks = micro_batches(flat, micro_batch=self.config.micro_batch, pad_to=pad_to, device=self.world.device)
        return torch.cat([self._velocity(module, chunk, cond) for chunk in chunks])[: len(flat.step)]

    def _watch_ratio(self, info: UpdateInfo) -> None:
        """Note the largest |log ratio| of a first pass, which is 0 unless rollout and update disagree about the policy."""
        largest, bound = info.max_abs["log_ratio"], self.config.policy.max_log_ratio
        self.max_log_ratio = max(self.max_log_ratio, largest) if largest == largest else largest
        if not largest <= bound and not info.skipped:  # NaN too
            raise RunError(
                f"update {self.engine.updates}: the first pass has a |log ratio| of {largest:.2g}, above "
                f"--policy.max-log-ratio {bound:g}: rollout and update do not compute the same policy"
            )

    def _record(self, info: UpdateInfo, reward: Tensor, seconds: dict[str, float]) -> dict[str, Any]:
        return {
            "update": self.engine.updates,
            "samples": self.samples,
            "reward": {"mean": reward.mean().item(), "std": reward.std().item()},
            "loss": info.loss,
            "grad_norm": info.grad_norm,
            "lr": info.lr,
            "policy": info.mean,
            "first_pass_max_abs_log_ratio": info.max_abs["log_ratio"],
            "pairs": info.items,
            "speed": self._speed(info, seconds["update"]),
            "skipped_steps": self.engine.skipped,
            "seconds": seconds,
        }

    def _speed(self, info: UpdateInfo, seconds: float) -> dict[str, float]:
        """Return the update's model FLOPs a second on this rank, and their part of the device's peak where it is known."""
        speed = {"update_flops": info.flops / seconds}
        dtype = self.config.engine.compute_dtype(self.world.device)
        if (most := flops.peak(self.world.device, dtype)) is not None:
            speed["mfu"] = flops.mfu(info.flops, seconds, peak=most, ranks=1)
        return speed

    def _evaluate(self, folder: RunFolder | None, name: str, samples: int) -> Evaluation:
        with self.engine.inference(average=True) as module:
            result = evaluate(
                self.job,
                module,
                grid=self.grid,
                samples=samples,
                micro_batch=self.config.micro_batch,
                world=self.world,
                guidance=self.config.rollout.guidance,
            )
        if folder:
            folder.log({"update": self.engine.updates, "score": result.score, "exact": result.exact})
            folder.samples(name, result)
        return result

    def _finish(self, folder: RunFolder | None, progress: RunProgress) -> dict[str, Any]:
        """Evaluate, export, draw and sum up."""
        config = self.config
        after = self._evaluate(folder, "after", config.final_samples)

        written: dict[str, Any] = {
            "average": self.engine.averaged(), "dtype": DTYPES[config.export_dtype], "world": self.world,
        }  # fmt: skip
        lora = config.train == "lora"
        export(self.engine.module, config.out / "weights", merge=lora, **written)
        if lora:
            write_lora(self.engine.module, config.out / "lora", **written)
        assert self.before is not None
        seconds = sum(self.seconds.values())
        summary = {
            "heldout_exact_before": self.before["exact"]["heldout"],
            "heldout_exact_after": after.exact["heldout"],
            "heldout_score_before": self.before["score"]["heldout"],
            "heldout_score_after": after.score["heldout"],
            "reward_exact_before": self.before["exact"]["reward"],
            "reward_exact_after": after.exact["reward"],
            "train_seconds": seconds,
            "train_seconds_by_phase": self.seconds,
            "train_samples": self.samples,
            "samples_per_second": self.samples / seconds if seconds else 0.0,
            "first_pass_max_abs_log_ratio": self.max_log_ratio,
            "updates": self.engine.updates,
            "skipped_steps": self.engine.skipped,
            "eval_samples": after.samples,
            "ranks": self.world.size,
            "seed": config.seed,
            "versions": versions(),
        }
        if folder:
            runfolder.write_json(config.out / "summary.json", summary)
            folder.curves()
            pictures.join(
                config.out / "samples" / "before-after.png",
                [config.out / "samples" / f"{name}.png" for name in ("before", "after")],
            )
        if self.console:
            progress.say("")
            rows = {
                f"{what}, by the {judge} judge": (
                    f"{self.before[part][judge]:.3f}",
                    f"{getattr(after, part)[judge]:.3f}",
                )
                for part, what in (("exact", "exactly right"), ("score", "characters right"))
                for judge in self.job.judges
            }
            self.console.print(
                table(f"held-out prompts, {after.samples} samples", ("before", "after"), rows), highlight=False
            )
            progress.say(
                f"{self.engine.updates} updates, {self.samples} samples, {seconds:.0f} s of training; largest first-pass "
                f"|log ratio| {self.max_log_ratio:g}; {self.engine.skipped} steps skipped"
            )
            progress.say(f"pictures: {config.out / 'samples' / 'before-after.png'} and {config.out / 'curves.png'}")
        return summary

    def _build(self) -> nn.Module:
        """Return the network as it is trained, before sharding."""
        module = jobs.build(self.job, empty=self.config.init == "sharded" and self.job.model.weights is not None)
        if self.config.train == "lora":
            try:
                add_lora(module, self.config.lora, self.job.model.lora_targets, seed=self.config.seed)
            except ValueError as error:
                raise UsageError(str(error)) from error
        return module

    def _fingerprint(self) -> dict[str, Any]:
        """Return what a run that resumes from this one's checkpoints must agree with."""
        settings = {name: value for name, value in _flat(_as_json(self.config)).items() if name.split(".")[0] not in FREE}
        if self.config.optimizer.schedule != "constant":
            settings["updates"] = self.config.updates
        prompts = "\n".join(self.job.train_prompts).encode()
        return {**settings, "train_prompts": hashlib.sha256(prompts).hexdigest()[:16], "base_weights": self.base}


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    packages = ("fluvial", "torch", "diffusers", "peft", "scikit-learn")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def _as_json(config: TrainConfig) -> dict[str, Any]:
    """Return a config as JSON holds it: paths as text, tuples as lists."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict, {"rollout.eta": 0.8, ...}, spelled as their flags are."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return flat


def _digest(module: nn.Module) -> str:
    """Return a fingerprint of a module's weights, from each tensor's name and sum."""
    sums = {name: float(tensor.double().sum()) for name, tensor in module.state_dict().items()}
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]


def _line(when: str, evaluation: Evaluation) -> str:
    parts = (f"{exact:.3f} by the {judge} judge" for judge, exact in evaluation.exact.items())
    return f"{when}: exactly right on held-out prompts {', '.join(parts)}"


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note the wall-clock seconds of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
