"""Gates: which samples of a batch have a KL, chosen by their rewards."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fluvial.core.checks import check_fields
from fluvial.core.gardo import Doubted, doubt_gate, rank_doubt
from fluvial.engines.errors import UsageError


@dataclass(frozen=True)
class Everywhere:
    """Every sample has the KL."""

    kind: ClassVar[str] = "everywhere"

    def choose(self, state: dict[str, list[float]], scores: Tensor) -> Tensor:
        """Return 1 for the samples that have the KL, else 0, `[N]`, given rewards `[N, K]`."""
        return torch.ones(len(scores))


@dataclass(frozen=True)
class Doubt:
    """Samples that the first reward and the others rank most differently have the KL, see `core.gardo.rank_doubt`.

    Args:
        doubted: Samples whose first reward is doubted: overrated (as in GARDO's text) or underrated (as in its code).
        share: Initial fraction q of the doubted samples that has the KL.
        rise: Factor of q if their mean doubt is above that of each of the last `window` batches.
        fall: Factor of q if it is below.
        least: Smallest fraction q.
        most: Largest fraction q.
        window: Number of batches.
    """

    kind: ClassVar[str] = "doubt"
    doubted: Doubted = "overrated"
    share: float = 0.1
    rise: float = 1.1
    fall: float = 0.9
    least: float = 0.02
    most: float = 0.2
    window: int = 20

    def __post_init__(self) -> None:
        unit, count = (1e-6, 1), (1, 2**31)
        check_fields(self, "gate", share=unit, least=unit, most=unit, fall=unit, rise=(1, 1e6), window=count)
        if not self.least <= self.share <= self.most:
            raise UsageError("gate.share", self.share, f"from `gate.least` {self.least} to `gate.most` {self.most}")

    def choose(self, state: dict[str, list[float]], scores: Tensor) -> Tensor:
        """Return 1 for the samples that have the KL, else 0, `[N]`, given rewards `[N, K]`; `state` is updated."""
        doubt = rank_doubt(scores[:, 0], scores[:, 1:], doubted=self.doubted)
        mean, past = float(doubt[doubt >= 0].mean()), state.setdefault("doubt", [])
        [share] = state.setdefault("share", [self.share])
        factor = self.rise if past and mean > max(past) else self.fall if past and mean < min(past) else 1.0
        state["share"] = [min(max(share * factor, self.least), self.most)]
        state["doubt"] = [*past, mean][-self.window :]
        return doubt_gate(doubt, share=state["share"][0])


Gate = Everywhere | Doubt
