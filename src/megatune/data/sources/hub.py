"""The data files of a data set on a hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatune.data.sources.data_files import DEFAULT_SPLIT, README, DataFiles, read_card
from megatune.hub.repository import Hub, fetch_all, open_repository, read_file


def hub_files(
    hub: Hub, repo_id: str, where: str, *, subsets: Sequence[str] = (), split: str = DEFAULT_SPLIT, folder: str = ""
) -> tuple[Path, ...]:
    """Return the data files of a data set on a hub, fetched where the cache does not have them.

    Raises:
        MegatuneError: no such repository, subset, split or data files, or they are private (exit codes 64 and 66);
            the hub or its library cannot be reached (69); the cache cannot be written (73).
    """
    repository = open_repository(hub, repo_id, where)
    name = f"{repo_id} on {repository.host}"
    card = read_card(read_file(repository, README) or "", name)
    fix = "download it to a folder, and name the files there"
    data_files = DataFiles(list(repository.sizes), card, name=repo_id.rpartition("/")[2], where=name, fix=fix)
    return fetch_all(repository, data_files.choose(subsets, split, folder))
