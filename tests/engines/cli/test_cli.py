"""Wrong input ends in one line that says what and where, with exit code 2, and nothing is written."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from fluvial.core.checks import FieldError
from fluvial.engines import run as training
from fluvial.engines.extensions.plan import memory
from fluvial.engines.run import recipes
from fluvial.engines.run.config import with_values
from fluvial.engines.run.record import as_record
from fluvial.models.handwriting import BASE, list_codes

WEIGHTS = "diffusion_pytorch_model.safetensors"
PROMPTS = {"empty.txt": "\n  \n", "letters.txt": "0427\n12a4\n", "unicode.txt": "１２３４\n"}

# (arguments, what the line must say); {tmp} is the test's folder.
WRONG: list[tuple[str, str]] = [
    ("frobnicate", "unknown command 'frobnicate'"),
    ("train", "needs the name of a recipe, got nothing, expected one of grpo"),
    ("train handwritten", "got 'handwritten', expected one of grpo, flash"),
    # And not --sampling.guidance.update.
    ("train handwriting --updatez 3", "unknown flag --updatez; did you mean '--updates'?"),
    ("train handwriting --micro-batch many", "--engine.micro-batch is 'many', expected a whole number or auto"),
    ("train handwriting --processes 0", "--processes is '0', expected a number from 1 to "),
    ("train handwriting --processes", "--processes is given no value"),
    ("train handwriting --processes 2 --processes=2", "--processes is given twice"),
    ("sample handwriting --processes 2", "unknown flag --processes"),
    ("train handwriting --updtes 3", "did you mean '--updates'?"),
    ("train handwriting --sampling.sampler.etaa 3", "did you mean '--sampling.sampler.eta'?"),
    ("train handwriting --update-micro-batch 0", "update-micro-batch is 0"),
    ("train handwriting --train half", "'half'"),
    ("train handwriting --sampling.sampler.eta nan", "eta is nan"),
    ("train handwriting --sampling.sampler.eta 0", "eta is 0, expected a number above 0: every step of flow_sde"),
    ("train handwriting --sampling.group 1", "group is 1, expected at least 2"),
    ("train handwriting --sampling.window.size 11", "--sampling.window has 11 stochastic steps in steps 0 to 6"),
    ("train handwriting --sampling.window.size 0", "--sampling.window.size is 0, expected an integer"),
    ("train handwriting --sampling.window.low 5 --sampling.window.size 2", "has 2 stochastic steps in steps 5 to 6"),
    ("train handwriting --sampling.window scatered", "branches, splits, candidates; did you mean 'scattered'?"),
    ("train handwriting --sampling.window scattered", "--sampling.window.size"),
    ("train handwriting --sampling.window all --sampling.window.size 2", "the kind all has no size, which random,"),
    (
        "train handwriting --sampling.sampler cps --sampling.window.size 1 --sampling.window.high 10",
        "the last step of cps has no log-probability",
    ),
    ("train handwriting --sampling.sampler cps --sampling.sampler.eta 1.5", "eta is 1.5, expected at most 1 for cps"),
    ("train handwriting --sampling.sampler ode --sampling.sampler.eta 1", "the kind ode has no eta, which flow_sde"),
    ("train handwriting --sampling.sampler euler", "'euler'"),
    ("train handwriting --clip-low nan", "--clip-low is nan"),
    ("train guard --sampling.sampler cps", "--sampling.sampler is 'cps', expected flow_sde or dance_sde"),
    ("train guard --form unscaled", "expected density or no_const"),
    ("train guard --reduction sum", "unknown flag --reduction: this method has none, and grpo, tempflow, chunk"),
    ("train handwriting --prompts {tmp}/empty.txt", "empty.txt is empty"),
    ("train handwriting --prompts {tmp}/letters.txt", "letters.txt, line 2: prompt '12a4' is not a code of 4 digits"),
    ("train handwriting --prompts {tmp}/unicode.txt", "unicode.txt, line 1"),
    ("train handwriting --prompts {tmp}", "is a folder without state.json, expected a file"),
    ("train handwriting --out {tmp}/held", "held already holds a run"),
    ("train handwriting --out {tmp}/new --resume", "new holds no run to resume"),
    ("train handwriting --out {tmp}/held --resume", "config.json is not the record of a run"),
    ("train handwriting --out {tmp}/run --resume-from {tmp}/run/checkpoints/000009", "000009 is not a checkpoint"),
    ("train handwriting --prompts {tmp}/heldout.txt", "heldout.txt, line 2: '{heldout}' is held out for evaluation"),
    ("train handwriting --seed 1{zeros}", "expected"),
    ("train handwriting --advantage.eps 0", "eps is 0"),
    (
        "train handwriting --sampling.sampler cps --form unscaled --sampling.window.high 10 --kl.coef 1",
        "the last step of cps has no KL",
    ),
    ("sample handwriting --seed -1", "seed is -1"),
    ("train handwriting --out {tmp}/new --weights {tmp}/list", "list/config.json holds a list, expected a JSON object"),
    ("train handwriting --out {tmp}/new --weights {tmp}/incomplete", "is incomplete: "),
    ("train handwriting --out {tmp}/empty.txt/run", "cannot be made: Not a directory"),
    ("train handwriting --out {tmp}/new --weights {tmp}", "holds no model: config.json is missing"),
    ("train handwriting --out {tmp}/new --weights {tmp}/foreign", "is not of the handwriting model: num_layers"),
    ("train handwriting --out {tmp}/new --weights {tmp}/cut", "cannot be read"),
    ("eval handwriting --weights {tmp}/nowhere", "nowhere: there is no such folder"),
    ("eval handwriting --samples 0", "samples is 0"),
    ("sample handwriting --prompts 12a4", "--prompts: prompt '12a4'"),
    ("sample handwriting --prompts", "--prompts"),
    ("sample handwriting --out {tmp}/empty.txt/x.png", "cannot be written"),
    ("sample handwriting --out {tmp}/x.nonsense", "x.nonsense, expected a name that ends in .png"),
    ("plan", "needs the name of a model or of a published run, got nothing, expected one of handwriting, sd3.5-medium"),
    ("preferences handwriting --group 1", "group is 1, expected at least 2"),
    ("preferences handwriting --out {tmp}/empty.txt", "cannot be written"),
    ("train grpo --model sd9", "--model is 'sd9', expected handwriting or handwriting-unet"),
    ("train grpo --reward nice", "--rewards is 'nice', expected one of characters"),
    ("train grpo --rewards characters=x", "whose weight 'x' is not a number other than 0"),
    ("train grpo --rewards characters machine characters=2", "which names 'characters' twice"),
    ("train dpo --preferences {tmp}/nowhere", "preferences.jsonl cannot be read"),
    ("train distill --teacher {tmp}/nowhere", "config.json is missing"),
    ("train nft --train full", "--train is 'full', expected lora: nft keeps policies that lag behind"),
    ("train grpo --model handwriting-unet", "expected ddim or ode"),
    ("train ddpo --model handwriting", "expected flow_sde or dance_sde or cps"),
    ("plan sd4", "got 'sd4', expected one of handwriting, sd3.5-medium, flux.1-dev, qwen-image"),
    ("plan handwriting --gpus 0", "gpus is 0"),
    ("train grpo --sampling.prompts 1000000", "prompts is 1000000, expected at most 131072: with groups of 8 it makes"),
    ("plan sd3.5-medium --resolution 512", "unknown flag --resolution: here it is --pipeline.height"),
    ("train grpo --processes 1000000", "--processes is '1000000', expected a number from 1 to "),
    ("sample handwriting --each 100000000", "--each is 100000000"),
    ("plan sd3.5-medium --gpus 10000000", "--gpus is 10000000, expected an integer in [1, 1048576]"),
    ("plan handwriting --height 64", "has images of one size only"),
    ("plan flux.1-dev --gpus 8 --engine.replicas 3", "engine.replicas is 3, expected a divisor of the 8 GPUs"),
    ("plan flux.1-dev --check", "flux.1-dev is too large for a CPU"),
    ("plan handwriting --check --gpus 2", "runs on 1 process(es), and the plan is for 2 GPUs"),
    ("plan handwriting --check --table", "set one of them"),
]


# Settings, and values with which no run makes sense.
NONSENSE: dict[str, tuple[Any, ...]] = {
    "sampling.sampler.eta": (50.0, -1.0),
    "sampling.steps": (10**6, -4),
    "sampling.group": (10**8, 0),
    "sampling.prompts": (10**8, 0),
    "sampling.guidance.scale": (1e9, -5.0),
    "lora.rank": (10**5, 0),
    "optimizer.lr": (1e20, -1.0),
    "kl.coef": (1e30, -0.1),
    "pipeline.height": (10**8, -64, 0),
    "pipeline.frames": (10**6, 0),
    "evaluation.samples": (10**12, 0),
    "evaluation.width": (10**6, 0),
    "engine.micro_batch": (10**9, -1),
    "checkpoint.every": (-1,),
}


@pytest.mark.parametrize("field", NONSENSE)
def test_nonsense_is_refused_by_the_name_of_its_setting(field: str) -> None:
    for value in NONSENSE[field]:
        with pytest.raises(FieldError, match=rf" is {re.escape(str(value))}, expected an? .*(integer|number) ") as caught:
            with_values(recipes.grpo("handwriting"), {field: value})
        assert caught.value.field.removeprefix("method.") == field


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompt files, a folder that holds a run, weights of another model and weights cut short."""
    tmp = tmp_path_factory.mktemp("wrong")
    for name, text in PROMPTS.items():
        (tmp / name).write_text(text)
    (tmp / "held").mkdir()
    (tmp / "held" / "config.json").write_text("{}")
    config, data = (BASE / "config.json").read_text(), (BASE / WEIGHTS).read_bytes()
    other = config.replace('"num_layers": 4', '"num_layers": 5')
    for name, text in {"foreign": other, "cut": config, "list": "[]", "incomplete": config}.items():
        (tmp / name).mkdir()
        (tmp / name / WEIGHTS).write_bytes(data[: len(data) // 2])
        (tmp / name / "config.json").write_text(text)
    tensors = load_file(BASE / WEIGHTS)
    del tensors["proj_out.weight"]
    save_file(tensors, tmp / "incomplete" / WEIGHTS, metadata={"format": "pt"})
    (tmp / "heldout.txt").write_text(f"{list_codes('train')[0]}\n{list_codes('heldout')[7]}\n")
    (tmp / "run").mkdir()
    (tmp / "run" / "config.json").write_text(json.dumps(as_record(replace(recipes.grpo(), out=tmp / "run"))))
    return tmp


@pytest.mark.parametrize(("typed", "says"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_input_is_one_line(folder: Path, typed: str, says: str, fluvial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 2; the line starts with the program's name."""
    monkeypatch.chdir(folder)  # another process may hold runs/grpo of the current folder
    words = {"tmp": folder, "zeros": "0" * 400, "heldout": list_codes("heldout")[7]}
    line = fluvial(*(word.format(**words) for word in typed.split()), code=2)
    assert line.startswith("fluvial: ")
    assert says.format(**words) in line
    assert not (folder / "new" / "config.json").exists()


def test_help_says_what_there_is(fluvial: Any) -> None:
    """Every command, in a few lines."""
    for typed in ((), ("--help",)):
        text = fluvial(*typed)
        assert all(command in text for command in ("train", "eval", "sample", "preferences", "plan", "torchrun"))


def test_a_sample_is_drawn(tmp_path: Path, fluvial: Any) -> None:
    """The image holds a cell for every prompt and repetition."""
    out = tmp_path / "deep" / "sample.png"
    shown = fluvial(*f"sample handwriting --prompts 0427 1999 --each 2 --steps 3 --out {out}".split())
    assert str(out) in shown.replace("\n", "")
    with Image.open(out) as image:
        assert image.width > 2 * 256
        assert image.height > 2 * 64


def test_weights_are_evaluated(fluvial: Any) -> None:
    """Both evaluators, in a table."""
    text = " ".join(fluvial("eval", "handwriting", "--samples", 6, "--steps", 2, "--micro-batch", 3).split())
    assert all(said in text for said in ("heldout", "reward", "6 samples of handwriting"))


def test_a_plan_is_printed_and_checked(fluvial: Any) -> None:
    """What each kind takes, whether it fits, what to turn; and that it is what an update here takes."""
    for typed, said in (
        (
            "--train full --gpus 8 --memory-gib 0.03 --reserve-gib 0",
            "full, on 8 GPUs .* --engine.checkpointing block it does",
        ),
        ("--table", "full, 64 GPUs │ as it is"),
        ("--check --micro-batch 16", "allocated at the peak"),
    ):
        assert re.search(said, " ".join(fluvial("plan", "handwriting", *typed.split()).split()))


@pytest.mark.long
def test_a_reward_of_videos_is_refused_before_its_download(tmp_path: Path, fluvial: Any) -> None:
    """Also as an evaluator, and as the judge of preferences."""
    for command, flag in (
        (("train", "grpo"), "--rewards"),
        (("train", "grpo"), "--evaluation.rewards"),
        (("eval", "handwriting"), "--rewards"),
        (("preferences", "handwriting"), "--rewards"),
    ):
        line = fluvial(*command, "--out", tmp_path / command[0], flag, "videoreward", code=2)
        assert "'videoreward' scores videos, and samples are images" in line


@pytest.mark.long
def test_a_plan_that_is_wrong_fails_its_check(monkeypatch: pytest.MonkeyPatch, fluvial: Any) -> None:
    """Exit code 1, and one line that names the kinds."""
    right = memory.account

    def wrong(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return found._replace(moments=found.moments + 4, activations=found.activations // 2)

    monkeypatch.setattr(memory, "account", wrong)
    line = fluvial("plan", "handwriting", "--check", "--micro-batch", 16, code=1)
    assert line.endswith("the plan does not agree with what was measured: moments, allocated at the peak")


@pytest.mark.parametrize("resumes", ["--resume", "--resume-from=000002", "--resume_from 000002"])
def test_what_is_typed_to_resume_goes_on_top_of_the_run(
    resumes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fluvial: Any
) -> None:
    """Not on top of the recipe: with its two updates a rollout, the three that are asked for would be refused."""
    begun = with_values(recipes.grpo(), {"out": tmp_path, "updates": 1, "passes.minibatches": 1, "seed": 5})
    (tmp_path / "config.json").write_text(json.dumps(as_record(begun)))
    seen: list[Any] = []
    monkeypatch.setattr(training, "train", lambda config, console: seen.append(config))
    fluvial("train", "grpo", *resumes.split(), "--out", tmp_path, "--updates", 3)
    (config,) = seen
    assert with_values(config, {"resume": False, "checkpoint.resume_from": None}) == replace(begun, updates=3)
    assert config.resume != (config.checkpoint.resume_from is not None)
    fluvial("train", "grpo", "--resume", "--help")  # where there is no run, too
