"""Prefetching of batches: a thread of each rank generates their samples in order, with a fixed version of the weights.

Rollout j has the weights after max(0, j - K) batches (K is `rollout.ahead`). So results depend on K, and not on the speed of
rollouts and updates. Prompts, keys and lengths are chosen on the main thread, which makes all collectives. The thread pushes
weights, generates samples and submits their images to the rewards.
"""

import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from queue import Queue
from threading import Event, Thread
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fluvial.core.random import Key, fold_in, key
from fluvial.core.rollout import Trajectory
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import ElsewhereError, LostProcessError, RunError, UsageError
from fluvial.engines.run.run import Run
from fluvial.engines.sampling.batch import Batch, RolloutSpec
from fluvial.engines.sampling.generate import Chunk, SampleBatch, join_batches
from fluvial.engines.sampling.source import Copy, snapshot_weights
from fluvial.engines.scoring.gather import Scoring
from fluvial.engines.scoring.runner import Collected
from fluvial.models import DiffusionModel
from fluvial.models.device import is_accelerator, set_current_device

FAILED = "failed"
PAUSE = 0.01  # polling interval of the store, in seconds
PREFIX = "ahead."  # prefix of tensor names in a checkpoint
FIELDS = ("x", "x_next", "steps", "log_prob", "velocity", "final")  # of a trajectory, each `[B, ...]`
ENDING = 30.0  # longest wait for the current chunk when a run ends early, in seconds


class RunAhead(Run):
    """Run for the `collect` of a prefetched batch: samples are requested here and generated on a thread.

    Args:
        run: the run.
        number: number of the batch.
        version: number of optimizer updates of the weights for its samples.
        request: function that requests the samples of a batch.
    """

    def __init__(self, run: Run, number: int, version: int, request: Callable[[Batch], None]) -> None:
        self.__dict__.update(run.__dict__)
        self.number, self.version, self.request = number, version, request

    @property
    def clock(self) -> int:
        """Number of optimizer updates before those on the batch that is collected."""
        return self.number * self.config.updates_per_rollout

    def sample(self, key: Key, **chosen: Any) -> Batch:
        """Request samples from the thread, and return their batch; reading them waits for the thread."""
        if chosen:
            raise self._refuse()
        spec = self.sampler.specify(key, self.sampler.choose_prompts(key, self.clock), self.clock)
        batch = self._batch(spec, made=Future(), scoring=Scoring(self.runners.fork()), version=self.version)
        self.request(batch)
        return batch

    def fill(self, batch: Batch, key: Key, *, rounds: int, floor: float = 0.0) -> Batch:
        """Raise UsageError: replacements depend on rewards, which are not known ahead."""
        raise self._refuse()

    def _refuse(self) -> UsageError:
        hint = "samples that depend on rewards cannot be requested before the rewards are known"
        return UsageError("rollout.ahead", self.config.rollout.ahead, "0", hint)


