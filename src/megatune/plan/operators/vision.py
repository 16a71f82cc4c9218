"""The vision tower of a vision-language model and its projectors, on the first stage.

Every rank of the stage computes the whole tower: tensor and context parallelism do not shard it. A layer is one of a
plain transformer without causality, with LayerNorm and a flash kernel, all of whose operators keep their input.

Legend: p patches of a micro-batch's images, w hidden size and f feed-forward size of the tower, e bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatune.architecture import Vision
from megatune.plan.case import Case
from megatune.plan.operators.linear import elementwise, linear_work
from megatune.plan.operators.operator import Attention, Memory, Operator
from megatune.plan.operators.shapes import Shapes

# Tokens of one image at most: patches attend to those of their own image. Rows with more are taken to have several.
_IMAGE_TOKENS = 1024
_LAUNCHES = 12  # of a layer, besides its products


@dataclass(frozen=True, slots=True)
class Images:
    """A tower, and what it computes in a micro-batch.

    Attributes:
        tokens: of the language model, that images stand for.
        tokens_of_image: of each of them.
        tower_trained, projector_trained: whether they have gradients.
    """

    tower: Vision
    tokens: int
    tokens_of_image: int
    tower_trained: bool
    projector_trained: bool

    @property
    def merged(self) -> int:
        """Patches of a token."""
        return self.tower.spatial_merge_size**2


def images_of(case: Case) -> Images | None:
    """Return what a micro-batch has of images; None where nothing."""
    tower, trainable = case.model.architecture.vision, case.settings.finetuning
    if tower is None or not case.image_tokens:
        return None
    full = trainable.finetuning_type == "full"
    return Images(
        tower,
        case.micro_batch_size * case.image_tokens,
        min(case.image_tokens, _IMAGE_TOKENS),
        full and not trainable.freeze_vision_tower,
        full and not trainable.freeze_multi_modal_projector,
    )


def vision_layer(shapes: Shapes, images: Images) -> tuple[Operator, ...]:
    """Return one layer of the tower. What is frozen keeps nothing, and holds a layer's tensors while it computes."""
    shapes = replace(shapes, weights_trained=images.tower_trained)
    tower, size, patches = images.tower, shapes.size, images.tokens * images.merged
    width, ffn = tower.hidden_size, tower.intermediate_size
    up = 2 * ffn if tower.gated else ffn
    hidden, inner = patches * width * size, patches * ffn * size

    def product(memory: Memory, columns: int, depth: int) -> Operator:
        return Operator("vision", memory, *linear_work(shapes, patches, columns, depth))

    attention = (Attention(patches, images.tokens_of_image * images.merged, 1, 2 * width, "unmasked"),)
    # Norms' inputs and outputs; q, k, v and the context; before and behind the activation, twice before with a gate.
    # The peak is at the gradients of the widest operator: its output's, and its input's.
    layer = (
        product(Memory(2 * hidden), 3 * width, width),
        Operator("vision", Memory(4 * hidden + 4 * patches * tower.num_heads), attention, attention, 3),
        product(Memory(0), width, width),
        product(Memory(2 * hidden), up, width),
        product(Memory(inner * (4 if tower.gated else 2), 2 * inner + hidden, 2 * inner + hidden), width, ffn),
        Operator("vision", Memory(0), *elementwise(shapes, patches * (10 * width + 3 * up), 2, 3, _LAUNCHES)),
    )
    return layer if images.tower_trained else tuple(operator._replace(backward=()) for operator in layer)


def projectors(shapes: Shapes, images: Images) -> Operator:
    """Return norm, linear, GELU, linear on patches side by side, of which each projector makes one token.

    All projectors' matrices are one product of as many multiply-adds.
    """
    tower, trained, hidden = images.tower, images.projector_trained, shapes.architecture.hidden_size
    wide = images.tokens * images.merged * tower.hidden_size
    merged = (4 * wide + images.tokens * hidden) * shapes.size
    kept = merged * tower.num_mergers if trained or images.tower_trained else 0
    shapes = replace(shapes, weights_trained=trained)
    work = linear_work(shapes, images.tokens, tower.num_projector_parameters / hidden, hidden)
    operator = Operator("projector", Memory(kept, merged, merged if kept else 0), *work)
    return operator if trained else operator._replace(backward=())
