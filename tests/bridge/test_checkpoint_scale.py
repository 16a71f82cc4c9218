"""Training state of a 70B model over 512 ranks, without the model: what each rank writes, and what it reads again."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from live_bytes import LiveBytes
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge import parameters as of_ranks
from megatune.bridge import safetensors_files, shard_files
from megatune.bridge.assemble import load_weights
from megatune.bridge.checked_files import BLOCK_BYTES, begin_check, digests_of, end_check
from megatune.bridge.file_stream import FileStream, HostBuffers, index_files
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorEntry, header_of
from megatune.bridge.shard_files import ShardFiles
from megatune.engine import groups
from megatune.engine.optimizer import MainShard
from megatune.families import FAMILIES, read_architecture
from megatune.families.table import Row, rows_of
from megatune.families.weights import Slice, Weight, engine_shape, hf_shapes, layers_of

TP, PP, DP = 8, 4, 16
BUCKET = 40_000_000  # elements, as Megatron-Core has them
KINDS = ("main", "exp_avg", "exp_avg_sq")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 8192, "head_dim": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def architecture() -> Architecture:
    return read_architecture(CONFIG, "70B")


def of_stage(architecture: Architecture, stage: int) -> list[tuple[Weight, int]]:
    """Weights of a pipeline stage, in the order of the model."""
    size = architecture.num_layers // PP
    weights = FAMILIES["llama"].weight_map(architecture)
    ends = {"embedding.word_embeddings.weight": 0}
    inside = [
        (weight, layer)
        for layer in range(stage * size, (stage + 1) * size)
        for weight in weights
        if weight.per_layer and layer in layers_of(weight, architecture)
    ]
    outside = [(weight, 0) for weight in weights if not weight.per_layer and not weight.is_buffer]
    return [
        *(one for one in outside if stage == 0 and one[0].engine in ends),
        *inside,
        *(one for one in outside if stage == PP - 1 and one[0].engine not in ends),
    ]


@cache
def parameters(architecture: Architecture, stage: int, tp_rank: int, dtype: torch.dtype) -> list[LocalParameter]:
    part = Slice(TP, tp_rank)
    return [
        LocalParameter(
            weight,
            layer,
            part,
            torch.nn.Parameter(torch.empty(engine_shape(weight, architecture, part), dtype=dtype, device="meta")),
            False,
        )
        for weight, layer in of_stage(architecture, stage)
    ]


def shards(held: list[LocalParameter], dp_rank: int) -> Iterator[tuple[LocalParameter, int, int]]:
    """What a distributed optimizer gives a rank: its part of each bucket, which are filled from the model's end."""
    bucket: list[tuple[LocalParameter, int]] = []
    size = 0
    for index, local in enumerate(reversed(held)):
        bucket.append((local, size))
        size += local.parameter.numel()
        if size < BUCKET and index + 1 < len(held):
            continue
        share = -(-size // (128 * DP)) * 128
        for other, first in bucket:
            start = max(dp_rank * share - first, 0)
            stop = min((dp_rank + 1) * share - first, other.parameter.numel())
            if start < stop:
                yield other, start, stop
        bucket, size = [], 0


def files_of(architecture: Architecture, stage: int, tp_rank: int, dp_rank: int, device: str = "meta") -> ShardFiles:
    """The files that a rank writes."""
    held = parameters(architecture, stage, tp_rank, torch.bfloat16)
    of_ranks.groups.tensor_parallel_group = lambda: SimpleNamespace(size=lambda: TP, rank=lambda: tp_rank)
    tensors: dict[Tensor, dict[str, Tensor]] = {}
    owned: dict[Tensor, MainShard] = {}
    for local, start, stop in shards(held, dp_rank):
        values = torch.empty(stop - start, device=device)
        owned[local.parameter] = MainShard(start, stop, values, values, {})
        tensors[local.parameter] = dict.fromkeys(KINDS, values)
    place: Any = SimpleNamespace(rank=0, pp_rank=stage, ep_size=1, etp_size=TP, tp_size=TP)
    return ShardFiles("optimizer", KINDS, held, owned, tensors, architecture, place)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, which is one rank after the other."""
    monkeypatch.setattr(groups, "all_gather_object", lambda value: [value])
    monkeypatch.setattr(groups, "replica_group", lambda: SimpleNamespace(size=lambda: DP, rank=lambda: 0))
    monkeypatch.setattr(groups, "tensor_parallel_group", groups.tensor_parallel_group)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", lambda *args, **options: None)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda *args, **options: None)
    assert shard_files.groups is of_ranks.groups is groups


@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.extended)])
def test_ranks_write_equal_parts_and_read_no_more_than_they_need(alone: None, share: int, tmp_path: Path) -> None:
    """Of the whole model, or of a quarter of its layers and words, which lie in as many ranks."""
    fewer = {name: CONFIG[name] // share for name in ("num_hidden_layers", "vocab_size")}
    architecture = read_architecture(CONFIG | fewer, "70B")
    whole: dict[str, int] = {}
    for weight in FAMILIES["llama"].weight_map(architecture):
        for layer in layers_of(weight, architecture) if not weight.is_buffer else ():
            whole |= {name: prod(shape) for name, shape in hf_shapes(weight, architecture, layer).items()}
    places: dict[str, tuple[str, int]] = {}
    entries_of: dict[str, list[TensorEntry]] = {}
    sizes: list[int] = []
    for rank in range(TP * PP * DP):
        stage, rest = divmod(rank, TP * DP)
        dp_rank, tp_rank = divmod(rest, TP)
        files = files_of(architecture, stage, tp_rank, dp_rank)
        name = f"optimizer-{rank + 1:05d}-of-{TP * PP * DP:05d}.safetensors"
        entries_of[name] = [entry.tensor for entry in files._entries]
        assert not {entry.name for entry in entries_of[name]} & places.keys()  # no box is written twice
        places |= {entry.name: (name, entry.num_bytes) for entry in entries_of[name]}
        sizes.append(files.num_bytes)
    # Every element once, by ranks that all write about as much.
    assert sum(size for _, size in places.values()) == 4 * len(KINDS) * sum(whole.values())
    assert max(sizes) < 1.1 * sum(sizes) / len(sizes)
    assert min(sizes) > 0.9 * sum(sizes) / len(sizes)

    training = tmp_path / "training"
    training.mkdir()
    (index,) = index_files("optimizer", places)
    index.write(training)
    for rank in (0, 137, 511):
        _read_again(rank, architecture, tmp_path, entries_of, places)


def _read_again(
    rank: int,
    architecture: Architecture,
    folder: Path,
    entries_of: dict[str, list[TensorEntry]],
    places: dict[str, tuple[str, int]],
) -> None:
    """Resume a rank in the layout that wrote: no file is there but its own, and those of ranks with the same norms."""
    stage, rest = divmod(rank, TP * DP)
    dp_rank, tp_rank = divmod(rest, TP)
    for other in entries_of:
        (folder / "training" / other).touch()  # listed, and empty
    beside = [f"optimizer-{rank - tp_rank + other + 1:05d}-of-{TP * PP * DP:05d}.safetensors" for other in range(TP)]
    for name in beside:
        _sparse(folder / "training" / name, entries_of[name])
    held = parameters(architecture, stage, tp_rank, torch.bfloat16)
    begin_check(folder)
    optimizer = SafetensorsFolder(folder / "training", "optimizer")
    mine = [(local, start, torch.empty(stop - start, device="meta")) for local, start, stop in shards(held, dp_rank)]
    needed = len(KINDS) * 4 * sum(target.numel() for _, _, target in mine)
    with LiveBytes() as live:
        for local, start, target in mine:
            for kind in KINDS:
                optimizer.fill(target, local.rows(architecture, start, start + len(target)), f"{kind}/", start=start)
    assert live.peak <= 4 * BUCKET  # beyond its state
    check = end_check()
    assert check is not None
    assert not check.problems
    assert check.num_bytes <= 1.05 * needed


def test_a_rank_that_saves_holds_a_bucket_beyond_its_state(
    alone: None, architecture: Architecture, tmp_path: Path
) -> None:
    files = files_of(architecture, 1, 3, 7, "cpu")
    whole, files._entries = sum(entry.tensor.num_bytes for entry in files._entries), files._entries[:40]
    assert files.num_bytes > 1.2 * 4 * BUCKET  # of the state enough to tell
    assert whole > files.num_bytes
    stream = FileStream(tmp_path, HostBuffers())
    writer = threading.Thread(target=stream.write)
    writer.start()
    with LiveBytes() as live:
        stream.put(files.files())
    writer.join()
    assert stream.written > files.num_bytes
    assert live.peak <= 4 * BUCKET


def test_each_rank_reads_its_slices_of_a_model(
    alone: None, architecture: Architecture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage's weights, in files of whole tensors: rows and columns alike."""
    entries = [
        TensorEntry(name, shape, torch.bfloat16)
        for weight, layer in of_stage(architecture, 1)[:36]
        for name, shape in hf_shapes(weight, architecture, layer).items()
    ]
    (tmp_path / "training").mkdir()
    _sparse(tmp_path / "model.safetensors", entries)
    monkeypatch.setattr(groups, "tensor_parallel_group", lambda: None)
    held = parameters(architecture, 1, 5, torch.bfloat16)[:36]
    begin_check(tmp_path)
    load_weights(SafetensorsFolder(tmp_path), held, architecture)
    check = end_check()
    assert check is not None
    assert not check.problems
    # Of what its replicas hold, too, a rank reads a part.
    assert check.num_bytes <= 1.05 * sum(local.parameter.nbytes for local in held) / DP


def _sparse(path: Path, entries: list[TensorEntry]) -> None:
    """Write a file of zeros, which takes no room, and its digests."""
    head = header_of(entries)
    size = len(head) + sum(entry.num_bytes for entry in entries)
    path.write_bytes(head)
    with open(path, "r+b") as file:
        file.truncate(size)
    content = head + bytes(-len(head) % BLOCK_BYTES)
    blocks = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    zeros = xxhash.xxh3_64_intdigest(bytes(BLOCK_BYTES))
    digests = [xxhash.xxh3_64_intdigest(block) for block in blocks]
    digests += [zeros] * (-(-size // BLOCK_BYTES) - len(digests))
    if size % BLOCK_BYTES:
        digests[-1] = xxhash.xxh3_64_intdigest(bytes(size % BLOCK_BYTES))
    digests_of(path).parent.mkdir(exist_ok=True)
    np.array(digests, dtype="<u8").tofile(digests_of(path))


# --- the table itself -------------------------------------------------------------------------------------------------


def test_a_shard_is_at_most_three_boxes_of_a_piece(architecture: Architecture) -> None:
    weight = next(
        each for each in FAMILIES["llama"].weight_map(architecture) if each.engine.endswith("linear_fc2.weight")
    )
    part = Slice(TP, 3)
    rows = list(rows_of(weight, architecture, part, 7, 5_000, 5_000_000))
    columns = 28672 // TP
    assert [row.box[:2] for row in rows] == [(1, 2), (2, 1395), (1395, 1396)]
    assert [row.box.left for row in rows] == [3 * columns + 5_000 % columns, 3 * columns, 3 * columns]
    assert sum(row.box.numel for row in rows) == 5_000_000 - 5_000
    assert isinstance(rows[0], Row)
    assert json.dumps(rows[0].shape) == "[8192, 28672]"
    assert safetensors_files.part_name("x", (4, 6), rows[0].box._replace(first=0, last=1, left=2, right=3)) == (
        "x[0:1,2:3 of 4x6]"
    )
