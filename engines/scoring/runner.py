"""Reward threads, which score chunks or groups while the next chunk is generated, and rewards with gradient."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from queue import Queue
from threading import Thread
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fluvial.engines.data.records import Prompt, as_prompts, texts
from fluvial.engines.engine.world import World, collective
from fluvial.engines.errors import FluvialError, RunError, UsageError
from fluvial.engines.scoring.protocol import Reward
from fluvial.engines.scoring.scores import SCORE, Scored, concatenate, format_prompts, make_invalid, one_line, read_scores
from fluvial.engines.scoring.signature import Samples, signature_of
from fluvial.models.device import record_use, set_current_device

Row = tuple[Tensor, Prompt, Tensor | None]  # image, prompt and latent of a sample


class GroupBuffer:
    """Buffer of samples until their group is complete. The samples of a group have consecutive ids."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting: dict[int, dict[int, Row]] = {}  # by group and id
        self._like: Samples | None = None

    def add(self, samples: Samples, ids: Sequence[int]) -> list[Samples]:
        """Add samples, and return the groups that they complete.

        Args:
            ids: index of each sample in the rollout, -1 for padding, which is skipped.
        """
        self._like = samples
        for i, number in enumerate(ids):
            if number >= 0:
                latent = None if samples.latents is None else samples.latents[i]
                self.waiting.setdefault(number // self.size, {})[number] = samples.images[i], samples.prompts[i], latent
        return self._complete()

    @collective
    def exchange(self, world: World) -> list[Samples]:
        """Exchange samples with other ranks, and return the groups that they complete.

        A group goes to the first rank that has samples of it.
        """
        if world.data_size == 1:
            return []
        waiting = {group: [(number, row[1]) for number, row in sorted(rows.items())] for group, rows in self.waiting.items()}
        waiting_by_rank = world.gather_items(waiting)[:: world.sequence]
        owner = {group: rank for rank in reversed(range(len(waiting_by_rank))) for group in waiting_by_rank[rank]}
        rank = world.data_rank
        # Ordered by receiver, and then by id.
        sent = sorted((owner[group], number) for group in waiting if owner[group] != rank for number, _ in waiting[group])
        coming = [
            (number, prompt)
            for other, groups in enumerate(waiting_by_rank)
            for number, prompt in sorted(row for group, rows in groups.items() for row in rows if owner[group] == rank)
            if other != rank
        ]
        moved = [
            [(owner[group], len(rows)) for group, rows in groups.items() if owner[group] != other]
            for other, groups in enumerate(waiting_by_rank)
        ]
        if not any(moved):
            return []
        send = [sum(count for to, count in moved[rank] if to == receiver) for receiver in range(world.data_size)]
        receive = [sum(count for to, count in moved[sender] if to == rank) for sender in range(world.data_size)]
        rows = [self.waiting[number // self.size].pop(number) for _, number in sent]
        self.waiting = {group: remaining for group, remaining in self.waiting.items() if remaining}
        like = self._like
        assert like is not None, "every rank makes samples"
        images = world.exchange(_stack([image for image, _, _ in rows], like.images), send, receive)
        latents: Sequence[Tensor | None] = [None] * len(images)
        if like.latents is not None:
            latents = world.exchange(
                _stack([latent for _, _, latent in rows if latent is not None], like.latents), send, receive
            ).unbind()
        for (number, prompt), image, latent in zip(coming, images, latents, strict=True):
            self.waiting.setdefault(number // self.size, {})[number] = image, prompt, latent
        return self._complete()

    def _complete(self) -> list[Samples]:
        """Remove and return the complete groups."""
        parts = []
        for group in sorted(group for group, rows in self.waiting.items() if len(rows) == self.size):
            rows = [row for _, row in sorted(self.waiting.pop(group).items())]
            latents = [latent for _, _, latent in rows if latent is not None]
            parts.append(
                Samples(
                    torch.stack([image for image, _, _ in rows]),
                    [prompt for _, prompt, _ in rows],
                    torch.stack(latents) if latents else None,
                    group,
                )
            )
        return parts


def _stack(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Stack tensors to `[N, ...]`; there may be none."""
    return torch.stack(list(rows)) if rows else like.new_empty(0, *like.shape[1:])


TIMEOUT = 600.0  # seconds that the scores of one chunk may take
POLL = 0.1  # polling interval while waiting for pending scores, in seconds
BAD = 2  # failures of samples tried one by one, after which the remaining samples of a chunk are skipped

Later = Future[Any]  # of what a reward returns


@dataclass
class Tally:
    """Counts of a reward's thread over the chunks of a rollout."""

    seconds: float = 0.0  # compute time of the reward
    failed: int = 0  # invalid samples
    problem: str = ""  # reason of the last invalid sample


class RewardRunner:
    """Scores chunks of samples on one thread, in order.

    A call that raises gives its samples no score. If one of them may be the cause, they are scored one by one.

    Args:
        timeout: seconds that the scores of one chunk may take; by default `TIMEOUT`.
        tolerated: number of invalid samples between two calls of `results` above which the reward is no longer called,
            because the run will stop; None always calls it.
    """

    def __init__(
        self, reward: Reward, *, label: str = "the reward", timeout: float | None = None, tolerated: int | None = None
    ) -> None:
        self.reward, self.label, self.timeout = reward, label, TIMEOUT if timeout is None else timeout
        self.signature, self.tolerated = signature_of(reward), tolerated
        self.work: Queue[tuple[Future[Scored | Later], Samples, Tally] | None] = Queue()
        self.waiting: list[
            tuple[Future[Scored | Later], Sequence[Prompt]]
        ] = []  # without images, which are freed once scored
        self.tally = Tally()  # since the last call of `results`
        # A daemon thread, so that a hanging reward does not keep the process alive.
        Thread(target=self._serve, name="reward", daemon=True).start()

    def submit(
        self, images: Tensor, prompts: Sequence[Prompt], latents: Tensor | None = None, group: int | None = None
    ) -> None:
        """Start scoring a chunk, see `Samples`."""
        future = Future[Scored | Later]()
        self.waiting.append((future, prompts))
        self.work.put((future, Samples(images, prompts, latents, group), self.tally))

    def fork(self) -> Self:
        """Return a runner on the same thread with separate chunks and results."""
        other = copy.copy(self)
        other.waiting, other.tally = [], Tally()
        return other

    def results(self, stop: Callable[[], bool] = lambda: False) -> list[Scored]:
        """Return the scores of each chunk submitted since the last call, in order.

        Args:
            stop: function that returns whether to stop waiting for pending scores, which are then `abandoned`.

        Raises:
            RunError: the reward took too long; the message names the prompts.
        """
        waiting, self.waiting = self.waiting, []
        results = []
        for future, prompts in waiting:
            try:
                scored = future.result(self.timeout)
                results.append(scored if isinstance(scored, Scored) else self._await_scores(scored, prompts, stop))
            except FutureTimeoutError:
                raise RunError(f"{self.label} took over {self.timeout:g} s for {format_prompts(texts(prompts))}") from None
        self.tally.failed = 0
        return results

    def collect(self) -> Tensor:
        """Return the scores of all chunks submitted since the last call, float32 on the CPU, in order.

        Raises:
            RunError: the reward raised, took too long, or did not return one valid number per image; the message names the
                prompt.
        """
        scored = concatenate(self.results())
        if torch.isnan(scored.scores).any():
            raise RunError(scored.problems[0])
        return scored.scores

    def close(self) -> None:
        """End the thread, without waiting for a hanging call."""
        self.work.put(None)

    def _serve(self) -> None:
        while (chunk := self.work.get()) is not None:
            future, scored = chunk[0], self._score_chunk(*chunk[1:])
            del chunk  # frees its images, whose memory an update needs
            future.set_result(scored)

    def _score_chunk(self, samples: Samples, tally: Tally) -> Scored | Later:
        """Return the scores of a chunk, whatever the reward raises, and count invalid ones."""
        set_current_device(samples.images.device)
        record_use(samples.images, samples.latents)
        if self.tolerated is not None and tally.failed > self.tolerated:
            return make_invalid(len(samples.prompts), tally.problem)
        start = time.perf_counter()
        try:
            scored = self._call(samples)
        except BaseException as error:  # also sys.exit in a reward, which the run must report
            # These errors would recur for each single sample.
            is_common = samples.group is not None or isinstance(error, OSError | FluvialError)
            line = self._line(error, samples.prompts)
            scored = make_invalid(len(samples.prompts), line) if is_common else self._one_by_one(samples, error)
        tally.seconds += time.perf_counter() - start
        if isinstance(scored, Scored):
            tally.failed += int(torch.isnan(scored.scores).sum())
            tally.problem = scored.problems[0] if scored.problems else tally.problem
        return scored

    def _await_scores(self, later: Later, prompts: Sequence[Prompt], stop: Callable[[], bool]) -> Scored:
        """Wait for pending scores of a reward, without a time limit."""
        while not later.done():
            if stop():
                return make_invalid(len(prompts), f"{self.label} was not waited for")._replace(abandoned=True)
            wait([later], POLL)
        try:
            return read_scores(later.result(), texts(prompts), label=self.label)
        except Exception as error:
            return make_invalid(len(prompts), self._line(error, prompts))

    def _call(self, samples: Samples) -> Scored | Later:
        returned = self.signature.call(self.reward, samples)
        return returned if isinstance(returned, Future) else read_scores(returned, texts(samples.prompts), label=self.label)

    def _line(self, error: BaseException, prompts: Sequence[Prompt]) -> str:
        """Return why a call gave no scores, in one line."""
        if not isinstance(error, FluvialError):
            return f"{self.label} raised {type(error).__name__} ({one_line(error)}) for {format_prompts(texts(prompts))}"
        return one_line(error) if str(error).startswith(self.label) else f"{self.label}: {one_line(error)}"

    def _one_by_one(self, samples: Samples, error: BaseException) -> Scored:
        """Score the samples one by one; the problem line names the first that fails."""
        parts, problem, bad = list[Scored](), self._line(error, samples.prompts), 0
        for i in range(len(samples.prompts)):
            single = samples.part(slice(i, i + 1))
            try:
                scored = self._call(single) if bad < BAD else make_invalid(1, problem)
                parts.append(
                    scored if isinstance(scored, Scored) else self._await_scores(scored, single.prompts, lambda: False)
                )
            except BaseException as sample_error:
                problem, bad = problem if bad else self._line(sample_error, single.prompts), bad + 1
                parts.append(make_invalid(1, problem))
        return concatenate(parts)._replace(problems=(problem,), failed=True)


class Collected(NamedTuple):
    """Scores of N samples by several rewards, on one rank."""

    scores: Tensor  # [N, K], NaN where invalid; 0 for samples that another rank scores
    parts: dict[str, dict[int, float]]  # additional scores by "reward/name" and sample
    problems: list[str]  # one line per reason of an invalid score
    computed: float  # compute time of the slowest reward, in seconds
    waited: float  # time waited for the rewards, in seconds
    abandoned: bool = False  # pending scores were not awaited


class RewardRunners:
    """Several rewards of the same samples, each on its own thread.

    Args:
        timeout: seconds that the scores of one chunk may take; by default `TIMEOUT`.
        group: samples per group; rewards that compare them get one group per call. 0 means no groups.
        tolerated: number of invalid samples of a reward above which it is no longer called, see `RewardRunner`.
    """

    def __init__(
        self,
        weighted: Mapping[str, tuple[Reward, float]],
        *,
        timeout: float | None = None,
        group: int = 0,
        tolerated: int | None = None,
    ) -> None:
        self.names = list(weighted)
        self.runners = [
            RewardRunner(reward, label=f"reward {name!r}", timeout=timeout, tolerated=tolerated)
            for name, (reward, _) in weighted.items()
        ]
        self.weights = torch.tensor([weight for _, weight in weighted.values()])
        self.group = group
        self._begin()

    def _begin(self) -> None:
        """Reset to no samples."""
        self.groupwise = [runner for runner in self.runners if runner.signature.takes("group")]
        self.buffer = GroupBuffer(self.group) if self.groupwise else None
        self._ids: list[int] = []  # index of each sample so far, -1 for padding
        self._groups: list[int] = []  # index of each group so far

    def discard(self) -> None:
        """Discard the samples so far; others replace them."""
        for runner in self.runners:
            runner.waiting = []
        self._begin()

    def fork(self, group: int | None = None) -> Self:
        """Return runners on the same threads with separate samples and results, for another rollout.

        They may be used on another thread than these, but only on one at a time.

        Args:
            group: samples per group, by default unchanged.
        """
        other = copy.copy(self)
        other.runners = [runner.fork() for runner in self.runners]
        other.group = self.group if group is None else group
        other._begin()
        return other

    def submit(
        self, images: Tensor, prompts: Sequence[Prompt], latents: Tensor | None = None, ids: Sequence[int] | None = None
    ) -> None:
        """Start scoring a chunk with every reward.

        Args:
            images, prompts, latents: the samples, see `Samples`.
            ids: index of each sample in the rollout, -1 for padding, whose score is not used; by default the next ones.
        """
        ids = range(len(self._ids), len(self._ids) + len(prompts)) if ids is None else ids
        self._ids.extend(ids)
        for runner in self.runners:
            if runner not in self.groupwise:
                runner.submit(images, prompts, latents)
        if self.buffer is not None:
            self._start(self.buffer.add(Samples(images, prompts, latents), ids))

    def collect(self, *, batch: int | None = None, stop: Callable[[], bool] = lambda: False) -> Collected:
        """Return the scores of all chunks submitted since the last call.

        Args:
            batch: number of samples of all ranks; by default the number of submitted samples.
            stop: function that returns whether to stop waiting for pending scores.

        Raises:
            RunError: a reward took too long.
        """
        start = time.perf_counter()
        ids, self._ids = self._ids, []
        count = len(ids) if batch is None else batch
        table, parts, problems = torch.zeros(count, len(self.runners)), dict[str, dict[int, float]](), list[str]()
        groups, self._groups, abandoned = self._groups, [], False
        for column, (name, runner) in enumerate(zip(self.names, self.runners, strict=True)):
            places = ids
            if runner in self.groupwise:
                assert self.buffer is not None
                places = [group * self.buffer.size + i for group in groups for i in range(self.buffer.size)]
            scored = concatenate(runner.results(stop))
            abandoned |= scored.abandoned
            scored_rows = [row for row, place in enumerate(places) if place >= 0]
            scored_places = [places[row] for row in scored_rows]
            table[scored_places, column] = scored.scores[scored_rows]
            problems += scored.problems
            for part, values in scored.parts.items():
                parts[f"{name}/{part}"] = dict(zip(scored_places, values[scored_rows].tolist(), strict=True))
        computed = max((runner.tally.seconds for runner in self.runners), default=0.0)
        for runner in self.runners:
            runner.tally.seconds = 0.0
        return Collected(table, parts, problems, computed, time.perf_counter() - start, abandoned)

    @collective
    def exchange(self, world: World) -> None:
        """Start scoring groups whose samples are on several ranks, each group on one of them."""
        if self.buffer is not None:
            self._start(self.buffer.exchange(world))

    def close(self) -> None:
        """End the threads."""
        for runner in self.runners:
            runner.close()

    def _start(self, groups: Sequence[Samples]) -> None:
        for samples in groups:
            assert samples.group is not None
            self._groups.append(samples.group)
            for runner in self.groupwise:
                runner.submit(*samples)


def score(reward: Reward, images: Tensor, prompts: Sequence[str | Prompt], *, label: str = "the reward") -> Tensor:
    """Return the scores of images `[B]`, float32 on the CPU, in one call.

    Raises:
        RunError: the reward raised, or did not return one valid number per image.
    """
    runner = RewardRunner(reward, label=label)
    try:
        runner.submit(images, as_prompts(prompts))
        return runner.collect()
    finally:
        runner.close()


def weighted_sum(rewards: Mapping[str, tuple[Reward, float]], samples: Samples, *, objective: str) -> Tensor:
    """Return the weighted sum of rewards of samples, `[B]`, with gradient.

    Args:
        objective: name of the method that follows the gradient, for messages.

    Raises:
        UsageError: a reward gives no gradient.
    """
    total = torch.zeros(len(samples.prompts), device=samples.images.device)
    for name, (reward, weight) in rewards.items():
        returned = signature_of(reward).call(reward, samples)
        scores = returned.get(SCORE) if isinstance(returned, Mapping) else returned
        if (
            not isinstance(scores, Tensor)
            or scores.shape != total.shape
            or (torch.is_grad_enabled() and not scores.requires_grad)
        ):
            raise UsageError(
                f"reward {name!r} gives no gradient, and {objective} follows it: expected PyTorch operations on the images, "
                f"and a tensor [{len(total)}]"
            )
        total = total + weight * scores
    return total
