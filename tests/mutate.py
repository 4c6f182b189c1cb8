"""Applies known faults to a copy of the tree, one at a time, and shows that a test catches each.

    python -P tests/mutate.py            all of them, in some minutes
    python -P tests/mutate.py --only 3   one of them
    python -P tests/mutate.py --list     the table of tests/README.md

A fault replaces one text in one file of a temporary copy, whose packages come first on PYTHONPATH. The tree itself is never
changed. Without faults the copy must pass the same tests, or they would prove nothing.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("core", "kernels", "models", "engines", "bench")
COPIED = (*FOLDERS, "tests", "pyproject.toml", "README.md", "constraints.txt", "Makefile")
INTERPRETER = {"TRITON_INTERPRET": "1", "FLUVIAL_NO_TYPECHECK": "1"}


class Fault(NamedTuple):
    """A fault: what it is, the text it replaces in a file, and the test that catches it."""

    what: str
    file: str
    old: str
    new: str
    test: str
    environment: dict[str, str] = {}  # noqa: RUF012


FAULTS = (
    Fault(
        "reward_prob with its sign inverted", "core/nft.py",
        "((clipped / adv_clip + 1) / 2)", "((1 - clipped / adv_clip) / 2)",
        "tests/core/test_nft.py::test_reward_prob_is_its_formula",
    ),
    Fault(
        "a gradient flows through NFT's self-normalising weight", "core/nft.py",
        "reduce(error.detach().abs()", "reduce(error.abs()",
        "tests/core/test_nft.py::test_no_gradient_flows_through_the_self_normalising_weight",
    ),
    Fault(
        "abs dropped for a float dt, so that the KL is rewarded", "core/step.py",
        "return abs(dt)", "return dt",
        "tests/core/test_step.py::test_the_kl_is_a_penalty_of_its_size_times_the_length_of_the_step",
    ),
    Fault(
        "the surrogate takes the smaller loss", "core/policy.py",
        "return torch.maximum(free, held), _info", "return torch.minimum(free, held), _info",
        "tests/core/test_policy.py::test_the_loss_is_the_formula",
    ),
    Fault(
        "GRPO-Guard's loss not divided by |dt|", "core/policy.py",
        "torch.maximum(free, held) / dt.abs()", "torch.maximum(free, held)",
        "tests/core/test_guard.py::test_the_loss_is_the_formula",
    ),
    Fault(
        "Flow-DPPO holds the pairs within the threshold", "core/policy.py",
        "moved & (kl >= kl_threshold)", "moved & (kl < kl_threshold)",
        "tests/core/test_dppo.py::test_the_loss_is_the_formula",
    ),
    Fault(
        "a density without the factor 1/2", "core/gaussian.py",
        "-squared_residual / (2 * std**2)", "-squared_residual / std**2",
        "tests/core/test_gaussian.py::test_density_is_that_of_torch",
    ),
    Fault(
        "the ddof of a group's std ignored", "core/advantages.py",
        "/ (count - ddof).clamp(min=1)", "/ count",
        "tests/core/test_advantages.py::test_it_is_the_loop_one_would_write",
    ),
    Fault(
        "the moving average does not warm up", "core/ema.py",
        "return min(decay, (1 + updates) / (10 + updates))", "return decay",
        "tests/core/test_ema.py::test_the_warm_up",
    ),
    Fault(
        "a rate in place of a step's std", "core/transitions.py",
        "std=rate * torch.sqrt(-dt)", "std=rate",
        "tests/core/test_transitions.py::test_coefficients_are_the_formulas",
    ),
    Fault(
        "DDIM's std of the next level's noise", "core/transitions.py",
        "std=eta * torch.sqrt((1 - abn) / (1 - ab))", "std=eta * torch.sqrt((1 - ab) / (1 - abn))",
        "tests/core/test_transitions.py::test_coefficients_are_the_formulas",
    ),
    Fault(
        "one round fewer of Philox", "core/random.py",
        "i * weyl for i in range(10)]", "i * weyl for i in range(9)]",
        "tests/core/test_random.py::test_known_answers_of_integers",
    ),
    Fault(
        "every step of a rollout draws the same noise", "core/random.py",
        "data = torch.tensor(steps, device", "data = torch.tensor([0] * len(steps), device",
        "tests/core/test_rollout.py::test_noise_differs_between_steps_and_samples",
    ),
    Fault(
        "AWM's level squared", "core/awm.py",
        "return -level * error\n", "return -(level**2) * error\n",
        "tests/core/test_awm.py::test_it_is_the_formula",
    ),
    Fault(
        "DPO prefers the worse sample", "core/dpo.py",
        "return -F.logsigmoid(_rewards(", "return -F.logsigmoid(-_rewards(",
        "tests/core/test_dpo.py::test_the_loss_is_the_formula",
    ),
    Fault(
        "k3's two terms added", "core/correction.py",
        "torch.expm1(gap) - gap.clamp(max=80)", "torch.expm1(gap) + gap.clamp(max=80)",
        "tests/core/test_correction.py::test_weights_and_diagnostics_are_those_of_the_loop_one_would_write",
    ),
    Fault(
        "v_uncond read with v's strides", "kernels/fused/gaussian_step.py",
        "row * s_uncond + start, g, offset, mask)\n        x_next",
        "row * s_v + start, g, offset, mask)\n        x_next",
        "tests/kernels/test_fused.py::test_each_operand_is_read_with_strides_of_its_own", INTERPRETER,
    ),
    Fault(
        "k3's series used where it is 2 % off", "kernels/fused/gaussian_step.py",
        "tl.abs(x) < 0.25", "tl.abs(x) < 4.0",
        "tests/kernels/test_fused.py::test_the_kl_to_the_old_policy_is_accurate_at_every_log_ratio", INTERPRETER,
    ),
    Fault(
        "use_safetensors dropped, so that a .bin file is unpickled", "models/pipelines/base.py",
        "kind.from_pretrained(folder, use_safetensors=True, ", "kind.from_pretrained(folder, ",
        "tests/models/pipelines/test_networks.py::test_weights_in_a_bin_file_are_never_loaded",
    ),
    Fault(
        "an adapter blended the wrong way round", "models/lora.py",
        "_shards(module, source), decay)", "_shards(module, source), 1 - decay)",
        "tests/models/test_lora.py::test_copy_and_blend",
    ),
    Fault(
        "the learning-rate schedule never applied", "engines/fsdp/engine.py",
        "            set_lr(self.optimizer, lr)\n", "",
        "tests/engines/fsdp/test_engine.py::test_each_update_moves_the_weights_at_its_own_rate",
    ),
    Fault(
        "the learning-rate schedule off by one update", "engines/fsdp/engine.py",
        "self.lr_factor(self.updates)", "self.lr_factor(self.updates + 1)",
        "tests/engines/fsdp/test_engine.py::test_each_update_moves_the_weights_at_its_own_rate",
    ),
    Fault(
        "a warm-up that begins at 0 and wastes an update", "engines/fsdp/config.py",
        "(done + 1) / warmup if", "done / warmup if",
        "tests/engines/fsdp/test_config.py::test_no_update_is_wasted",
    ),
    Fault(
        "the gradient is not clipped", "engines/fsdp/optimizers.py", 'group["params"]], max_norm, norm)',
        'group["params"]], math.inf, norm)',
        "tests/engines/fsdp/test_engine.py::test_the_gradient_is_clipped_to_the_norm",
    ),
    Fault(
        "restore counts a skipped update as a step of Adam", "engines/fsdp/engine.py",
        "fill_(self.updates - self.skipped)", "fill_(self.updates)",
        "tests/engines/fsdp/test_engine.py::test_a_skipped_update_is_no_step_of_the_restored_optimizer",
    ),
    Fault(
        "skipped_in_a_row not restored", "engines/fsdp/engine.py",
        'self.skipped_in_a_row = counters["skipped_in_a_row"]', "self.skipped_in_a_row = 0",
        "tests/engines/fsdp/test_engine.py::test_skips_in_a_row_go_on_counting_after_a_restoration",
    ),
    Fault(
        "each rank divides by its own number of items", "engines/fsdp/engine.py",
        "(loss * factor * real[rows]).sum() / count", "(loss * factor * real[rows]).sum() / held",
        "tests/engines/train/test_two_ranks.py::test_uneven_ranks_take_the_step_of_one_process",
    ),
    Fault(
        "evaluation without the moving average", "engines/fsdp/engine.py",
        "swap = average and bool(self.average)", "swap = False",
        "tests/engines/train/test_trainer.py::test_what_is_evaluated_is_the_moving_average",
    ),
    Fault(
        "the final export without the moving average", "engines/train/trainer.py",
        'self.engine.averaged() if self.config.evaluation.average else None', 'None',
        "tests/engines/train/test_trainer.py::test_what_is_exported_is_the_moving_average",
    ),
    Fault(
        "checkpoint tensors never synced to the disk", "engines/checkpoint/storage.py",
        "            stream.flush()\n            os.fsync(stream.fileno())\n", "            stream.flush()\n",
        "tests/engines/checkpoint/test_durability.py::test_every_byte_is_synced_before_the_checkpoint_gets_its_name",
    ),
    Fault(
        "the entries of a checkpoint's folder not synced before the rename", "engines/checkpoint/storage.py",
        "        sync(partial)\n", "",
        "tests/engines/checkpoint/test_durability.py::test_every_byte_is_synced_before_the_checkpoint_gets_its_name",
    ),
    Fault(
        "a checkpoint's SHA-256 not compared", "engines/checkpoint/checkpoint.py",
        '.hexdigest() != expected[file][1]', '.hexdigest() == ""',
        "tests/engines/checkpoint/test_damage.py::test_a_flipped_bit_is_noticed",
    ),
    Fault(
        "items that change ranks take another sample's conditioning", "engines/rollout/items.py",
        "sample=known + torch.arange(", "sample=torch.arange(",
        "tests/engines/rollout/test_items.py::test_pairs_move_whole",
    ),
    Fault(
        "a rank pads prompts to the longest of its own", "engines/rollout/text.py",
        "int(everyone[:, 0].max())", "int(sums[:, 0].max())",
        "tests/engines/rollout/test_text.py::test_the_longest_prompt_of_all_ranks_counts",
    ),
    Fault(
        "an image is cut to the widest size", "engines/data/sizes.py",
        "round(abs(ratio), 9)", "round(ratio, 9)",
        "tests/engines/data/test_buckets.py::test_an_image_gets_the_nearest_ratio_or_none",
    ),
    Fault(
        "sources with more prompts are drawn more often where there are several sizes", "engines/data/buckets.py",
        " * prompt.weight / totals[prompt.source]", " * prompt.weight",
        "tests/engines/data/test_buckets.py::test_sources_keep_their_shares_over_sizes",
    ),
    Fault(
        "an update takes the schedule of another size", "engines/train/learner.py",
        "self.schedules.of(tuple(samples.trajectory.final.shape[1:]))", "self.schedules.of(self.job.shape)",
        "tests/engines/train/test_sizes.py::test_rollouts_have_the_size_of_their_prompts_or_one_that_is_drawn",
    ),
    Fault(
        "a tie with the base counts as a loss", "engines/evaluation/statistics.py",
        "0.5 * (ours == theirs)", "0.0 * (ours == theirs)",
        "tests/engines/evaluation/test_statistics.py::test_a_win_rate_counts_a_tie_one_half",
    ),
    Fault(
        "samples that fill up the last chunk are kept as images", "engines/evaluation/evaluate.py",
        "count = sum(real[first : first + micro_batch])", "count = micro_batch",
        "tests/engines/evaluation/test_evaluate.py::test_scores_images_and_table_are_the_same_on_two_ranks",
    ),
    Fault(
        "results of a prompt layer mixed up between the halves of guidance", "models/prompt_layers.py",
        "return results[call]", "return results[0]",
        "tests/models/pipelines/test_prompt_layers.py::test_calls_are_told_apart_and_failures_leave_nothing",
    ),
    Fault(
        "a trainer keeps its own micro-batch where its checkpoint has another", "engines/train/trainer.py",
        "        if self._is_open:", "        if False:",
        "tests/engines/train/test_micro_batch.py::test_a_trainer_that_has_chosen_takes_the_number_of_its_checkpoint",
    ),
    Fault(
        "joined layers of the original layout in another order", "models/original/layout.py",
        'originals = ("qkv 0/3", "qkv 1/3"', 'originals = ("qkv 1/3", "qkv 0/3"',
        "tests/models/test_original.py::test_diffusers_converts_the_weights_back_to_the_bit",
    ),
    Fault(
        "an export of the moving average holds the weights", "engines/export/run.py",
        'start = "average." if average else "weight."', 'start = "weight."',
        "tests/engines/export/test_export_run.py::test_every_format_computes_what_the_run_did",
    ),
    Fault(
        "steps of the window leave out blocks", "engines/rollout/generate.py",
        "cache.prediction(exact=step in whole)", "cache.prediction(exact=False)",
        "tests/engines/train/test_run_settings.py::test_deterministic_steps_leave_out_blocks_and_the_window_does_not",
    ),
    Fault(
        "one sample that hardly changed lets its batch leave out blocks", "models/step_cache.py",
        "< self._threshold).all()", "< self._threshold).any()",
        "tests/models/pipelines/test_step_cache.py::test_a_pass_that_hardly_changed_adds_what_the_blocks_added_before",
    ),
    Fault(
        "a contact sheet shows the images of one rank alone", "engines/evaluation/evaluate.py",
        "world.gather_items(own)[:: world.sequence]", "[own]",
        "tests/engines/evaluation/test_evaluate.py::test_videos_travel_between_ranks_as_a_sheet_shows_them",
    ),
    Fault(
        "a reply of a reward server that is read whatever its size", "engines/http/transport.py",
        "if len(body) > most_bytes:", "if len(body) > 100 * most_bytes:",
        "tests/engines/http/test_client.py::test_an_endless_reply_is_cut_off",
    ),
    Fault(
        "a function that a pickle names is called", "engines/rewards/clients/unpickle.py",
        "return _Machine().run(data)", "import pickle; return pickle.loads(data)",
        "tests/engines/rewards/clients/test_unpickle.py::test_code_in_a_pickle_is_not_run",
    ),
    Fault(
        "a request that fails for now is not sent again", "engines/http/client.py",
        "AWAY = (408, 429, 502, 503, 504)", "AWAY = (408,)",
        "tests/engines/http/test_client.py::test_what_may_pass_is_tried_again_with_growing_delay",
    ),
    Fault(
        "samples of a client that has gone are scored", "engines/serve/asgi.py",
        "        if not task.done():\n", "        if not await asyncio.wait({task}):\n",
        "tests/engines/serve/test_rewards.py::test_samples_of_a_client_that_has_gone_are_not_scored",
    ),
    Fault(
        "GenEval's positions with the sides exchanged", "models/rewards/geneval.py",
        '"left of": x < -0.5', '"left of": x > 0.5',
        "tests/models/rewards/test_geneval.py::test_positions",
    ),
    Fault(
        "a terminal's Ctrl-C reaches ranks past the command", "engines/run/launch.py", "process_group=0",
        "process_group=None", "tests/engines/run/test_launch.py::test_ctrl_c_in_a_terminal_reaches_each_rank_once",
    ),
    Fault(
        "a rank steps copies of its parameters", "engines/fsdp/optimizers.py", "_local(sharded).detach()",
        "_local(sharded).detach().clone()",
        "tests/engines/fsdp/test_optimizers.py::test_a_step_of_plain_tensors_is_that_of_sharded_ones",
    ),
)  # fmt: skip


def copied(folder: Path) -> None:
    """Copy the tree to a folder, with the namespace that makes its packages `fluvial`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    namespace = folder / "namespace" / "fluvial"
    namespace.mkdir(parents=True)
    for name in FOLDERS:
        (namespace / name).symlink_to(folder / name)


