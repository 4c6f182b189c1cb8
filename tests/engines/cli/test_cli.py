"""Wrong input ends in one line that says what and where, with exit code 2, and nothing is written."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import launch
from safetensors.torch import load_file, save_file

from fluvial.engines.cli import main as cli
from fluvial.engines.run.config import with_values

PROMPTS = {"empty.txt": "\n  \n", "letters.txt": "0427\n12a4\n", "short.txt": "427\n", "unicode.txt": "１２３４\n"}

# (arguments, what the line must say); {tmp} is the test's folder.
WRONG: list[tuple[str, str]] = [
    ("frobnicate", "unknown command 'frobnicate'"),
    ("train", "needs the name of a recipe, got nothing, expected one of grpo"),
    ("train handwritten", "got 'handwritten', expected one of grpo, dance"),
    ("train handwriting --bogus 3", "unknown flag --bogus"),
    ("train handwriting --processes 0", "--processes is '0', expected a number from 1, or auto"),
    ("train handwriting --processes", "--processes is given no value"),
    ("train handwriting --processes 2 --processes=2", "--processes is given twice"),
    ("sample handwriting --processes 2", "unknown flag --processes"),
    ("train handwriting --updtes 3", "did you mean '--updates'?"),
    ("train handwriting --sampling.sampler.etaa 3", "did you mean '--sampling.sampler.eta'?"),
    ("train handwriting --updates many", "--updates"),
    ("train handwriting --updates 0", "updates is 0"),
    ("train handwriting --update-micro-batch 0", "update-micro-batch is 0"),
    ("train handwriting --train half", "'half'"),
    ("train handwriting --sampling.sampler.eta -0.1", "eta is -0.1"),
    ("train handwriting --sampling.sampler.eta nan", "eta is nan"),
    ("train handwriting --sampling.sampler.eta inf", "eta is inf"),
    ("train handwriting --sampling.sampler.eta 0", "eta is 0, expected a number above 0: every step of flow_sde"),
    ("train handwriting --sampling.group 1", "group is 1, expected at least 2"),
    ("train handwriting --sampling.window.size 11", "--sampling.window has 11 stochastic steps in steps 0 to 6"),
    ("train handwriting --sampling.window.size 0", "--sampling.window.size is 0, expected an integer"),
    ("train handwriting --sampling.window.low 5 --sampling.window.size 2", "has 2 stochastic steps in steps 5 to 6"),
    ("train handwriting --sampling.window scatered", "moving, branches; did you mean 'scattered'?"),
    ("train handwriting --sampling.window scattered", "--sampling.window.size"),
    (
        "train handwriting --sampling.window all --sampling.window.size 2",
        "the kind all has no size, which random, scattered,",
    ),
    (
        "train handwriting --sampling.sampler cps --sampling.window.size 1 --sampling.window.high 10",
        "the last step of cps has no log-probability",
    ),
    ("train handwriting --sampling.sampler cps --sampling.sampler.eta 1.5", "eta is 1.5, expected at most 1 for cps"),
    ("train handwriting --sampling.sampler ode --sampling.sampler.eta 1", "the kind ode has no eta, which flow_sde"),
    ("train handwriting --sampling.sampler euler", "'euler'"),
    ("train handwriting --clip-low nan", "--clip-low is nan"),
    ("train handwriting --kl.coef -1", "coef is -1"),
    ("train guard --sampling.sampler cps", "--sampling.sampler is 'cps', expected flow_sde or dance_sde"),
    ("train guard --form unscaled", "expected density or no_const"),
    ("train guard --reduction sum", "unknown flag --reduction: this method has none, and grpo, tempflow have it"),
    ("train handwriting --optimizer.lr -1", "lr is -1"),
    ("train handwriting --lora.rank 0", "lora.rank is 0"),
    ("train handwriting --prompts {tmp}/missing.txt", "missing.txt cannot be read: No such file"),
    ("train handwriting --prompts {tmp}/empty.txt", "empty.txt is empty"),
    ("train handwriting --prompts {tmp}/letters.txt", "letters.txt, line 2: prompt '12a4' is not a code of 4 digits"),
    ("train handwriting --prompts {tmp}/short.txt", "short.txt, line 1: prompt '427'"),
    ("train handwriting --prompts {tmp}/unicode.txt", "unicode.txt, line 1"),
    ("train handwriting --prompts {tmp}", "is a folder without state.json, expected a file"),
    ("train handwriting --out {tmp}/held", "held already holds a run"),
    ("train handwriting --out {tmp}/new --resume", "new holds no run to resume"),
    ("train handwriting --out {tmp}/held --resume", "config.json is not the record of a run"),
    ("train handwriting --out {tmp}/run --resume-from {tmp}/run/checkpoints/000009", "000009 is not a checkpoint"),
    ("train handwriting --prompts {tmp}/heldout.txt", "heldout.txt, line 2: '{heldout}' is held out for evaluation"),
    ("train handwriting --seed -1", "seed is -1"),
    ("train handwriting --seed 1{zeros}", "expected"),
    ("train handwriting --advantage.eps 0", "eps is 0"),
    (
        "train handwriting --sampling.sampler cps --form unscaled --sampling.window.high 10 --kl.coef 1",
        "the last step of cps has no KL",
    ),
    ("pretrain handwriting --seed -1", "seed is -1"),
    ("pretrain handwriting --out {tmp}/empty.txt", "cannot be made"),
    ("sample handwriting --seed -1", "seed is -1"),
    ("train handwriting --out {tmp}/new --weights {tmp}/list", "list/config.json holds a list, expected a JSON object"),
    ("train handwriting --out {tmp}/new --weights {tmp}/incomplete", "is incomplete: "),
    ("train handwriting --out {tmp}/empty.txt/run", "cannot be made: Not a directory"),
    ("train handwriting --out {tmp}/new --weights {tmp}", "holds no model: config.json is missing"),
    ("train handwriting --out {tmp}/new --weights {tmp}/foreign", "is not of the handwriting model: num_layers"),
    ("train handwriting --out {tmp}/new --weights {tmp}/cut", "cannot be read"),
    ("pretrain handwriting --out {tmp}/foreign", "already holds a model"),
    ("pretrain handwriting --batch 0", "batch is 0"),
    ("eval handwriting --weights {tmp}/nowhere", "nowhere: there is no such folder"),
    ("eval handwriting --samples 0", "samples is 0"),
    ("sample handwriting --prompts 12a4", "--prompts: prompt '12a4'"),
    ("sample handwriting --prompts", "--prompts"),
    ("sample handwriting --out {tmp}/empty.txt/x.png", "cannot be written"),
    ("sample handwriting --out {tmp}/x.nonsense", "x.nonsense, expected a name that ends in .png"),
    ("plan", "needs the name of a model or of a published run, got nothing, expected one of handwriting, sd3.5-medium"),
    ("preferences handwriting --group 1", "group is 1, expected at least 2"),
    ("preferences handwriting --rewards nice", "--rewards is 'nice', expected one of characters"),
    ("preferences handwriting --out {tmp}/empty.txt", "cannot be written"),
    ("pretrain handwriting --model handwriting-unet", "fluvial pretrain handwriting-unet"),
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
    ("plan handwriting --resolution 64", "has images of one size only"),
    ("plan flux.1-dev --resolution 1000", "resolution is 1000, expected a multiple of 16"),
    ("plan flux.1-dev --gpus 8 --engine.replicas 3", "engine.replicas is 3, expected a divisor of the 8 GPUs"),
    ("plan flux.1-dev --check", "flux.1-dev is too large for a CPU"),
    ("plan handwriting --check --gpus 2", "runs on 1 process(es), but the plan is for 2 GPUs"),
    ("plan handwriting --check --table", "ask one"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompt files, a folder that holds a run, weights of another model and weights cut short."""
    from fluvial.engines.run import recipes
    from fluvial.engines.run.record import as_record
    from fluvial.models.handwriting import BASE, codes

    tmp = tmp_path_factory.mktemp("wrong")
    for name, text in PROMPTS.items():
        (tmp / name).write_text(text)
    (tmp / "held").mkdir()
    (tmp / "held" / "config.json").write_text("{}")
    config = (BASE / "config.json").read_text()
    for name in ("foreign", "cut", "list", "incomplete"):
        (tmp / name).mkdir()
        data = (BASE / "diffusion_pytorch_model.safetensors").read_bytes()
        (tmp / name / "diffusion_pytorch_model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp / "foreign" / "config.json").write_text(config.replace('"num_layers": 4', '"num_layers": 5'))
    (tmp / "cut" / "config.json").write_text(config)
    (tmp / "list" / "config.json").write_text("[]")
    (tmp / "incomplete" / "config.json").write_text(config)
    tensors = load_file(BASE / "diffusion_pytorch_model.safetensors")
    del tensors["proj_out.weight"]
    save_file(tensors, tmp / "incomplete" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    (tmp / "heldout.txt").write_text(f"{codes('train')[0]}\n{codes('heldout')[7]}\n")
    (tmp / "run").mkdir()
    record = as_record(replace(recipes.grpo(), out=tmp / "run"))
    (tmp / "run" / "config.json").write_text(json.dumps(record))
    return tmp


@pytest.mark.parametrize(("typed", "says"), WRONG, ids=[typed for typed, _ in WRONG])
def test_wrong_input_is_one_line(
    folder: Path, typed: str, says: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2; the line starts with the program's name."""
    from fluvial.models.handwriting import codes

    monkeypatch.chdir(folder)  # another process may hold runs/grpo of the current folder
    words = {"tmp": folder, "zeros": "0" * 400, "heldout": codes("heldout")[7]}
    code = cli.run([word.format(**words) for word in typed.split()])
    captured = capfd.readouterr()
    assert code == 2, captured
    line = launch.one_line(captured.err)
    assert line.startswith("fluvial: ")
    assert says.format(**words) in line
    assert not (folder / "new" / "config.json").exists()


@pytest.mark.parametrize("typed", ["", "--help"])
def test_help_says_what_there_is(typed: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every command, in a few lines."""
    assert cli.run(typed.split()) == 0
    text = capfd.readouterr().out
    assert all(command in text for command in ("train", "pretrain", "eval", "sample", "preferences", "plan", "torchrun"))


@pytest.mark.parametrize("command", ["train", "pretrain", "eval", "sample", "plan"])
def test_help_of_a_command_explains_every_field(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Every flag has a text; nothing is listed bare."""
    assert cli.run([command, "handwriting", "--help-all"]) == 0
    text = capfd.readouterr().out
    assert "(default:" in text
    for flag in re.split(r"\n│ (?=--)", text)[1:]:
        words = [word for word in flag.split() if word[0] not in "-│{(" and not word.isupper()]
        assert len(words) > 2, flag


def test_training_help_names_the_papers(capfd: pytest.CaptureFixture[str]) -> None:
    """What the recipe is and where it comes from."""
    cli.run(["train", "handwriting", "--help"])
    text = capfd.readouterr().out
    assert "Flow-GRPO" in text
    assert "2505.05470" in text


def test_a_sample_is_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The image holds a cell for every prompt and repetition."""
    from PIL import Image

    out = tmp_path / "deep" / "sample.png"
    assert cli.run(f"sample handwriting --prompts 0427 1999 --each 2 --steps 3 --out {out}".split()) == 0
    assert str(out) in capfd.readouterr().out.replace("\n", "")
    with Image.open(out) as image:
        assert image.width > 2 * 256
        assert image.height > 2 * 64


def test_weights_are_evaluated(capfd: pytest.CaptureFixture[str]) -> None:
    """Both evaluators, in a table."""
    assert cli.run(["eval", "handwriting", "--samples", "6", "--steps", "2", "--micro-batch", "3"]) == 0
    text = capfd.readouterr().out
    assert "heldout" in text
    assert "reward" in text
    assert "6 samples of handwriting" in " ".join(text.split())


def test_a_plan_is_printed_and_checked(capfd: pytest.CaptureFixture[str]) -> None:
    """What each kind takes, whether it fits, what to turn; and that it is what an update here takes."""
    typed = "plan handwriting --train full --gpus 8 --memory-gib 0.03 --reserve-gib 0"
    assert cli.run(typed.split()) == 0
    text = " ".join(capfd.readouterr().out.split())
    assert "parameters, full, on 8 GPUs" in text
    assert "With --engine.checkpointing block it does" in text
    assert cli.run(["plan", "handwriting", "--table"]) == 0
    assert "full, 64 GPUs │ as it is" in " ".join(capfd.readouterr().out.split())
    assert cli.run(["plan", "handwriting", "--check", "--micro-batch", "16"]) == 0
    assert "allocated at the peak" in capfd.readouterr().out


def test_a_plan_that_is_wrong_fails_its_check(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and one line that names the kinds."""
    from fluvial.engines.extensions.plan import memory

    right = memory.account

    def wrong(*args: Any, **options: Any) -> Any:
        found = right(*args, **options)
        return found._replace(moments=found.moments + 4, activations=found.activations // 2)

    monkeypatch.setattr(memory, "account", wrong)
    assert cli.run(["plan", "handwriting", "--check", "--micro-batch", "16"]) == 1
    line = launch.one_line(capfd.readouterr().err)
    assert line.endswith("the plan does not agree with what was measured: moments, allocated at the peak")


@pytest.mark.parametrize("resumes", ["--resume", "--resume-from=000002", "--resume_from 000002"])
def test_what_is_typed_to_resume_goes_on_top_of_the_run(
    resumes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not on top of the recipe: with its two updates a rollout, the three that are asked for would be refused."""
    from fluvial.engines import run as training
    from fluvial.engines.run import recipes
    from fluvial.engines.run.record import as_record

    out = tmp_path / "run"
    begun = with_values(recipes.grpo(), {"out": out, "updates": 1, "passes.minibatches": 1, "seed": 5})
    out.mkdir()
    (out / "config.json").write_text(json.dumps(as_record(begun)))
    seen: list[Any] = []
    monkeypatch.setattr(training, "train", lambda config, console: seen.append(config))
    assert cli.run(["train", "grpo", *resumes.split(), "--out", str(out), "--updates", "3"]) == 0, capfd.readouterr().err
    (config,) = seen
    assert with_values(config, {"resume": False, "checkpoint.resume_from": None}) == replace(begun, updates=3)
    assert config.resume != (config.checkpoint.resume_from is not None)
    assert cli.run(["train", "grpo", "--resume", "--help"]) == 0  # where there is no run, too
