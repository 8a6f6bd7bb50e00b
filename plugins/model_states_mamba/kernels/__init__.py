"""Scans of state space models: each a torch twin and Triton kernels."""
