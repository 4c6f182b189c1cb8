"""Whole groups out of chunks of samples: a reward that compares the samples of a prompt gets all of them in one call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fluvial.engines.data.records import Prompt
from fluvial.engines.engine.world import World
from fluvial.engines.scoring.signature import Samples

Row = tuple[Tensor, Prompt, Tensor | None]  # image, prompt and latent of a sample


class GroupBuffer:
    """Keeps samples until their group is complete. The samples of a group have consecutive ids."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.waiting: dict[int, dict[int, Row]] = {}  # by group and id
        self._like: Samples | None = None

    def add(self, samples: Samples, ids: Sequence[int]) -> list[Samples]:
        """Take samples in, and return the groups that are complete with them.

        Args:
            ids: index of each in the rollout, -1 for a repeat, which is left out.
        """
        self._like = samples
        for i, number in enumerate(ids):
            if number >= 0:
                latent = None if samples.latents is None else samples.latents[i]
                self.waiting.setdefault(number // self.size, {})[number] = samples.images[i], samples.prompts[i], latent
        return self._complete()

    def exchange(self, world: World) -> list[Samples]:
        """Return the groups that are complete with the samples of other ranks; every rank must take part.

        A group goes to the first rank that has samples of it.
        """
        if world.data_size == 1:
            return []
        own = {group: [(number, row[1]) for number, row in sorted(rows.items())] for group, rows in self.waiting.items()}
        held = world.gather_items(own)[:: world.sequence]
        owner = {group: rank for rank in reversed(range(len(held))) for group in held[rank]}
        rank = world.data_rank
        # Ordered by receiver, and then by id.
        sent = sorted((owner[group], number) for group in own if owner[group] != rank for number, _ in own[group])
        coming = [
            (number, prompt)
            for other, groups in enumerate(held)
            for number, prompt in sorted(row for group, rows in groups.items() for row in rows if owner[group] == rank)
            if other != rank
        ]
        moved = [
            [(owner[group], len(rows)) for group, rows in groups.items() if owner[group] != other]
            for other, groups in enumerate(held)
        ]
        if not any(moved):
            return []
        send = [sum(count for to, count in moved[rank] if to == receiver) for receiver in range(world.data_size)]
        receive = [sum(count for to, count in moved[sender] if to == rank) for sender in range(world.data_size)]
        rows = [self.waiting[number // self.size].pop(number) for _, number in sent]
        self.waiting = {group: rest for group, rest in self.waiting.items() if rest}
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
        """Take out the groups that are complete."""
        found = []
        for group in sorted(group for group, rows in self.waiting.items() if len(rows) == self.size):
            rows = [row for _, row in sorted(self.waiting.pop(group).items())]
            latents = [latent for _, _, latent in rows if latent is not None]
            found.append(
                Samples(
                    torch.stack([image for image, _, _ in rows]),
                    [prompt for _, prompt, _ in rows],
                    torch.stack(latents) if latents else None,
                    group,
                )
            )
        return found


def _stack(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return tensors as one, `[N, ...]`, also where there are none."""
    return torch.stack(list(rows)) if rows else like.new_empty(0, *like.shape[1:])
