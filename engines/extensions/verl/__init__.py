"""The plug-in for verl: its workers train diffusion models with fluvial's engine (backend "fluvial").

`plugin` is the only module that imports verl, which a user of verl has installed.
"""
