"""Loading of reward models' weights, tokenizers and preprocessing, from a folder or the Hub; errors are one line."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fluvial.models.hub import probe_hub
from fluvial.models.pipelines.folder import silence
from fluvial.models.rewards.shared.pixels import Preprocess, read_preprocess
from fluvial.models.rewards.table import RewardModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Files that identify the folder of a tokenizer.
TOKENIZERS = ("tokenizer.json", "vocab.json", "spiece.model", "vocab.txt")

Processor = tuple[str, str | None]  # folder or id of tokenizer and preprocessing, and commit


class LoadingError(ValueError):
    """A reward model cannot be built; the message is one line."""


@dataclass(eq=False)
class ModelReward(ABC):
    """Reward from a frozen model of transformers.

    Args:
        weights: folder of the model, or id on the Hub.
        revision: commit on the Hub; by default that of the default weights.
        device: device of the model, e.g. "cuda:1"; by default that of the first samples.
        dtype: dtype of the model, "float32", "bfloat16" or "float16".
        batch: largest number of samples per forward pass.

    Raises:
        ValueError: the weights are missing or belong to another model, or an option is wrong; in one line.
    """

    weights: str | Path
    _: KW_ONLY
    revision: str | None = None
    device: str | None = None
    dtype: str = "float32"
    batch: int = 16
    model: Any = field(init=False)
    tokenizer: Any = field(init=False)

    facts: ClassVar[RewardModel]

    def __post_init__(self) -> None:
        try:
            check_packages(self.facts)
            self.model_device, self.precision = _parse_device(self.device), DTYPES[check_choice("dtype", self.dtype, DTYPES)]
            self.model = self.load(self.facts.choose_commit(self.weights, self.revision))
        except LoadingError as error:
            raise LoadingError(f"{self.facts.name}: {error}") from error
        self.model.eval().requires_grad_(False).to(device=self.model_device, dtype=self.precision)

    @abstractmethod
    def load(self, commit: str | None) -> Any:
        """Return the model, and keep its tokenizer and preprocessing.

        Raises:
            LoadingError: a file is missing or does not fit; the message is one line without the reward's name.
        """

    def place_model(self, samples: Tensor) -> torch.device:
        """Return the model's device; if the option `device` is not set, the model moves to that of the first samples."""
        if self.model_device is None:
            self.model_device = samples.device
            self.model.to(self.model_device)
        return self.model_device


def resolve_weights(weights: str | Path) -> str:
    """Return an existing folder or file of weights with its home directory expanded, or an id on the Hub unchanged.

    Raises:
        LoadingError: the path does not exist.
    """
    path, text = Path(weights).expanduser(), str(weights)
    if path.exists():
        return str(path)
    if text.startswith((".", "/", "~")) or text.count("/") != 1:
        raise LoadingError(f"there is no file or folder {text}; expected one, or an id on the Hub as owner/name")
    return text


def load_model(kind: Any, weights: str | Path, revision: str | None) -> Any:
    """Load a model of a transformers class with the weights of a folder, or of a commit on the Hub.

    Raises:
        LoadingError: the weights do not exist, belong to another architecture, or are incomplete.
    """
    from transformers import AutoConfig

    source, expected, what = resolve_weights(weights), kind.config_class.model_type, f"the weights {weights}"
    with silence():
        config = fetch(what, AutoConfig.from_pretrained, source, revision=revision)
        if config.model_type != expected:
            raise LoadingError(f"the weights {weights} are of the architecture {config.model_type!r}, expected {expected!r}")
        model, report = fetch(what, kind.from_pretrained, source, revision=revision, output_loading_info=True)
    # Position ids are constants that only some versions of transformers save.
    check_complete(weights, missing=[name for name in report["missing_keys"] if not name.endswith("_ids")])
    return model


def check_complete(weights: str | Path, *, missing: Sequence[str]) -> None:
    """Raise LoadingError if tensors are missing, which would keep their random values."""
    if missing:
        names = sorted(missing)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise LoadingError(f"the weights {weights} are incomplete: they lack {names[0]}{more}; download them again")


