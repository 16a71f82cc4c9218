"""What a chunked mixer needs to know of the documents in a row, so that no state passes from one to the next.

Everything follows from the boundaries of the documents. It is computed once for each pattern of them and kept.

Legend: s tokens of a whole row, C tokens of a chunk, N chunks, the last one padded.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatune.engine import device

CHUNK = 64
# Patterns that are kept: more than micro-batches are under way in a pipeline.
_REMEMBERED = 64


class Documents(NamedTuple):
    """The documents of a row; every tensor is bool, on the device.

    Attributes:
        sees: [N, C, C], whether a token sees an earlier one, or itself, of its chunk: both are of one document.
        continues: [N, C], whether a token's document began before the chunk, so that the token sees the state.
        lasts: [N, C], whether a token's document is that of the chunk's end, so that the token changes the state.
        carries: [N], whether one document fills the chunk and began before it: the state is kept, decayed.
        taps: [taps - 1, s], whether the token that many places before, from 1 on, is of the same document.
    """

    sees: Tensor
    continues: Tensor
    lasts: Tensor
    carries: Tensor
    taps: Tensor


@lru_cache(_REMEMBERED)
def documents_of(boundaries: tuple[int, ...], num_taps: int) -> Documents:
    """Return the masks of a row.

    Args:
        num_taps: of the convolution.
    """
    s = boundaries[-1]
    document = torch.bucketize(torch.arange(s), torch.tensor(boundaries), right=True)
    padded = torch.cat((document, document[-1:].expand(-s % CHUNK))).view(-1, CHUNK)
    before = torch.cat((padded[:1, 0], padded[:-1, -1]))[:, None]
    sees = (padded[:, :, None] == padded[:, None, :]) & torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    lasts = padded == padded[:, -1:]
    taps = [
        torch.cat((torch.zeros(min(k, s), dtype=torch.bool), document[k:] == document[:-k])) for k in range(1, num_taps)
    ]
    masks = sees, padded == before, lasts, (padded[:, -1:] == before)[:, 0], torch.stack(taps)
    return Documents(*map(device.send, masks))
