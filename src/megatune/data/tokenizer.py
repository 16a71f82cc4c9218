"""The tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer.

    Raises:
        MegatuneError: INPUT, when there is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "put tokenizer.json and tokenizer_config.json beside the weights"
        finding = Finding("the tokenizer cannot be loaded", str(model_dir), why, fix)
        raise MegatuneError(finding, ExitCode.INPUT) from error
