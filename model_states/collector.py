"""Python's garbage collector, held off where it only costs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_LEAST_FROZEN = 2000  # objects that a bare interpreter has, and more


@contextmanager
def collector_paused() -> Iterator[None]:
    """No automatic collection within; afterwards they are as before.

    Modules and models that are loaded make hundreds of thousands of objects that stay, and each time their number has
    grown by a quarter the collector looks at all of them: a fifth of the time of transformers' imports. Afterwards they
    count as old, or the first collection would look at each of them once more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Whoever has called gc.freeze() has thousands there, which are to stay; Python itself keeps hundreds.
            if gc.get_freeze_count() < _LEAST_FROZEN:
                gc.freeze()
                gc.unfreeze()
            gc.enable()
