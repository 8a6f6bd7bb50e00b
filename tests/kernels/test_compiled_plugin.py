"""`support.compiled`: a kernel the compiler refuses fails its test, one that it takes passes whatever it writes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNELS = """
import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _double_kernel(source, target, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(target + offsets, 2 * tl.load(source + offsets, offsets < size), offsets < size)


@triton.jit
def _crooked_kernel(source, target, size, BLOCK: tl.constexpr):
    offsets = tl.arange(0, 16)
    tl.store(target + offsets, tl.load(source + offsets) + tl.arange(0, BLOCK))


@triton.jit
def _idle_kernel(target):
    tl.store(target, 0.0)


def launch(kernel, dtype=torch.float32):
    target = torch.zeros(5)
    kernel[(1,)](torch.ones(5, dtype=dtype), target, 5, BLOCK=8)
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_straight(dtype):
    assert launch(_double_kernel, dtype).tolist() == [2.0] * 5, "nothing was written"


def test_crooked():
    try:
        launch(_crooked_kernel)
    except Exception:
        pass
"""


@pytest.mark.slow
def test_what_compiles_passes_and_what_does_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_made_up.py").write_text(KERNELS)
    places = [str(TESTS), str(TESTS.parent), str(TESTS.parent / "plugins")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "support.compiled",
        "-p",
        "no:cacheprovider",
        "--cases",
        "2",
    ]
    done = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "DoesNotCompile: _crooked_kernel: CompilationError" in done.stdout
    summary = done.stdout.split("compiled for sm_90", 1)[1]
    assert "    2  _double_kernel" in summary
    assert "1 kernels, 2 variants" in summary
    assert "not launched: _crooked_kernel, _idle_kernel" in summary
