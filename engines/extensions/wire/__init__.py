"""Wire formats between trainers and servers: sglang-diffusion's rollout schema, weight buckets, and the HTTP client."""