class RolloutPrefetcher:
    """Prefetcher of the batches of a run. All ranks create it.

    Args:
        run: the run; its source may be called on another thread.
        copy: network that takes the weights of each version.
    """

    def __init__(self, run: Run, copy: Copy) -> None:
        self.config, self.world, self.engine, self.run, self.copy = run.config, run.world, run.engine, run, copy
        self.local = not run.config.rollout.is_served  # each rank pushes to its own source; else rank 0 pushes for all
        self.requested: dict[int, Batch] = {}
        self._work: Queue[tuple[int, Batch, dict[str, Tensor] | None] | None] = Queue()
        self._ending = Event()
        self._order = PushOrder(self.world, self._ending.is_set)
        self._thread: Thread | None = None

    @collective
    def next(self) -> Batch:
        """Return the next batch, and request those after it; RunError if its samples could not be generated."""
        per_batch = self.config.updates_per_rollout
        number = self.engine.updates // per_batch
        self._request(range(number, min(number + self.config.rollout.ahead + 1, self.config.updates // per_batch)))
        batch = self.requested.pop(number)
        with self.world.agreed():
            batch.made.result()
        return batch

    @collective
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Wait until the samples of all requested batches are scored, and return these batches.

        Returns:
            Tensors, the same on every rank, and values of JSON.
        """
        tensors, meta = dict[str, Tensor](), dict[str, Any]()
        for number, batch in sorted(self.requested.items()):
            with self.world.agreed():
                samples = batch.made.result()
            assert batch.scoring is not None
            scores = batch.scoring.collect(self.world, batch=self.config.method.sampling.batch)
            packed, meta[str(number)] = pack(samples, scores, self.config.method.sampling.batch, self.world)
            meta[str(number)]["version"] = batch.version
            tensors.update({f"{PREFIX}{number}.{name}": tensor for name, tensor in packed.items()})
        return tensors, meta

    @collective
    def restore(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Restore batches from a result of `state`, on any number of ranks."""
        model, size = self.run.job.model, self.config.samples_per_pass
        for name, values in sorted(meta.items(), key=lambda item: int(item[0])):
            batch = self._collect(int(name), values["version"], lambda batch: None)
            prefix = f"{PREFIX}{name}."
            stored = {each.removeprefix(prefix): tensor for each, tensor in tensors.items() if each.startswith(prefix)}
            samples, scores = unpack(stored, values, batch.spec, model, size, self.world)
            assert batch.scoring is not None
            batch.scoring.collected = scores
            batch.made.set_result(samples)
            self.requested[int(name)] = batch

    def close(self) -> None:
        """End the thread after its current chunk."""
        self._ending.set()
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(ENDING)

    @collective
    def _request(self, numbers: range) -> None:
        """Request the rollouts among `numbers` that are not requested yet, with the current weights."""
        new = [number for number in numbers if number not in self.requested]
        if not new:
            return
        if self._thread is None:
            # A daemon, so that a source that hangs does not keep the process alive.
            self._thread = Thread(target=self._serve, name="rollouts", daemon=True)
            self._thread.start()
        weights: dict[str, Tensor] | None = snapshot_weights(self.engine)

        def request(batch: Batch) -> None:
            nonlocal weights
            self._work.put((number, batch, weights))
            weights = None  # the next batches have the same weights

        for number in new:
            self.requested[number] = self._collect(number, self.engine.updates, request)

    @collective
    def _collect(self, number: int, version: int, request: Callable[[Batch], None]) -> Batch:
        """Collect a batch whose samples are only requested."""
        root = fold_in(key(self.config.seed), number * self.config.updates_per_rollout)
        return self.config.method.collect(RunAhead(self.run, number, version, request), root)

    def _serve(self) -> None:
        """Generate the requested rollouts in order, until one fails or the run ends."""
        device = self.world.device
        set_current_device(device)
        # A side stream, so that rollouts and updates overlap.
        module = torch.get_device_module(device)
        side = module.Stream(device) if is_accelerator(device) else None
        with module.stream(side) if side is not None else nullcontext():
            while (work := self._work.get()) is not None and not self._ending.is_set():
                number, batch, weights = work
                try:
                    batch.made.set_result(self._generate(number, batch, weights, side))
                except BaseException as error:  # the main thread must get it, even if the other ranks cannot be told
                    batch.made.set_exception(error)
                    self._order.report_failure()
                    break
        # Further requested rollouts fail, until the run ends.
        while not (self._ending.is_set() and self._work.empty()) and (work := self._work.get()) is not None:
            work[1].made.set_exception(ElsewhereError("the rollout thread has ended"))

    def _generate(self, number: int, batch: Batch, weights: dict[str, Tensor] | None, side: Any) -> SampleBatch:
        """Generate this rank's samples of a batch."""
        if side is not None:
            side.wait_stream(torch.get_device_module(self.world.device).default_stream(self.world.device))
        if weights is not None:
            self._push(number, batch.version, weights)

        def check_version(chunk: Chunk) -> None:
            if self._ending.is_set():
                raise ElsewhereError("the run has ended")
            if chunk.version != batch.version:
                raise RunError(
                    f"rollout {number}: the source made samples with the weights of update {chunk.version}, expected "
                    f"those of update {batch.version}"
                )
            if side is not None:
                side.synchronize()  # the rewards and the update read them on other streams

        assert batch.scoring is not None
        samples = self.run.sampler.generate_verified(
            batch.spec, batch.scoring.runners, self.copy.behaviour, self.copy.world, seen=check_version
        )
        if side is not None:
            side.synchronize()
            main = torch.get_device_module(self.world.device).default_stream(self.world.device)
            # Otherwise their memory may be reused here while the update still reads it.
            optree.tree_map(
                lambda tensor: tensor.record_stream(main), (samples.cond, samples.trajectory, samples.thumbnails)
            )
        self._order.note_rollout(number)
        return samples

    def _push(self, number: int, version: int, weights: dict[str, Tensor]) -> None:
        self.copy.load(weights, version)
        push = partial(self.run.sampler.source.push, self.copy, version)
        if self.local:
            push()
        else:
            self._order.push(number, push)


class PushOrder:
    """Order of weight pushes: new weights are pushed once, between the previous rollout and the next one on all ranks.

    The ranks' threads communicate through the store of the process group. They poll it, because waiting in the store would
    block the main thread, which shares the connection.

    Args:
        world: process group. All ranks create it.
        stopped: returns whether this rank has given up.
    """

    def __init__(self, world: World, stopped: Callable[[], bool]) -> None:
        self.world, self.stopped, self.last = world, stopped, -1  # number of the last generated rollout
        self.store: dist.Store | None = None
        if world.size > 1:
            name = world.gather_items(uuid.uuid4().hex)[0]  # a process may train several times
            self.store = dist.PrefixStore(f"fluvial/ahead/{name}", dist.distributed_c10d._get_default_store())

    def push(self, number: int, push: Callable[[], None]) -> None:
        """Push the weights of a rollout: on rank 0 once no rank needs the earlier ones, then on the others.

        Args:
            push: function that pushes the weights; on other ranks than 0 it only records the version.

        Raises:
            ElsewhereError: another rank failed.
            LostProcessError: another rank did not generate its rollout within the timeout of a collective.
        """
        if self.store is None:
            push()
            return
        if self.world.is_main:
            self._wait([f"made/{self.last}/{rank}" for rank in range(self.world.size)] if self.last >= 0 else [])
            push()
            self.store.set(f"pushed/{number}", "")
        else:
            self._wait([f"pushed/{number}"])
            push()

    def note_rollout(self, number: int) -> None:
        """Note that this rank has generated a rollout."""
        self.last = number
        if self.store is not None:
            self.store.set(f"made/{number}/{self.world.rank}", "")

    def report_failure(self) -> None:
        """Tell the other ranks that this one failed."""
        if self.store is not None:
            self.store.set(FAILED, str(self.world.rank))

    def _wait(self, keys: list[str]) -> None:
        assert self.store is not None
        deadline = time.monotonic() + self.world.timeout
        while not all(self.store.check([key]) for key in keys):
            if self.store.check([FAILED]):
                raise ElsewhereError(f"rank {self.store.get(FAILED).decode()} failed; its own message says why")
            if self.stopped():
                raise ElsewhereError("the run has ended")
            if time.monotonic() > deadline:
                raise LostProcessError(
                    f"rank {self.world.rank}: another process has not made its rollout within {self.world.timeout:g} s"
                )
            time.sleep(PAUSE)


@collective
def pack(batch: SampleBatch, collected: Collected, samples: int, world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Pack a rollout into tensors and values of JSON.

    Conditioning is left out, because prompts can be encoded again. Host memory per rank: the samples of all ranks.

    Args:
        collected: scores of its samples by this rank's rewards.
    """
    rows: dict[str, Tensor | None] = {name: getattr(batch.trajectory, name) for name in FIELDS}
    rows["thumbnails"] = batch.thumbnails
    # Each sample's score is on one rank and 0 on the others. The ranks of a sequence group have the same samples.
    scores = world.gather(collected.scores[None].to(world.device))[:: world.sequence].sum(0)
    tensors = {
        name: world.gather_data(tensor.contiguous())[:samples].cpu() for name, tensor in rows.items() if tensor is not None
    }
    tensors["scores"] = scores.cpu()
    by_rank = world.gather_items((collected.parts, collected.problems))[:: world.sequence]
    parts: dict[str, dict[str, float]] = {}
    for rank_parts, _ in by_rank:
        for name, values in rank_parts.items():
            parts.setdefault(name, {}).update({str(index): value for index, value in values.items()})
    # Files do not store empty tensors, so their shapes are kept here.
    empty = {name: [*tensor.shape] for name, tensor in tensors.items() if not tensor.numel()}
    meta = {
        "parts": parts,
        "problems": [line for _, lines in by_rank for line in lines],
        "computed": collected.computed,
        "waited": collected.waited,
        "empty": empty,
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor.numel()}, meta


def unpack(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    spec: RolloutSpec,
    model: DiffusionModel,
    micro_batch: int,
    world: World,
) -> tuple[SampleBatch, Collected]:
    """Return this rank's samples of a packed rollout, and the scores of all its samples.

    Args:
        tensors, meta: result of `pack`, perhaps on another number of ranks.
        model: model that encodes the prompts.
        micro_batch: number of samples per chunk.
    """
    device, ids, texts = world.device, torch.tensor([*spec.requests.ids]), spec.requests.prompts
    whole = {**tensors, **{name: torch.empty(shape) for name, shape in meta["empty"].items()}}
    parts = list[SampleBatch]()
    for start in range(0, len(ids), micro_batch):
        rows, prompts = ids[start : start + micro_batch], texts[start : start + micro_batch]
        mine = {name: whole[name][rows].to(device) for name in (*FIELDS, "thumbnails") if name in whole}
        cond = spec.sampling.encode(model, prompts)
        trajectory = Trajectory(
            mine["x"], mine["x_next"], mine["steps"].long(), mine["log_prob"], mine.get("velocity"), mine["final"], None
        )
        parts.append(SampleBatch(prompts, cond, trajectory, mine.get("thumbnails")))
    batch = join_batches(parts)
    if not world.is_main:  # one rank has the scores of all samples
        return batch, Collected(torch.zeros_like(whole["scores"]), {}, [], meta["computed"], meta["waited"])
    reward_parts = {name: {int(index): value for index, value in values.items()} for name, values in meta["parts"].items()}
    return batch, Collected(whole["scores"], reward_parts, list(meta["problems"]), meta["computed"], meta["waited"])
