"""`fluvial preferences MODEL`: write pairs of samples, the best and the worst of each prompt, for `train dpo`."""

from dataclasses import dataclass
from pathlib import Path

from fluvial.engines.cli.listing import BUILT_IN
from fluvial.engines.cli.parse import at_least_one, console, flags_in_errors, named, parsed
from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class PreferencesConfig:
    """Draw samples of training prompts, and write the best and the worst sample of each prompt, by a reward, to a folder.

    Args:
        out: Folder for preferences.jsonl and its images.
        weights: Folder of the model's weights. By default the shipped base weights.
        prompts: Number of prompts. A prompt whose samples all get the same reward gives no preference.
        group: Number of samples per prompt.
        rewards: Names of the job's rewards or functions of your own (module:name), each with or without =weight. By default
            the job's first reward.
        steps: Number of steps of the sampling schedule.
        seed: Seed of the prompts and of the noise.
        micro_batch: Number of samples per forward pass.
    """

    out: Path
    weights: Path | None = None
    prompts: int = 400
    group: int = 8
    rewards: tuple[str, ...] = ()
    steps: int = 10
    seed: int = 0
    micro_batch: int = 128

    def __post_init__(self) -> None:
        at_least_one(prompts=self.prompts, steps=self.steps, micro_batch=self.micro_batch)
        if self.group < 2:
            raise UsageError(f"group is {self.group}, expected at least 2: a preference is between two samples")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"seed is {self.seed}, expected 0 <= seed < 2^63")


def run(args: list[str]) -> None:
    """Write the folder, and print the command that trains on it.

    Raises:
        UsageError: the arguments are wrong, or the folder cannot be written.
    """
    name = named("preferences", args, tuple(BUILT_IN), "a model")
    program = f"fluvial preferences {name}"
    config = parsed(PreferencesConfig, lambda: PreferencesConfig(Path("runs") / "preferences"), program, args[1:])
    with flags_in_errors(config):
        count = write(name, config)
    console().print(
        f"{count} preferences of {config.prompts} prompts: {config.out}; train on them with\n"
        f"fluvial train dpo --model {name} --objective.preferences {config.out}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def write(name: str, config: PreferencesConfig) -> int:
    """Draw and write the preferences of a built-in model, and return how many there are."""
    import torch

    from fluvial.core.dpo import best_and_worst
    from fluvial.core.random import fold_in, key, uniform
    from fluvial.engines.data.preferences import claim_preferences, write_preferences
    from fluvial.engines.rewards.registry import select
    from fluvial.engines.rewards.runner import score
    from fluvial.engines.rollout.generate import Requests, Sampling, generate, on_device
    from fluvial.engines.rollout.streams import Stream
    from fluvial.engines.train import job as jobs

    job = jobs.named(name, weights=config.weights)
    claim_preferences(config.out)
    weighted = select(job.rewards, config.rewards)
    root, batch = key(config.seed), config.prompts * config.group
    draws = uniform(fold_in(root, Stream.PREFERENCE_PROMPTS), (config.prompts,))
    indices = (draws * len(job.prompts)).long().tolist()
    prompts = [job.prompts[indices[i // config.group]] for i in range(batch)]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    requests = Requests(prompts, range(batch), fold_in(root, Stream.PREFERENCE_SAMPLES))
    sampling = Sampling(job.shape, on_device(job.model.schedule(config.steps, job.shape), device))
    module = jobs.build(job).to(device).eval()
    chunks = generate(job.model, module, requests, sampling, micro_batch=config.micro_batch)
    drawn = torch.cat([chunk.images.cpu() for chunk in chunks])
    scores = [
        weight * score(reward, drawn, prompts, label=f"reward {name!r}") for name, (reward, weight) in weighted.items()
    ]
    found = best_and_worst(torch.stack(scores).sum(0), torch.arange(batch) // config.group)
    pairs = [(prompts[i], drawn[found.win[i]], drawn[found.lose[i]]) for i in torch.nonzero(found.valid).flatten().tolist()]
    write_preferences(config.out, pairs)
    return len(pairs)
