"""Audio files to samples: `load_audio` for one, `AudioPool.load` for many at once, in threads.

Names are imported on first use: decoding needs the extra `audio`, and most of what runs here never hears anything.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core_runner.audio.load import load_audio
    from core_runner.audio.pool import AudioPool
    from core_runner.audio.sources import AUDIO_SUFFIXES, Samples, Source

_HOME = {
    "AUDIO_SUFFIXES": "sources",
    "AudioPool": "pool",
    "Samples": "sources",
    "Source": "sources",
    "load_audio": "load",
}

__all__ = ["AUDIO_SUFFIXES", "AudioPool", "Samples", "Source", "load_audio"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'core_runner.audio' has no attribute {name!r}")
    value = getattr(import_module(f"core_runner.audio.{_HOME[name]}"), name)
    globals()[name] = value
    return value
