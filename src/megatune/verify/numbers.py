"""Logits, loss and gradients of one computation, in a folder: models do not fit into memory twice.

loss.json               {"loss": mean over all trained tokens}
logits.safetensors      the sample's number -> its logits, [s, vocabulary]
gradient*.safetensors   grad/HUGGING_FACE_NAME -> its gradient
trace-*.safetensors     sample's number/PLACE -> what was computed there, [s, ...]; each pipeline stage writes its own
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from megatune.bridge.safetensors_files import SafetensorsFolder
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


def write_trace(folder: Path, stage: int, outputs: Mapping[tuple[int, str], Tensor]) -> None:
    """Write what one pipeline stage computed, by sample and place, [s, ...] on the CPU."""
    save_file({f"{sample}/{place}": values.contiguous() for (sample, place), values in outputs.items()},
              folder / f"trace-{stage}.safetensors")  # fmt: skip


class Trace:
    """What `write_trace` wrote into a folder, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self._file_of = {
            name: file
            for path in sorted(folder.glob("trace-*.safetensors"))
            for file in [SafetensorsFolder(folder, path.stem)]
            for name in file.names()
        }

    @property
    def places(self) -> set[str]:
        """Where something was computed."""
        return {name.partition("/")[2] for name in self._file_of}

    @property
    def num_samples(self) -> int:
        return len({name.partition("/")[0] for name in self._file_of})

    def output(self, sample: int, place: str) -> Tensor:
        """Return what was computed of one sample in a place, [s, ...]."""
        return _whole(self._file_of[f"{sample}/{place}"], f"{sample}/{place}")


class Numbers:
    """What was written into a folder, read tensor by tensor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        """Return the gradient of one parameter, in its Hugging Face shape."""
        return _whole(self._gradients, f"grad/{name}")


def _whole(folder: SafetensorsFolder, name: str) -> Tensor:
    return folder.read(Segment(name, 0, 0, folder.shape(name)[0]))
