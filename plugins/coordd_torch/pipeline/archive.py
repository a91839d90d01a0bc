"""A checkpoint folder: safetensors files and one manifest.

Files are replaced atomically, the manifest last: if a manifest exists, every file that it names is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from coordd.errors import ArgumentError

__all__ = [
    "MANIFEST",
    "listed",
    "opened",
    "read_manifest",
    "replace_manifest",
    "shapes",
    "some",
    "stream",
    "withdraw",
    "write",
]

MANIFEST = "manifest.json"

_SHOWN = 5


def write(folder: Path, file: str, tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> None:
    """Writes a file of tensors with its metadata, and replaces an older one."""
    _safetensors()
    from safetensors.torch import save_file

    with _replacing(folder / file) as draft:
        save_file(_apart(tensors), draft, {"format": "pt", **notes})


def stream(
    folder: Path, files: Mapping[str, str], device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields tensors one by one, and reads only the requested tensors of each file.

    Args:
        folder: where the files are.
        files: maps the name of each tensor to its file.
        device: where the tensors are placed.
    """
    for name, source in _sources(folder, files, device):
        yield name, source.get_tensor(name)


def shapes(folder: Path, files: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Reads only the shapes of tensors."""
    return {name: tuple(source.get_slice(name).get_shape()) for name, source in _sources(folder, files, "cpu")}


@contextmanager
def opened(folder: Path, file: str, device: torch.device | str = "cpu") -> Iterator[Any]:
    """Opens a file for reading; each tensor is read when it is requested.

    Raises:
        ArgumentError: the file does not exist, or is not a safetensors file.
    """
    safetensors = _safetensors()
    try:
        source = safetensors.safe_open(str(folder / file), framework="pt", device=str(device))
    except (FileNotFoundError, safetensors.SafetensorError) as error:
        raise ArgumentError(f"{file} of the checkpoint in {folder} cannot be read: {error}") from error
    with source:
        yield source


def listed(folder: Path, file: str) -> tuple[list[str], dict[str, str], int]:
    """Returns the names of a file's tensors, its metadata, and the size of all its tensors in bytes."""
    with opened(folder, file) as source:
        names, notes = list(source.keys()), source.metadata() or {}
    with (folder / file).open("rb") as stream:
        header = int.from_bytes(stream.read(8), "little")
    return names, notes, (folder / file).stat().st_size - header - 8


def withdraw(folder: Path) -> None:
    """Creates the folder, and deletes an older manifest, since the files that it names are about to change."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)


def replace_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Writes the manifest."""
    with _replacing(folder / MANIFEST) as draft:
        draft.write_text(json.dumps(manifest, indent=2, sort_keys=True) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Reads the manifest.

    Raises:
        ArgumentError: there is no manifest, or it is not one of a checkpoint.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        manifest["metadata"], manifest["weight_map"]
    except FileNotFoundError:
        reason = f"{folder} holds no complete checkpoint: it has no {MANIFEST}, which is written last"
        raise ArgumentError(reason) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{folder / MANIFEST} is no manifest of a checkpoint ({error})") from error
    return manifest


def some(names: Iterable[str]) -> str:
    """Formats the first few names, and the number of further names."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return ", ".join(map(repr, ordered[:_SHOWN])) + rest


def _sources(folder: Path, files: Mapping[str, str], device: torch.device | str) -> Iterator[tuple[str, Any]]:
    for file in sorted(set(files.values())):
        with opened(folder, file, device) as source:
            yield from ((name, source) for name, place in files.items() if place == file)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Makes tensors contiguous and copies shared memory: the format supports neither strides nor shared memory."""
    seen: set[int] = set()
    apart = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().contiguous()
        apart[name] = plain.clone() if plain.untyped_storage().data_ptr() in seen else plain
        seen.add(plain.untyped_storage().data_ptr())
    return apart


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        reason = "checkpoints need safetensors, which is not installed: pip install 'coordd[pipeline]'"
        raise ArgumentError(reason) from error
    return safetensors
