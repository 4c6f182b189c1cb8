"""Try a pipeline of diffusers as a tiny random one: train it on one rank, on two, and from a server; open its adapter."""

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fluvial.bench.trial.forked import Forked, ProcessResult, open_process, run_ranks, wait

PROMPTS = ("a red fox", "two cats", "an owl")
RUN = (
    "--sampling.prompts 2 --sampling.group 2 --sampling.steps 3 --micro-batch 2 --update-micro-batch 2 --updates 1 "
    "--passes.minibatches 1 --final-samples 2 --evaluation.every 0 --checkpoint.every 1"
)
MICRO_BATCH = ("--micro-batch", "2")
COLUMNS = ("pipeline", "by", "conditions", "error", "first ratio", "LoRA opens", "two ranks", "served", "result")
ADDRESS = re.compile(r"http://[\d.]+:\d+")
CLOSE = 1e-3  # relative difference of the gradient's norm on two ranks, whose sums have another order
ENDINGS = {"image": "png", "video": "npy", "audio": "wav"}  # of the files of a kind
FRAMES, SECONDS = 5, 0.32  # of a video, and of a sound
STARTING = 60.0  # seconds until a server has to listen


class PipelineTrial(NamedTuple):
    """The result of trying one pipeline."""

    pipeline: str
    how: str = ""  # "adapter", "recorded" or "blocks"; empty if nothing was trained
    conditions: tuple[str, ...] = ()  # arguments that are images, videos or sounds
    error: float | None = None  # of velocities and images against the pipeline's own; None for an adapter
    ratio: float | None = None  # importance ratio before the first update
    opens: str = ""  # whether the exported adapter opens with the pipeline's load_lora_weights
    ranks: str = ""  # whether a run on two ranks has the same samples and the same gradient
    served: str = ""  # whether a run from the samples of `fluvial serve` has an adapter of the same bits
    layers: int = 0  # linear layers that LoRA adapts
    parameters: int = 0  # of the adapter
    flow: bool = True  # whether its scheduler is a flow's
    guided: bool = True  # False if it is refused with guidance, and trains at a scale of 1
    reason: str = ""  # why it is refused; empty if it trains

    @property
    def trains(self) -> bool:
        """Whether the pipeline trains, on policy to the bit."""
        return not self.reason and self.ratio == 1.0

    def format_cells(self) -> tuple[str, ...]:
        """Return the row of the table."""
        error = "" if self.error is None else f"{self.error:.0e}" if self.error else "0"
        ratio = "" if self.ratio is None else f"{self.ratio:g}"
        trains = "trains" if self.guided else "trains without guidance"
        result = trains if self.trains else f"refused because {self.reason}" if self.reason else "is off policy"
        name = (self.pipeline, self.how, ", ".join(self.conditions))
        return (*name, error, ratio, self.opens, self.ranks, self.served, result)


