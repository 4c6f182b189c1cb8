"""Model cards: the README.md beside exported weights, written from the records of the run."""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluvial.engines import plugins
from fluvial.engines.export.formats import COMFY_LORA, COMFY_WEIGHTS, Format
from fluvial.engines.files import LORA
from fluvial.engines.run.log.records import flatten, read_json, read_records

CARD, CURVE, SAMPLES = "README.md", "reward.png", "samples.png"
# Fields that name files of a machine, or that do not change the weights.
OMITTED = {
    *("out", "model", "prompts", "resume", "tracker", "engine", "checkpoint", "export", "lora.weights", "pipeline.heldout"),
    *("pipeline.text_cache", "pipeline.weights", "method.preferences", "method.teacher", "data.images", "data.cache"),
    *("data.errors", "evaluation.every", "evaluation.samples", "evaluation.final_samples"),
}
CHANGES_WEIGHTS = {"engine.micro_batch", "engine.update_micro_batch", "engine.init", "engine.implementation"}
FORMS = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr"}
LICENCE = re.compile(r"^license(?:_name|_link)?: .+$", re.MULTILINE)


@dataclass(frozen=True)
class Card:
    """Contents of a model card.

    Args:
        kind: format of the weights.
        model: base model: an id on the Hub, a folder, or a built-in model.
        pipeline: class of diffusers' pipeline; None for a model that is not a pipeline.
        network: class of the network; None if it is not a class of diffusers.
        parts: names of the networks, if there are several.
        video: whether the model generates videos.
        folder: folder of the base model if it is a pipeline; the licence is read from it.
        method: name of the method.
        settings: configuration of the run, as JSON.
        defaults: default configuration of the method, as JSON.
        update: number of updates of the weights.
        average: whether the weights are the moving average.
        dtype: dtype of the files.
        merge: whether a file for ComfyUI holds merged weights.
    """

    kind: Format
    model: str
    pipeline: str | None
    network: str | None
    parts: tuple[str, ...]
    video: bool
    folder: Path | None
    method: str
    settings: Mapping[str, Any]
    defaults: Mapping[str, Any]
    update: int
    average: bool
    dtype: str
    merge: bool = False

    @property
    def hub_id(self) -> str | None:
        """Id of the base model on the Hub; None for a folder or a built-in model."""
        is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", self.model) and not os.path.exists(self.model)
        return self.model if is_id else None

    @property
    def base(self) -> str:
        """Name of the base model without its parent folders."""
        return self.hub_id or Path(self.model).name

    @property
    def is_adapter(self) -> bool:
        """Whether the files hold an adapter, not weights."""
        return self.kind == "lora" or (self.kind == "comfyui" and not self.merge and self.settings["train"] == "lora")


def write_card(card: Card, out: Path, *, run: Path | None) -> None:
    """Write README.md to the folder of an export, with the curve and the samples of its run if there are any.

    Args:
        card: contents of the card.
        out: folder of the export.
        run: folder of the run, whose records up to the card's update are shown; None shows none.

    Raises:
        OSError: the folder cannot be written.
    """
    all_records = () if run is None else read_records(run / "metrics.jsonl")
    records = [record for record in all_records if record["update"] <= card.update]
    title, points, unit = _read_curve(records)
    for draw in plugins.load_all("curves") if len(points) > 1 else ():
        draw(out / CURVE, title, points, unit)
    summary = (None if run is None else read_json(run / "summary.json")) or {}
    is_final = bool(summary) and summary.get("updates") == card.update
    images = None if run is None else run / "samples" / ("before-after.png" if is_final else f"update-{card.update:04d}.png")
    if images is not None and images.is_file():
        shutil.copyfile(images, out / SAMPLES)
    has_curve, has_images = (out / CURVE).is_file(), (out / SAMPLES).is_file()
    results = _format_results(records, summary if is_final else {}, curve=has_curve, images=has_images)
    text = [_format_front_matter(card), _format_introduction(card), _format_loading(card), _format_settings(card), results]
    (out / CARD).write_text("\n\n".join(part for part in text if part) + "\n", encoding="utf-8")


def _format_front_matter(card: Card) -> str:
    lines = ["---"]
    if card.hub_id:
        lines += [f"base_model: {card.hub_id}", f"base_model_relation: {'adapter' if card.is_adapter else 'finetune'}"]
    if card.pipeline or card.network:
        lines.append("library_name: diffusers")
    lines += [f"pipeline_tag: {'text-to-video' if card.video else 'text-to-image'}"]
    lines += _read_licence(card.folder)
    tags = ["fluvial", "diffusers", card.method.partition(":")[2] or card.method]
    tags += ["lora"] * card.is_adapter + ["comfyui"] * (card.kind == "comfyui")
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _read_licence(folder: Path | None) -> list[str]:
    """Return the lines about the licence in the base model's card, if any."""
    if folder is None or not (folder / CARD).is_file():
        return []
    front = re.match(r"---\n(.*?)\n---", (folder / CARD).read_text(encoding="utf-8", errors="replace"), flags=re.DOTALL)
    return LICENCE.findall(front[1]) if front else []


def _format_introduction(card: Card) -> str:
    files = f"{FORMS[card.settings['lora']['form']['kind']]} adapter of" if card.is_adapter else "weights of"
    base = f"[{card.base}](https://huggingface.co/{card.base})" if card.hub_id else f"`{card.base}`"
    lines = [f"The {files} {base} after {card.update} updates of `{card.method}` by fluvial, in {card.dtype}."]
    if card.average:
        lines.append("The files hold the moving average of the trained weights.")
    if card.settings["lora"]["weights"] is not None:
        lines.append("Training started from an adapter, which is included.")
    if card.settings["pipeline"]["weights"] is not None and card.is_adapter:
        lines.append(f"Training started from other weights of `{card.base}`: load the adapter on top of those.")
    return f"# {card.base}, post-trained with {card.method}\n\n{' '.join(lines)}"


