"""Checkpoints that attack, or lie: each is refused by name, before anything is allocated or executed."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import MakeModel
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata
from torch_dist_kit import to_mcore

from megatune.bridge.merged_model import MergedModel
from megatune.errors import ExitCode, MegatuneError

FC2, FC1 = "decoder.layers.mlp.linear_fc2.weight", "decoder.layers.mlp.linear_fc1.weight"
CANARY = Path("canary")  # in the folder that the test runs in


class Attack:
    """What a pickle of it runs when it is loaded."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {CANARY}",)


class Evaluated:
    def __reduce__(self) -> Any:
        return eval, (f"open('{CANARY}', 'w')",)


def edit(folder: Path, change: Callable[[Any], None], protocol: int = 4) -> None:
    """Change the metadata of a checkpoint of ours."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol))


def place(metadata: Any, name: str, number: int = 0) -> Any:
    """Where the file has a chunk."""
    return [info for index, info in metadata.storage_data.items() if index.fqn == name][number]


def moved(**changes: Any) -> Callable[[Path], None]:
    """The first chunk of a tensor lies elsewhere."""
    return lambda folder: edit(folder, lambda found: vars(place(found, FC2)).update(changes))


def shaped(size: Any = None, chunks: Callable[[list], list] = lambda each: each) -> Callable[[Path], None]:
    """A tensor has another shape, or other chunks."""

    def change(found: Any) -> None:
        tensor = found.state_dict_metadata[FC2]
        tensor.size = tensor.size if size is None else torch.Size(size)
        tensor.chunks = chunks(tensor.chunks)

    return lambda folder: edit(folder, change)


def attacked(attack: Any, protocol: int) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda found: setattr(found, "all_local_plans", [attack]), protocol)


def named(module: str, name: str) -> Callable[[Path], None]:
    """The metadata is a call of something, by a name that is looked up in steps."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, f"touch {CANARY}")]
    data = b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."
    return lambda folder: (folder / ".metadata").write_bytes(data)


def stored(value: Any, *, zipped: bool = True) -> Callable[[Path], None]:
    """A file of the checkpoint has something else where a chunk should be."""

    def replace(folder: Path) -> None:
        torch.save(value, folder / "__9_0.distcp", _use_new_zipfile_serialization=zipped)
        size = (folder / "__9_0.distcp").stat().st_size
        moved(relative_path="__9_0.distcp", offset=0, length=max(size, 30000))(folder)
        with open(folder / "__9_0.distcp", "ab") as file:
            file.write(b"\0" * max(0, 30000 - size))

    return replace


def unpacking(folder: Path) -> None:
    """A header that unpacks to far more than the file has."""
    with zipfile.ZipFile(folder / "__9_0.distcp", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1))
        archive.writestr("archive/byteorder", bytes(1 << 26))
    with open(folder / "__9_0.distcp", "r+b") as file:
        size = file.seek(0, os.SEEK_END)
    moved(relative_path="__9_0.distcp", offset=0, length=size)(folder)


def common(folder: Path) -> None:
    torch.save({"args": Attack()}, folder / "common.pt")


def swap(folder: Path) -> None:
    first, second = sorted(folder.glob("*.distcp"))[:2]
    size = max(path.stat().st_size for path in (first, second))
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)
    for path in (first, second):  # neither looks cut short
        os.truncate(path, size)


def twice(chunks: list) -> list:
    half = torch.Size([1, 40, 96])
    parts = [ChunkStorageMetadata(torch.Size([0, start, 0]), half) for start in (0, 24)]
    return [*parts, *chunks[1:]]


def typed(folder: Path) -> None:
    edit(folder, lambda found: setattr(found.state_dict_metadata[FC2].properties, "dtype", torch.float16))


