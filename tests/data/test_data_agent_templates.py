"""Agent templates write what those of ms-swift write, as tests/swift_golden/make_agents.py recorded it."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from megatune.data.bad_rows import RowError
from megatune.data.conversation import ToolCall
from megatune.data.templates.tools import NOT_SUPPORTED, AgentTemplate, agent_names, agent_template
from megatune.errors import ExitCode, MegatuneError

GOLDEN = json.loads(gzip.decompress((Path(__file__).parents[1] / "swift_golden/agents.json.gz").read_bytes()))
CHAT: dict[str, str] = GOLDEN["inputs"]["chat"]
RECORDED = [
    pytest.param(int(version), name, id=f"{version}-{name}")
    for version, names in GOLDEN["versions"].items()
    for name, outputs in names.items()
    if outputs
]


def _write(template: AgentTemplate, kind: str, given: Any) -> Any:
    if kind == "offers":
        return list(template.add_tools(*given))
    if kind == "calls":
        calls, before = given
        return list(template.calls([ToolCall(*call) for call in calls], before))
    if kind == "results":
        return list(template.results(*given, **CHAT))
    return template.standalone(given, **CHAT)


@pytest.mark.parametrize(("version", "name"), RECORDED)
def test_as_ms_swift(version: int, name: str) -> None:
    template = agent_template(name, version)
    recorded = GOLDEN["versions"][str(version)][name]
    compared = 0
    for kind, outputs in recorded.items():
        for given, expected in zip(GOLDEN["inputs"][kind], outputs, strict=True):
            compared += 1
            if isinstance(expected, dict):  # ms-swift cannot write it
                with pytest.raises(RowError):
                    _write(template, kind, given)
            else:
                assert _write(template, kind, given) == expected, (kind, given)
    assert compared > 40


def test_every_name_of_ms_swift_is_written_or_refused() -> None:
    for version, names in GOLDEN["versions"].items():
        refused = {name for name, outputs in names.items() if outputs is None}
        assert refused <= set(NOT_SUPPORTED)
        for name in refused:
            with pytest.raises(MegatuneError, match=f"agent template {name} is not supported") as error:
                agent_template(name, int(version))
            assert error.value.exit_code is ExitCode.SETTINGS
    assert agent_names(4).keys() == {name for name, outputs in GOLDEN["versions"]["4"].items() if outputs}


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(MegatuneError, match=r"ms-swift 4 has no agent template 'qwen3coder'(?s:.*)qwen3_coder"):
        agent_template("qwen3coder", 4)
    with pytest.raises(MegatuneError, match=r"ms-swift 3 has no agent template 'qwen3_5'"):
        agent_template("qwen3_5", 3)


def test_templates_go_to_worker_processes() -> None:
    for template in (agent_template(name, 4) for name in agent_names(4)):
        assert pickle.loads(pickle.dumps(template)) == template
