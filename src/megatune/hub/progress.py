"""How far a download is, counted by several threads, and how it is ended."""

from __future__ import annotations

from typing import Any

from megatune.progress import Progress


class FetchProgress(Progress):
    """Bytes that came, of all."""

    _stopped = False

    def add(self, count: int) -> None:
        """Count bytes that came; of a file that has to begin anew, less than 0.

        Raises:
            InterruptedError: after `stop`, so that a download ends.
        """
        if self._stopped:
            raise InterruptedError("stopped")
        super().add(count)

    def stop(self) -> None:
        """End the downloads that report here, at the next bytes that come."""
        self._stopped = True

    def bar_class(self) -> type:
        """Return what `huggingface_hub` makes a bar of for each file, in place of one of tqdm: it reports here."""
        progress = self

        class FileBar:
            def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
                progress.add(initial)

            def __enter__(self) -> FileBar:
                return self

            def __exit__(self, *_: object, **__: object) -> None:
                pass

            # Bytes over the network may be fewer than those of the file: `update` alone counts.
            close = set_postfix_str = update_transfer = set_transfer_postfix_str = __exit__

            def update(self, count: int | float | None = 1) -> None:
                progress.add(int(count or 0))

        return FileBar
