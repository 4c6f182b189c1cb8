"""Images with the same caption, which objectives compare with one another."""

from collections.abc import Sequence

from fluvial.core.random import Key, uniform
from fluvial.engines.data.records import Prompt
from fluvial.engines.errors import UsageError


class Captions:
    """The images of each caption. Images of several sizes are compared with those of their size.

    A caption with a single image is left out, because there is nothing to compare it with. A prompt without an image, whose
    sample a job makes itself, is compared with other samples of the prompt.

    Args:
        prompts: captions with their images.

    Raises:
        UsageError: no caption has two images of one size.
    """

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        found: dict[tuple[str, object], list[int]] = {}
        for place, prompt in enumerate(prompts):
            found.setdefault((prompt.text, prompt.size), []).append(place)
        self.members = [places for places in found.values() if len(places) > 1 or prompts[places[0]].image is None]
        if not self.members:
            raise UsageError(
                "`objective.compare` is caption, and no caption of data has two images: add images, or set it "
                "to data, which compares images of different captions"
            )
        self.firsts = [prompts[places[0]] for places in self.members]

    def drawn(self, caption: int, key: Key, count: int) -> list[int]:
        """Return the indices of `count` images of a caption, each as often as the others, or once more.

        Args:
            caption: index of the caption in `firsts`.
            key: key of the draw.
            count: number of images.
        """
        places = self.members[caption]
        order: list[int] = uniform(key, (len(places),)).argsort(stable=True).tolist()
        return [places[order[number % len(places)]] for number in range(count)]
