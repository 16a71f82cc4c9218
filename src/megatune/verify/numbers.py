"""Logits, loss and gradients of one computation, in a folder: models do not fit into memory twice.

loss.json               {"loss": mean over all trained tokens}
logits.safetensors      the sample's number -> its logits, [s, vocabulary]
gradient*.safetensors   grad/HUGGING_FACE_NAME -> its gradient
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatune.bridge.reader import SafetensorsFolder
from megatune.families.weights import Segment


def write_loss(folder: Path, loss: float) -> None:
    """Write the mean loss."""
    (folder / "loss.json").write_text(json.dumps({"loss": loss}), encoding="utf-8")


def write_logits(folder: Path, logits: Sequence[Tensor]) -> None:
    """Write the logits of each sample, [s, vocabulary] on the CPU."""
    save_file({str(index): values.contiguous() for index, values in enumerate(logits)}, folder / "logits.safetensors")


def write_gradients(folder: Path, gradients: Mapping[str, Tensor]) -> None:
    """Write gradients that are in memory, by Hugging Face name."""
    save_file({f"grad/{name}": values.contiguous() for name, values in gradients.items()},
              folder / "gradient.safetensors")  # fmt: skip


class Numbers:
    """What was written into a folder, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.loss: float = json.loads((folder / "loss.json").read_text(encoding="utf-8"))["loss"]
        self._logits = SafetensorsFolder(folder, "logits")
        self._gradients = SafetensorsFolder(folder, "gradient")

    @property
    def num_samples(self) -> int:
        return len(self._logits.names())

    @property
    def names(self) -> set[str]:
        """Hugging Face names of the parameters whose gradient is here."""
        return {name.removeprefix("grad/") for name in self._gradients.names()}

    def logits(self, sample: int) -> Tensor:
        """[s, vocabulary] of one sample."""
        return _whole(self._logits, str(sample))

    def gradient(self, name: str) -> Tensor:
        """The gradient of one parameter, in its Hugging Face shape."""
        return _whole(self._gradients, f"grad/{name}")


def _whole(folder: SafetensorsFolder, name: str) -> Tensor:
    return folder.read(Segment(name, 0, 0, folder.shape(name)[0]))
