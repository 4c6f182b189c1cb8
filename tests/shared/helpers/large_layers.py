"""A model of a few large layers, whose memory is large compared with that of the process."""

from torch import nn

LAYERS, WIDTH = 6, (4096, 2048)


def tower() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH[1], WIDTH[0]) for _ in range(LAYERS)))


BYTES = 4 * LAYERS * (WIDTH[0] * WIDTH[1] + WIDTH[0])
