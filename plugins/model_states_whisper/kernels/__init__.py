"""Kernels of transcription: each a torch twin and a Triton kernel."""
