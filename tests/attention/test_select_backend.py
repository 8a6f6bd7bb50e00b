"""Which backend serves a model, and what a person is told when it is not the one asked for."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from model_states.attention import AttentionSpec, TorchAttention, register_backend, select_backend
from model_states.attention.select import BACKENDS
from model_states.errors import CapabilityError

SPEC = AttentionSpec(4, 2, 64, 64, 0.125)
CPU = torch.device("cpu")


class Picky(TorchAttention):
    name = "picky"

    def unsupported(
        self, spec: AttentionSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> str | None:
        return f"soft_cap={spec.soft_cap} is not supported" if spec.soft_cap else None


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    registry = dict(BACKENDS)
    monkeypatch.setattr("model_states.attention.select.BACKENDS", registry)
    return registry


def test_a_cpu_gets_torch_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="model_states"):
        backend = select_backend(None, [SPEC], 16, torch.float32, CPU)
    assert backend.name == "torch"
    assert [r.getMessage() for r in caplog.records] == ["attention backend: torch (the device is not CUDA)"]


def test_cuda_gets_triton_when_it_supports_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    assert select_backend(None, [SPEC], 16, torch.bfloat16, cuda).name == "triton"
    big = AttentionSpec(4, 2, 512, 512, 0.1)
    with caplog.at_level(logging.INFO, logger="model_states"):
        assert select_backend(None, [SPEC, big], 16, torch.bfloat16, cuda).name == "torch"
    assert "head size 512 is over 256" in caplog.text


def test_a_named_backend_is_taken_or_the_reason_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_backend("torch", [SPEC], 16, torch.float32, CPU).name == "torch"
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CapabilityError, match=r"'triton' cannot serve this model: .* 'cpu'. Use 'torch'"):
        select_backend("triton", [SPEC], 16, torch.float32, CPU)
    with pytest.raises(CapabilityError, match=r"'flash' is unknown. Installed: torch, triton"):
        select_backend("flash", [SPEC], 16, torch.float32, CPU)


def test_triton_by_name_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model_states.attention.select.has_triton", lambda: False)
    with pytest.raises(CapabilityError, match="not installed"):
        select_backend("triton", [SPEC], 16, torch.float32, CPU)
    assert select_backend(None, [SPEC], 16, torch.float32, torch.device("cuda")).name == "torch"


def test_heads_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(CapabilityError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        select_backend(None, [AttentionSpec(4, 3, 64, 64, 0.1)], 16, torch.float32, CPU)


def test_a_third_party_backend_is_chosen_by_name(registry: dict[str, object]) -> None:
    register_backend("picky", Picky)
    register_backend("picky", Picky)
    assert isinstance(select_backend("picky", [SPEC], 16, torch.float32, CPU), Picky)
    capped = AttentionSpec(4, 2, 64, 64, 0.1, soft_cap=30.0)
    with pytest.raises(CapabilityError, match=r"'picky' cannot serve this model: soft_cap=30.0"):
        select_backend("picky", [SPEC, capped], 16, torch.float32, CPU)
    with pytest.raises(CapabilityError, match="'torch' exists already"):
        register_backend("torch", Picky)


def test_choosing_torch_does_not_import_triton() -> None:
    code = (
        "import sys, torch\n"
        "from model_states.attention import AttentionSpec, select_backend\n"
        "select_backend(None, [AttentionSpec(4, 2, 8, 8, 1.0)], 16, torch.float32, torch.device('cpu'))\n"
        "sys.exit('triton' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kernel_files_can_be_imported_without_triton() -> None:
    code = (
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import model_states.attention.triton_backend\n"
        "import model_states.kernels.write_cache\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
