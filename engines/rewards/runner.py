"""Reward threads: rewards score a chunk of images while the next chunk is generated."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from fluvial.engines.errors import RunError
from fluvial.engines.rewards.protocol import Reward
from fluvial.engines.rewards.scores import as_scores, named, one_line, with_metadata

TIMEOUT = 600.0  # seconds that the scores of one chunk may take


class RewardRunner:
    """Scores chunks of images on one thread, in order.

    Args:
        reward: reward to call.
        label: name of the reward in messages.
        timeout: seconds that the scores of one chunk may take; by default `TIMEOUT`.
    """

    def __init__(self, reward: Reward, *, label: str = "the reward", timeout: float | None = None) -> None:
        self.reward, self.label, self.timeout = with_metadata(reward), label, TIMEOUT if timeout is None else timeout
        self.work: Queue[tuple[Future[Any], Tensor, Sequence[str]] | None] = Queue()
        self.waiting: list[tuple[Future[Any], Tensor, Sequence[str]]] = []
        # A daemon: a reward that hangs does not keep the process alive.
        Thread(target=self._serve, name="reward", daemon=True).start()

    def submit(self, images: Tensor, prompts: Sequence[str]) -> None:
        """Start scoring a chunk."""
        chunk = (Future[Any](), images, prompts)
        self.waiting.append(chunk)
        self.work.put(chunk)

    def collect(self) -> Tensor:
        """Return the scores of all chunks submitted since the last call, float32 on the CPU, in order.

        Raises:
            RunError: the reward raised, took too long, or did not return one finite number per image; the message names the
                prompt.
        """
        waiting, self.waiting = self.waiting, []
        return torch.cat([self._checked(*chunk) for chunk in waiting]) if waiting else torch.empty(0)

    def close(self) -> None:
        """Let the thread end, without waiting for a call that hangs."""
        self.work.put(None)

    def _serve(self) -> None:
        while (chunk := self.work.get()) is not None:
            future, images, prompts = chunk
            try:
                future.set_result(self.reward(images, prompts))
            except BaseException as error:  # also a reward that calls sys.exit: the run must hear of it
                future.set_exception(self._located(error, images, prompts))

    def _checked(self, future: Future[Any], images: Tensor, prompts: Sequence[str]) -> Tensor:
        try:
            returned = future.result(self.timeout)
        except FutureTimeoutError:
            raise RunError(f"{self.label} took over {self.timeout:g} s for {named(prompts)}") from None
        return as_scores(returned, prompts, label=self.label)

    def _located(self, error: BaseException, images: Tensor, prompts: Sequence[str]) -> RunError:
        """Return the error to report, with the first prompt whose image, scored alone, makes the reward raise."""
        culprit = list(prompts)
        for i, prompt in enumerate(prompts):
            try:
                self.reward(images[i : i + 1], [prompt])
            except BaseException:
                culprit = [prompt]
                break
        located = RunError(f"{self.label} raised {type(error).__name__} ({one_line(error)}) for {named(culprit)}")
        located.__cause__ = error
        return located


class RewardRunners:
    """Several rewards of the same images, each on its own thread.

    Args:
        weighted: rewards with their weights, by name.
        timeout: seconds that the scores of one chunk may take; by default `TIMEOUT`.
    """

    def __init__(self, weighted: Mapping[str, tuple[Reward, float]], *, timeout: float | None = None) -> None:
        self.runners = [
            RewardRunner(reward, label=f"reward {name!r}", timeout=timeout) for name, (reward, _) in weighted.items()
        ]
        self.weights = torch.tensor([weight for _, weight in weighted.values()])

    def submit(self, images: Tensor, prompts: Sequence[str]) -> None:
        """Start scoring a chunk with every reward."""
        for runner in self.runners:
            runner.submit(images, prompts)

    def collect(self) -> Tensor:
        """Return the scores `[B, K]` of all chunks submitted since the last call, see `RewardRunner.collect`."""
        columns = [runner.collect() for runner in self.runners]
        return torch.stack(columns, dim=1) if columns else torch.empty(0, 0)

    def close(self) -> None:
        """Let the threads end."""
        for runner in self.runners:
            runner.close()


def score(reward: Reward, images: Tensor, prompts: Sequence[str], *, label: str = "the reward") -> Tensor:
    """Return the scores of images `[B]`, float32 on the CPU, in one call and without a thread.

    Raises:
        RunError: the reward raised, or did not return one finite number per image.
    """
    try:
        returned: Any = with_metadata(reward)(images, prompts)
    except Exception as error:
        raise RunError(f"{label} raised {type(error).__name__} ({one_line(error)}) for {named(prompts)}") from error
    return as_scores(returned, prompts, label=label)
