"""Jobs: what is trained on what, and judged by whom. A recipe says how."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from fluvial.engines.errors import UsageError
from fluvial.engines.rewards import Reward
from fluvial.models import VelocityModel


@dataclass(frozen=True)
class Job:
    """A model, the prompts it is trained and evaluated on, the reward it learns from, and the judges.

    A judge is a reward too; a sample that it gives 1 counts as exactly right. The judge named `heldout` must share neither
    data nor model with the reward, so that gaming the reward shows.
    """

    model: VelocityModel
    train_prompts: Sequence[str]
    heldout_prompts: Sequence[str]
    reward: Reward
    judges: Mapping[str, Reward]


def handwriting(*, weights: Path | None = None, prompts: Path | None = None) -> Job:
    """Return the built-in job: write 4-digit codes so that a reader reads them.

    Args:
        weights: folder of the model's weights; the shipped base by default.
        prompts: text file of codes to train on; by default all that are not held out.
    """
    from fluvial.models.handwriting import BASE, Handwriting, codes, evaluation_reader, reward_reader

    model = Handwriting(BASE if weights is None else weights)
    return Job(
        model=model,
        train_prompts=codes("train") if prompts is None else read_prompts(prompts, model, heldout=codes("heldout")),
        heldout_prompts=codes("heldout"),
        reward=reward_reader().characters,
        judges={"reward": reward_reader().characters, "heldout": evaluation_reader().characters},
    )


def build(job: Job, *, empty: bool = False) -> nn.Module:
    """Return a job's network with its weights, on the CPU, or `empty`, with parameters on the meta device.

    Raises:
        UsageError: the weights are missing, damaged or of another model.
    """
    try:
        return job.model.build(empty=empty)
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the model cannot be loaded: {reason}") from error


def read_prompts(path: Path, model: VelocityModel, *, heldout: Sequence[str]) -> tuple[str, ...]:
    """Return the prompts of a text file, one a line; blank lines are passed over.

    Raises:
        UsageError: the file cannot be read, is empty, or a line is no prompt for the model or is held out for evaluation;
            it names file and line.
    """
    apart = frozenset(heldout)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"prompts file {path} cannot be read: {reason}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if prompt := line.strip():
            try:
                model.check_prompt(prompt)
            except ValueError as error:
                raise UsageError(f"prompts file {path}, line {number}: {error}") from error
            if prompt in apart:
                raise UsageError(
                    f"prompts file {path}, line {number}: {prompt!r} is held out for evaluation, never trained on"
                )
            prompts.append(prompt)
    if not prompts:
        raise UsageError(f"prompts file {path} is empty, expected one prompt a line")
    return tuple(prompts)
