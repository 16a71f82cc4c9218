"""Model FLOP of a step, for what is trained of it."""

from __future__ import annotations

from functools import lru_cache

from megatune.architecture import Architecture
from megatune.plan.case import Case
from megatune.plan.flops import num_matmul_parameters, train_flops
from megatune.plan.time.vision import vision_flops


def model_flops(case: Case) -> float:
    """As `train_flops`; of frozen matrices the weights' gradients are left out, a third of their products."""
    rows, length = case.global_batch_size, case.sequence_length
    document = round(min(case.document_length or length, length))
    matmuls, whole = _of_document(case.model.architecture, document)
    frozen = case.settings.finetuning.finetuning_type == "lora" or case.settings.finetuning.freeze_language_model
    return rows * length / document * (whole - (matmuls / 3 if frozen else 0.0)) + vision_flops(case)


@lru_cache(maxsize=4096)
def _of_document(architecture: Architecture, length: int) -> tuple[float, float]:
    """Of a document: FLOP of all matrices, and with attention."""
    return 6.0 * num_matmul_parameters(architecture) * length, train_flops(architecture, [length])