def measure(name: str, folder: Path, command: Callable[[list[str]], int]) -> PipelineTrial:
    """Build a tiny random pipeline of a class of diffusers and train it by GRPO for one update; see `PipelineTrial`.

    Every step is a process of its own, with limits of memory and time.

    Args:
        name: pipeline class of diffusers.
        folder: empty folder.
        command: runs a command line of fluvial, and returns its exit code.
    """
    from fluvial.models.pipelines.open import list_adapters
    from fluvial.models.tiny import modular
    from fluvial.models.tiny import pipelines as tiny

    other = tiny.find_other_scheduler(name)
    if other and not (name in list_adapters() or tiny.is_modular(name)):
        return PipelineTrial(name, flow=False, reason=f"its scheduler is not a flow's ({other})")
    row = PipelineTrial(name, flow=not other)
    built = wait([Forked(lambda: _build(name, folder), folder / "build.txt")])
    if built.code:
        return row._replace(reason=_shorten_reason(f"no tiny one can be built to try it: {built.last}", name, folder))
    asked = modular.find_call(name)

    def run_command(args: list[str]) -> int:
        import torch

        torch.set_num_threads(1)
        with tiny.replace_surroundings(name, asked.size):
            return command(args)

    def train_with(words: list[str]) -> ProcessResult:
        return wait([Forked(lambda: run_command(["train", *words, "--out", str(folder / "run")]), folder / "run.txt")])

    trained = train_with(words := _build_command(name, folder, asked))
    row = row._replace(conditions=asked.media)
    if trained.code and asked.scale != 1:
        shutil.rmtree(folder / "run", ignore_errors=True)
        first, row = trained, row._replace(guided=False)
        if (trained := train_with(words := _build_command(name, folder, asked._replace(scale=1.0, negative="")))).code:
            trained, row = first, row._replace(guided=True)
    if trained.code:
        return row._replace(reason=_shorten_reason(_find_reason(trained), name, folder))
    if (log_ratio := _read_update(folder / "run")["first_pass_max_abs_log_ratio"]) is None:
        return row._replace(reason="its log-probabilities are not finite numbers")
    within = re.search(r"velocities and images within ([\d.e+-]+)", trained.output)
    adapted = re.search(r"LoRA adapts (\d+) linear layers, (\d+) parameters", trained.output)
    return row._replace(
        how="adapter" if name in list_adapters() else "blocks" if tiny.is_modular(name) else "recorded",
        error=None if within is None else float(within[1]),
        ratio=math.exp(log_ratio),
        layers=0 if adapted is None else int(adapted[1]),
        parameters=0 if adapted is None else int(adapted[2]),
        opens=wait([Forked(lambda: print(_check_opens(name, folder)), folder / "opens.txt")]).last,
        ranks=_compare_two_ranks(words, folder, run_command),
        served=_train_served(words, folder, run_command, recorded=name not in list_adapters()),
    )


def rising(audios: Any, prompts: Sequence[str]) -> Any:
    """Return how much louder the second half of each sound is than the first, `[B]`: a reward of pipelines of sounds."""
    first, second = audios.square().flatten(1).chunk(2, dim=1)
    return second.sum(1) / (first.sum(1) + second.sum(1))


def format_table(rows: Sequence[PipelineTrial]) -> str:
    """Return a Markdown table of the trials, those that train first, and a sentence that counts them."""
    ordered = sorted(rows, key=lambda row: (not row.trains, not row.flow, row.pipeline))
    cells = [COLUMNS, tuple("---" for _ in COLUMNS), *(row.format_cells() for row in ordered)]
    lines = ["| " + " | ".join(cell.replace("|", "or") for cell in row) + " |" for row in cells]
    flows, rest = [row for row in rows if row.flow], [row.trains for row in rows if not row.flow]
    others = f"; {sum(rest)} of {len(rest)} others, which are not flows" if rest else ""
    return "\n".join([*lines, "", f"{sum(row.trains for row in flows)} of {len(flows)} flow pipelines train{others}."])


