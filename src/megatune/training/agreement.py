"""Work that one rank does for all ranks, or one process for its machine, and checks that all machines have the same
settings, model and data."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from megatune.config.model import is_changed, open_changed
from megatune.config.setting import Mark
from megatune.config.settings import Settings, all_settings, setting_value
from megatune.config.values import shown
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import is_hub_id
from megatune.launch.context import RankContext
from megatune.launch.failure import describe_failure, mark_relayed
from megatune.objectives.choose import make_objective
from megatune.training.storage.files import writing

T = TypeVar("T")


def on_rank_0(action: Callable[[], T], *, is_long: bool = False) -> T:
    """Run `action` on rank 0 and return its result on every rank. Collective.

    Args:
        is_long: the action may take longer than a collective operation may, such as deleting terabytes. The other ranks
            wait as long as the limit of the last `context.beat` allows.

    Raises:
        Exception: on every rank, the exception that `action` raised on rank 0, or a RuntimeError with its type and text
            if it cannot be pickled. The launcher reports it as rank 0's.
    """
    result: T | None = None
    error: Exception | None = None
    relayed: tuple[Exception, int] | None = None
    if groups.rank() == 0:
        try:
            result = action()
        except Exception as raised:
            error = raised
            relayed = _relayed(raised)
    result, relayed = (groups.store_broadcast if is_long else groups.broadcast)((result, relayed))
    if error is not None:
        raise error
    if relayed is not None:
        raise mark_relayed(*relayed)
    return result  # type: ignore[return-value]


def post_outcome(key: str, token: str, outcome: object) -> None:
    """Post this rank's result or exception for `posted_outcomes`.

    This is not a collective operation, so that a background thread can call it during training.

    Args:
        token: distinguishes this outcome from an earlier one of the same `key`, which it replaces.
    """
    relayed = _relayed(outcome) if isinstance(outcome, Exception) else None
    groups.store_set(f"{key}/{groups.rank()}", (token, None if relayed else outcome, relayed))


class Outcome(NamedTuple):
    """A rank's result or exception."""

    value: Any
    error: tuple[Exception, int] | None

    def result(self) -> Any:
        """Return the result, or raise the exception."""
        if self.error is not None:
            raise mark_relayed(*self.error)
        return self.value


def find_outcome(key: str, token: str, rank: int) -> Outcome | None:
    """Return the outcome that a rank posted with this token, or None if it has not posted one yet."""
    its_token, result, relayed = groups.store_get(f"{key}/{rank}") or (None, None, None)
    return Outcome(result, relayed) if its_token == token else None


def posted_outcomes(key: str, token: str, world_size: int) -> list[Any]:
    """Wait for every rank's `post_outcome` of this token, and return the results by rank.

    Raises:
        Exception: the exception of a rank, as `on_rank_0` raises it.
    """
    found: dict[int, Any] = {}
    for pause in groups.poll_intervals():
        for rank in [rank for rank in range(world_size) if rank not in found]:
            if (outcome := find_outcome(key, token, rank)) is not None:
                found[rank] = outcome.result()
        if len(found) == world_size:
            break
        time.sleep(pause)
    return [found[rank] for rank in range(world_size)]


def _relayed(error: Exception) -> tuple[Exception, int]:
    return _portable(error), describe_failure(error).exit_code