def renamed(name: str) -> Callable[[Path], None]:
    def change(found: Any) -> None:
        found.state_dict_metadata[name] = found.state_dict_metadata.pop(FC2)
        found.storage_data = {
            type(index)(name if index.fqn == FC2 else index.fqn, index.offset): info
            for index, info in found.storage_data.items()
        }

    return lambda folder: edit(folder, change)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "os.system": (attacked(Attack(), 2), "system'"),
    "os.system, protocol 4": (attacked(Attack(), 4), "system'"),
    "eval": (attacked(Evaluated(), 4), "builtins.eval"),
    "a function of torch's": (named("torch.distributed.checkpoint.filesystem", "os.system"), "filesystem.os.system"),
    "an import": (named("importlib", "import_module"), "importlib.import_module"),
    "torch.load": (named("torch", "load"), "torch.load"),
    "no metadata": (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({"a": 1})), "something other"),
    "noise": (lambda folder: (folder / ".metadata").write_bytes(b"\x80\x04\xff"), "cannot be read"),
    "a pickle for a chunk": (stored((Attack(), torch.zeros(8000))), "system'"),
    "a pickle with zeros behind it": (stored(Attack()), "not a tensor"),
    "an old pickle for a chunk": (stored(Attack(), zipped=False), "not a tensor"),
    "an archive that unpacks to more": (unpacking, "why: it is not a tensor\n"),
    "a pickle in common.pt": (common, "system'"),
    "a path above": (moved(relative_path="../__0_0.distcp"), "outside the checkpoint's folder"),
    "an absolute path": (moved(relative_path="/etc/passwd"), "outside the checkpoint's folder"),
    "the folder itself": (moved(relative_path=".."), "outside the checkpoint's folder"),
    "a missing shard": (lambda folder: sorted(folder.glob("*.distcp"))[1].unlink(), "is missing"),
    "a shard cut short": (lambda folder: os.truncate(sorted(folder.glob("*.distcp"))[1], 5000), "truncated"),
    "swapped shards": (swap, "swapped or truncated"),
    "beyond the file": (moved(offset=2**50), "ends at byte"),
    "before the file": (moved(offset=-1), "has the invalid location -1"),
    "a huge tensor": (shaped([4, 2**40, 96]), "overlap, or leave gaps"),
    "a huge chunk": (
        shaped(
            [4, 2**40, 96],
            lambda each: [ChunkStorageMetadata(one.offsets, torch.Size([1, 2**40, 96])) for one in each],
        ),
        "bytes",
    ),
    "too huge to be counted": (shaped([2**62, 64, 96]), "is not a valid shape"),
    "negative sizes": (shaped([4, -64, 96]), "is not a valid shape"),
    "overlapping chunks": (shaped(None, twice), "overlap"),
    "a missing chunk": (shaped(None, lambda each: each[:-1]), "overlap, or leave gaps"),
    "no chunks": (shaped(None, lambda each: []), "overlap, or leave gaps"),
    "a chunk in no file": (lambda folder: edit(folder, lambda found: found.storage_data.clear()), "without a file"),
    "another dtype": (typed, "torch.float32"),
    "another shape in the file": (moved(offset=0), "a part of"),
    "a smaller tensor in the file": (stored(torch.zeros(1, 64, 95)), "the file has [1, 64, 95]"),
    "another model's tensor": (renamed("decoder.layers.mlp.linear_fc9.weight"), "linear_fc9.weight"),
    "bytes for a tensor": (
        lambda folder: edit(folder, lambda found: found.state_dict_metadata.update({FC2: BytesStorageMetadata()})),
        "tensors are missing",
    ),
    "compressed": (moved(transform_descriptors=["zstd"]), "is compressed"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(model_dir: MakeModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return to_mcore(model_dir("llama"), tmp_path_factory.mktemp("sound") / "mcore", max_file_bytes=100_000)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sound, "mcore")
    change, said = HOSTILE[name]
    change(Path("mcore/iter_0000001"))
    Path("hf").mkdir()
    with pytest.raises(MegatuneError) as refused:
        MergedModel(Path("mcore"), []).write(Path("hf"), 5 * 10**9)
    assert refused.value.exit_code == ExitCode.INPUT
    assert said in str(refused.value)
    assert "mcore/iter_0000001" in str(refused.value)
    assert not CANARY.exists()


@pytest.mark.parametrize("said", ["../mcore", "/etc", "1e3", "-1", ""])
def test_a_tracker_that_leads_elsewhere(said: str, sound: Path, tmp_path: Path) -> None:
    shutil.copytree(sound, tmp_path / "mcore")
    (tmp_path / "mcore/latest_checkpointed_iteration.txt").write_text(said)
    with pytest.raises(MegatuneError, match="expected a number, or release"):
        MergedModel(tmp_path / "mcore", [])
