"""The sampler: per-slot parameters, kernels with their torch twins, one `Sampler` that a plugin may wrap."""
