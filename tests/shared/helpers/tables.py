"""The table of samplers that the package tests with, and gives to its users."""

from fluvial.testing.samplers import *  # noqa: F403
