"""Weights by their names in the whole model: saved per stage, loaded with any number of stages or into the plain model.

The folder has ``stage-<k>-of-<n>.safetensors`` for each stage, and ``manifest.json`` in the format of transformers'
index of sharded files, so that other tools can read it. All stages save; afterwards one rank writes the manifest. A
tied parameter is saved once, by its lowest stage, and the manifest lists its other names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline import archive
from coordd_torch.pipeline.archive import some

__all__ = ["aliases", "check_names", "load", "load_into", "load_like", "save_stage", "stage_file", "write_manifest"]

_ALIASES = "aliases"


def stage_file(stage: int, stages: int, kind: str = "stage") -> str:
    """Returns the file name of a stage."""
    return f"{kind}-{stage}-of-{stages}.safetensors"


def aliases(model: nn.Module) -> dict[str, str]:
    """Maps each further name of a tied parameter to the name that comes first in the model."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[id(value)] for name, value in named if first.setdefault(id(value), name) != name}


def save_stage(
    folder: str | Path,
    stage: int,
    stages: int,
    tensors: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] | None = None,
) -> None:
    """Saves the tensors of one stage, and deletes the folder's older manifest.

    Args:
        folder: is created if needed.
        stage: its number, from 0.
        stages: number of stages.
        tensors: by their names in the whole model; leave out tensors that are tied to one of a lower stage.
        aliases: further names of tied parameters, as `aliases` finds them; a tensor is not saved again under these
            names.

    Raises:
        ArgumentError: a value is not a tensor, or is on the meta device.
    """
    further = dict(aliases or {})
    own = {name: value for name, value in tensors.items() if further.get(name) not in tensors}
    renamed = {further.get(name, name): value for name, value in own.items()}
    odd = [name for name, value in renamed.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise ArgumentError(f"only tensors can be saved in a checkpoint, and these are none: {some(odd)}")
    empty = [name for name, value in renamed.items() if value.is_meta]
    if empty:
        raise ArgumentError(
            f"stage {stage} is to save what it does not hold, but has on the meta device: {some(empty)}"
        )
    archive.withdraw(Path(folder))
    known = {alias: name for alias, name in further.items() if name in renamed}
    archive.write(Path(folder), stage_file(stage, stages), renamed, {_ALIASES: json.dumps(known)})


def write_manifest(
    folder: str | Path, stages: int, *, optimizer: bool = False, metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes the manifest, which completes a checkpoint after all stages have saved.

    Args:
        folder: the folder of the saved files.
        stages: number of stages.
        optimizer: whether the stages have saved the state of their optimizers, too.
        metadata: further JSON values, such as the number of the step.

    Raises:
        ArgumentError: a stage has not saved, or two stages have saved the same tensor.
    """
    folder = Path(folder)
    weights, notes, size = _gather(folder, [stage_file(stage, stages) for stage in range(stages)])
    further = {alias: name for note in notes for alias, name in json.loads(note.get(_ALIASES, "{}")).items()}
    states = [stage_file(stage, stages, "optimizer") for stage in range(stages)] if optimizer else []
    _gather(folder, states)
    noted = {**(metadata or {}), "total_size": size, "stages": stages, _ALIASES: further, "optimizer": states}
    archive.replace_manifest(folder, {"metadata": noted, "weight_map": weights})


def load(
    folder: str | Path, names: Iterable[str] | None = None, *, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Loads tensors from a checkpoint, and opens only the files that contain them.

    Args:
        folder: of the checkpoint.
        names: in the whole model; by default all, including the further names of tied parameters.
        device: where the tensors are placed.

    Returns:
        the tensors by name; all names of a tied parameter map to the same tensor.

    Raises:
        ArgumentError: the checkpoint is incomplete, or lacks one of the names.
    """
    folder = Path(folder)
    weights, further = _contents(folder)
    asked = [*weights, *further] if names is None else list(names)
    sources = {name: further.get(name, name) for name in asked}
    missing = [name for name, source in sources.items() if source not in weights]
    if missing:
        raise ArgumentError(f"the checkpoint in {folder} has no {some(missing)}")
    found = dict(archive.stream(folder, {source: weights[source] for source in sources.values()}, device))
    return {name: found[source] for name, source in sources.items()}


def load_like(folder: str | Path, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loads the tensors with the names of the given ones, and checks that the shapes are equal.

    Raises:
        ArgumentError: the checkpoint is incomplete, lacks one of the names, or has another shape for it.
    """
    _check_shapes(Path(folder), {name: [value] for name, value in held.items()})
    return load(folder, held)


def load_into(model: nn.Module, folder: str | Path) -> None:
    """Fills a model from a checkpoint; of a partly real model only the real tensors are read.

    Raises:
        ArgumentError: the checkpoint is incomplete, has other names than the model, or other shapes. The model is then
            unchanged.
    """
    folder = Path(folder)
    weights, further = _contents(folder)
    held = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    saved = check_names(folder, held.keys(), aliases(model))
    targets: dict[str, list[torch.Tensor]] = {}
    for name in [name for name, value in held.items() if name in saved and not value.is_meta]:
        targets.setdefault(further.get(name, name), []).append(held[name])
    _check_shapes(folder, targets)
    with torch.no_grad():
        for name, tensor in archive.stream(folder, {name: weights[name] for name in targets}):
            for target in targets[name]:
                target.copy_(tensor)


def check_names(folder: str | Path, held: AbstractSet[str], alike: Mapping[str, str]) -> set[str]:
    """Compares the names in a checkpoint with those of a model.

    Args:
        folder: of the checkpoint.
        held: the names that the model has.
        alike: the further names of tied parameters among them, as `aliases` finds them.

    Returns:
        the names in the checkpoint.

    Raises:
        ArgumentError: the checkpoint lacks a name, or has an unknown one.
    """
    weights, further = _contents(Path(folder))
    saved = weights.keys() | further.keys()
    missing = [name for name in held - saved if alike.get(name) not in saved]
    unexpected = saved - held
    complaints = [f"it has no {some(missing)}"] if missing else []
    complaints += [f"the model has no {some(unexpected)}"] if unexpected else []
    if complaints:
        raise ArgumentError(f"the checkpoint in {folder} is not of this model: {'; '.join(complaints)}")
    return saved


def _check_shapes(folder: Path, targets: Mapping[str, Sequence[torch.Tensor]]) -> None:
    weights, further = _contents(folder)
    sources = {name: further.get(name, name) for name in targets}
    there = archive.shapes(folder, {source: weights[source] for source in sources.values() if source in weights})
    different = [
        f"{name} (here {tuple(target.shape)}, there {there[source]})"
        for name, source in sources.items()
        for target in targets[name]
        if target.shape != there.get(source, target.shape)
    ]
    if different:
        raise ArgumentError(f"the checkpoint in {folder} has other shapes than the model: {some(different)}")


def _contents(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    manifest = archive.read_manifest(folder)
    return manifest["weight_map"], manifest["metadata"].get(_ALIASES, {})


def _gather(folder: Path, files: Iterable[str]) -> tuple[dict[str, str], list[dict[str, str]], int]:
    places: dict[str, str] = {}
    notes, size = [], 0
    for file in files:
        names, note, length = archive.listed(folder, file)
        twice = [name for name in names if name in places]
        if twice:
            raise ArgumentError(f"{file} in {folder} has what {places[twice[0]]} has, too: {some(twice)}")
        places |= dict.fromkeys(names, file)
        notes.append(note)
        size += length
    return places, notes, size
