"""Networks that choose at each forward pass which of their parts run."""

import torch
from torch import Tensor, distributed


class Routed:
    """A network that runs some of its parts in each forward pass, the same on all ranks that share its parameters.

    A part is gathered, and its gradient reduced, by all of these ranks or by none. A network that is not shared needs no
    communication, so that it may compute on any thread.

    Attributes:
        ranks: number of ranks that share the parameters, all ranks or one; set when the network is sharded.
    """

    ranks: int = 1

    def find_unused(self, unused: Tensor) -> Tensor:
        """Return whether each part is unused on all of the ranks, bool on the host; all of them must call this together."""
        if self.ranks == 1:
            return unused
        counts = unused.to(torch.int32)
        distributed.all_reduce(counts, op=distributed.ReduceOp.MIN)
        return counts.bool()
