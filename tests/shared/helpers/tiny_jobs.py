"""The job of a tiny net that the package tests with, and gives to its users."""

from fluvial.testing.tiny import *  # noqa: F403
from fluvial.testing.tiny import TinyRun

Run = TinyRun
