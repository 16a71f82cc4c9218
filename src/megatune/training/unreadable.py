"""Pictures that a rank could not decode: all ranks leave their samples out of the loss, or the run ends."""

from __future__ import annotations

from collections.abc import Sequence

from megatune.data.bad_rows import MOST_NAMED
from megatune.data.batch_pictures import Unreadable
from megatune.data.batches import Batch
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.errors import ExitCode, Finding, MegatuneError


def without_unreadable(
    batches: Sequence[Batch], place: RankCoordinates, *, refuse: bool
) -> tuple[list[Batch], list[Unreadable]]:
    """Return micro-batches without the labels of samples that have an unreadable picture, and these pictures.

    Each picture is decoded by one of the ranks that have its micro-batch, so that the others have to be told of it. A
    sample's file is named once: both answers of a pair have the pictures of its prompt.
    Collective: a sum over all ranks, and more only where a picture is unreadable.

    Args:
        batches: this data-parallel rank's micro-batches of a step.
        refuse: end the run instead.

    Raises:
        MegatuneError: DATA, on every rank, naming the files.
    """
    if not groups.total(sum(len(batch.unreadable) for batch in batches)):
        return list(batches), []
    mine = [
        (place.dp_rank, number, each._replace(document=each.document - each.document % batch.documents_per_sample))
        for number, batch in enumerate(batches)
        for each in batch.unreadable
    ]
    found = list(dict.fromkeys(each for of_rank in groups.gather(mine) for each in of_rank))
    if refuse:
        findings = [Finding(each.reason, each.where, each.detail) for _, _, each in found[:MOST_NAMED]]
        fix = "repair the files, or write on_bad_row: skip, which leaves their rows out of the loss"
        findings.append(Finding(f"{len(found)} images or videos of a step cannot be decoded", fix=fix))
        raise MegatuneError(findings, ExitCode.DATA)
    documents = [
        [each.document for dp_rank, batch, each in found if (dp_rank, batch) == (place.dp_rank, number)]
        for number in range(len(batches))
    ]
    kept = [batch.without(lost) if lost else batch for batch, lost in zip(batches, documents, strict=True)]
    return kept, [each for _, _, each in found]
