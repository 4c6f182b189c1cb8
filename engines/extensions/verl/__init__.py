"""Plug-in for verl, whose workers then train diffusion models with fluvial's engine (backend "fluvial").

Only `plugin` imports verl, which a user of verl has installed.
"""
