"""Which rank runs the vision encoder on which picture."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
