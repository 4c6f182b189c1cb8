"""Tests for methods and samplers of your own: properties, tiny models and tables that fluvial's own tests use."""

from fluvial.testing.methods import PROPERTIES, check_method

__all__ = ["PROPERTIES", "check_method"]
