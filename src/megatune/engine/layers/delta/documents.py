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
    """The documents of a row; every tensor is on the device.

    Attributes:
        sees: bool [N, C, C + 1], whether a token sees an earlier one, or itself, of its chunk: of its document.
            The last column is the state before the chunk, which tokens of a document that began earlier see; the last
            row is also what the state behind the chunk keeps.
        places: int64 [s], where each token is among `num_places`, which have a place without a token for each earlier
            tap of the convolution before each document, and behind the last.
        num_places: of tokens and without one.
    """

    sees: Tensor
    places: Tensor
    num_places: int


@lru_cache(_REMEMBERED)
def documents_of(boundaries: tuple[int, ...], num_taps: int) -> Documents:
    """Return what a row's boundaries say.

    Args:
        num_taps: of the convolution.
    """
    s, gap = boundaries[-1], num_taps - 1
    document = torch.bucketize(torch.arange(s), torch.tensor(boundaries), right=True)
    padded = torch.cat((document, document[-1:].expand(-s % CHUNK))).view(-1, CHUNK)
    before = torch.cat((padded[:1, 0], padded[:-1, -1]))[:, None]
    seen = torch.cat((padded, before), 1)
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
    sees = (padded[:, :, None] == seen[:, None, :]) & torch.nn.functional.pad(earlier, (0, 1), value=True)
    places = torch.arange(s) + gap * document
    return Documents(device.send(sees), device.send(places), s + gap * len(boundaries))