def _format_loading(card: Card) -> str:
    """Return the section with the code that loads the files."""
    base = card.hub_id or "path/to/the/base/model"
    folders = [f"path/to/this/folder/{part}" for part in card.parts] or ["path/to/this/folder"]
    named = [*zip(card.parts or (_name_component(card),), folders, strict=True)]
    imports, open_pipeline = "DiffusionPipeline", f'pipeline = DiffusionPipeline.from_pretrained("{base}")'
    if card.kind == "comfyui":
        target, file = ("loras", COMFY_LORA) if card.is_adapter else ("diffusion_models", COMFY_WEIGHTS)
        files = [f"`{part}/{file}`" for part in card.parts] or [f"`{file}`"]
        return f"## Use\n\nCopy {' and '.join(files)} to `ComfyUI/models/{target}`."
    if card.kind == "full":
        code = ['pipeline = DiffusionPipeline.from_pretrained("path/to/this/folder")']
    elif card.kind == "lora" and card.pipeline and card.settings["lora"]["form"]["kind"] == "lokr":  # pipelines reject it
        code = [open_pipeline, *(f"pipeline.{name}.{_format_adapter_call(card, folder)}" for name, folder in named)]
    elif card.kind == "lora" and card.pipeline:
        first, *second = folders
        code = [open_pipeline, f'pipeline.load_lora_weights("{first}")']
        code += [f'pipeline.load_lora_weights("{other}", load_into_transformer_2=True)' for other in second]
    elif card.kind == "lora":
        imports = str(card.network)
        code = [f'network = {card.network}.from_pretrained("{base}")', f"network.{_format_adapter_call(card, folders[0])}"]
    elif card.network:
        imports = f"DiffusionPipeline, {card.network}" if card.pipeline else card.network
        code = [f'{name} = {card.network}.from_pretrained("{folder}")' for name, folder in named]
        if card.pipeline:
            arguments = ", ".join(f"{name}={name}" for name, _ in named)
            code.append(f'pipeline = DiffusionPipeline.from_pretrained("{base}", {arguments})')
    else:
        return ""
    return "\n".join(["## Use", "", "```python", f"from diffusers import {imports}", "", *code, "```"])


def _name_component(card: Card) -> str:
    """Return the name of the network in diffusers' pipelines."""
    return "unet" if "UNet" in str(card.network) else "transformer"


def _format_adapter_call(card: Card, folder: str) -> str:
    """Return the call with which a network loads an adapter, whose keys begin with the network's name."""
    return f'load_lora_adapter("{folder}", weight_name="{LORA}", prefix="{_name_component(card)}")'


def _format_settings(card: Card) -> str:
    """Return the section of the settings that differ from the defaults of the method."""
    settings, defaults = flatten(card.settings), flatten(card.defaults)
    rows = [
        f"| `{name.removeprefix('method.')}` | `{json.dumps(value)}` |"
        for name, value in settings.items()
        if defaults.get(name) != value and (name in CHANGES_WEIGHTS or not {name, name.partition(".")[0]} & OMITTED)
    ]
    if not rows:
        return f"## Training\n\nMethod `{card.method}` with its defaults."
    head = f"## Training\n\nMethod `{card.method}`. Settings that are not its defaults:"
    return "\n".join([head, "", "| field | value |", "|---|---|", *rows])


def _format_results(records: list[dict[str, Any]], summary: Mapping[str, Any], *, curve: bool, images: bool) -> str:
    """Return the section of results: the curve, the first and the last held-out scores, the run, and samples."""
    evaluations = [record for record in records if record.get("score")]
    lines: list[str] = []
    if curve:
        lines += [f"![mean while training]({CURVE})", ""]
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        lines += [f"| held-out prompts | update {first['update']} | update {last['update']} |", "|---|---|---|"]
        for kind, label in (("score", "score"), ("exact", "exactly right")):
            for name in last.get(kind) or {}:
                before, after = (record.get(kind, {}).get(name) for record in (first, last))
                if kind == "score" or before or after:
                    lines.append(f"| {label}, `{name}` | {_format_number(before)} | {_format_number(after)} |")
        lines.append("")
    counted = {
        "eval_samples": "samples of the last evaluation",
        "train_samples": "samples trained on",
        "train_seconds": "seconds of training",
        "ranks": "processes",
        "seed": "seed",
    }
    rows = [
        f"| {label} | {_format_number(summary[name])} |" for name, label in counted.items() if summary.get(name) is not None
    ]
    if rows:
        lines += ["| run | |", "|---|---|", *rows, ""]
    if images:
        lines += [f"![samples]({SAMPLES})"]
    return "\n".join(["## Results", "", *lines]).rstrip() if lines else ""


def _read_curve(records: list[dict[str, Any]]) -> tuple[str, list[tuple[float, float]], str]:
    """Return title, points and unit of the curve of the reward, or of the loss in a run without rewards."""
    points = [(r["update"], r["reward"]["mean"]) for r in records if (r.get("reward") or {}).get("mean") is not None]
    if points:
        return "Reward while training", points, "mean over the samples"
    return "Loss while training", [(r["update"], r["loss"]) for r in records if r.get("loss") is not None], ""


def _format_number(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
