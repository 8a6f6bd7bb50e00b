"""`python -m core_runner_toy DIRECTORY` writes a toy model there."""

from __future__ import annotations

import sys
from pathlib import Path

from core_runner_toy.checkpoint import write_checkpoint

if len(sys.argv) != 2:
    raise SystemExit("usage: python -m core_runner_toy DIRECTORY")
print(write_checkpoint(Path(sys.argv[1])))
