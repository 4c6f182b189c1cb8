"""Trackers of the numbers and images of a run, besides its folder. Their failures never stop training."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError

DEFAULT = "tensorboard"
MOST_FAILURES = 3  # in a row


class TrackedRun(NamedTuple):
    """Facts of a run for a tracker."""

    folder: Path
    config: Mapping[str, Any]  # as in config.json
    id: str  # the same after a resumption: 21 digits and lower-case letters
    update: int  # update that the run starts after; above 0 for a resumed run


class TrackedSamples(NamedTuple):
    """Images of an evaluation."""

    name: str  # e.g. "before"
    images: list[Image.Image]
    captions: list[str]  # prompt of each image, with its score if there is one
    sheet: Image.Image  # all images side by side, with their captions


class Tracker(Protocol):
    """Receiver of a run's logs; a function or class of a `TrackedRun` makes one."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers of an update, by names such as "reward/mean"."""
        ...

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        """Log the images of an evaluation."""
        ...

    def finish(self) -> None:
        """Write buffered data, and end."""
        ...


Maker = Callable[[TrackedRun], Tracker]


EXTRAS = ("wandb", "trackio", "swanlab", "mlflow")  # packages, each with an extra of its name


def find_tracker(name: str) -> Maker | None:
    """Return the maker of a tracker by name; None for "none".

    Args:
        name: none, an entry point of `fluvial.trackers`, or `module:name`.

    Raises:
        UsageError: there is no such tracker, or its package is not installed.
    """
    if name in EXTRAS:
        spec = find_spec(name)
        # A folder with the package's name in the working folder, as wandb creates, looks like a package without a file.
        if spec is None or spec.origin is None:
            raise UsageError("tracker", name, hint=f"{name} is not installed; pip install 'fluvial[{name}]'")
    maker: Maker | None = plugins.load(name, "trackers", _explain_no_maker, table={"none": None})
    return maker


def find_trackers(names: str) -> dict[str, Maker]:
    """Return the makers of trackers by comma-separated names, see `find_tracker`; empty for "none"."""
    makers = {name: find_tracker(name) for name in dict.fromkeys(names.replace(" ", "").split(","))}
    return {name: maker for name, maker in makers.items() if maker is not None}


class SafeTracker:
    """A tracker whose first failure becomes a warning of one line. After three failures in a row it is not called again.

    Args:
        name: name for the warning.
        maker: function that makes the tracker.
        run: the run.
        warn: function that prints the warning.
    """

    def __init__(self, name: str, maker: Maker, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self.name, self.warn, self.failures, self.warned = name, warn, 0, False
        self.tracker: Tracker | None = None
        with self._guard():
            self.tracker = maker(run)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers of an update."""
        with self._guard():
            if self.tracker is not None:
                self.tracker.log(numbers, step)

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        """Log the images of an evaluation."""
        with self._guard():
            if self.tracker is not None:
                self.tracker.log_images(samples, step)

    def finish(self) -> None:
        """End the tracker."""
        with self._guard():
            if self.tracker is not None:
                self.tracker.finish()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
            self.failures = 0
        except (Exception, SystemExit) as error:  # whatever a tracker raises, training goes on
            self.failures += 1
            if self.failures == MOST_FAILURES:
                self.tracker = None
            if not self.warned:
                self.warned = True
                reason = " ".join(str(error).split())
                self.warn(
                    f"tracker {self.name} failed ({type(error).__name__}: {reason}); training goes on, and metrics.jsonl "
                    "holds every number"
                )


def _explain_no_maker(maker: Any) -> str | None:
    if maker is None or callable(maker):
        return None
    return f"is of type {type(maker).__name__}, expected a function or a class of a TrackedRun"
