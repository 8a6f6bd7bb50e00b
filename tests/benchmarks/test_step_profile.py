"""Device operations are put into the class that a reader expects."""

from __future__ import annotations

import pytest
from step_profile import class_of, kernel_files, quietest


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("_paged_attention_decode_kernel", "attention"),
        ("_positions_kernel", "input preparation"),
        ("_staged_write_kernel", "input preparation"),
        ("nvjet_hsh_128x64_64x8_2x1_v_bz_coopB_TNT", "matmul"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16>", "matmul"),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>",
            "norm, rope, elementwise",
        ),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("Memset (Device)", "copies"),
        ("flash_fwd_kernel", "attention"),
    ],
)
def test_class_of(kernel: str, expected: str) -> None:
    assert class_of(kernel) == expected


def test_kernels_are_found_by_their_files() -> None:
    files = kernel_files()
    assert files["_post_update_kernel"] == "core_runner/kernels/post_update.py"
    assert files["_paged_attention_prefill_kernel"] == "model_states/kernels/paged_attention_prefill.py"
    assert {class_of(name) for name, file in files.items() if "/sampling/" in file} == {"sampler"}


def test_the_quietest_window_counts_and_the_slowest_is_beside_it() -> None:
    hosts = [0.9, 0.4, 1.1]
    windows = [{"host_ms": host, "wall_ms": 3.0 + host, "loop_ms": 4 * host} for host in hosts]
    assert quietest(windows) == {
        "host_ms": 0.4, "wall_ms": 3.4, "loop_ms": 1.6, "slowest_host_ms": 1.1, "slowest_loop_ms": 4.4,
        "windows": windows,
    }  # fmt: skip
