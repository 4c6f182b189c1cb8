"""Which samples of a batch a KL holds, by their rewards."""

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
    """Samples have the KL that the first reward and the others rank most differently, see `core.gardo.rank_doubt`.

    Args:
        doubted: Samples whose first reward is doubted: overrated (as in GARDO's text) or underrated (as in its code).
        share: Share q of them that has the KL, at first.
        rise: Factor of q if their mean doubt is above that of the last `window` batches.
        fall: Factor of q if it is below.
        least: Smallest share q.
        most: Largest share q.
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
        """Return 1 for the samples that have the KL, else 0, `[N]`, given rewards `[N, K]`; q and the window are kept."""
        doubt = rank_doubt(scores[:, 0], scores[:, 1:], doubted=self.doubted)
        mean, known = float(doubt[doubt >= 0].mean()), state.setdefault("doubt", [])
        [share] = state.setdefault("share", [self.share])
        factor = self.rise if known and mean > max(known) else self.fall if known and mean < min(known) else 1.0
        state["share"] = [min(max(share * factor, self.least), self.most)]
        state["doubt"] = [*known, mean][-self.window :]
        return doubt_gate(doubt, share=state["share"][0])


Gate = Everywhere | Doubt
