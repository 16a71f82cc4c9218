"""Settings that the model's config.json decides where they are not written: the weight of the balancing loss."""

from __future__ import annotations

from megatune.architecture import Architecture, MixtureOfExperts
from megatune.config.dialects.table import AUX_LOSS
from megatune.config.load import Loaded

CONFIG = "config.json"
_ROUTED = ("aux_loss", "seq_aux_loss")  # the kinds of balancing that have a loss


def of_model(loaded: Loaded, architecture: Architecture) -> tuple[Loaded, list[str]]:
    """Return the settings with the weight of the balancing loss, as if a user had written it, and lines that say so.

    As in mcore_adapter and Megatron-SWIFT 3 it is config.json's router_aux_loss_coef where none is written. A written
    weight of Transformers' formula is converted to Megatron-Core's.
    """
    entry, moe = loaded.entries.get(AUX_LOSS), architecture.moe
    written = loaded.settings.experts.moe_aux_loss_coeff
    if moe is None or AUX_LOSS in loaded.invalid:
        return loaded, []
    if written is None:
        return _published(loaded, moe)
    row = None if entry is None else loaded.dialect.row_of(entry.key)
    if entry is None or row is None or not row.pooled_loss:
        return loaded, []
    value = written * pooled_factor(moe)
    line = (
        f"{entry.key} {written:g}: moe_aux_loss_coeff {value:.4g}, for Transformers' loss pools the {sum(moe.layers)} "
        f"layers and grows with the {moe.router_topk} experts of a token, and Megatron-Core's is summed over layers"
    )
    return loaded.taking({AUX_LOSS: value}, entry.where, entry.origin), [line]


def pooled_factor(moe: MixtureOfExperts) -> float:
    """Return what a weight of Transformers' balancing loss is multiplied by to be one of Megatron-Core's.

    With f(l, e) the mean number of times that a token chooses expert e in layer l, and P(l, e) its mean probability,
    Transformers' loss is E sum_e mean_l f mean_l P, and Megatron-Core's sum_l E/k sum_e f P. Where all layers route
    alike the second is L/k times the first, and so are its gradients.
    """
    return moe.router_topk / sum(moe.layers)


def _published(loaded: Loaded, moe: MixtureOfExperts) -> tuple[Loaded, list[str]]:
    value = moe.aux_loss_coeff if loaded.settings.experts.moe_router_load_balancing_type in _ROUTED else 0.0
    lines = [f"moe_aux_loss_coeff {value:g}: router_aux_loss_coef of {CONFIG}"] if value else []
    return loaded.taking({AUX_LOSS: value}, CONFIG, CONFIG), lines
