"""Trackers: where the numbers and images of a run go besides its folder. One that fails never stops training."""

import json
import netrc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from PIL import Image

from fluvial.engines import plugins
from fluvial.engines.errors import UsageError

PROJECT = "fluvial"
MOST_FAILURES = 3  # in a row


class TrackedRun(NamedTuple):
    """Facts of a run that a tracker gets at its start."""

    folder: Path
    config: Mapping[str, Any]  # as config.json holds it
    id: str  # the same after a resumption: 21 digits and lower-case letters
    update: int  # update that the run starts after; above 0 for a run that is resumed


class Samples(NamedTuple):
    """Images of an evaluation."""

    name: str  # e.g. "before"
    images: list[Image.Image]  # each alone
    captions: list[str]  # prompt, and score if there is one, of each
    sheet: Image.Image  # all of them side by side, with their captions


class Tracker(Protocol):
    """Receives what a run logs; it is made by a function, or a class, of a `TrackedRun`."""

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers of an update, by names such as "reward/mean"."""
        ...

    def images(self, samples: Samples, step: int) -> None:
        """Log the images of an evaluation."""
        ...

    def finish(self) -> None:
        """Write what is buffered, and end."""
        ...


Maker = Callable[[TrackedRun], Tracker]


class TensorBoard:
    """Writes event files to the folder `tensorboard` of the run."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.update + 1 if run.update else None)
        if not run.update:
            self.writer.add_text("config", f"    {json.dumps(run.config, indent=1)}".replace("\n", "\n    "), 0)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Write a point of each number."""
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def images(self, samples: Samples, step: int) -> None:
        """Write the sheet, which has the captions that TensorBoard lacks."""
        import numpy as np

        self.writer.add_image(f"samples/{samples.name}", np.asarray(samples.sheet), step, dataformats="HWC")

    def finish(self) -> None:
        """Flush the events."""
        self.writer.close()


class PackageTracker:
    """Logs to a package: numbers by update, and images with their captions.

    Args:
        target: what has the functions log and finish, the package or a run of it.
        image: the package's class of images.
    """

    def __init__(self, target: Any, image: Callable[..., Any]) -> None:
        self.target, self.image = target, image

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        """Log numbers over updates."""
        self.target.log(dict(numbers), step=step)

    def images(self, samples: Samples, step: int) -> None:
        """Log the images with their captions."""
        captioned = zip(samples.images, samples.captions, strict=True)
        self.log({f"samples/{samples.name}": [self.image(image, caption=caption) for image, caption in captioned]}, step)

    def finish(self) -> None:
        """End the run."""
        self.target.finish()


class Wandb(PackageTracker):
    """Logs to Weights & Biases; offline, below the run folder, unless there is a login or WANDB_MODE says otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        known = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or has_login("api.wandb.ai")
        made = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode=None if known else "offline",
            settings=wandb.Settings(console="off"),
        )
        # A resumed run logs updates again that came after its checkpoint, and wandb's own step only grows.
        made.define_metric("update")
        made.define_metric("*", step_metric="update")
        super().__init__(made, wandb.Image)

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        """Log numbers over updates."""
        self.target.log({**numbers, "update": step})


class Trackio(PackageTracker):
    """Logs to Trackio, which keeps runs on this machine unless TRACKIO_SPACE_ID names a Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # Trackio continues a run by its name.
        trackio.init(
            project=PROJECT,
            name=f"{run.folder.name}-{run.id[:8]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        super().__init__(trackio, trackio.Image)

    def images(self, samples: Samples, step: int) -> None:
        """Log each image alone, as Trackio has no lists of them."""
        for i, (image, caption) in enumerate(zip(samples.images, samples.captions, strict=True)):
            self.log({f"samples/{samples.name}/{i}": self.image(image, caption=caption)}, step)


class SwanLab(PackageTracker):
    """Logs to SwanLab; offline, below the run folder, unless there is a login or SWANLAB_MODE says otherwise."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        login = Path.home() / ".swanlab" / ".netrc"
        known = os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY") or login.is_file()
        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        swanlab.init(
            project=PROJECT,
            name=run.folder.name,
            config=dict(run.config),
            log_dir=str(folder),
            mode=None if known else "offline",
            id=run.id,
            resume="allow",
        )
        super().__init__(swanlab, swanlab.Image)


TRACKERS: dict[str, Maker | None] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "swanlab": SwanLab,
    "none": None,
}
EXTRAS = ("wandb", "trackio", "swanlab")  # packages, each with an extra of its name


def find(name: str) -> Maker | None:
    """Return the maker of the tracker that a name stands for, None for "none".

    Args:
        name: one of the table, an entry point of `fluvial.trackers`, or `module:name`.

    Raises:
        UsageError: there is none, or its package is not installed.
    """
    if name in EXTRAS:
        spec = find_spec(name)
        # A folder of the package's name in the working folder, which wandb makes, is found as a package without a file.
        if spec is None or spec.origin is None:
            raise UsageError("tracker", name, hint=f"{name} is not installed; pip install 'fluvial[{name}]'")
    found: Maker | None = plugins.load(name, "trackers", _makes, table=TRACKERS)
    return found


def has_login(host: str) -> bool:
    """Return whether the user's netrc file holds a login for a host."""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class SafeTracker:
    """A tracker whose failures end in one line. After three in a row it is left alone.

    Args:
        name: name for the line.
        maker: function that makes the tracker.
        run: the run.
        warn: where the line goes.
    """

    def __init__(self, name: str, maker: Maker, run: TrackedRun, warn: Callable[[str], None]) -> None:
        self.name, self.warn, self.failures, self.warned = name, warn, 0, False
        self.tracker: Tracker | None = None
        with self._guarded():
            self.tracker = maker(run)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log the numbers of an update."""
        with self._guarded():
            if self.tracker is not None:
                self.tracker.log(numbers, step)

    def images(self, samples: Samples, step: int) -> None:
        """Log the images of an evaluation."""
        with self._guarded():
            if self.tracker is not None:
                self.tracker.images(samples, step)

    def finish(self) -> None:
        """End the tracker."""
        with self._guarded():
            if self.tracker is not None:
                self.tracker.finish()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
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


def _makes(found: Any) -> str | None:
    if found is None or callable(found):
        return None
    return f"is of type {type(found).__name__}, expected a function or a class of a TrackedRun"
