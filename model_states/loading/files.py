"""Weight files of a checkpoint: found, complete, readable, and safetensors only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from model_states.errors import CheckpointError
from model_states.loading.hub import find_file, list_files, read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^.+-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Checked weight files, all in `directory`. `standard`: named as transformers itself looks for them."""

    directory: Path
    paths: Sequence[Path]
    standard: bool


def find_weight_files(model: str) -> WeightFiles:
    """Find and check the safetensors files of a hub name or directory; downloads what is missing.

    One `model.safetensors`; else the files of its index; else every `*.safetensors` beside config.json.
    Raises CheckpointError naming the file: none at all, pickles only, a shard that is missing, truncated or
    lacks a tensor that the index promises, a tensor that two unindexed files hold.
    """
    # In transformers' own order, so that a directory with both means the same to it and to us.
    single = find_file(model, SINGLE)
    if single is not None:
        tensor_names(single)
        return WeightFiles(single.parent, [single], standard=True)
    index = find_file(model, INDEX)
    if index is not None:
        return WeightFiles(index.parent, _indexed_files(model, index), standard=True)
    return _unindexed_files(model)


def _indexed_files(model: str, index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise CheckpointError(f"{index} has no `weight_map`; it cannot say which file holds which tensor")
    tensors_of: dict[str, list[str]] = {}
    for tensor, filename in weight_map.items():
        tensors_of.setdefault(str(filename), []).append(tensor)
    return [_indexed_file(model, index, name, tensors) for name, tensors in sorted(tensors_of.items())]


def _indexed_file(model: str, index: Path, filename: str, tensors: list[str]) -> Path:
    # An index is data from elsewhere: it must not lead out of the checkpoint, nor to a pickle.
    if Path(filename).name != filename or not filename.endswith(".safetensors"):
        raise CheckpointError(
            f"{index} names {filename!r}; only .safetensors files beside the index are read"
        )
    path = find_file(model, filename)
    if path is None:
        raise CheckpointError(
            f"model {model!r}: {filename} is missing; {INDEX} expects {len(tensors)} tensors in it, "
            f"{tensors[0]} among them; download the checkpoint again"
        )
    # A shard of another download is whole in itself; only its names show that it is the wrong one.
    absent = sorted(set(tensors) - set(tensor_names(path)))
    if absent:
        raise CheckpointError(
            f"{path} lacks {len(absent)} tensors that {INDEX} expects in it: {', '.join(absent[:5])}"
        )
    return path


def _unindexed_files(model: str) -> WeightFiles:
    names = list_files(model, ".safetensors")
    if not names:
        raise _no_weights(model)
    _require_whole_series(model, names)
    paths = [path for name in names if (path := find_file(model, name)) is not None]
    # Which file would win is a guess where two hold one tensor: two copies, or two checkpoints in one place.
    owner: dict[str, Path] = {}
    for path in paths:
        for tensor in tensor_names(path):
            if tensor in owner:
                raise CheckpointError(
                    f"model {model!r} has no {INDEX}, and both {owner[tensor].name} and {path.name} hold "
                    f"{tensor}; keep the files of one checkpoint only"
                )
            owner[tensor] = path
    return WeightFiles(paths[0].parent, paths, standard=False)


def _require_whole_series(model: str, names: list[str]) -> None:
    """Files that call themselves "2 of 3" say themselves which of them is missing."""
    found = [match for name in names if (match := _SHARD.match(name))]
    for match in found:
        have = {int(other[1]) for other in found if other[2] == match[2]}
        absent = sorted(set(range(1, int(match[2]) + 1)) - have)
        if absent:
            raise CheckpointError(
                f"model {model!r} has no {INDEX}, and of {match[2]} shards number {absent[0]} is missing "
                f"(found: {', '.join(names)}); download the checkpoint again"
            )


def _no_weights(model: str) -> CheckpointError:
    pickles = list_files(model, ".bin") + list_files(model, ".pt") + list_files(model, ".pth")
    if not pickles:
        return CheckpointError(f"model {model!r} has no weights: no {SINGLE} and no {INDEX}")
    return CheckpointError(
        f"model {model!r} has pickled weights only ({', '.join(pickles[:3])}), which can run code when "
        "read; convert them where you trust them: transformers' AutoModelForCausalLM.from_pretrained(MODEL)"
        ".save_pretrained(NEW_DIRECTORY) writes safetensors"
    )


def tensor_names(path: Path) -> list[str]:
    """Names in one safetensors file, from its header; CheckpointError when it is truncated or corrupt."""
    from safetensors import safe_open

    try:
        with safe_open(str(path), framework="pt") as opened:
            return list(opened.keys())
    except Exception as error:
        # safetensors' own error is no subclass of anything narrower.
        raise CheckpointError(
            f"{path} is truncated or no safetensors file: {error}; download it again"
        ) from error


def read_tensors(paths: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Every tensor of the files by name, on the CPU, mapped from the file rather than copied."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in paths:
        tensors.update(load_file(str(path)))
    return tensors
