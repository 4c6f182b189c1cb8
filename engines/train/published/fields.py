"""What each setting of a published run means, in the order in which they are shown."""

from typing import NamedTuple


class Field(NamedTuple):
    """A setting of a published run."""

    meaning: str
    unit: str  # empty where there is none


FIELDS: dict[str, Field] = {
    "resolution_height": Field("training image/frame height", "px"),
    "resolution_width": Field("training image/frame width", "px"),
    "num_frames": Field("video frames (1 = image)", "frames"),
    "train_sampling_steps": Field("denoising steps of the rollout sampler", "steps"),
    "eval_sampling_steps": Field("denoising steps at evaluation", "steps"),
    "train_guidance_scale": Field("guidance scale used in the rollout", ""),
    "eval_guidance_scale": Field("guidance scale used at evaluation", ""),
    "guidance_kind": Field(
        "cfg / true_cfg_renorm (CFG rescaled per token to the conditional norm) / distilled (embedded guidance) / none",
        "",
    ),
    "cfg_in_training_forward": Field("whether the loss's forward pass applies guidance", "bool"),
    "sampler": Field(
        "rollout sampler: flow_sde (std = a*sqrt(sigma/(1-sigma))*sqrt(dt)), dance_sde (std = eta*sqrt(dt)), cps "
        "(std = sigma_next*sin(a*pi/2)), ddim_eta, dpm2_ode, sa_solver, euler_ode, wan_sde, or a described one",
        "",
    ),
    "eval_sampler": Field("evaluation sampler", ""),
    "time_shift": Field("static time shift of the sigma schedule", ""),
    "noise_level": Field(
        "noise coefficient of the rollout sampler: a (flow_sde, cps) or eta (dance_sde, ddim_eta); 0 = deterministic",
        "",
    ),
    "sde_window_size": Field("stochastic steps per trajectory: 'all', 0 (deterministic sampler) or a number", "steps"),
    "sde_window_range": Field("[low, high) bounds on step indices the stochastic steps come from", "step index"),
    "sde_window_draw": Field("how the stochastic steps are chosen", ""),
    "trained_steps_per_sample": Field(
        "denoising steps of a trajectory that enter the policy-gradient loss (methods trained on the reverse chain)",
        "steps",
    ),
    "trained_steps_selection": Field("which ones: first / random / window / all / all_but_last / ...", ""),
    "timestep_fraction": Field("fraction in the config that yields the number of trained steps or levels", "fraction"),
    "last_step_trained": Field("whether the final denoising step can be trained", "bool"),
    "shared_initial_noise": Field("whether members of a group start from one initial noise", "bool"),
    "prompts_per_rollout": Field("prompt groups per rollout, all GPUs together (arithmetic on the config)", "prompts"),
    "samples_per_prompt": Field("samples per prompt group", "samples"),
    "samples_per_rollout": Field("samples generated per rollout, all GPUs", "samples"),
    "samples_per_update": Field("samples behind one optimizer step, all GPUs", "samples"),
    "updates_per_rollout": Field("optimizer steps per rollout and inner epoch", "updates"),
    "inner_epochs": Field("passes over one rollout", "epochs"),
    "micro_batch_per_gpu": Field("samples per forward-backward on one GPU", "samples"),
    "ratio_clip_low": Field("lower clip: ratio >= 1 - value", ""),
    "ratio_clip_high": Field("upper clip: ratio <= 1 + value", ""),
    "advantage_center": Field("what is subtracted: group / batch / none", ""),
    "advantage_scale": Field("what divides: group / global (batch) std / none / described", ""),
    "advantage_std_ddof": Field("0 = population, 1 = Bessel-corrected std", ""),
    "advantage_eps": Field("constant added to the std (or floor where said)", ""),
    "advantage_clip": Field("absolute clip on the advantage", ""),
    "advantage_aggregation": Field(
        "how several rewards are merged: single / weighted_reward_sum / advantage_sum / gdpo",
        "",
    ),
    "zero_advantage_filter": Field("whether samples with zero advantage are taken out of the training batch", "bool"),
    "kl_kind": Field(
        "none / mean_gaussian (squared mean difference over 2 std^2) / mean_mse (without the std) / velocity_mse / "
        "described",
        "",
    ),
    "kl_coef": Field("KL coefficient", ""),
    "optimizer": Field("optimizer", ""),
    "learning_rate": Field("peak learning rate actually applied", ""),
    "adam_beta1": Field("Adam beta1", ""),
    "adam_beta2": Field("Adam beta2", ""),
    "adam_eps": Field("Adam epsilon", ""),
    "weight_decay": Field("weight decay", ""),
    "max_grad_norm": Field("gradient-norm clip", ""),
    "lr_warmup_steps": Field("warm-up", "updates"),
    "lr_schedule": Field("learning-rate schedule", ""),
    "ema_enabled": Field("whether averaged weights are kept", "bool"),
    "ema_decay": Field("decay (cap) of the averaged weights", ""),
    "ema_interval": Field("apply the average every n optimizer steps (or the unit given in 'unusual')", "updates"),
    "ema_ramp": Field("ramp below the cap, t = update count", ""),
    "finetune": Field("lora / full", ""),
    "lora_rank": Field("LoRA rank", ""),
    "lora_alpha": Field("LoRA alpha", ""),
    "lora_targets": Field("adapted module names", "list"),
    "lora_init": Field("LoRA A initialisation ('gaussian', 'default' = PEFT default)", ""),
    "precision_compute": Field("autocast / forward dtype of the trained network", "dtype"),
    "precision_trainable": Field("dtype of trainable parameters and optimizer master", "dtype"),
    "precision_base": Field("dtype of frozen base weights", "dtype"),
    "precision_vae": Field("VAE dtype", "dtype"),
    "precision_text_encoder": Field("text-encoder dtype", "dtype"),
    "precision_logprob": Field("dtype of the sampler step and log-probability", "dtype"),
    "text_max_length": Field("token limits per encoder", "object, tokens"),
    "rewards": Field("reward name -> weight", "object"),
    "dataset": Field("prompt or pair dataset", ""),
    "total_epochs": Field("rollout epochs configured ('open' = stopped by hand)", "epochs"),
    "total_updates": Field("optimizer or trainer steps configured or published", "steps"),
    "save_interval": Field("checkpoint interval", "rollouts unless said"),
    "eval_interval": Field("evaluation interval", "rollouts unless said"),
    "seed": Field("training seed", ""),
    "data_seed": Field("prompt sampler seed", ""),
    "noise_levels_per_sample": Field("fresh noise levels per sample (methods trained on the forward process)", "levels"),
    "noise_level_draw": Field("how they are drawn", ""),
    "loss_weighting": Field("per-step or per-level loss weight", ""),
    "loss_extra": Field("numbers that belong to one loss only", "object"),
}
