"""The reward models that fluvial ships, and what it says about those that it cannot.

`REWARD_MODELS["pickscore"].make(device="cuda:1")` builds one.
"""

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

VIT_L = "openai/clip-vit-large-patch14", "32bd64288804d66eefd0ccbe215aa642df71cc41"  # CLIP, and its commit
DINOV2 = "facebook/dinov2-base", "f9e44c814b77203eaa57a6bdbbd535f21ede1415"
READ = "1 - min(lev(t, w), |w|) / |w|"  # of the text t that is read and the text w that is asked for


@dataclass(frozen=True)
class RewardModel:
    """A row of the table of reward models.

    Args:
        name: name on the command line.
        factory: class or function that builds the reward, as `module:name` below `fluvial.models.rewards`. It is imported
            when it is needed.
        formula: score of an image x and a prompt p.
        source: paper or repository that the formula comes from.
        licence: licence of the weights.
        weights: id of the default weights on the Hub; empty if there are none.
        revision: commit of the default weights.
        parameters: number of parameters in millions.
        install: what to install beside fluvial, e.g. "fluvial[rewards]"; None if nothing.
        packages: names that must be importable for it.
        gradients: whether the score is differentiable in the images, as `alignprop` needs it.
        takes: first argument of the reward, "images" (or videos), "videos" or "audio".
    """

    name: str
    factory: str
    formula: str
    source: str
    licence: str
    weights: str = ""
    revision: str | None = None
    parameters: float = 0.0
    install: str | None = None
    packages: tuple[str, ...] = ()
    gradients: bool = False
    takes: str = "images"

    @property
    def make(self) -> Any:
        """Class or function that builds the reward. Its arguments are the options, e.g. of `pickscore:device=cuda:1`.

        It raises ValueError, in one line, if the reward cannot be built.
        """
        module, _, name = self.factory.partition(":")
        return getattr(import_module(f"fluvial.models.rewards.{module}"), name)

    @property
    def gibibytes(self) -> float:
        """Memory of the weights in float32, in GiB; half of it in bfloat16."""
        return self.parameters * 1e6 * 4 / 2**30

    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [name for name in self.packages if find_spec(name) is None]

    def commit(self, weights: object, revision: str | None) -> str | None:
        """Return the commit to load: the one asked for, or that of the default weights, or None for the newest."""
        return revision or (self.revision if weights == self.weights else None)


