"""Batches ahead of the trainer: a thread of each rank makes their samples in order, with the weights that belong to each.

Rollout j is made with the weights of version max(0, j - K), where a version counts the rollouts that were learnt from. So
what is computed depends on K and not on how fast samples are made or learnt from. Prompts, keys and lengths are found on the
main thread, where all collectives are; the thread pushes weights, makes samples and hands their images to the rewards.
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
PAUSE = 0.01  # seconds between two looks at the store
PREFIX = "ahead."  # of the names of a checkpoint's tensors
FIELDS = ("x", "x_next", "steps", "log_prob", "velocity", "final")  # of a trajectory, each `[B, ...]`
ENDING = 30.0  # seconds that the end of a chunk is waited for when a run ends early


class RunAhead(Run):
    """A run as `collect` sees it for a batch ahead: samples are asked for with the current weights, and made on a thread.

    Args:
        run: the run.
        number: number of the batch.
        version: number of updates of the weights that make its samples.
        ask: function of a batch whose samples are to be made.
    """

    def __init__(self, run: Run, number: int, version: int, ask: Callable[[Batch], None]) -> None:
        self.__dict__.update(run.__dict__)
        self.number, self.version, self.ask = number, version, ask

    @property
    def clock(self) -> int:
        """Number of updates before those on the batch that is collected."""
        return self.number * self.config.updates_per_rollout

    def sample(self, key: Key, **chosen: Any) -> Batch:
        """Return samples that are made on the thread: reading them waits for it."""
        if chosen:
            raise self._refuse()
        spec = self.sampler.specify(key, self.sampler.prompts(key, self.clock), self.clock)
        batch = self._batch(spec, made=Future(), scoring=Scoring(self.runners.fork()), version=self.version)
        self.ask(batch)
        return batch

    def fill(self, batch: Batch, key: Key, *, rounds: int, floor: float = 0.0) -> Batch:
        """Raise UsageError: rewards are not waited for."""
        raise self._refuse()

    def _refuse(self) -> UsageError:
        hint = "samples that rewards choose cannot be asked for ahead of them"
        return UsageError("rollout.ahead", self.config.rollout.ahead, "0", hint)


class RolloutPrefetcher:
    """Collects the batches of a run ahead of its updates.

    Args:
        run: the run, whose source may be called on another thread. Every rank must take part.
        copy: network that takes the weights of each version.
    """

    def __init__(self, run: Run, copy: Copy) -> None:
        self.config, self.world, self.engine, self.run, self.copy = run.config, run.world, run.engine, run, copy
        self.local = not run.config.rollout.is_served  # each rank has its own source; else rank 0 pushes weights for all
        self.requested: dict[int, Batch] = {}
        self._work: Queue[tuple[int, Batch, dict[str, Tensor] | None] | None] = Queue()
        self._ending = Event()
        self._order = PushOrder(self.world, self._ending.is_set)
        self._thread: Thread | None = None

    @collective
    def next(self) -> Batch:
        """Return the next batch, and ask for those after it; RunError if its samples could not be made."""
        every = self.config.updates_per_rollout
        number = self.engine.updates // every
        self._ask(range(number, min(number + self.config.rollout.ahead + 1, self.config.updates // every)))
        batch = self.requested.pop(number)
        with self.world.agreed():
            batch.made.result()
        return batch

    @collective
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the batches that were asked for, once their samples are made and scored.

        Returns:
            Tensors, the same on every rank, and values that JSON can hold.
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
        """Take over batches as `state` returned them, on any number of ranks."""
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
        """End the thread after the chunk that it makes now."""
        self._ending.set()
        self._work.put(None)
        if self._thread is not None:
            self._thread.join(ENDING)

    @collective
    def _ask(self, numbers: range) -> None:
        """Ask for the rollouts that were not asked for, with the current weights."""
        new = [number for number in numbers if number not in self.requested]
        if not new:
            return
        if self._thread is None:
            # A daemon: a source that hangs does not keep the process alive.
            self._thread = Thread(target=self._serve, name="rollouts", daemon=True)
            self._thread.start()
        weights: dict[str, Tensor] | None = snapshot_weights(self.engine)

        def ask(batch: Batch) -> None:
            nonlocal weights
            self._work.put((number, batch, weights))
            weights = None  # the next ones have the same

        for number in new:
            self.requested[number] = self._collect(number, self.engine.updates, ask)

    @collective
    def _collect(self, number: int, version: int, ask: Callable[[Batch], None]) -> Batch:
        """Return a batch whose samples are asked for."""
        root = fold_in(key(self.config.seed), number * self.config.updates_per_rollout)
        return self.config.method.collect(RunAhead(self.run, number, version, ask), root)

    def _serve(self) -> None:
        """Make rollouts in their order, until one fails or the run ends."""
        device = self.world.device
        set_current_device(device)
        # A stream of its own, so that samples are made while an update is computed.
        module = torch.get_device_module(device)
        side = module.Stream(device) if is_accelerator(device) else None
        with module.stream(side) if side is not None else nullcontext():
            while (work := self._work.get()) is not None and not self._ending.is_set():
                number, batch, weights = work
                try:
                    batch.made.set_result(self._make(number, batch, weights, side))
                except BaseException as error:  # the main thread must hear of it, whether or not the other ranks do
                    batch.made.set_exception(error)
                    self._order.report_failure()
                    break
        # The rollouts that are asked for fail, until the run ends.
        while not (self._ending.is_set() and self._work.empty()) and (work := self._work.get()) is not None:
            work[1].made.set_exception(ElsewhereError("the thread that makes rollouts has ended"))

    def _make(self, number: int, batch: Batch, weights: dict[str, Tensor] | None, side: Any) -> SampleBatch:
        """Return this rank's samples of a batch."""
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
            # Else their memory may be used again here while the update still reads it.
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
    """Lets new weights be pushed once, after every rank has made the rollout before and before any makes the next.

    The ranks' threads see each other through the store of the process group. A look at it blocks nobody; waiting there would
    block the main thread, which has the same connection.

    Args:
        world: process group. Every rank must take part.
        stopped: function that returns whether this rank has given up.
    """

    def __init__(self, world: World, stopped: Callable[[], bool]) -> None:
        self.world, self.stopped, self.last = world, stopped, -1  # number of the last rollout that was made
        self.store: dist.Store | None = None
        if world.size > 1:
            name = world.gather_items(uuid.uuid4().hex)[0]  # a process may train several times
            self.store = dist.PrefixStore(f"fluvial/ahead/{name}", dist.distributed_c10d._get_default_store())

    def push(self, number: int, push: Callable[[], None]) -> None:
        """Push the weights of a rollout, on rank 0 when no rank needs the earlier ones any more, and then on the others.

        Args:
            push: function that pushes them; on the other ranks it has only to note that they were pushed.

        Raises:
            ElsewhereError: another rank failed.
            LostProcessError: another rank did not make its rollout in the time of a collective.
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
        """Note that this rank has made a rollout."""
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
    """Return a rollout as tensors, and as values that JSON can hold.

    Conditioning is left out: prompts are encoded again.

    Memory on the host, per rank: the samples of all ranks.

    Args:
        collected: what its rewards say of them.
    """
    rows: dict[str, Tensor | None] = {name: getattr(batch.trajectory, name) for name in FIELDS}
    rows["thumbnails"] = batch.thumbnails
    # A sample's score is 0 on all ranks but one. The ranks of a group have the same samples.
    scores = world.gather(collected.scores[None].to(world.device))[:: world.sequence].sum(0)
    tensors = {
        name: world.gather_data(tensor.contiguous())[:samples].cpu() for name, tensor in rows.items() if tensor is not None
    }
    tensors["scores"] = scores.cpu()
    said = world.gather_items((collected.parts, collected.problems))[:: world.sequence]
    parts: dict[str, dict[str, float]] = {}
    for parts_of_rank, _ in said:
        for name, values in parts_of_rank.items():
            parts.setdefault(name, {}).update({str(place): value for place, value in values.items()})
    # A file holds no tensor without values, so its shape stands here.
    empty = {name: [*tensor.shape] for name, tensor in tensors.items() if not tensor.numel()}
    meta = {
        "parts": parts,
        "problems": [line for _, lines in said for line in lines],
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
    """Return this rank's samples of a rollout as `pack` returned it, and what its rewards say of them.

    Args:
        tensors, meta: what `pack` returned, perhaps on another number of ranks.
        model: model that prompts are encoded with.
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
    said = {name: {int(place): value for place, value in values.items()} for name, values in meta["parts"].items()}
    return batch, Collected(whole["scores"], said, list(meta["problems"]), meta["computed"], meta["waited"])
