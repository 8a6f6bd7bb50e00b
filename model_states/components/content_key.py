"""Names of arrays by their content."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256
from typing import Any, Final

import numpy as np
import torch

_PIECE: Final = 1 << 18  # bytes; one is hashed in a fraction of a millisecond


def content_key(value: Any, given: Any = None) -> bytes:
    """Name of an encoder input's content.

    value: an array, or a tensor. given: a name by which the caller vouches for the content, or None. What lies on a
    device gets a name of its own, which nothing else shares: to read it would wait for the device.
    """
    if given is not None:
        if not isinstance(given, str) or not given:
            raise ValueError(f"key={given!r} must be a string that no other content has, or be left out")
        return b"given:" + given.encode()
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return b"unique:" + secrets.token_bytes(16)
        value = value.numpy()
    array = np.ascontiguousarray(value)
    header = f"{array.dtype} {array.shape}".encode()
    return sha256(header + _digest(array.reshape(-1).view(np.uint8).data)).digest()


def _digest(data: memoryview) -> bytes:
    """Of the digests of the pieces. Half a minute of audio takes milliseconds, so threads share a long input."""
    pieces = [data[start : start + _PIECE] for start in range(0, len(data), _PIECE)]
    run = map if len(pieces) < 3 else _threads().map
    return b"".join(run(lambda piece: sha256(piece).digest(), pieces))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), "core-runner-content-key")
