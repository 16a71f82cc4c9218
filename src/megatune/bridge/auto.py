"""Register model types that Transformers lacks, but computes identically under another name."""

from __future__ import annotations

from megatune.families import FAMILIES


def register_types() -> None:
    """Let Transformers' AutoConfig and AutoModel load every family without running code from a checkpoint."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for family in FAMILIES.values():
        if family.computed_as and family.model_type not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(family.model_type, CONFIG_MAPPING[family.computed_as])
            names = get_checkpoint_conversion_mapping(family.computed_as)
            if names is not None:
                register_checkpoint_conversion_mapping(family.model_type, names)
