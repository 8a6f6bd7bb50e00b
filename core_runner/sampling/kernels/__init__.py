"""Kernels of the sampler: one operation per file, each in plain torch and in Triton."""
