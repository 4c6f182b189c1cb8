"""`fluvial models`: list the models that can be trained, or try every pipeline of diffusers as a tiny random one."""

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fluvial.engines.cli.listing import JSON, find_installed, paragraphs, table, without
from fluvial.engines.errors import RunError, UsageError, convert_errors
from fluvial.models.catalogue import KNOWN

MEASURED, TINY, OUT = "--measured", "--tiny", "--out"
USAGE = """usage: fluvial models [--json]
       fluvial models --tiny CLASS --out FOLDER
       fluvial models --measured [CLASS ...] [--json]

List the models that can be trained: by which name (--model), what they make and predict, and the memory of their weights.
--json prints the same for programs.

--tiny writes a pipeline of random weights and a few megabytes, to try commands with: of any class of diffusers with a
transformer or of an adapter, e.g. StableDiffusionXLPipeline. It prints the command that trains it.

--measured tries every pipeline of the installed diffusers that has a transformer or is modular, or the named ones, as a tiny
random one: it is trained for one update, on one rank, on two, and from the samples of a server, and its adapter is opened.
It prints which train, and why the others are refused. It takes about half a minute per pipeline.
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
replayed, and it is rejected with a reason if the replay gives another velocity. A modular pipeline (FLUX.3, Krea 2) is
trained through its own blocks. Your own adapter is named as module:name.
"""


def run(args: list[str]) -> None:
    """Print the table."""
    args, as_json = without(args, JSON)
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
    print("\n".join(table(("--model", "makes", "predicts", "network, in bfloat16"), [*BUILT_IN, *rows])))
    print("", paragraphs(FOOT), sep="\n", end="")
    for name, source in find_installed("models").items():
        print(f"\nAn installed package has an adapter for {name}: {source}")


def write_tiny(args: Sequence[str]) -> None:
    """Write a tiny random pipeline of a class, and print how it is trained."""
    if len(args) != 4 or args[2] != OUT:
        raise UsageError(f"models: expected {TINY} CLASS {OUT} FOLDER, got {' '.join(args)} (fluvial models --help)")
    from fluvial.models.pipelines.folder import quietly
    from fluvial.models.pipelines.open import built_in
    from fluvial.models.tiny.modular import find_call, save
    from fluvial.models.tiny.pipelines import UnknownPart, has_transformer
    from fluvial.models.tiny.settings import special

    name, folder, adapters = args[1], Path(args[3]), built_in()
    if not (name in adapters or has_transformer(name)):
        raise UsageError(
            f"{TINY} is {name!r}, expected a class of diffusers with a transformer or one of {', '.join(adapters)}"
        )
    if folder.exists():
        raise UsageError(f"{OUT} is {folder}, which is there already: name a new folder")
    with convert_errors(UsageError, UnknownPart, says=f"{name} cannot be made tiny"), quietly():
        save(name, folder)
    asked, recipe = find_call(name), "ddpo" if name in adapters and adapters[name].prediction == "epsilon" else "grpo"
    is_classes = "id2label" in special(name, "own", {})  # a prompt is a class, by its number or name
    prompts = "prompts.jsonl" if asked.media else "classes.txt" if is_classes else "@animals"
    sizes = "--updates 2 --sampling.prompts 2 --sampling.group 2 --sampling.steps 4"
    size = f"--pipeline.height {asked.size} --pipeline.width {asked.size}"
    size += f" --pipeline.frames {asked.frames}" if asked.frames > 1 else ""
    call = [f"{key}={json.dumps(value)}" for key, value in asked.call.items() if name not in adapters]
    call = ["--pipeline.call", *map(shlex.quote, call)] if call else []
    print(f"{folder}: a {name} of random weights; with images in records of the prompts: {', '.join(asked.media) or 'none'}")
    print(f"fluvial train {recipe} --model {folder} --prompts {prompts} --rewards jpeg {sizes} {size}", *call)


def run_measured(names: Sequence[str], *, as_json: bool) -> None:
    """Print the table of the named pipelines, or of all; each row is also said on the error stream when it is known."""
    from fluvial.bench.trial.pipelines import format_table, measure
    from fluvial.engines.cli.main import run as command
    from fluvial.models.tiny.pipelines import has_transformer, pipelines

    if unknown := [name for name in names if not has_transformer(name)]:
        raise UsageError(f"models --measured: the installed diffusers has no {unknown[0]}, or it has no transformer")
    if not (known := names or pipelines()):
        raise RunError(
            "models --measured: diffusers' pipelines cannot be imported: python -c 'from diffusers import FluxPipeline'"
        )
    rows = []
    for name in known:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, Path(folder), command))
        print(" | ".join(rows[-1].format_cells()), file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps([{**row._asdict(), "trains": row.trains} for row in rows], indent=1))
    else:
        print(format_table(rows))
