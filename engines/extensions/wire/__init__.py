"""The rollout schema of sglang-diffusion: requests and responses, their tensors and their names. Nothing here does I/O."""
