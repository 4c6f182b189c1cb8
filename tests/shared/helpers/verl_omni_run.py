"""A run of verl-omni's own entry point on the CPU: clones of its code, packages that it needs, and stand-ins for the rest.

verl-omni and the commit of verl that it names are on no package index: FLUVIAL_CLONES is a folder with clones of both.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers import absent, wheels

SHARED = Path(__file__).parents[1]
CLONES = {"verl": "8a69493", "verl-omni": "a1139ba"}  # commits that were tested
PACKAGES = (  # none of them is a package of this project's environment
    *("hydra-core==1.3.8", "antlr4-python3-runtime==4.9.3", "codetiming==1.4.0", "torchdata==0.11.0", "cachetools==8.0.2"),
    *("dill==0.4.1", "datasets==5.2.0", "multiprocess==0.70.19", "xxhash==4.1.0", "TransferQueue==0.1.8"),
    *("pyzmq==27.3.0", "prometheus_client==0.26.0", "fastapi==0.115.14", "starlette==0.46.2", "annotated-doc"),
    # The newest transformers that verl-omni takes, and what it needs of older versions.
    *("transformers==5.14.1", "tokenizers==0.22.2", "huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9"),
    *("aiohttp==3.14.5", "aiohappyeyeballs", "aiosignal", "frozenlist", "multidict", "propcache", "yarl"),
)
LATE = "The current node timed out during startup"  # Ray gives its own processes 30 seconds: on a busy machine again
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def clones() -> Path:
    """Return the folder of the clones; skip the test without it."""
    folder = Path(os.environ.get("FLUVIAL_CLONES", "/nowhere"))
    if missing := [name for name in CLONES if not (folder / name / name.replace("-", "_")).is_dir()]:
        commits = ", ".join(f"{name} ({CLONES[name]})" for name in missing)
        pytest.skip(f"FLUVIAL_CLONES names no folder with a clone of {commits}")
    return folder


def run(folder: Path, settings: Mapping[str, Any], entry: str = "main_diffusion") -> None:
    """Run an entry point in a folder until it ends.

    Args:
        folder: folder of the run; its rollouts are stored in `rollouts`.
        settings: of hydra, by name.
        entry: module of verl-omni's trainers.
    """
    found, site = clones(), wheels.install_all("verl-omni-site", PACKAGES)
    path = [stand_ins(folder / "absent"), found / "verl", found / "verl-omni", site, SHARED]
    (folder / "rollouts").mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "VERL_USE_EXTERNAL_MODULES": "workers.verl_cpu",
        "FLUVIAL_ROLLOUTS": str(folder / "rollouts"),
        **dict.fromkeys(("HF_HUB_OFFLINE", "HYDRA_FULL_ERROR", "OMP_NUM_THREADS"), "1"),
        **dict.fromkeys(("RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"), "0"),
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)  # Ray counts one GPU, which nobody asks for
    command = [sys.executable, "-P", "-W", "ignore", "-m", f"verl_omni.trainer.{entry}", *arguments(settings)]
    log = folder / "log.txt"
    for _ in range(3):
        with log.open("w") as out:
            done = subprocess.run(command, env=environment, cwd=folder, stdout=out, stderr=out, timeout=1800, check=False)
        if LATE not in log.read_text():
            break
    assert done.returncode == 0, log.read_text()[-6000:]


def arguments(settings: Mapping[str, Any], sign: str = "=") -> Iterable[str]:
    """Yield settings as hydra reads them."""
    for name, value in settings.items():
        given = f"{{{','.join(arguments(value, ':'))}}}" if isinstance(value, Mapping) else json.dumps(value)
        yield f"{name}{sign}{given}"


def stand_ins(folder: Path) -> Path:
    """Write packages with the names of those that have no CPU wheel."""
    for name in ("vllm", "vllm_omni"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("from helpers import absent\n\nabsent.stand_in(__name__)\n")
    metadata = folder / f"vllm-{absent.VERSION}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {absent.VERSION}\n")
    return folder


def settings(model: Path, data: Path, out: Path, **more: Any) -> dict[str, Any]:
    """Return settings of five steps of Flow-GRPO with two prompts of two samples each."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        **dict.fromkeys(("data.train_files", "data.val_files"), str(data)),
        "data.train_batch_size": 2,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "data.max_prompt_length": 64,
        "+data.cache_dir": str(out / "cache"),
        "actor_rollout_ref.model.path": str(model),
        "actor_rollout_ref.model.algorithm": "flow_grpo",
        "actor_rollout_ref.model.attn_backend": "native",
        "actor_rollout_ref.model.custom_chat_template": TEMPLATE,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fluvial",
        f"{actor}.fsdp_config.dtype": "float32",
        f"{actor}.ppo_mini_batch_size": 1,
        f"{actor}.ppo_micro_batch_size_per_gpu": 6,
        f"{actor}.diffusion_loss.clip_ratio": 0.2,
        f"{actor}.optim.lr": 1e-3,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.optim.clip_grad": 1e6,
        f"{actor}.optim.override_optimizer_config": {"eps": 1e-4},
        f"{actor}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"],
        f"{actor}.checkpoint.load_contents": ["model", "optimizer", "extra"],
        f"{rollout}.name": "fluvial",
        f"{rollout}.rollout_attn_backend": "TORCH_SDPA",
        f"{rollout}.n": 2,
        f"{rollout}.seed": 7,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 8,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.max_prompt_embed_length": 128,
        f"{rollout}.pipeline.height": 16,
        f"{rollout}.pipeline.width": 16,
        f"{rollout}.pipeline.num_inference_steps": 3,
        f"{rollout}.pipeline.max_sequence_length": 40,
        f"{rollout}.algo.noise_level": 0.7,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": str(SHARED / "helpers" / "omni_rollouts.py"),
        "reward.custom_reward_function.name": "red",
        "trainer.logger": ["console"],
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": 5,
        "trainer.save_freq": 1,
        "trainer.default_local_dir": str(out),
        "ray_kwargs.ray_init.num_cpus": 6,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        **more,
    }