def check_packages(facts: RewardModel) -> None:
    """Raise LoadingError if a package that the reward needs is not installed."""
    if missing := facts.list_missing_packages():
        raise LoadingError(f"{', '.join(missing)} is not installed: pip install '{facts.install}'")


def check_choice(option: str, value: str, choices: Collection[str]) -> str:
    """Return the value of an option; LoadingError if it is not one of the choices."""
    if value not in choices:
        raise LoadingError(f"{option} is {value!r}, expected one of {', '.join(choices)}")
    return value


def load_tokenizer(source: str, revision: str | None) -> Any:
    """Load the tokenizer of a folder or of an id on the Hub; LoadingError if there is none."""
    from transformers import AutoTokenizer

    with silence():
        return fetch(f"the tokenizer of {source}", AutoTokenizer.from_pretrained, source, revision=revision)


def load_preprocess(source: str, revision: str | None) -> Preprocess:
    """Load the preprocessing of a folder or of an id on the Hub; LoadingError if it is missing or not supported."""
    from transformers.image_processing_utils import BaseImageProcessor

    with silence():
        get_settings = BaseImageProcessor.get_image_processor_dict
        settings, _ = fetch(f"the image processor of {source}", get_settings, source, revision=revision)
    try:
        return read_preprocess(settings)
    except ValueError as error:
        raise LoadingError(f"{source} cannot be used: {error}") from error


def find_weight_file(weights: str | Path, name: str, revision: str | None) -> Path:
    """Return the path of one file: `weights` itself, or the file `name` in the folder or Hub id `weights`.

    Raises:
        LoadingError: the file does not exist.
    """
    source = resolve_weights(weights)
    if Path(source).is_file():
        return Path(source)
    if Path(source).is_dir():
        if (Path(source) / name).is_file():
            return Path(source) / name
        raise LoadingError(f"the folder {source} has no file {name}")
    from huggingface_hub import hf_hub_download

    with silence():
        return Path(fetch(f"{name} of {weights}", hf_hub_download, source, name, revision=revision))


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or of a `torch.save` file, unpickling only tensors.

    If the file has the key `state_dict`, return the tensors under it.

    Raises:
        LoadingError: the file cannot be read, or does not contain tensors by name.
    """
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        loaded = attempt(f"the weights {file}", load_file, file)
    else:
        loaded = attempt(f"the weights {file}", torch.load, file, map_location="cpu", weights_only=True, mmap=True)
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise LoadingError(f"the weights {file} hold a {type(loaded).__name__}, expected tensors by name")
    return loaded


def find_processor(weights: str | Path, processor: str | None, default: Processor) -> Processor:
    """Return the folder or id, and the commit, of the tokenizer and the preprocessing.

    Args:
        weights: weights of the model.
        processor: folder or id of the option, or None.
        default: id and commit to use if `weights` is a folder without a tokenizer.
    """
    if processor is not None:
        return str(Path(processor).expanduser()), (default[1] if processor == default[0] else None)
    folder = Path(weights).expanduser()
    if any((folder / name).is_file() for name in TOKENIZERS):
        return str(folder), None
    return default


def _parse_device(name: str | None) -> torch.device | None:
    """Return the device of a name, or None for None; LoadingError if the device does not exist."""
    if name is None:
        return None
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise LoadingError(f"device is {name!r}, which is not there ({get_first_line(error)})") from error
    return device


def attempt(what: str, function: Any, *args: Any, **options: Any) -> Any:
    """Call a loading function, and turn its exceptions into a LoadingError of one line."""
    try:
        return function(*args, **options)
    except Exception as error:
        raise LoadingError(f"{what} cannot be loaded: {get_first_line(error)}") from error


def fetch(what: str, function: Any, source: str | Path, *args: Any, **options: Any) -> Any:
    """Call a loading function on a file, a folder or an id on the Hub, see `attempt`; the Hub is probed for an id."""
    with nullcontext() if Path(source).exists() else probe_hub():
        return attempt(what, function, source, *args, **options)


def get_first_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
