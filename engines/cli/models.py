"""`fluvial models`: list the models that can be trained, or try every pipeline of diffusers as a tiny random one."""

import io
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from fluvial.engines.cli.listing import JSON, installed, paragraphs, table, without
from fluvial.engines.errors import UsageError
from fluvial.models.catalogue import KNOWN

MEASURED = "--measured"
USAGE = """usage: fluvial models [--json]
       fluvial models --measured [CLASS ...] [--json]

List the models that can be trained: by which name (--model), what they make and predict, and the memory of their weights.
--json prints the same for programs.

--measured tries every pipeline of the installed diffusers that has a transformer, or the named ones, as a tiny random one:
it is trained for one update, and its adapter is opened. It prints which train, and why the others are refused. It takes
minutes.
"""
BUILT_IN = (
    ("handwriting", "codes", "velocity", "0.6 million parameters, built in"),
    ("handwriting-unet", "codes", "epsilon", "0.7 million parameters, built in"),
    ("words", "words", "velocity", "1.3 million parameters, built in; needs fluvial[words]"),
    ("edit-words", "edits of words", "velocity", "1.3 million parameters, built in; needs fluvial[words]"),
)
FOOT = """
A model is named by its id on the Hub or by its folder. Other models of the same pipelines work as well. Models that predict
epsilon take the sampler ddim (recipe ddpo), models that predict a velocity take the others. Text encoders and VAE come on
top; fluvial plan works out the memory of training.

Any other flow pipeline of diffusers with a transformer can be named too. Without an adapter its calls are recorded and
replayed, and it is rejected with a reason if the replay gives another velocity. Your own adapter is named as module:name.
"""

PROMPTS = ("a red fox", "two cats", "an owl")
RUN = (
    "--rollout.prompts 2 --rollout.group 2 --rollout.steps 3 --micro-batch 2 --updates 1 --minibatches 1 "
    "--final-samples 2 --eval-every 0 --checkpoint-every 1"
)
COLUMNS = ("pipeline", "by", "images", "error", "first ratio", "LoRA opens", "result")


def run(args: list[str]) -> None:
    """Print the table."""
    args, as_json = without(args, JSON)
    if args and args[0] in ("-h", "--help"):
        print(paragraphs(USAGE), end="")
        return
    if args and args[0] == MEASURED:
        run_measured(args[1:], as_json=as_json)
        return
    if args:
        raise UsageError(f"models takes --measured only, got {args[0]!r} (fluvial models --help)")
    if as_json:
        networks = [{**known._asdict(), "gibibytes": known.gibibytes} for known in KNOWN]
        names = ("example", "makes", "prediction", "network")
        print(json.dumps([*(dict(zip(names, row, strict=True)) for row in BUILT_IN), *networks], indent=1))
        return
    sizes = [f"{known.billions:g} billion parameters, {known.gibibytes:.0f} GiB ({known.pipeline})" for known in KNOWN]
    rows = [(known.example, known.makes, known.prediction, size) for known, size in zip(KNOWN, sizes, strict=True)]
    print("\n".join(table(("--model", "makes", "predicts", "network, in bfloat16"), [*BUILT_IN, *rows])))
    print("", paragraphs(FOOT), sep="\n", end="")
    for name, source in installed("models").items():
        print(f"\nAn installed package has an adapter for {name}: {source}")


class Row(NamedTuple):
    """One pipeline: what was tried, and what came of it."""

    pipeline: str
    how: str  # "adapter" or "recorded"; empty if nothing was trained
    images: tuple[str, ...]  # arguments that are images
    error: float | None  # of velocities and images against the pipeline's own; None for an adapter
    ratio: float | None  # importance ratio before the first update
    opens: str  # whether the exported adapter opens with the pipeline's load_lora_weights
    reason: str  # why it is refused; empty if it trains

    @property
    def trains(self) -> bool:
        """Whether the pipeline trains, on policy to the bit."""
        return not self.reason and self.ratio == 1.0

    def cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        error = "" if self.error is None else f"{self.error:.0e}" if self.error else "0"
        ratio = "" if self.ratio is None else f"{self.ratio:g}"
        result = "trains" if self.trains else f"refused because {self.reason}" if self.reason else "is off policy"
        return (self.pipeline, self.how, ", ".join(self.images), error, ratio, self.opens, result)