def patched(folder: Path, fault: Fault) -> None:
    """Put a fault into a copy of the tree.

    Raises:
        AssertionError: the file does not hold the text exactly once.
    """
    path = folder / fault.file
    text = path.read_text()
    count = text.count(fault.old)
    assert count == 1, f"{fault.file} holds the text of {fault.what!r} {count} times, expected once: {fault.old!r}"
    path.write_text(text.replace(fault.old, fault.new))


def passes(folder: Path, tests: Sequence[str], environment: dict[str, str]) -> bool:
    """Run tests in a copy of the tree, and return whether they all pass.

    Raises:
        AssertionError: they did not run.
    """
    path = os.pathsep.join([str(folder / "namespace"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        cwd=folder, env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or " failed" in done.stdout or " error" in done.stdout, done.stdout[-3000:]
    return done.returncode == 0


def show(numbers: Sequence[int]) -> int:
    """Apply faults by number, print a line for each, and return how many were not caught."""
    missed, faults = 0, {number: FAULTS[number - 1] for number in numbers}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copied(folder)
        for environment in ({}, INTERPRETER):
            tests = sorted({fault.test for fault in faults.values() if fault.environment == environment})
            assert not tests or passes(folder, tests, environment), "a test fails without a fault: run pytest to see which"
        for number, fault in faults.items():
            path = folder / fault.file
            text = path.read_text()
            patched(folder, fault)
            caught = not passes(folder, [fault.test], fault.environment)
            path.write_text(text)
            missed += not caught
            print(f"{number:3d}  {'caught' if caught else 'NOT CAUGHT':<10}  {fault.what}: {fault.test}", flush=True)
    return missed


def table() -> str:
    """Return the faults as a table in Markdown."""
    rows = [
        f"| {number} | {fault.what} | `{fault.file}` | `{fault.test.removeprefix('tests/')}` |"
        for number, fault in enumerate(FAULTS, 1)
    ]
    return "\n".join(["| | fault | in | caught by |", "|---|---|---|---|", *rows])


def main() -> int:
    """Return the exit code: 0 if every fault was caught."""
    parser = argparse.ArgumentParser(description="Apply known faults to a copy of the tree, and show that tests catch them.")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the faults", choices=range(1, len(FAULTS) + 1))
    parser.add_argument("--list", action="store_true", help="print the table of tests/README.md")
    arguments = parser.parse_args()
    if arguments.list:
        print(table())
        return 0
    missed = show(arguments.only or range(1, len(FAULTS) + 1))
    print(f"{missed} not caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
