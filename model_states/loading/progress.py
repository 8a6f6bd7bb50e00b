"""transformers' loading bar, turned into calls of `ModelConfig.progress`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[str, int, int], None]
# What transformers logs and the loader says itself, with the tensors' names: its report, and heads that differ.
_REPORT = "LOAD REPORT"
_TWO_HEADS = "but both are present in the checkpoints"


class _Reporter:
    """Stands where transformers expects a tqdm bar: iterated over, or updated by hand."""

    def __init__(self, progress: Progress | None, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._items: Iterable[Any] = args[0] if args else options.get("iterable") or ()
        self._what = str(options.get("desc") or "Loading weights")
        self._total = int(
            options.get("total") or (len(self._items) if hasattr(self._items, "__len__") else 0)
        )
        self._progress = progress
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        self.update(0)
        for item in self._items:
            yield item
            self.update(1)

    def update(self, count: int = 1) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._what, self._done, self._total)

    def __enter__(self) -> _Reporter:
        return self

    def __exit__(self, *exception: object) -> None:
        return None

    def __getattr__(self, name: str) -> Callable[..., None]:
        """The rest of tqdm's surface (set_description, close, ...) has nothing to draw on."""
        return lambda *args, **options: None


@contextmanager
def reported_loading(progress: Progress | None) -> Iterator[list[str]]:
    """Within it transformers draws no bar and logs no load report; the reports are in the yielded list.

    The bar's steps go to `progress(what, done, total)`, one per tensor. The hook is the process's: two models
    that load at once in two threads may count into each other's bar, never into each other's weights.
    """
    from transformers.utils import logging as hf_logging

    reports: list[str] = []

    def keep_report(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if _REPORT in text:
            reports.append(text)
        return _REPORT not in text and _TWO_HEADS not in text

    logger = hf_logging.get_logger("transformers.modeling_utils")
    previous = hf_logging.set_tqdm_hook(lambda factory, args, options: _Reporter(progress, args, options))
    logger.addFilter(keep_report)
    try:
        yield reports
    finally:
        logger.removeFilter(keep_report)
        hf_logging.set_tqdm_hook(previous)