def _portable(error: Exception) -> Exception:
    """Return the error itself if it can be pickled, else a RuntimeError with its type and text."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # a class may raise anything when it is pickled
        pass
    return RuntimeError(f"{type(error).__name__}: {error}")


KEY = "the key"


def wait_for_machines(context: RankContext, name: str, note: object) -> Any:
    """Wait until every machine has posted its note under a name; return the note of this machine.

    Preparing data can take longer than a collective operation may, so ranks poll for notes instead. A failure ends the
    rank that prepares, and with it the run.

    Args:
        note: the note of this machine on the rank that posts it; None on the other ranks.
    """
    if note is not None:
        groups.store_set(f"{name}/{context.node_rank}", note)
    own = wait_for_note(context, f"{name}/{context.node_rank}")
    if context.rank == 0:  # polls for all ranks, to limit the number of requests to the store
        for node_rank in range(num_machines(context)):
            wait_for_note(context, f"{name}/{node_rank}")
        groups.store_set(f"{name}/all", True)
    wait_for_note(context, f"{name}/all")
    return own


def check_same(context: RankContext, what: str, contents: Mapping[str, str | int] | None) -> None:
    """Check that all machines have the same data. Collective.

    Args:
        what: describes the data, for the error message.
        contents: counts and digests of this machine's data, by name; None on ranks that do not report them.

    Raises:
        MegatuneError: DATA, on every rank, naming the machines that differ from the majority, and the differences.
    """
    if num_machines(context) == 1:
        return
    machines: dict[str, list[str]] = {}  # by their contents, in order of node rank
    gathered = groups.all_gather_object((context.node_rank, socket.gethostname(), contents))
    found = [one for one in gathered if one[2] is not None]
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
    what: str, names: Sequence[str], others: Sequence[str], expected: Mapping[str, Any], contents: Mapping[str, Any]
) -> Finding:
    differences = [name for name in {**expected, **contents} if expected.get(name) != contents.get(name)]
    words = [
        f"{name}: {contents[name]} instead of {expected[name]}"
        if isinstance(contents.get(name), int) and isinstance(expected.get(name), int)
        else f"{name} differs"
        for name in differences
    ]
    if KEY in contents and KEY not in differences:
        cause = "the same files and settings gave different tokens: other versions of libraries, or a damaged cache"
        fix = "install the same versions of tokenizers and transformers, and delete the prepared rows on each machine"
    else:
        cause = "a local copy of a file is stale, or the tokenizer is another"
        again = "copy the data sets and the model's folder to that machine again"
        fix = f"{again}, or keep them where all machines read them"
    differ = "differs" if len(others) == 1 else "differ"
    what = f"machines have different {what}: {', '.join(others)} {differ} from {', '.join(names)}"
    return Finding(what, why=f"{'; '.join(words)}; {cause}", fix=fix)


def model_on_node(context: RankContext, settings: Settings, model_dir: str | None, resumed: Path | None) -> Path:
    """Return the folder with the model's files, on every rank. Collective.

    Args:
        model_dir: the folder into which the launcher downloaded the model, if it did.
        resumed: the checkpoint that the run resumes from. It replaces the model, unless it holds adapters or the
            initial model is the reference.

    Raises:
        MegatuneError: as `hub.models.open_model`; INPUT, if machines have different versions of the model.
    """
    name = settings.model.model_name_or_path
    assert name is not None
    is_compared = make_objective(settings).has_reference and settings.preference.ref_model is None
    if resumed is not None and settings.finetuning.finetuning_type != "lora" and not is_compared:
        small = context.run_dir / "model"
        is_folder = not _is_fetched(name, settings, settings.model.mcore_model)
        return Path(name) if is_folder else on_rank_0(lambda: _keep_small_files(resumed, small))
    model = settings.model
    of_model = name, model.model_revision, settings, model.mcore_model
    return fetched_on_node(context, "model", *of_model, fetched=model_dir)


def fetched_on_node(
    context: RankContext,
    note: str,
    name: str,
    revision: str,
    settings: Settings,
    weights: str | None = None,
    *,
    fetched: str | None = None,
) -> Path:
    """Return the local folder of a model, on every rank. Collective.

    One process of each machine downloads it, unless the launcher did. That can take longer than a collective operation
    may, so the others poll for a note.

    Args:
        note: the model's key in the store.
        settings: of the run, which may change the model.
        weights: a folder in Megatron-Core's format with the weights; None to use those of the model's folder.
        fetched: the folder into which the launcher downloaded the model, if it did.

    Raises:
        MegatuneError: as `hub.models.open_model`; INPUT, if machines have different versions of the model.
    """
    if num_machines(context) == 1 and not _is_fetched(name, settings, weights):
        return Path(name)
    key = f"{note}/{context.node_rank}"
    if context.local_rank:
        return Path(wait_for_note(context, f"{key}/folder", "fetch"))
    context.beat("fetch", 0, limit=float("inf"))
    if fetched is not None:
        folder, version = Path(fetched), revision
    else:
        model = open_changed(settings, name, revision, weights)
        folder, version = model.fetch(), model.commit or "a folder"
    groups.store_set(key, version)
    versions = [wait_for_note(context, f"{note}/{node}", "fetch") for node in range(num_machines(context))]
    if other := next((node for node, each in enumerate(versions) if each != versions[0]), 0):
        what = f"machine 0 has {versions[0]} of {name}, and machine {other} {versions[other]}"
        fix = "write model_revision: COMMIT, or the same folder on every machine"
        raise MegatuneError(Finding(what, "model_name_or_path", fix=fix), ExitCode.INPUT)
    groups.store_set(f"{key}/folder", str(folder.absolute()))
    return folder


def _is_fetched(name: str, settings: Settings, weights: str | None) -> bool:
    """Return whether a model has to be downloaded, converted or changed first."""
    return any((weights, is_changed(settings), is_hub_id(name), is_torch_dist(name)))


def _keep_small_files(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint's configuration and tokenizer into `folder`: the run may delete the checkpoint later."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".index.json")):
                shutil.copyfile(path, folder / path.name)
    return folder


def num_machines(context: RankContext) -> int:
    """Return the number of machines of the run."""
    return context.world_size // context.local_world_size


def wait_for_note(context: RankContext, key: str, phase: str = "data") -> Any:
    """Wait without limit until a rank posts a note under a key; return it."""
    pauses = groups.poll_intervals()
    while (note := groups.store_get(key)) is None:
        context.beat(phase, 0)
        time.sleep(next(pauses))
    return note


def check_same_settings(settings: Settings) -> None:
    """Check that all ranks have the same settings. Collective.

    Args:
        settings: as given to this rank, before they were completed from the model.

    Raises:
        MegatuneError: SETTINGS, on every rank: each key that differs, with its values and their ranks.
    """
    mine = {
        info.name: shown(setting_value(settings, path))
        for path, info in all_settings().items()
        if not info.marks & {Mark.SECRET, Mark.MACHINE}  # data that machines read is compared separately
    }
    digest = hashlib.sha256(json.dumps(mine).encode()).hexdigest()
    if len(set(groups.all_gather_object(digest))) == 1:
        return
    everyone = groups.all_gather_object((socket.gethostname(), mine))
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
    return f"{groups.format_ranks(ranks)} ({hosts_named})"
