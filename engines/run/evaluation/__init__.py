"""Evaluation: samples of prompts, the scores of several evaluators, and their comparison with a base model."""
