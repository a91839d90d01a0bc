"""What stages save is found again at any number of stages, and by the plain model."""

from __future__ import annotations

import copy
import json
import sys

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline import archive
from coordd_torch.pipeline.build import keep
from coordd_torch.pipeline.checkpoint import aliases, load, load_into, save_stage, write_manifest


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("passing", torch.ones(3), persistent=False)


def save(folder, model: nn.Module, stages: int, **metadata) -> None:
    """Deals the names out, those of one tied parameter to the lowest of its stages and others to each of theirs."""
    tensors, further = model.state_dict(), aliases(model)
    for stage in reversed(range(stages)):
        own = {name: tensors[name] for place, name in enumerate(tensors) if place * stages // len(tensors) == stage}
        above_lowest = {name for name in own if name in further and further[name] not in own}
        save_stage(folder, stage, stages, {n: t for n, t in own.items() if n not in above_lowest}, aliases=further)
    write_manifest(folder, stages, metadata=metadata)


def equal(one: nn.Module, other: nn.Module) -> bool:
    tensors = other.state_dict()
    return all(torch.equal(value, tensors[name]) for name, value in one.state_dict().items())


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_plain_model_loads_what_any_number_of_stages_has_saved(tmp_path, stages) -> None:
    model, fresh = Tied(), Tied()
    model.blocks(torch.randn(5, 4))  # so that batch norms have seen something
    save(tmp_path / "made" / "anew", model, stages)
    load_into(fresh, tmp_path / "made" / "anew")
    assert equal(fresh, model)
    assert fresh.head.weight is fresh.embedding.weight


def test_a_part_of_a_model_loads_its_part(tmp_path) -> None:
    model, part = Tied(), Tied()
    save(tmp_path, model, 3)
    keep(part, {"head.weight", "blocks.1.0.bias"})
    load_into(part, tmp_path)
    assert torch.equal(part.head.weight, model.head.weight)
    assert torch.equal(part.blocks[1][0].bias, model.blocks[1][0].bias)
    assert part.blocks[0][0].bias.is_meta


def test_only_the_files_that_are_needed_are_opened(tmp_path) -> None:
    model = Tied()
    save(tmp_path, model, 3)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    needed = manifest["weight_map"]["blocks.1.0.weight"]
    for file in set(manifest["weight_map"].values()) - {needed}:
        (tmp_path / file).unlink()
    assert torch.equal(load(tmp_path, ["blocks.1.0.weight"])["blocks.1.0.weight"], model.blocks[1][0].weight)
    with pytest.raises(
        ArgumentError, match=rf"stage-0-of-3.safetensors of the checkpoint in {tmp_path} cannot be read"
    ):
        load(tmp_path, ["embedding.weight"])


def test_the_manifest_is_an_index_as_others_write_it(tmp_path) -> None:
    model = Tied()
    save(tmp_path, model, 2, step=7)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["weight_map"].keys() == model.state_dict().keys() - {"head.weight"}
    assert set(manifest["weight_map"].values()) == {"stage-0-of-2.safetensors", "stage-1-of-2.safetensors"}
    sizes = [value.nbytes for name, value in model.state_dict().items() if name != "head.weight"]
    assert manifest["metadata"]["total_size"] == sum(sizes)
    assert manifest["metadata"]["aliases"] == {"head.weight": "embedding.weight"}
    assert manifest["metadata"]["step"] == 7


def test_what_is_tied_is_one_tensor_under_all_its_names(tmp_path) -> None:
    save(tmp_path, Tied(), 2)
    found = load(tmp_path)
    assert found.keys() == Tied().state_dict().keys()
    assert found["head.weight"] is found["embedding.weight"]
    assert load(tmp_path, ["head.weight"]).keys() == {"head.weight"}


def test_what_is_not_tied_any_more_gets_the_same_values(tmp_path) -> None:
    model, untied = Tied(), Tied()
    untied.head.weight = nn.Parameter(torch.zeros(9, 4))
    save(tmp_path, model, 2)
    load_into(untied, tmp_path)
    assert untied.head.weight is not untied.embedding.weight
    assert equal(untied, model)


def test_a_stage_may_know_what_is_tied_by_its_other_name(tmp_path) -> None:
    model = Tied()
    save_stage(tmp_path, 0, 1, {"head.weight": model.head.weight}, aliases=aliases(model))
    write_manifest(tmp_path, 1)
    assert torch.equal(load(tmp_path, ["embedding.weight"])["embedding.weight"], model.embedding.weight)


def test_layouts_types_and_common_memory_do_not_matter(tmp_path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = {
        "t": whole.T,
        "row": whole[1],
        "half": whole.bfloat16(),
        "flag": torch.tensor(True),
        "none": torch.empty(0),
    }
    save_stage(tmp_path, 0, 1, tensors)
    write_manifest(tmp_path, 1)
    found = load(tmp_path)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in tensors.items())


def test_without_a_manifest_there_is_no_checkpoint(tmp_path) -> None:
    save(tmp_path, Tied(), 2)
    save_stage(tmp_path, 1, 2, {"x": torch.ones(1)})
    with pytest.raises(ArgumentError, match=rf"{tmp_path} holds no complete checkpoint: it has no manifest.json"):
        load(tmp_path)


def test_the_manifest_waits_for_all_stages(tmp_path) -> None:
    save_stage(tmp_path, 0, 2, {"x": torch.ones(1)})
    with pytest.raises(ArgumentError, match=r"stage-1-of-2.safetensors .* cannot be read"):
        write_manifest(tmp_path, 2)
    assert not (tmp_path / "manifest.json").exists()


def test_two_stages_must_not_save_the_same(tmp_path) -> None:
    for stage in range(2):
        save_stage(tmp_path, stage, 2, {"x": torch.ones(1)})
    with pytest.raises(ArgumentError, match=r"stage-1-of-2.* has what stage-0-of-2.safetensors has, too: 'x'"):
        write_manifest(tmp_path, 2)


def test_a_crash_while_writing_leaves_the_older_file_and_no_draft(tmp_path, monkeypatch) -> None:
    save_stage(tmp_path, 0, 1, {"x": torch.ones(1)})
    before = (tmp_path / "stage-0-of-1.safetensors").read_bytes()
    monkeypatch.setattr(archive.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_stage(tmp_path, 0, 1, {"x": torch.zeros(1)})
    assert (tmp_path / "stage-0-of-1.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["stage-0-of-1.safetensors"]


def test_missing_and_unexpected_names_are_told(tmp_path) -> None:
    save(tmp_path, nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    with pytest.raises(ArgumentError, match=rf"the checkpoint in {tmp_path} has no '7.weight'"):
        load(tmp_path, ["0.weight", "7.weight"])
    other = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    before = copy.deepcopy(other)
    told = r"is not of this model: it has no '2.bias', '2.weight'; the model has no '1.bias', '1.weight'"
    with pytest.raises(ArgumentError, match=told):
        load_into(other, tmp_path)
    assert equal(other, before)


def test_other_shapes_are_told(tmp_path) -> None:
    save(tmp_path, nn.Linear(2, 2), 1)
    with pytest.raises(ArgumentError, match=r"other shapes than the model: 'weight \(here \(2, 3\), there \(2, 2\)\)'"):
        load_into(nn.Linear(3, 2), tmp_path)


def test_what_cannot_be_saved_is_told(tmp_path) -> None:
    with pytest.raises(ArgumentError, match="these are none: 'extra'"):
        save_stage(tmp_path, 0, 1, {"extra": {"state": 1}})
    with pytest.raises(ArgumentError, match="on the meta device: 'x'"):
        save_stage(tmp_path, 0, 1, {"x": torch.empty(1, device="meta")})


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}'])
def test_a_broken_manifest_is_told(tmp_path, text) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ArgumentError, match="is no manifest of a checkpoint"):
        load(tmp_path)


def test_a_truncated_file_is_told(tmp_path) -> None:
    save(tmp_path, nn.Linear(2, 2), 1)
    file = tmp_path / "stage-0-of-1.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ArgumentError, match=r"stage-0-of-1.safetensors .* cannot be read"):
        load(tmp_path)


def test_without_safetensors_one_is_told_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ArgumentError, match=r"pip install 'coordd\[pipeline\]'"):
        save_stage(tmp_path, 0, 1, {"x": torch.ones(1)})
