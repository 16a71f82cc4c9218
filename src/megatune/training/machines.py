"""Every machine prepares rows for itself: they are the same on all, or the run ends before it trains the difference."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext

_POLL_SECONDS = 0.05
KEY = "the key"


def wait_for_machines(context: RankContext, name: str, note: str | None) -> str:
    """Wait until every machine has posted its note under a name; returns this machine's.

    Preparing data can take longer than any collective operation may, so ranks look for notes instead of waiting in one.
    A failure ends the rank that prepares, and with it the run.

    Args:
        note: of this machine, in the rank that has it; None in its other ranks.
    """
    if note is not None:
        groups.post(f"{name}/{context.node_rank}", note)
    own = wait_for_note(context, f"{name}/{context.node_rank}")
    if context.rank == 0:  # asks for all, so that the store is not asked for each by each rank
        for node_rank in range(num_machines(context)):
            wait_for_note(context, f"{name}/{node_rank}")
        groups.post(f"{name}/all", "")
    wait_for_note(context, f"{name}/all")
    return own


def check_same(context: RankContext, what: str, contents: Mapping[str, str | int] | None) -> None:
    """Refuse to train what is not the same on all machines. Collective.

    Args:
        what: is compared, in words.
        contents: counts and digests of this machine's, by name; None in ranks that leave it to another of the machine.

    Raises:
        MegatuneError: DATA, on every rank, naming the machines that differ from most of them, and in what.
    """
    if num_machines(context) == 1:
        return
    machines: dict[str, list[str]] = {}  # by their contents, in order of node rank
    found = [one for one in groups.gather((context.node_rank, socket.gethostname(), contents)) if one[2] is not None]
    for node_rank, host, of_machine in sorted(found, key=lambda one: one[0]):
        names = machines.setdefault(json.dumps(of_machine), [])
        if (name := f"{host} (node rank {node_rank})") not in names:
            names.append(name)
    most = max(machines, key=lambda one: len(machines[one]))
    names, expected = machines.pop(most), json.loads(most)
    if machines:
        findings = [_difference(what, names, other, expected, json.loads(raw)) for raw, other in machines.items()]
        raise MegatuneError(findings, ExitCode.DATA)


def _difference(
    what: str,
    names: Sequence[str],
    other_names: Sequence[str],
    expected: Mapping[str, Any],
    contents: Mapping[str, Any],
) -> Finding:
    differences = [name for name in {**expected, **contents} if expected.get(name) != contents.get(name)]
    words = [
        f"{name}: {contents[name]} instead of {expected[name]}"
        if isinstance(contents.get(name), int) and isinstance(expected.get(name), int)
        else f"{name} differs"
        for name in differences
    ]
    if KEY in contents and KEY not in differences:
        cause = "the same files and settings gave other tokens: other versions of libraries, or a damaged cache"
        fix = "install the same versions of tokenizers and transformers, and write overwrite_cache: true once"
    else:
        cause = "a local copy of a file is stale, or the tokenizer is another"
        fix = (
            "copy the data sets and the model's folder to that machine again, or keep them where all machines read them"
        )
    differ = "differs" if len(other_names) == 1 else "differ"
    what = f"machines have different {what}: {', '.join(other_names)} {differ} from {', '.join(names)}"
    return Finding(what, why=f"{'; '.join(words)}; {cause}", fix=fix)


def num_machines(context: RankContext) -> int:
    """Return how many machines the run has."""
    return context.world_size // context.local_world_size


def wait_for_note(context: RankContext, key: str, phase: str = "data") -> str:
    """Return what a rank posts under a key, for as long as that takes."""
    while (note := groups.posted(key)) is None:
        context.beat(phase, 0)
        time.sleep(_POLL_SECONDS)
    return note