def _build(name: str, folder: Path) -> None:
    """Save the tiny pipeline and its prompts, with images, videos and sounds of random numbers."""
    from fluvial.models.tiny import modular
    from fluvial.models.tiny import pipelines as tiny

    asked = modular.find_call(name)
    modular.save(name, folder / "model")
    records = [
        {
            "prompt": tiny.make_prompt(name, text),
            **{
                argument: _write_random(folder, argument, 10 * number + place, asked)
                for place, argument in enumerate(asked.media)
            },
        }
        for number, text in enumerate(PROMPTS)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def _build_command(name: str, folder: Path, asked: Any) -> list[str]:
    """Return the command line that trains a tiny pipeline, without its folder."""
    from fluvial.models.pipelines.open import list_adapters
    from fluvial.models.tiny.pipelines import find_other_scheduler

    adapter = list_adapters().get(name)
    size = [
        "--pipeline.height",
        str(asked.size),
        "--pipeline.width",
        str(asked.size),
        "--pipeline.frames",
        str(asked.frames),
    ]
    files = ["--model", str(folder / "model"), "--prompts", str(folder / "prompts.jsonl")]
    words = [*files, *RUN.split(), *size, "--sampling.guidance.scale", f"{asked.scale:g}"]
    words += ["--rewards", f"{__name__}:rising" if asked.sounds else "jpeg"]
    if adapter is None and asked.call:
        words += ["--pipeline.call", *(f"{key}={json.dumps(value)}" for key, value in asked.call.items())]
    if asked.negative:
        words += ["--sampling.guidance.negative", asked.negative]
    return ["ddpo" if find_other_scheduler(name) else "grpo", *words]


def _compare_two_ranks(words: list[str], folder: Path, command: Callable[[list[str]], int]) -> str:
    """Return whether two ranks make the same samples as one, on policy, and find the same gradient."""
    ended = run_ranks(lambda: command(["train", *words, "--out", str(folder / "two")]), folder, 2)
    if ended.code:
        return f"no: {_join_line(_find_reason(ended))[:60]}"
    one, two = (_read_update(folder / run) for run in ("run", "two"))
    norms = one["grad_norm"], two["grad_norm"]
    same = math.isclose(one["reward"]["mean"], two["reward"]["mean"], rel_tol=1e-6) and math.isclose(*norms, rel_tol=CLOSE)
    return "no: other samples" if not same else "yes" if two["first_pass_max_abs_log_ratio"] == 0 else "no: off policy"


def _train_served(words: list[str], folder: Path, command: Callable[[list[str]], int], *, recorded: bool) -> str:
    """Return whether a run from a server's samples trains an adapter of the same bits."""
    import torch

    recipe, *options = words
    shared = _select_server_options(
        options, ("--pipeline", "--sampling.guidance", "--sampling.steps", *(["--prompts"] * recorded))
    )
    weights = str(folder / "weights")
    asked = ["serve", str(folder / "model"), "--port", "0", *MICRO_BATCH, *shared, "--weights-root", weights, str(folder)]
    with open_process(lambda: command(asked), folder / "serve.txt") as server:
        until = time.monotonic() + STARTING
        while (match := ADDRESS.search(server.read_output())) is None and time.monotonic() < until:
            if server.poll() is not None:
                return f"no: {_join_line(server.read_output().strip().rpartition(chr(10))[2])[:60]}"
            time.sleep(0.1)
        if match is None:
            return "no: the server does not start"
        source = ["--rollout.source", match[0], "--rollout.servers.weights-folder", weights]
        args = ["train", recipe, *options, *source, "--out", str(folder / "served")]
        ended = wait([Forked(lambda: command(args), folder / "served.txt")])
    if ended.code:
        return f"no: {_join_line(re.sub(rf'{ADDRESS.pattern}[^ ]*', 'the server', _find_reason(ended)))[:120]}"
    one, other = (_read_adapter(folder / run) for run in ("run", "served"))
    same = one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    return "yes" if same else "no: other bits"


def _select_server_options(options: list[str], prefixes: tuple[str, ...]) -> list[str]:
    """Return the options of a run that a server takes too, by their prefixes, with the server's names."""
    selected, taking = list[str](), False
    for word in options:
        if word.startswith("--"):
            taking = word.startswith(prefixes)
            word = word.replace("--sampling.", "--")
        if taking:
            selected.append(word)
    return selected


def _read_update(run: Path) -> dict[str, Any]:
    """Return the metrics of a run's first optimizer update."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return next(line for line in lines if "grad_norm" in line)


def _read_adapter(run: Path) -> dict[str, Any]:
    """Return the tensors of a run's exported adapter."""
    from safetensors.torch import load_file

    files = sorted((run / "lora").rglob("*.safetensors"))
    return {f"{number}.{key}": tensor for number, file in enumerate(files) for key, tensor in load_file(file).items()}


def _check_opens(name: str, folder: Path) -> str:
    """Return "yes" if the pipeline's own loader opens the exported adapter of a run, otherwise a reason."""
    from diffusers import DiffusionPipeline, ModularPipeline

    from fluvial.models.pipelines.folder import silence
    from fluvial.models.replay.processors import add_tokenizers, read_processors
    from fluvial.models.tiny.pipelines import is_modular, replace_surroundings

    try:
        with silence(), replace_surroundings(name, 0):
            if is_modular(name):
                pipe: Any = ModularPipeline.from_pretrained(str(folder / "model"), local_files_only=True)
                pipe.load_components([part for part in pipe.components if part.startswith(("transformer", "unet"))])
            else:
                processors = read_processors(folder / "model")
                pipe = DiffusionPipeline.from_pretrained(folder / "model", local_files_only=True, **processors)
                add_tokenizers(pipe, folder / "model", {})
            if not hasattr(pipe, "load_lora_weights"):
                return "no loader"
            network = getattr(pipe, "transformer", None) or pipe.unet
            if not hasattr(network, "load_lora_adapter"):  # which the pipeline's loader calls
                return "no: diffusers' loader fails"
            lora = folder / "run" / "lora"
            pipe.load_lora_weights(lora / "transformer" if (lora / "transformer").is_dir() else lora)
            return "yes" if getattr(network, "peft_config", None) else "no layer"
    except Exception as error:  # of diffusers
        return f"no: {_join_line(error)[:60]}"


def _write_random(folder: Path, argument: str, seed: int, asked: Any) -> str:
    """Write a file of random numbers for an argument that is an image, a video or a sound, and return its name."""
    import numpy as np
    import torch
    from PIL import Image

    from fluvial.models.replay.kinds import IMAGE, KINDS, SOUND, Sound, write_sound

    kind = next((kind for kind in KINDS if argument in kind.arguments), IMAGE)
    numbers, size = np.random.default_rng(seed), asked.size
    name = f"{seed}.{ENDINGS[kind.name]}"
    if kind is SOUND:
        vae = json.loads((folder / "model" / "vae" / "config.json").read_text(encoding="utf-8"))
        rate = next(vae[key] for key in ("sampling_rate", "sample_rate") if key in vae)
        wave = numbers.uniform(-1, 1, (vae.get("audio_channels", 2), int(SECONDS * rate)))
        (folder / name).write_bytes(write_sound(Sound(torch.from_numpy(wave).float(), rate)))
    elif kind is IMAGE:
        Image.fromarray(numbers.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
    else:
        frames = asked.frames if asked.frames > 1 else FRAMES
        np.save(folder / name, numbers.integers(0, 256, (frames, size, size, 3), dtype=np.uint8))
    return name


def _find_reason(ended: ProcessResult) -> str:
    """Return the error message of a command that failed."""
    lines = [line for line in ended.output.splitlines() if line.startswith("fluvial: ")]
    return lines[-1].removeprefix("fluvial: ") if lines else ended.last


def _shorten_reason(message: str, name: str, folder: Path) -> str:
    """Return the error message without the pipeline's name, its folder, and the arguments of its call."""
    short = message.replace(str(folder / "model"), "its folder")
    for start in (
        r"model its folder: ",
        r"prompts file \S+, line \d+: ",
        f"{name} cannot be trained without an adapter: ",
        f"{name} ",
    ):
        short = re.sub(f"^{start}", "", short)
    short = re.sub(r"^cannot be called with .*?: (?=[A-Z]\w+: )", "cannot be called: ", short)
    scheduler = r"ValueError: RecordingScheduler: the config is of (\w+), expected \w+'s"
    short = re.sub(scheduler, r"its scheduler is a \1, whose steps are not Euler's of a flow", short)
    short = re.sub(r"NameError: name '(\w+)' is not defined", r"a package with `\1` is not installed", short)
    return _join_line(short.removeprefix("its folder/").replace(str(folder), ""))


def _join_line(error: object) -> str:
    return " ".join(str(error).split())[:220]
