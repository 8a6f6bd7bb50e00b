"""Kernels that components and the runner share, and the choice between Triton and torch."""
