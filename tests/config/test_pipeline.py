"""Which pipeline chunk holds which layers."""

import pytest

from megatune.config.pipeline import PipelineChunk, parse_layout, pipeline_chunks
from megatune.config.settings import ParallelSettings

CASES = [
    ({}, 3, [3]),
    ({"pipeline_model_parallel_size": 2}, 4, [2, 2]),
    ({"pipeline_model_parallel_size": 4}, 6, [2, 2, 1, 1]),  # the last stage, with the loss, is never the fuller
    ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, 7, [2, 2, 2, 1]),
    ({"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}, 4, [1, 3]),
    ({"pipeline_model_parallel_size": 4, "decoder_last_pipeline_num_layers": 1}, 8, [3, 2, 2, 1]),
    ({"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2,
      "decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4}, 14, [1, 4, 2, 1, 4, 2]),
    ({"pipeline_model_parallel_size": 2, "account_for_embedding_in_pipeline_split": True,
      "account_for_loss_in_pipeline_split": True}, 6, [3, 3]),
    ({"pipeline_model_parallel_size": 4, "account_for_embedding_in_pipeline_split": True,
      "account_for_loss_in_pipeline_split": True}, 6, [1, 2, 2, 1]),
    ({"pipeline_model_parallel_size": 3, "account_for_embedding_in_pipeline_split": True}, 2, [0, 1, 1]),
    ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "E|t*3|(t)*2|tL"}, 6, [0, 3, 2, 1]),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "num_layers", "expected"), CASES)
def test_layers_of_each_chunk(settings, num_layers, expected):
    chunks = pipeline_chunks(ParallelSettings(**settings), num_layers)
    assert [chunk.num_layers for chunk in chunks] == expected
    assert [chunk.embedding for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
    assert [chunk.loss for chunk in chunks] == [*[False] * (len(chunks) - 1), True]


def test_a_layout_is_read():
    assert parse_layout("Et,t | (tt|)*2 t*3L") == [
        PipelineChunk(2, embedding=True), PipelineChunk(2), PipelineChunk(2), PipelineChunk(3, loss=True)
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["", "E|L", "tEL", "Et|t", "EtL|t", "Et(t|L", "Et)*2L", "Et*L", "E2tL", "EtmL"])
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_layout(text)


def test_virtual_stages_follow_from_a_layout():
    parallel = ParallelSettings(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t|t|tL")
    assert parallel.virtual_stages == 2
