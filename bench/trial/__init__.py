"""Trials: every pipeline of the installed diffusers as a tiny random one, by the same commands as a real one."""
