"""Rewards: any function from images and prompts to a number each. It runs on a thread beside the rollout."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import Queue
from threading import Thread

import torch
from torch import Tensor

from fluvial.engines.errors import RunError, UsageError

# reward(images [B, C, H, W] in [0, 1], prompts) -> [B]
Reward = Callable[[Tensor, Sequence[str]], Tensor]


class RewardRunner:
    """Scores chunks of images on one thread, in order, while the next chunk is generated.

    Args:
        reward: what to call.
        timeout: seconds that one chunk may take.
    """

    def __init__(self, reward: Reward, *, timeout: float = 600.0) -> None:
        self.reward, self.timeout = reward, timeout
        self.work: Queue[tuple[Future[Tensor], Tensor, Sequence[str]] | None] = Queue()
        self.waiting: list[tuple[Future[Tensor], Tensor, Sequence[str]]] = []
        # A daemon: a reward that hangs does not keep the process from ending.
        Thread(target=self._serve, name="reward", daemon=True).start()

    def submit(self, images: Tensor, prompts: Sequence[str]) -> None:
        """Start scoring a chunk."""
        chunk = (Future[Tensor](), images, prompts)
        self.waiting.append(chunk)
        self.work.put(chunk)

    def collect(self) -> Tensor:
        """Return the rewards of all chunks submitted since the last call, float32 on the CPU, in order.

        Raises:
            RunError: the reward raised, took too long, returned the wrong number of values or one that is not finite;
                the message names the prompt.
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

    def _checked(self, future: Future[Tensor], images: Tensor, prompts: Sequence[str]) -> Tensor:
        try:
            rewards = torch.as_tensor(future.result(self.timeout), dtype=torch.float32, device="cpu")
        except FutureTimeoutError:
            raise RunError(f"the reward took over {self.timeout:g} s for {_named(prompts)}") from None
        if rewards.shape != (len(prompts),):
            raise RunError(
                f"the reward returned shape {list(rewards.shape)} for {len(prompts)} images, expected [{len(prompts)}] "
                f"({_named(prompts)})"
            )
        for i in torch.nonzero(~torch.isfinite(rewards)).flatten().tolist():
            raise RunError(f"the reward is {rewards[i]:g} for {_named([prompts[i]])}, expected a finite number")
        return rewards

    def _located(self, error: BaseException, images: Tensor, prompts: Sequence[str]) -> RunError:
        """Return the error to report: of the first prompt whose image, scored alone, makes the reward raise."""
        culprit = list(prompts)
        for i, prompt in enumerate(prompts):
            try:
                self.reward(images[i : i + 1], [prompt])
            except BaseException:
                culprit = [prompt]
                break
        located = RunError(f"the reward raised {type(error).__name__} ({error}) for {_named(culprit)}")
        located.__cause__ = error
        return located


class Rewards:
    """Several rewards of the same images, each on a thread of its own.

    Args:
        weighted: the rewards and their weights.
    """

    def __init__(self, weighted: Sequence[tuple[Reward, float]]) -> None:
        self.runners = [RewardRunner(reward) for reward, _ in weighted]
        self.weights = torch.tensor([weight for _, weight in weighted])

    def submit(self, images: Tensor, prompts: Sequence[str]) -> None:
        """Start scoring a chunk."""
        for runner in self.runners:
            runner.submit(images, prompts)

    def collect(self) -> Tensor:
        """Return the rewards `[B, K]` of all chunks submitted since the last call, as `RewardRunner.collect` does."""
        columns = [runner.collect() for runner in self.runners]
        return torch.stack(columns, dim=1) if columns else torch.empty(0, 0)

    def close(self) -> None:
        """Let the threads end."""
        for runner in self.runners:
            runner.close()


def chosen(rewards: Mapping[str, Reward], names: Sequence[str]) -> dict[str, tuple[Reward, float]]:
    """Return the rewards that are asked for, `name` or `name=weight`, with their weights; the first where none is.

    A name `module:callable` is any function of that module.

    Raises:
        UsageError: there is no such reward, it is named twice, or a weight is no number but 0.
    """
    found: dict[str, tuple[Reward, float]] = {}
    for text in names or [next(iter(rewards))]:
        name, _, weight = text.partition("=")
        if name not in rewards and ":" not in name:
            raise UsageError(
                f"--rewards {text}: there is no reward {name!r}, expected some of {', '.join(rewards)}, or module:callable"
            )
        if name in found:
            raise UsageError(f"--rewards {text}: {name} is named twice")
        try:
            value = float(weight or "1")
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value == 0:
            raise UsageError(f"--rewards {text}: {weight!r} is no weight, expected a number that is not 0, e.g. {name}=0.5")
        found[name] = imported(name) if ":" in name else rewards[name], value
    return found


def imported(text: str) -> Reward:
    """Return the function of `module:callable`, of a module that Python finds.

    Raises:
        UsageError: there is no such module, it fails, or it has no such function.
    """
    module, _, name = text.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise UsageError(f"--rewards {text}: there is no module {error.name!r} here or among the installed ones") from error
    except AttributeError as error:
        raise UsageError(f"--rewards {text}: {module} has no {name!r}") from error
    except Exception as error:
        raise UsageError(f"--rewards {text}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UsageError(f"--rewards {text}: {name} is a {type(found).__name__}, expected a function")
    return found


def _named(prompts: Sequence[str]) -> str:
    unique = list(dict.fromkeys(prompts))
    shown = ", ".join(repr(prompt) for prompt in unique[:3])
    return f"prompt{'s' if len(unique) > 1 else ''} {shown}{', ...' if len(unique) > 3 else ''}"
