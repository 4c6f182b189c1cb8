"""Trials of every pipeline of the installed diffusers: a tiny random one is trained by the same commands as a real one."""
