"""The vision tower of a vision-language model, on the first stage.

Legend: p patches of a micro-batch's images, w hidden size and f feed-forward size of the tower, e bytes of a number.
"""

from __future__ import annotations

from megatune.plan.case import Case
from megatune.plan.memory.operators import Operator, chain, repeat


def vision_tower(case: Case) -> Operator:
    """Of the images of a micro-batch; nothing without images.

    Every rank of the first stage computes the whole tower: tensor and context parallelism do not cut it. A layer is
    one of a plain transformer without causality, with LayerNorm and a flash kernel, all of whose operators keep their
    input. What is frozen keeps nothing, and holds a layer's tensors while it computes.
    """
    tower, trainable = case.model.vision, case.settings.finetuning
    patches = 0 if tower is None else case.micro_batch_size * case.image_tokens * tower.spatial_merge_size**2
    if tower is None or not patches:
        return Operator(0)
    size = case.itemsize
    hidden, inner = patches * tower.hidden_size * size, patches * tower.ffn_hidden_size * size
    # Two norms' inputs and outputs, q, k, v, the context; before and behind the activation, twice before with a gate.
    layer = 8 * hidden + inner * (4 if tower.gated else 2) + 4 * patches * tower.num_attention_heads
    trained = trainable.finetuning_type == "full"
    tower_trained = trained and not trainable.freeze_vision_tower
    projector_trained = trained and not trainable.freeze_multi_modal_projector
    # The gradients of a layer's widest operator: its output's, and its input's.
    working = 2 * inner + hidden
    one = Operator(layer, working, working) if tower_trained else Operator(0, layer, 0)
    operators = [repeat(one, tower.num_layers)]
    # Patches side by side, of which a projector makes one token: norm, linear, GELU, linear.
    merged = 4 * hidden + patches // tower.spatial_merge_size**2 * case.model.architecture.hidden_size * size
    kept = merged * tower.num_mergers if projector_trained or tower_trained else 0
    operators.append(Operator(kept, merged, merged if kept else 0))
    return chain(operators)