def measure(name: str, folder: Path) -> Row:
    """Build a tiny random pipeline of a class of diffusers, train it by GRPO for one update, and open its adapter.

    Args:
        name: class of diffusers' pipeline.
        folder: empty folder.
    """
    from fluvial.engines.cli import main
    from fluvial.models.pipelines.open import built_in
    from fluvial.models.tiny import pipelines as tiny

    try:
        asked = tiny.asked_of(name)
        tiny.save(name, folder / "model")
    except Exception as error:  # of diffusers and transformers
        return Row(name, "", (), None, None, "", f"no tiny one can be built to try it: {_line(error)}")
    adapted = name in built_in()
    records = [
        {
            "prompt": text,
            **{argument: _drawn(folder, 10 * number + place, asked.size) for place, argument in enumerate(asked.media)},
        }
        for number, text in enumerate(PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    call = [] if adapted else ["--pipeline.call", *(f"{key}={json.dumps(value)}" for key, value in asked.call.items())]
    size = [
        "--pipeline.height",
        str(asked.size),
        "--pipeline.width",
        str(asked.size),
        "--pipeline.frames",
        str(asked.frames),
    ]
    words = ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl"), *RUN.split(), *size]
    words += [*(call if len(call) > 1 else []), "--rollout.guidance.scale", f"{asked.scale:g}", "--out", str(folder / "run")]
    words += ["--rollout.guidance.negative", asked.negative] if asked.negative else []
    recipe = "ddpo" if adapted and built_in()[name].prediction == "epsilon" else "grpo"
    output, errors = io.StringIO(), io.StringIO()
    with tiny.unscaled_images(name, asked.size), redirect_stdout(output), redirect_stderr(errors):
        try:
            code = main.run(["train", recipe, *words])
        except Exception as error:
            code, said = 1, f"{type(error).__name__}: {_line(error)}"
        else:
            said = _line(errors.getvalue().strip().rpartition("\n")[2].removeprefix("fluvial: "))
    if code:
        return Row(name, "", asked.media, None, None, "", _reason(said, name, folder))
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    first = next(line for line in lines if "grad_norm" in line)
    within = re.search(r"velocities and images within ([\d.e+-]+)", output.getvalue() + errors.getvalue())
    return Row(
        name,
        "adapter" if adapted else "recorded",
        asked.media,
        None if within is None else float(within[1]),
        math.exp(first["first_pass_max_abs_log_ratio"]),
        _opens(folder),
        "",
    )


def measured_table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown, those that train first."""
    ordered = sorted(rows, key=lambda row: (not row.trains, row.pipeline))
    cells = [COLUMNS, tuple("---" for _ in COLUMNS), *(row.cells() for row in ordered)]
    return "\n".join("| " + " | ".join(cell.replace("|", "or") for cell in row) + " |" for row in cells)


def run_measured(names: Sequence[str], *, as_json: bool) -> None:
    """Print the table of the named pipelines, or of all; each row is also said on the error stream when it is known."""
    from fluvial.models.tiny.pipelines import flow_pipelines, is_flow_pipeline

    if unknown := [name for name in names if not is_flow_pipeline(name)]:
        raise UsageError(f"models --measured: the installed diffusers has no {unknown[0]}, or it has no transformer")
    rows = []
    for name in names or flow_pipelines():
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder)))
        print(" | ".join(rows[-1].cells()), file=sys.stderr, flush=True)
    trained = sum(row.trains for row in rows)
    if as_json:
        print(json.dumps([{**row._asdict(), "trains": row.trains} for row in rows], indent=1))
    else:
        print(f"{measured_table(rows)}\n\n{trained} of {len(rows)} train.")


def _opens(folder: Path) -> str:
    """Return whether the exported adapter of a run opens with the pipeline's own loader."""
    from diffusers import DiffusionPipeline

    from fluvial.models.pipelines.folder import quietly

    try:
        with quietly():
            pipe = DiffusionPipeline.from_pretrained(folder / "model", local_files_only=True)
            if not hasattr(pipe, "load_lora_weights"):
                return "no loader"
            pipe.load_lora_weights(folder / "run" / "lora")
            network = getattr(pipe, "transformer", None) or pipe.unet
            return "yes" if getattr(network, "peft_config", None) else "no layer"
    except Exception as error:  # of diffusers
        return f"no: {_line(error)[:60]}"


def _drawn(folder: Path, seed: int, size: int) -> str:
    """Write an image of random pixels, and return its name."""
    import numpy as np
    from PIL import Image

    name = f"{seed}.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
    return name


def _reason(said: str, name: str, folder: Path) -> str:
    """Return why a pipeline is refused, without the names of the pipeline and of its folder."""
    short = said.replace(str(folder / "model"), "the folder").removeprefix("model the folder: ")
    return short.removeprefix(f"{name} cannot be trained without an adapter: ").removeprefix(f"{name} ")


def _line(error: object) -> str:
    return " ".join(str(error).split())[:220]
