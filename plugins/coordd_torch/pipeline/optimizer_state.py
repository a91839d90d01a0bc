"""Optimizer state by parameter name: saved per stage, loaded with any number of stages or for the plain model.

Tensors are in ``optimizer-<k>-of-<n>.safetensors``; numbers and the settings of the groups are in its metadata, as
JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from coordd.errors import ArgumentError
from coordd_torch.pipeline import archive
from coordd_torch.pipeline.archive import some
from coordd_torch.pipeline.checkpoint import stage_file

__all__ = ["load_optimizer", "read_optimizer", "save_optimizer"]

_NOT_SETTINGS = frozenset({"params", "param_names"})


def save_optimizer(
    folder: str | Path,
    stage: int,
    stages: int,
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[str, torch.Tensor],
) -> None:
    """Saves the state of one stage's optimizer; call it before the manifest is written, as for the stage's weights.

    Args:
        folder: is created if needed.
        stage: its number, from 0.
        stages: number of stages.
        optimizer: its state is saved for the named parameters; None where a stage has no parameters.
        names: the parameters by their names in the whole model; leave out parameters that a lower stage saves.

    Raises:
        ArgumentError: the state or the settings contain values other than tensors and JSON values.
    """
    called = {id(parameter): name for name, parameter in names.items()}
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items() if optimizer else ():
        if name := called.get(id(parameter)):
            tensors |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
            plain[name] = {key: value for key, value in state.items() if not isinstance(value, torch.Tensor)}
    groups = [
        {"names": [called[id(one)] for one in group["params"] if id(one) in called], "settings": _settings(group)}
        for group in (optimizer.param_groups if optimizer else ())
    ]
    try:
        kind = json.dumps(type(optimizer).__name__ if optimizer else None)
        notes = {"kind": kind, "plain": json.dumps(plain), "groups": json.dumps(groups)}
    except TypeError as error:
        raise ArgumentError(
            f"the state of {type(optimizer).__name__} cannot be saved by parameter, since not all of it is tensors, "
            f"numbers and text ({error})"
        ) from error
    archive.withdraw(Path(folder))
    archive.write(Path(folder), stage_file(stage, stages, "optimizer"), tensors, notes)


def load_optimizer(folder: str | Path, optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]) -> None:
    """Loads the state that `read_optimizer` returns into an optimizer."""
    optimizer.load_state_dict(read_optimizer(folder, optimizer, names))


def read_optimizer(
    folder: str | Path, optimizer: torch.optim.Optimizer, names: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Reads the saved state and settings of an optimizer's parameters; the optimizer is not changed.

    Args:
        folder: of the checkpoint.
        optimizer: of any stage, at any number of stages, or of the plain model.
        names: its parameters by their names in the whole model.

    Returns:
        the state in the form of the optimizer's own `load_state_dict`.

    Raises:
        ArgumentError: the checkpoint is incomplete, has no optimizer state, or state of another type of optimizer or of
            other parameters; or parameters with different saved settings are now in one group.
    """
    folder = Path(folder)
    saved = _Saved(folder)
    if others := saved.kinds - {type(optimizer).__name__}:
        raise ArgumentError(
            f"the checkpoint in {folder} has the state of {' and '.join(sorted(others))}, which "
            f"{type(optimizer).__name__} cannot go on with: load the weights alone (optimizer=False)"
        )
    called = {id(parameter): saved.name(name) for name, parameter in names.items()}
    order = [called.get(id(one), "") for group in optimizer.param_groups for one in group["params"]]
    if "" in order:
        raise ArgumentError(f"{order.count('')} of the optimizer's {len(order)} parameters have no name")
    missing = [name for name in order if name not in saved.settings]
    if missing:
        raise ArgumentError(f"the checkpoint in {folder} has no optimizer state of {some(missing)}")
    packed, states = optimizer.state_dict(), saved.states(order)
    packed["param_groups"] = [
        group | saved.shared([order[index] for index in group["params"]], group) for group in packed["param_groups"]
    ]
    packed["state"] = {index: states[name] for index, name in enumerate(order) if states[name]}
    return packed


class _Saved:
    """Optimizer state in a checkpoint.

    Attributes:
        kinds: names of the classes of the saved optimizers.
        settings: maps the name of each parameter to the settings of its group.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, str] = {}
        self._plain: dict[str, dict[str, Any]] = {}
        self.kinds: set[str] = set()
        self.settings: dict[str, dict[str, Any]] = {}
        metadata = archive.read_manifest(folder)["metadata"]
        self._aliases: dict[str, str] = metadata.get("aliases", {})
        for file in metadata.get("optimizer", []):
            keys, notes, _ = archive.listed(folder, file)
            self._places |= dict.fromkeys(keys, file)
            self.kinds |= {kind} if (kind := json.loads(notes.get("kind", "null"))) else set()
            self._plain |= json.loads(notes["plain"])
            for group in json.loads(notes["groups"]):
                self.settings |= dict.fromkeys(group["names"], group["settings"])

    def name(self, name: str) -> str:
        """Returns the name under which a parameter was saved; a tied one has several."""
        return self._aliases.get(name, name)

    def states(self, names: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Reads the state of these parameters."""
        states = {name: dict(self._plain.get(name, {})) for name in names}
        places = {key: file for key, file in self._places.items() if key.rpartition(".")[0] in states}
        for key, tensor in archive.stream(self._folder, places):
            name, _, key_ = key.rpartition(".")
            states[name][key_] = tensor
        return states

    def shared(self, names: Sequence[str], group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings that all these parameters had, converted to the types that the group has now."""
        settings = self.settings[names[0]] if names else {}
        others = [name for name in names if self.settings[name] != settings]
        if others:
            raise ArgumentError(
                f"in the checkpoint in {self._folder} {names[0]!r} has other settings than {some(others)}, which are "
                "in one group of the optimizer now"
            )
        return {key: _like(group.get(key), value) for key, value in settings.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in group.items() if key not in _NOT_SETTINGS}
    return {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in kept.items()}


def _like(now: Any, value: Any) -> Any:
    if isinstance(now, torch.Tensor):
        return torch.tensor(value, dtype=now.dtype, device=now.device)
    return tuple(value) if isinstance(value, list) else value
