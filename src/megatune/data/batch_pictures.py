"""Pictures of a micro-batch: decoded by the ranks that share it, each its part, and placed among the tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from megatune.data.bad_rows import RowError
from megatune.data.media.positions import rotary_position_ids
from megatune.data.pictures import unpacked

if TYPE_CHECKING:
    from megatune.data.rows import Document
    from megatune.data.vision import VisionInput


class Share(NamedTuple):
    """One of the ranks that deal the pictures of a micro-batch among themselves."""

    rank: int
    size: int


class Unreadable(NamedTuple):
    """A picture that could not be decoded; the micro-batch has zeros in its place.

    Attributes:
        document: its number in `Batch.lengths`.
        where: the file, in words.
        code, reason, detail: as a `RowError` has them.
    """

    document: int
    where: str
    code: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Pictures:
    """The images and videos of a micro-batch, n of them, in the order of their tokens.

    Attributes:
        pixel_values: fp32 [patches, C·T·p²], of the pictures that this rank computes, in their order.
        grids: int64 [n, 3], patches (t, h, w) of all pictures.
        owners: int64 [n], which of the ranks that share the micro-batch computes each; 0 where no share is given.
        places: int64 [tokens], where the pictures' tokens are in the flattened rows, [b · s], in order.
        rotary_position_ids: int64 [3, b, s], counted from 0 in every document; padding counts on.
    """

    pixel_values: torch.Tensor
    grids: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor
    rotary_position_ids: torch.Tensor

    def pin_memory(self) -> Pictures:
        """Return the same in page-locked memory."""
        return Pictures(*(getattr(self, each.name).pin_memory() for each in fields(self)))


def collate_pictures(
    model: VisionInput,
    documents: Sequence[Document],
    starts: np.ndarray,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    share: Share | None,
) -> tuple[Pictures, tuple[Unreadable, ...]]:
    """Return the pictures of a micro-batch, and which of this rank's share could not be decoded.

    Args:
        starts: where documents begin in the flattened rows, and their end behind the last.
        input_ids, position_ids: [b, s].
    """
    numbered = [(number, each) for number, document in enumerate(documents) for each in document.pictures]
    grids = np.array([each.grid for _, each in numbered], dtype=np.int64)
    sizes = grids.prod(axis=1).tolist()  # patches
    owners = deal(sizes, share.size) if share is not None else [0] * len(sizes)
    mine = [place for place, owner in enumerate(owners) if share is not None and owner == share.rank]
    vision = model.vision
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.zeros((sum(sizes[place] for place in mine), channels), dtype=np.float32)
    unreadable, stop = [], 0
    known: dict[bytes, slice] = {}  # pixels by what they are decoded from: the answers of a pair have the same pictures
    for place in mine:
        number, picture = numbered[place]
        start, stop = stop, stop + sizes[place]
        content = bytes(picture.packed)
        if content in known:
            pixels[start:stop] = pixels[known[content]]
            continue
        source, measured = unpacked(content)
        try:
            pixels[start:stop] = model.processor.pixels(source, measured)
            known[content] = slice(start, stop)
        except RowError as error:
            unreadable.append(Unreadable(number, source.name, error.code, error.reason, error.detail))
    ids = np.stack([position_ids.reshape(-1)] * 3)
    for document, start, end in zip(documents, starts, starts[1:], strict=False):
        if document.pictures:
            measures = [(each.grid, each.seconds_per_grid) for each in document.pictures]
            own = rotary_position_ids(document.input_ids, measures, vision)
            size = own.shape[1]
            ids[:, start : start + size] = own
            ids[:, start + size : end] = own.max() + 1 + np.arange(end - start - size)
    flat = input_ids.reshape(-1)
    places = np.flatnonzero((flat == vision.image_token_id) | (flat == vision.video_token_id))
    found = (pixels, grids, np.array(owners, dtype=np.int64), places, ids.reshape(3, *input_ids.shape))
    return Pictures(*map(torch.from_numpy, found)), tuple(unreadable)


def deal(patches: Sequence[int], size: int) -> list[int]:
    """Return the owner of each picture, 0 to `size` - 1: the largest picture first, each to the rank with the fewest
    patches.

    Among equals the picture that comes first, and the lowest rank. Nothing but the arguments decides.

    Args:
        patches: of each picture.
        size: number of ranks.
    """
    owners = [0] * len(patches)
    loads = [(0, rank) for rank in range(size)]
    for picture in sorted(range(len(patches)), key=lambda picture: -patches[picture]):
        load, owners[picture] = loads[0]
        heapq.heapreplace(loads, (load + patches[picture], owners[picture]))
    return owners
