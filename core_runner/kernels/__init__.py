"""Input preparation and post-update: one operation per file, each in plain torch and in Triton."""
