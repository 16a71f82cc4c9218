"""All ranks of a run were given the same settings, or it ends before it trains: each reads its own file and flags."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Sequence

from megatune.config.setting import Mark
from megatune.config.settings import Settings, all_settings, setting_value
from megatune.config.values import shown
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError


def check_same_settings(settings: Settings) -> None:
    """Refuse to train with settings that are not the same on all ranks. Collective.

    Args:
        settings: as this rank was given them, before its machine's model and hub completed them.

    Raises:
        MegatuneError: SETTINGS, on every rank: each key that differs, with its values and who has them.
    """
    mine = {
        info.name: shown(setting_value(settings, path))
        for path, info in all_settings().items()
        if not info.marks & {Mark.SECRET, Mark.MACHINE}  # what machines read is compared itself (machines.py)
    }
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(groups.gather(digest))) == 1:
        return
    everyone = groups.gather((socket.gethostname(), mine))
    fix = "start all ranks with the same file and the same flags"
    findings = []
    for key in mine:
        ranks: dict[str, list[int]] = {}
        for rank, (_, given) in enumerate(everyone):
            ranks.setdefault(given.get(key, "nothing"), []).append(rank)
        if len(ranks) > 1:
            hosts = [host for host, _ in everyone]
            each = "; ".join(f"{value} on {_named(held, hosts)}" for value, held in ranks.items())
            findings.append(Finding(f"ranks were given different settings: {key}: {each}", fix=fix))
    raise MegatuneError(findings, ExitCode.SETTINGS)


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """[0, 1, 2, 5] -> "ranks 0 to 2, 5 (host a)"."""
    names = sorted({hosts[rank] for rank in ranks})
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    hosts_named = f"{'host' if len(names) == 1 else 'hosts'} {', '.join(names[:3])}{more}"
    return f"{groups.named(ranks)} ({hosts_named})"
