"""Trackers that come with fluvial: TensorBoard, Weights & Biases, Trackio, SwanLab and MLflow."""

import json
import math
import netrc
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fluvial.engines.run.log.trackers import TrackedRun, TrackedSamples

PROJECT = "fluvial"
HISTOGRAM = "/histogram/"  # in the name of a bin, between the metric and the lower edge; that of the first is `below`


class TensorBoard:
    """Tracker that writes event files to the folder `tensorboard` of the run."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.update + 1 if run.update else None)
        if not run.update:
            self.writer.add_text("config", f"    {json.dumps(run.config, indent=1)}".replace("\n", "\n    "), 0)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Write a point per number."""
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        """Write the sheet, which shows the captions; TensorBoard has none."""
        import numpy as np

        self.writer.add_image(f"samples/{samples.name}", np.asarray(samples.sheet), step, dataformats="HWC")

    def finish(self) -> None:
        """Flush the events."""
        self.writer.close()


class PackageTracker:
    """Tracker that logs numbers and captioned images to a package.

    Args:
        target: object with the functions log and finish: the package or a run of it.
        image: class of the package for images.
    """

    def __init__(self, target: Any, image: Callable[..., Any]) -> None:
        self.target, self.image = target, image

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        """Log numbers over updates."""
        self.target.log(dict(numbers), step=step)

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        """Log the images with their captions."""
        captioned = zip(samples.images, samples.captions, strict=True)
        self.log({f"samples/{samples.name}": [self.image(image, caption=caption) for image, caption in captioned]}, step)

    def finish(self) -> None:
        """End the run."""
        self.target.finish()


class Wandb(PackageTracker):
    """Tracker for Weights & Biases; offline, in the run folder, unless there is a login or WANDB_MODE is set."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        has_mode = os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY") or has_login("api.wandb.ai")
        wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.config),
            mode=None if has_mode else "offline",
            settings=wandb.Settings(console="off"),
        )
        # A resumed run repeats the updates after its checkpoint, and wandb's own step can only grow.
        wandb_run.define_metric("update")
        wandb_run.define_metric("*", step_metric="update")
        super().__init__(wandb_run, wandb.Image)
        self.histogram = wandb.Histogram

    def log(self, numbers: Mapping[str, Any], step: int) -> None:
        """Log numbers over updates, with the bins of a histogram as one histogram."""
        plain = {name: number for name, number in numbers.items() if HISTOGRAM not in name}
        histograms = {name: self.histogram(np_histogram=bins) for name, bins in read_histograms(numbers).items()}
        self.target.log({**plain, **histograms, "update": step})


class Trackio(PackageTracker):
    """Tracker for Trackio, which keeps runs on this machine unless TRACKIO_SPACE_ID names a Space."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        # Trackio resumes a run by its name.
        trackio.init(
            project=PROJECT,
            name=f"{run.folder.name}-{run.id[:8]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        super().__init__(trackio, trackio.Image)

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        """Log each image alone, because Trackio has no lists of images."""
        for i, (image, caption) in enumerate(zip(samples.images, samples.captions, strict=True)):
            self.log({f"samples/{samples.name}/{i}": self.image(image, caption=caption)}, step)


class SwanLab(PackageTracker):
    """Tracker for SwanLab; offline, in the run folder, unless there is a login or SWANLAB_MODE is set."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        login = Path.home() / ".swanlab" / ".netrc"
        has_mode = os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY") or login.is_file()
        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        swanlab.init(
            project=PROJECT,
            name=run.folder.name,
            config=dict(run.config),
            log_dir=str(folder),
            mode=None if has_mode else "offline",
            id=run.id,
            resume="allow",
        )
        super().__init__(swanlab, swanlab.Image)


class Mlflow:
    """Tracker for MLflow: the server of MLFLOW_TRACKING_URI, else a database in the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self.mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            folder = run.folder.absolute()
            mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
            if mlflow.get_experiment_by_name(PROJECT) is None:
                mlflow.create_experiment(PROJECT, artifact_location=(folder / "mlflow").as_uri())
        mlflow.set_experiment(PROJECT)
        # MLflow chooses the ids of runs, so ours is a tag.
        earlier = mlflow.search_runs(filter_string=f"tags.{PROJECT} = '{run.id}'", output_format="list")
        options = {"run_id": earlier[0].info.run_id} if earlier else {"run_name": run.folder.name}
        mlflow.start_run(**options, tags={PROJECT: run.id})
        mlflow.log_dict(dict(run.config), "config.json")

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers over updates; characters that MLflow rejects in names become underscores."""
        self.mlflow.log_metrics({re.sub(r"[^\w\-. :/]", "_", name): value for name, value in numbers.items()}, step=step)

    def log_images(self, samples: TrackedSamples, step: int) -> None:
        """Log the sheet, which shows the captions; MLflow has none."""
        self.mlflow.log_image(samples.sheet, key=f"samples/{samples.name}", step=step)

    def finish(self) -> None:
        """End the run."""
        self.mlflow.end_run()


def read_histograms(numbers: Mapping[str, float]) -> dict[str, tuple[list[float], list[float]]]:
    """Return the heights and the edges of each histogram among numbers; the outer bins, which are open, get width 1."""
    histograms = dict[str, dict[float, float]]()
    for name, height in numbers.items():
        metric, is_bin, edge = name.partition(HISTOGRAM)
        if is_bin:
            bins = histograms.setdefault(f"{metric}{HISTOGRAM}".rstrip("/"), {})
            bins[-math.inf if edge == "below" else float(edge)] = height
    results = {}
    for name, bins in histograms.items():
        edges = sorted(bins)[1:]
        results[name] = [bins[edge] for edge in sorted(bins)], [edges[0] - 1, *edges, edges[-1] + 1]
    return results


def has_login(host: str) -> bool:
    """Return whether the user's netrc file holds a login for a host."""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
