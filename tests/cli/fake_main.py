"""A process of its own that runs `core-runner` with the fake model, slowly: `fake_main.py SECONDS ARGUMENT...`.

Each step takes SECONDS. The file that FAKE_STARTED names appears when the first one begins.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import fake_llm

import core_runner
from core_runner.cli import main

SECONDS = float(sys.argv[1])


class SlowLLM(fake_llm.FakeLLM):
    def step_done(self):
        super().step_done()
        if "FAKE_STARTED" in os.environ:
            Path(os.environ["FAKE_STARTED"]).touch()
        time.sleep(SECONDS)


vars(core_runner)["LLM"] = SlowLLM
main(sys.argv[2:], prog_name="core-runner")
