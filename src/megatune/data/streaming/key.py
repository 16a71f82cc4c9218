"""What determines the rows of a stream. Its files may be too large to read them for a name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.data.cache.key import prepared_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings

_ENDS_BYTES = 1 << 20


def streamed_key(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> str:
    """32 hexadecimal digits of all that determines the rows; of each file its size, its start and its end.

    Raises:
        MegatuneError: as `prepared_key`.
    """
    data = settings.data
    determining = [prepared_key(settings, tokenizer, _Ends()), data.buffer_size, data.disable_shuffling]
    return hashlib.sha256(json.dumps(determining).encode()).hexdigest()[:32]


class _Ends:
    """Names files by their ends: what is appended, cut off or replaced shows there, a byte changed between does not."""

    def of(self, path: Path) -> str:
        size = path.stat().st_size
        with open(path, "rb") as file:
            start = file.read(_ENDS_BYTES)
            file.seek(max(0, size - _ENDS_BYTES))
            return hashlib.sha256(b"%d\0" % size + start + file.read(_ENDS_BYTES)).hexdigest()