REWARD_MODELS: dict[str, RewardModel] = {
    model.name: model
    for model in (
        RewardModel(
            "pickscore",
            "clip:PickScore",
            "exp(logit_scale) cos(f(x), g(p)) / 26",
            "arXiv 2305.01569",
            "none stated; MIT of the CLIP that it was finetuned from",
            "yuvalkirstain/PickScore_v1",
            "a4e4367c6dfa7288a00c550414478f865b875800",
            986.1,
            gradients=True,
        ),
        RewardModel(
            "hpsv2",
            "hpsv2:Hpsv2",
            "cos(f(x), g(p))",
            "arXiv 2306.09341",
            "Apache-2.0",
            "xswu/HPSv2",
            "697403c78157020a1ae59d23f111aa58ced35b0a",
            986.1,
            "fluvial[rewards]",
            ("ftfy",),
            gradients=True,
        ),
        RewardModel(
            "hpsv3",
            "qwen_vl:Hpsv3",
            "mu(x, p), of a Gaussian",
            "arXiv 2508.03789",
            "MIT",
            "MizzenAI/HPSv3",
            "4f81e3e09edd82fe3c5f636444c721b592a735ca",
            7748.6,
            gradients=True,
        ),
        RewardModel(
            "editreward",
            "qwen_vl:EditReward",
            "(mu_1(x, y, p) + mu_2(x, y, p)) / 2",
            "arXiv 2509.26346",
            "MIT of its code",
            "TIGER-Lab/EditReward-Qwen2.5-VL-7B",
            "51b92ab5246295637c4ab3bd71e54a26f0a5189d",
            7753.1,
            gradients=True,
        ),
        RewardModel(
            "videoreward",
            "qwen_vl:VideoReward",
            "sum over VQ, MQ and TA of (y(x, p) - mean) / std",
            "arXiv 2501.13918",
            "MIT of its code",
            "KlingTeam/VideoReward",
            "4f26600130683e6f1de9f5d463887f28e8ef995c",
            2208.6,
            gradients=True,
            takes="videos",
        ),
        RewardModel(
            "imagereward",
            "imagereward:ImageReward",
            "(h(t(x, p)) - 0.167) / 1.033, h linear",
            "arXiv 2304.05977",
            "Apache-2.0",
            "THUDM/ImageReward",
            "5736be03b2652728fb87788c9797b0570450ab72",
            446.0,
            gradients=True,
        ),
        RewardModel(
            "clipscore", "clip:ClipScore", "cos(f(x), g(p))", "arXiv 2104.08718", "MIT", *VIT_L, 427.6, gradients=True
        ),
        RewardModel(
            "siglip",
            "clip:Siglip",
            "cos(f(x), g(p))",
            "arXiv 2303.15343",
            "Apache-2.0",
            "google/siglip-so400m-patch14-384",
            "9fdffc58afc957d1a03a25b10dba0329ab15c2a3",
            878.0,
            "fluvial[rewards]",
            ("sentencepiece",),
            gradients=True,
        ),
        RewardModel(
            "aesthetic",
            "clip:Aesthetic",
            "h(f(x) / |f(x)|), h linear",
            "LAION; arXiv 2305.13301",
            "MIT (CLIP), Apache-2.0 (head)",
            *VIT_L,
            428.5,
            gradients=True,
        ),
        RewardModel(
            "dino",
            "identity:Dino",
            "cos(f(x), f(y)), y the image of the prompt's record",
            "arXiv 2208.12242, 2304.07193",
            "Apache-2.0",
            *DINOV2,
            86.6,
            gradients=True,
        ),
        RewardModel(
            "perceptual",
            "identity:Perceptual",
            "-sum_l mean_i |u_li(x) - u_li(y)|^2, y as of dino",
            "arXiv 1801.03924, 2304.07193",
            "Apache-2.0",
            *DINOV2,
            86.6,
            gradients=True,
        ),
        RewardModel(
            "ocr",
            "ocr:Ocr",
            READ,
            "arXiv 2505.05470",
            "Apache-2.0",
            "PP-OCRv6 small, in the package rapidocr",
            parameters=7.6,
            install="fluvial[rewards]",
            packages=("rapidocr", "onnxruntime"),
        ),
        RewardModel(
            "got_ocr",
            "got_ocr:GotOcr",
            READ,
            "arXiv 2409.01704",
            "Apache-2.0",
            "stepfun-ai/GOT-OCR-2.0-hf",
            "d3017ef2c2c1395888c8d635c5e0508bcb0ac78d",
            560.5,
        ),
        RewardModel(
            "clap",
            "clap:Clap",
            "cos(f(a), g(p))",
            "arXiv 2211.06687",
            "Apache-2.0",
            "laion/clap-htsat-unfused",
            "8fa0f1c6d0433df6e97c127f64b2a1d6c0dcda8a",
            153.5,
            gradients=True,
            takes="audio",
        ),
        RewardModel("jpeg", "jpeg:make_compressibility", "-bytes(JPEG_95(x)) / 1000", "arXiv 2305.13301", "none"),
        RewardModel(
            "jpeg_incompressibility", "jpeg:make_incompressibility", "bytes(JPEG_95(x)) / 1000", "arXiv 2305.13301", "none"
        ),
        RewardModel(
            "sharpness",
            "sharpness:make",
            "Var(Laplacian(grey(x)))",
            "doi 10.1016/j.patcog.2012.11.011",
            "none",
            gradients=True,
        ),
    )
}

# Rewards that people ask for by name, and why they run in a server of their own.
ELSEWHERE: dict[str, str] = {
    "geneval": "its detector needs mmdet and Python 3.10; models.rewards.geneval has its rules for any detector",
    "deqa": "needs mPLUG-Owl2, which is code in its repository",
    "unifiedreward": "has 7 billion parameters and writes: serve it, and use unified_reward, unified_reward_2 or win_rate",
    "imagebind": "no class of transformers; its package needs torchvision and torchaudio",
}
