"""Adapters beside linear layers: what they keep, and what they compute.

Legend as in `linear`.
"""

from __future__ import annotations

from megatune.plan.operators.operator import Kernel, Memory, Moved, Product, Work
from megatune.plan.operators.shapes import Adapted, Shapes


def adapter_memory(
    shapes: Shapes,
    adapter: Adapted,
    saved: int,
    vectors: int,
    inputs: int,
    outputs: int,
    *,
    matrices: int = 1,
    shared: bool = False,
) -> Memory:
    """Return what an adapter adds to the memory of a linear layer, which keeps its input for it.

    It keeps the latent, in a 16-bit model copies of A and B, and of matrices that the engine stacks B as it is laid out
    for them; with dropout, in place of its input, what is left of that, and what was dropped; with lengths of rows also
    the outputs before they are multiplied.

    Args:
        saved: bytes of the input, whose gradient is there twice.
        vectors: that the adapter's outputs are added to.
        matrices: [outputs, inputs], one of each of a rank's experts.
        shared: another operator saves the input, too.
    """
    size, out = shapes.size, vectors * outputs * shapes.size
    columns = outputs + inputs if shapes.wide else outputs if adapter.masked else 0
    kept = (vectors + matrices * columns) * adapter.width * size
    if shapes.drops:
        # A CPU multiplies by numbers, a GPU keeps a byte for each.
        kept += (saved if shapes.on_cpu else saved // size) + (saved if shared else 0)
    return Memory(kept + out, 2 * out, saved + out) if shapes.decomposed else Memory(kept, out, saved)


def adapted(shapes: Shapes, work: Work, rows: float, columns: float, depth: float, name: str, count: int = 1) -> Work:
    """Add the adapter beside `count` linear layers, where they have one.

    Forward two narrow products, the second of which adds to the outputs; backward two of each, and a sum of what both
    ways say of the inputs. Lengths of rows multiply the outputs, and are computed with a product of the weight.
    """
    if (beside := shapes.adapted(name)) is None:
        return work
    forward, backward, launches, weight = work
    width, size = beside.width, shapes.size
    inputs, outputs = count * rows * depth * size, count * rows * columns * size
    down, up = Product(rows, width, depth, size, count), Product(rows, columns, width, size, count)
    ahead: tuple[Kernel, ...] = (down, up, Moved(outputs))
    back: tuple[Kernel, ...] = (down, up, Moved(3 * inputs), Product(rows, width, columns, size, count), down)
    if shapes.decomposed:
        ahead += (Product(columns, width, depth, size, count), Moved(5 * outputs))
        back += (Moved(6 * outputs),)
    return forward + ahead, backward + back, launches + (12 if shapes.decomposed else 5) * count, weight
