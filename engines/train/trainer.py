"""Training: prompts -> rollout -> rewards -> advantages -> update -> log -> evaluate -> checkpoint."""

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import optree
import torch
from rich.console import Console
from torch import Tensor, nn

from fluvial.core.random import Key, fold_in, key, uniform
from fluvial.core.rollout import unrecorded
from fluvial.core.sigmas import sde_window
from fluvial.engines.checkpoint import checkpoint
from fluvial.engines.errors import RunError, UsageError
from fluvial.engines.fsdp import flops
from fluvial.engines.fsdp.determinism import deterministic
from fluvial.engines.fsdp.engine import Engine, UpdateInfo
from fluvial.engines.fsdp.export import export, write_lora
from fluvial.engines.fsdp.loading import fingerprint
from fluvial.engines.fsdp.parallelize import DTYPES
from fluvial.engines.fsdp.world import World, init_world
from fluvial.engines.objectives.table import Dpo, name_of
from fluvial.engines.report import images
from fluvial.engines.report.progress import RunProgress, table
from fluvial.engines.rewards.runner import Rewards, chosen
from fluvial.engines.rollout.generate import Chunk, generate, on_device, slots
from fluvial.engines.rollout.streams import Stream
from fluvial.engines.train import job as jobs
from fluvial.engines.train import restart, run_folder
from fluvial.engines.train.config import TrainConfig, check_model
from fluvial.engines.train.diagnostics import Probe, diversity, pooled
from fluvial.engines.train.evaluate import Evaluation, evaluate
from fluvial.engines.train.job import Job
from fluvial.engines.train.learner import Learner, Learnt, old_decay
from fluvial.engines.train.policies import Policies
from fluvial.engines.train.recipes import as_record
from fluvial.engines.train.run_folder import RunFolder
from fluvial.engines.train.stop import StopRequest, stop_request
from fluvial.models import is_recorded
from fluvial.models.lora import add_lora

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
    with deterministically, init_world(timeout=config.collective_timeout) as world, stop_request() as stop:
        config = restart.continued(config, world, console=console)
        with world.agreed():
            if job is None:
                job = jobs.of_run(config)
            resume = config.resume or config.resume_from is not None
            if world.is_main:
                run_folder.claim(config.out, resume=resume)
        trainer = Trainer(config, job, world, console=console if world.is_main else None)
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
        with world.agreed():
            try:
                check_model(config, job.model.prediction, recorded=is_recorded(job.model))
            except ValueError as error:
                raise UsageError(str(error)) from error
            self.rewards = chosen(job.rewards, config.rewards) if config.makes_samples else {}
            if not job.evaluators:
                job = self.job = replace(job, evaluators={name: evaluator for name, (evaluator, _) in self.rewards.items()})
            given = config.objective.preferences if isinstance(config.objective, Dpo) else None
            self.preferences = jobs.read_preferences(given, job) if given is not None else ()
            if not config.makes_samples and given is None and job.data is None:
                raise UsageError(f"{name_of(config.objective)} learns from data, and this job has none: use another recipe")
        policies = Policies(config, job, world, build=self._network, weights=weights)
        guidance = config.rollout.guidance
        if guidance.scale != 1 and guidance.negative:
            try:
                job.model.check_prompt(guidance.negative)
            except ValueError as error:
                raise UsageError(f"--rollout.guidance.negative: {error}") from error
        self.schedule = on_device(job.model.schedule(config.rollout.steps, job.shape), world.device)
        self.learner = Learner(config, job, world, self.engine, policies, self.schedule)
        self.policies = policies
        self.probe: Probe | None = None
        if job.prepare is not None:
            job.prepare(world, [guidance.negative] if guidance.scale != 1 else [])
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
        folder = RunFolder(config.out, as_record(config), update=self.engine.updates) if self.world.is_main else None
        runner = Rewards(list(self.rewards.values()))
        try:
            with RunProgress(self.console, total=config.updates, done=self.engine.updates) as progress:
                if self.job.check is not None:
                    self._check(self.job.check, progress)
                if self.before is None:
                    evaluation = self._evaluate(folder, "before", config.final_samples)
                    self.before = {"score": evaluation.score, "exact": evaluation.exact}
                    progress.say(_line("before training", evaluation))
                while self.engine.updates < config.updates:
                    record, stopping = self.update(runner, stop)
                    if folder:
                        folder.log(record)
                    progress.advance(_shown(record), record["seconds"], updates=config.updates_per_rollout)
                    done = self.engine.updates
                    if self._due(config.eval_every) and done < config.updates and not stopping:
                        evaluation = self._evaluate(folder, f"update {done:04d}", config.eval_samples)
                        progress.say(_line(f"after {done} updates", evaluation))
                    if stopping or self._due(config.checkpoint_every) or done == config.updates:
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

    def _check(self, check: Callable[[nn.Module], str], progress: RunProgress) -> None:
        """Try whether the job's model can be trained at all."""
        with self.engine.inference() as module, self.world.agreed():
            try:
                progress.say(check(module))
            except ValueError as error:
                raise UsageError(f"--model {self.config.model}: {error}") from error

    def _due(self, every: int) -> bool:
        """Whether the last rollout's updates reached a multiple of `every`; 0 is never."""
        done = self.engine.updates
        return bool(every) and done // every > (done - self.config.updates_per_rollout) // every

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

    def update(self, runner: Rewards, stop: StopRequest) -> tuple[dict[str, Any], bool]:
        """Make one rollout and the optimizer updates of it: (their record, whether any rank was asked to stop)."""
        config, root = self.config, fold_in(self.key, self.engine.updates)
        seconds: dict[str, float] = {}
        with _timed(seconds, "rollout"):
            chunks = self._rollout(root, runner) if not self.preferences else []
        with _timed(seconds, "reward"):
            if config.engine.offload == "phases" and config.makes_samples:
                self.engine.offload()
            with self.world.agreed():
                rewards = runner.collect()
            # The request to stop travels with the rewards, so that all ranks stop after the same update.
            rewards, stopping = self._gathered(rewards, stop)
            spread = self._diversity(chunks)
            self.engine.onload()
            self.policies.onload()
        rollouts = self.engine.updates // config.updates_per_rollout
        with _timed(seconds, "update"):
            if self.preferences:
                places = (
                    (uniform(fold_in(root, Stream.PROMPTS), (config.rollout.prompts,)) * len(self.preferences))
                    .long()
                    .tolist()
                )
                numbers = list(range(config.rollout.prompts))
                learnt = self.learner.learn_preferences([self.preferences[place] for place in places], numbers, root)
            else:
                learnt = self.learner.learn(chunks, rewards, runner.weights, root)
            if (decay := old_decay(config, rollouts + 1)) is not None:
                self.policies.follow(self.engine, decay)
        self.samples += 2 * config.rollout.prompts if self.preferences else config.rollout.batch
        for phase, spent in seconds.items():
            self.seconds[phase] += spent
        self._watch_ratio(learnt.updates[0])
        return self._record(learnt, rewards @ runner.weights, rewards, spread, seconds), stopping

    def _rollout(self, root: Key, runner: Rewards) -> list[Chunk]:
        """Make this rank's samples, and start to evaluator them; or take them from the job's data."""
        config, rollout = self.config, self.config.rollout
        places = (uniform(fold_in(root, Stream.PROMPTS), (rollout.prompts,)) * len(self.job.train_prompts)).long().tolist()
        ids, _ = slots(rollout.batch, micro_batch=config.micro_batch, world=self.world)
        prompts = [self.job.train_prompts[places[i // rollout.group]] for i in ids]
        if not config.makes_samples:
            return self._data(ids, prompts, fold_in(root, Stream.SAMPLES))
        if config.engine.offload == "phases":
            self.engine.offload(parameters=False)
            self.policies.offload()
        on_steps, deterministic_rollout = config.objective.trains_on == "steps", rollout.sampler == "ode"
        window = sde_window(fold_in(root, Stream.WINDOW), rollout.steps, rollout.window_size, *rollout.window_range)
        chunks = []
        with self.policies.behaviour(self.engine) as module:
            for chunk in generate(
                self.job.model, module, prompts, ids,
                shape=self.job.shape,
                initial=[i // rollout.group for i in ids] if rollout.shared_noise else None,
                schedule=self.schedule, key=fold_in(root, Stream.SAMPLES),
                micro_batch=config.micro_batch, transition=self.learner.sampler,
                window=window if on_steps or not deterministic_rollout else (), record=on_steps, solver=rollout.solver,
                form=config.recorded_form, reduction=rollout.reduction,
                keep_velocity=on_steps and "old" in config.objective.compares_with, implementation=config.implementation,
                guidance=rollout.guidance, autocast=rollout.autocast,
            ):  # fmt: skip
                runner.submit(chunk.images, chunk.prompts)
                chunks.append(chunk._replace(images=pooled(chunk.images)))  # the reward has them
        return chunks

    def _data(self, ids: list[int], prompts: list[str], root: Key) -> list[Chunk]:
        """Return clean samples of the job's own in place of a rollout."""
        assert self.job.data is not None
        size, device = self.config.micro_batch, self.world.device
        chunks = []
        for start in range(0, len(ids), size):
            part = prompts[start : start + size]
            # A key a chunk, of the first sample's number: what a sample is does not depend on the ranks.
            x0 = self.job.data(fold_in(root, ids[start]), part).to(device)
            cond = optree.tree_map(
                lambda tensor: tensor.to(device), self.config.rollout.guidance.encode(self.job.model, part)
            )
            chunks.append(Chunk(part, cond, unrecorded(x0), x0[:0]))
        return chunks

    def _gathered(self, rewards: Tensor, stop: StopRequest) -> tuple[Tensor, bool]:
        """Return the rewards `[B, K]` of all samples, on the host, and whether any rank was asked to stop."""
        batch, kinds = self.config.rollout.batch, len(self.rewards)
        flags = torch.tensor([float(bool(stop))])
        gathered = self.world.gather(torch.cat([rewards.flatten(), flags]).to(self.world.device)[None]).cpu()
        stopping = bool(gathered[:, -1].any())
        if not kinds:
            return torch.zeros(batch, 0), stopping
        # Ranks of a group have the same.
        return gathered[:: self.world.sequence, :-1].reshape(-1, kinds)[:batch], stopping

    def _diversity(self, chunks: list[Chunk]) -> float | None:
        """Return how far the samples of a group lie apart, see `diagnostics.diversity`; None without a rollout."""
        if not self.config.makes_samples:
            return None
        batch, group = self.config.rollout.batch, self.config.rollout.group
        everyone = self.world.gather_data(torch.cat([chunk.images for chunk in chunks]))[:batch]
        return diversity(everyone, group) if group > 1 else None

    def _watch_ratio(self, info: UpdateInfo) -> None:
        """Note the largest |log ratio| of a first pass, which is 0 unless rollout and update disagree about the policy."""
        if "log_ratio" not in info.max_abs:
            return
        largest, bound = info.max_abs["log_ratio"], self.config.max_log_ratio
        self.max_log_ratio = max(self.max_log_ratio, largest) if largest == largest else largest
        if not largest <= bound and not info.skipped:  # NaN too
            raise RunError(
                f"update {self.engine.updates}: the first pass has a |log ratio| of {largest:.2g}, above "
                f"--max-log-ratio {bound:g}: rollout and update do not compute the same policy; where that is meant, "
                "--correction.mode truncate makes up for it"
            )

    def _record(
        self, learnt: Learnt, reward: Tensor, rewards: Tensor, spread: float | None, seconds: dict[str, float]
    ) -> dict[str, Any]:
        """Return what is logged of a rollout and its updates; numbers are of the last update where it made several."""
        first, info = learnt.updates[0], learnt.updates[-1]
        record: dict[str, Any] = {
            "update": self.engine.updates,
            "samples": self.samples,
            "loss": info.loss,
            "grad_norm": info.grad_norm,
            "lr": info.lr,
            "objective": info.mean,
            "pairs": sum(update.items for update in learnt.updates),
            "speed": self._speed(learnt.updates, seconds["update"]),
            "skipped_steps": self.engine.skipped,
            "seconds": seconds,
        }
        if self.rewards:
            record["reward"] = {"mean": reward.mean().item(), "std": reward.std().item()}
        if len(self.rewards) > 1:
            record["rewards"] = dict(zip(self.rewards, rewards.mean(0).tolist(), strict=True))
        if spread is not None:
            record["diversity"] = spread
        if "log_ratio" in first.max_abs:
            record["first_pass_max_abs_log_ratio"] = first.max_abs["log_ratio"]
        if learnt.correction is not None:
            names = learnt.correction._fields
            record["correction"] = dict(zip(names, torch.stack(list(learnt.correction)).tolist(), strict=True))
        return record

    def _speed(self, updates: list[UpdateInfo], seconds: float) -> dict[str, float]:
        """Return the updates' model FLOPs a second on this rank, and their part of the device's peak where it is known."""
        work = sum(update.flops for update in updates)
        speed = {"update_flops": work / seconds}
        dtype = self.config.engine.compute_dtype(self.world.device)
        if (most := flops.peak(self.world.device, dtype)) is not None:
            speed["mfu"] = flops.mfu(work, seconds, peak=most, ranks=1)
        return speed

    def _evaluate(self, folder: RunFolder | None, name: str, samples: int) -> Evaluation:
        with self.engine.inference(average=True) as module:
            result = evaluate(
                self.job,
                module,
                schedule=self.schedule,
                samples=samples,
                micro_batch=self.config.micro_batch,
                world=self.world,
                guidance=self.config.rollout.guidance,
            )
            drift = self._drift(module)
        if folder:
            folder.log({"update": self.engine.updates, "score": result.score, "exact": result.exact, "drift": drift})
            folder.samples(name, result)
        return result

    def _drift(self, module: nn.Module) -> float:
        """Return how far the model has gone from the one that training began with, see `diagnostics.Probe`."""
        if self.probe is None:
            path = self.config.out / "probe.safetensors"
            with self.world.agreed():
                self.probe = Probe.load(path, self.world.device) if self.before is not None else None
            if self.probe is None:
                self.probe = Probe.take(self.job, module, self.schedule, micro_batch=self.config.micro_batch)
                if self.world.is_main:
                    self.probe.save(path)
        return self.probe.drift(self.job, module, micro_batch=self.config.micro_batch)

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
            **{f"{evaluator}_exact_before": right for evaluator, right in self.before["exact"].items()},
            **{f"{evaluator}_exact_after": right for evaluator, right in after.exact.items()},
            **{f"{evaluator}_score_before": score for evaluator, score in self.before["score"].items()},
            **{f"{evaluator}_score_after": score for evaluator, score in after.score.items()},
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
            run_folder.write_json(config.out / "summary.json", summary)
            folder.curves()
            images.join(
                config.out / "samples" / "before-after.png",
                [config.out / "samples" / f"{name}.png" for name in ("before", "after")],
            )
        if self.console:
            progress.say("")
            rows = {
                f"{what}, by the {evaluator} evaluator": (
                    f"{self.before[part][evaluator]:.3f}",
                    f"{getattr(after, part)[evaluator]:.3f}",
                )
                for part, what in (("exact", "exactly right"), ("score", "score"))
                for evaluator in self.job.evaluators
                if part == "score" or after.exact[evaluator] or self.before["exact"][evaluator]
            }
            self.console.print(
                table(f"held-out prompts, {after.samples} samples", ("before", "after"), rows), highlight=False
            )
            progress.say(
                f"{self.engine.updates} updates, {self.samples} samples, {seconds:.0f} s of training; largest first-pass "
                f"|log ratio| {self.max_log_ratio:g}; {self.engine.skipped} steps skipped"
            )
            progress.say(f"images: {config.out / 'samples' / 'before-after.png'} and {config.out / 'curves.png'}")
        return summary

    def _build(self) -> nn.Module:
        """Return the network as it is trained, before sharding."""
        module = self._network(self.job)
        if self.config.train == "lora":
            adapters = ("default", "old") if self.config.keeps_old else ("default",)
            try:
                add_lora(module, self.config.lora, self.job.model.lora_targets, adapters=adapters, seed=self.config.seed)
            except ValueError as error:
                raise UsageError(str(error)) from error
        return module

    def _network(self, job: Job) -> nn.Module:
        """Return a job's network with its base weights, or empty if each rank is to read its own shards of them."""
        return jobs.build(job, empty=self.config.init == "sharded" and job.model.weights is not None)

    def _fingerprint(self) -> dict[str, Any]:
        """Return what a run that resumes from this one's checkpoints must agree with."""
        settings = {name: value for name, value in _flat(as_record(self.config)).items() if name.split(".")[0] not in FREE}
        if self.config.optimizer.schedule != "constant":
            settings["updates"] = self.config.updates
        prompts = "\n".join(self.job.train_prompts).encode()
        return {**settings, "train_prompts": hashlib.sha256(prompts).hexdigest()[:16], "base_weights": self.base}


def versions() -> dict[str, str]:
    """Return the versions of what a result depends on."""
    packages = ("fluvial", "torch", "diffusers", "peft", "scikit-learn")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}}


def _shown(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a record that a person watches."""
    reward = {"reward": record["reward"]["mean"]} if "reward" in record else {}
    names = {"ratio": "ratio", "kl_ref": "KL", "clipped": "clipped", "error": "error", "accuracy": "accuracy"}
    return reward | {shown: record["objective"][name] for name, shown in names.items() if name in record["objective"]}


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
    exactly = any(evaluation.exact.values())
    numbers = evaluation.exact if exactly else evaluation.score
    parts = (f"{number:.3f} by the {evaluator} evaluator" for evaluator, number in numbers.items())
    return f"{when}: {'exactly right' if exactly else 'score'} on held-out prompts {', '.join(parts)}"


@contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Note the wall-clock seconds of a phase."""
    start = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - start
