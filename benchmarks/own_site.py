"""A folder in which Python finds what a distribution requires, and nothing else that is installed beside it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import Distribution
from pathlib import Path

from packaging.requirements import Requirement


def link_requirements(name: str, packages: Sequence[str], folder: Path) -> list[str]:
    """Link a distribution, its `packages` and all that it requires, directly or not, into `folder`; gives their names.

    For a process with this folder alone as its site (`python -S`, PYTHONPATH): libraries such as transformers look at
    whatever is installed, and import some of it. A folder that several distributions share is linked whole.
    """
    needed = {dist.name: dist for dist in _closure(Requirement(name), set())}
    for dist in needed.values():
        for path in _top_level(dist):
            _link(path, folder)
    # An editable installation lists a .pth file in their place.
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            _link(Path(spec.origin).parent, folder)
    return sorted(needed)


def _closure(wanted: Requirement, seen: set[tuple[str, str]]) -> Iterator[Distribution]:
    """The distribution, and those that it requires here with the extras that are wanted; what is not there is left."""
    try:
        dist = importlib.metadata.distribution(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return
    for extra in ("", *sorted(wanted.extras)):
        if (dist.name, extra) in seen:
            continue
        seen.add((dist.name, extra))
        yield dist
        for line in dist.requires or ():
            required = Requirement(line)
            if required.marker is None or required.marker.evaluate({"extra": extra}):
                yield from _closure(required, seen)


def _top_level(dist: Distribution) -> set[Path]:
    """The entries of its site that belong to a distribution, its metadata among them."""
    names = {file.parts[0] for file in dist.files or () if file.parts[0] not in ("..", "__pycache__", "bin")}
    return {path for path in (Path(str(dist.locate_file(name))) for name in names) if path.exists()}


def _link(path: Path, folder: Path) -> None:
    with suppress(FileExistsError):
        (folder / path.name).symlink_to(path.resolve())
