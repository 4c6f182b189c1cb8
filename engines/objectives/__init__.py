"""Objectives: one file per objective, and the table of them."""
