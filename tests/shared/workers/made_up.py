"""Pipelines that a new diffusers brings, tried by the command that tries them all."""

import diffusers

from fluvial.engines.cli import main


class MadeUpImg2ImgPipeline(diffusers.FluxImg2ImgPipeline):
    pass


class MadeUpInpaintPipeline(diffusers.FluxInpaintPipeline):
    """One that changes the samples between its steps."""


def measured() -> None:
    """Print the rows of both as JSON, and exit."""
    kinds = MadeUpImg2ImgPipeline, MadeUpInpaintPipeline
    for kind in kinds:
        kind.__module__ = kind.__mro__[1].__module__
        setattr(diffusers, kind.__name__, kind)
    raise SystemExit(main.run(["models", "--measured", *(kind.__name__ for kind in kinds), "--json"]))
