"""`fluvial models`: list the models that can be trained, or try tiny random pipelines of every class of diffusers."""

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.cli.listing import JSON, drop_flag, find_installed, format_paragraphs, format_table
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.models.catalogue import KNOWN

MEASURED, TINY, OUT = "--measured", "--tiny", "--out"
USAGE = """usage: fluvial models [--json]
       fluvial models --tiny CLASS --out FOLDER
       fluvial models --measured [CLASS ...] [--json]

List the models that can be trained: their names for --model, output, prediction, and the memory of their weights. --json
prints the same for programs.

--tiny writes a pipeline of a few megabytes with random weights, to try commands with. CLASS is a class of diffusers with a
transformer or with an adapter in fluvial, e.g. StableDiffusionXLPipeline. It prints the command that trains it.

--measured tries every pipeline of the installed diffusers that has a transformer or is modular, or the named ones, as a tiny
random pipeline: it trains one update on one rank, on two, and from the samples of a server, and loads the adapter. It prints
which pipelines train, and why others are rejected. It takes about half a minute per pipeline.
"""
BUILT_IN = (
    ("handwriting", "codes", "velocity", "0.6 million parameters, built in"),
    ("handwriting-unet", "codes", "epsilon", "0.7 million parameters, built in"),
    ("words", "words", "velocity", "1.3 million parameters, built in; needs fluvial[words]"),
    ("edit-words", "edits of words", "velocity", "1.3 million parameters, built in; needs fluvial[words]"),
)
FOOT = """
A model is named by its id on the Hub or by its folder. Other models of the same pipelines work too. Models that predict
epsilon use the sampler ddim (recipe ddpo), models that predict a velocity use the others. Text encoders and VAE come on
top; fluvial plan computes the memory of training.

Any other flow pipeline of diffusers with a transformer can be named too. Without an adapter, its calls are recorded and
replayed, and it is rejected with a reason if the replay gives another velocity. A modular pipeline (FLUX.3, Krea 2) is
trained through its own blocks. Your own adapter is named as module:name.
"""


def run(args: list[str]) -> None:
    """Print the table, or run --tiny or --measured."""
    args, as_json = drop_flag(args, JSON)
    if args and args[0] == MEASURED:
        run_measured(args[1:], as_json=as_json)
        return
    if args and args[0] == TINY:
        write_tiny(args)
        return
    if args:
        raise UsageError(f"models takes --measured or --tiny, got {args[0]!r} (fluvial models --help)")
    if as_json:
        networks = [{**known._asdict(), "gibibytes": known.gibibytes} for known in KNOWN]
        names = ("example", "makes", "prediction", "network")
        print(json.dumps([*(dict(zip(names, row, strict=True)) for row in BUILT_IN), *networks], indent=1))
        return
    sizes = [f"{known.billions:g} billion parameters, {known.gibibytes:.0f} GiB ({known.pipeline})" for known in KNOWN]
    rows = [(known.example, known.makes, known.prediction, size) for known, size in zip(KNOWN, sizes, strict=True)]
    print("\n".join(format_table(("--model", "makes", "predicts", "network, in bfloat16"), [*BUILT_IN, *rows])))
    print("", format_paragraphs(FOOT), sep="\n", end="")
    for name, source in find_installed("models").items():
        print(f"\nAn installed package has an adapter for {name}: {source}")


def write_tiny(args: Sequence[str]) -> None:
    """Write a tiny random pipeline of a class, and print the command that trains it."""
    if len(args) != 4 or args[2] != OUT:
        raise UsageError(f"models: expected {TINY} CLASS {OUT} FOLDER, got {' '.join(args)} (fluvial models --help)")
    from fluvial.models.pipelines.folder import silence
    from fluvial.models.pipelines.open import list_adapters
    from fluvial.models.tiny.modular import find_call, save
    from fluvial.models.tiny.pipelines import UnknownPart, has_transformer
    from fluvial.models.tiny.settings import look_up

    name, folder, adapters = args[1], Path(args[3]), list_adapters()
    if not (name in adapters or has_transformer(name)):
        raise UsageError(
            f"{TINY} is {name!r}, expected a class of diffusers with a transformer or one of {', '.join(adapters)}"
        )
    if folder.exists():
        raise UsageError(f"{OUT} is {folder}, which already exists: name a new folder")
    with convert_errors(UsageError, UnknownPart, says=f"{name} cannot be made tiny"), silence():
        save(name, folder)
    call, recipe = find_call(name), "ddpo" if name in adapters and adapters[name].prediction == "epsilon" else "grpo"
    takes_classes = "id2label" in look_up(name, "own", {})  # a prompt is the number or the name of a class
    prompts = "prompts.jsonl" if call.media else "classes.txt" if takes_classes else "@animals"
    sizes = "--updates 2 --sampling.prompts 2 --sampling.group 2 --sampling.steps 4"
    size = f"--pipeline.height {call.size} --pipeline.width {call.size}"
    size += f" --pipeline.frames {call.frames}" if call.frames > 1 else ""
    arguments = [f"{key}={json.dumps(value)}" for key, value in call.call.items() if name not in adapters]
    arguments = ["--pipeline.call", *map(shlex.quote, arguments)] if arguments else []
    print(f"{folder}: a {name} with random weights; images in the prompts' records: {', '.join(call.media) or 'none'}")
    print(f"fluvial train {recipe} --model {folder} --prompts {prompts} --rewards jpeg {sizes} {size}", *arguments)


def run_measured(names: Sequence[str], *, as_json: bool) -> None:
    """Print the table of the named pipelines, or of all; each row is printed to stderr as soon as it is known."""
    from fluvial.bench.trial.pipelines import format_table, measure
    from fluvial.engines.cli.main import run as command
    from fluvial.models.tiny.pipelines import has_transformer, list_pipelines

    if unknown := [name for name in names if not has_transformer(name)]:
        raise UsageError(f"models --measured: the installed diffusers has no {unknown[0]}, or it has no transformer")
    if not (classes := names or list_pipelines()):
        raise RunError(
            "models --measured: diffusers' pipelines cannot be imported: python -c 'from diffusers import FluxPipeline'"
        )
    rows = []
    for name in classes:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder), command))
        print(" | ".join(rows[-1].format_cells()), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps([{**row._asdict(), "trains": row.trains} for row in rows], indent=1))
    else:
        print(format_table(rows))
