"""Where a checkpoint's files are: a local directory, or the hub and its cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from model_states.errors import CheckpointError


def find_file(model: str, filename: str) -> Path | None:
    """Path of one file of `model` (directory or hub name), downloaded if need be; None where there is none.

    Raises CheckpointError: no such directory and no such hub name, no access, or the hub is out of reach and
    the cache holds nothing of this model.
    """
    # A directory goes before the hub: what lies on this machine is what the caller sees.
    directory = Path(model).expanduser()
    if directory.is_dir():
        path = directory / filename
        return path if path.is_file() else None
    if directory.exists():
        raise CheckpointError(f"model {model!r} is a file; name the directory that holds config.json")
    return _find_on_hub(model, filename)


def is_local(model: str) -> bool:
    """Whether `model` names a directory."""
    return Path(model).expanduser().is_dir()


def _find_on_hub(model: str, filename: str) -> Path | None:
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, filename))
    except hub.HFValidationError as error:
        raise CheckpointError(
            f"model {model!r}: no such directory, and not a hub name (owner/name) either"
        ) from error
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"model {model!r} is gated: accept its licence on the hub, then log in with `hf auth login`"
        ) from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"model {model!r}: no such directory, and the hub has no such model (or it is private: "
            "log in with `hf auth login`)"
        ) from error
    # This one first: it is a kind of the "no such entry" below, but says that nobody could be asked.
    except hub.LocalEntryNotFoundError as error:
        # Out of reach: what the cache lacks is unknown; beside a cached config.json it is taken as absent.
        if filename != "config.json" and _is_cached(model):
            return None
        raise CheckpointError(
            f"model {model!r}: no such directory, the hub cannot be reached and {filename} is not in its "
            "cache; connect, or name a local directory"
        ) from error
    except hub.EntryNotFoundError:
        return None
    except (hub.HfHubHTTPError, OSError) as error:
        raise CheckpointError(
            f"model {model!r}: {filename} could not be read from the hub: {error}"
        ) from error


def _is_cached(model: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(model, "config.json"), str)


def list_files(model: str, suffix: str) -> list[str]:
    """Names of the top-level files of `model` that end in `suffix`, sorted."""
    if is_local(model):
        names = [path.name for path in Path(model).expanduser().iterdir() if path.is_file()]
    else:
        names = _list_on_hub(model)
    return sorted(name for name in names if name.endswith(suffix) and "/" not in name)


def _list_on_hub(model: str) -> list[str]:
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    try:
        return list(HfApi().list_repo_files(model))
    except (hub.OfflineModeIsEnabled, hub.HfHubHTTPError, OSError):
        # Without the hub, the snapshot in the cache is all there is to list.
        config = find_file(model, "config.json")
        return [path.name for path in config.parent.iterdir()] if config else []


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises CheckpointError naming the file when it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}; an object is needed")
    return content
