"""Megatron-Core is what each patch of it was written for, and nothing of it is set beside the table of patches."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from megatron.core.tensor_parallel import random
from packaging.version import Version

from megatune import engine
from megatune.engine.patches import ADAM, PATCHES, VERSIONS, Patch, patch_model

ENGINE = Path(engine.__file__).parent
INSTALLED = version("megatron-core")
RELIED_ON = [(patch, name) for patch in PATCHES for name in patch.relies_on]


def source_of(name: str) -> str:
    """Text of MODULE:NAME or MODULE:CLASS.METHOD as its file has it: what is imported may be patched by now."""
    module, _, path = name.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec
    assert spec.origin
    text = Path(spec.origin).read_text(encoding="utf-8")
    node: ast.AST = ast.parse(text)
    for part in path.split("."):
        found = [child for child in getattr(node, "body", ()) if getattr(child, "name", None) == part]
        assert found, f"{module} of Megatron-Core {INSTALLED} has no {path}"
        node = found[0]
    return ast.get_source_segment(text, node) or ""


@pytest.mark.parametrize(("patch", "name"), RELIED_ON, ids=[name for _, name in RELIED_ON])
def test_what_a_patch_relies_on_is_what_it_was_checked_with(patch: Patch, name: str) -> None:
    digest = hashlib.sha256(source_of(name).encode()).hexdigest()[:12]
    checked = patch.relies_on[name]
    known = [version for version in checked if Version(version) <= Version(INSTALLED)]
    assert digest == checked[max(known, key=Version)], (
        f"{name} of Megatron-Core {INSTALLED} is not the text that a patch was checked with "
        f"({', '.join(checked)}). Compare the two, and what engine/ sets in {patch.module}: "
        f"{', '.join(patch.names)}. {patch.reason} Where it is still right, run tests/engine and tests/parity with "
        f'{INSTALLED}, and write "{INSTALLED}": "{digest}" in engine/patches.py.'
    )


def test_every_text_is_of_a_version_that_was_read() -> None:
    read = {version.rpartition(".")[0] for version in VERSIONS}
    begun = {version for patch in PATCHES for digests in patch.relies_on.values() for version in digests}
    assert begun <= read
    first = min(VERSIONS, key=Version).rpartition(".")[0]
    assert all(first in digests for patch in PATCHES for digests in patch.relies_on.values())


def set_names(source: str) -> list[str]:
    """Names of modules of Megatron-Core that a file's code sets itself."""
    tree = ast.parse(source)
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and alias.name.startswith("megatron")}
    # A name for one of them, as `module: Any = layers`.
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id in modules:
            modules.add(ast.unparse(node.target))
    targets = [
        target
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(each)
    ]
    found = [ast.unparse(one) for one in targets if isinstance(one, ast.Attribute)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"]
    found += [f"{ast.unparse(call.args[0])}." for call in calls]
    return [name for name in found if name.partition(".")[0] in modules]


def test_nothing_is_patched_beside_the_table() -> None:
    assert set_names("from megatron.core.x import layers\nmodule: Any = layers\nmodule.a = layers.b = 1") == [
        "module.a",
        "layers.b",
    ]
    assert set_names("import megatron.core.optimizer as opt\nsetattr(opt, 'Adam', 1)") == ["opt."]
    wrong = {path.name: set_names(path.read_text(encoding="utf-8")) for path in ENGINE.rglob("*.py")}
    assert not {name: found for name, found in wrong.items() if found}


def test_a_name_that_no_patch_declares_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"megatron\.core\.optimizer: .*SGD"):
        ADAM.set(SGD=None)


def test_a_recomputed_output_gets_its_memory_back_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.17 on Megatron-Core compiles an extension for this where it is first needed."""
    patch_model(swiglu=False, weight_gradients=False)
    monkeypatch.setattr(random, "load_inline", None, raising=False)
    values = torch.randn(6, requires_grad=True)
    recomputed = random.CheckpointWithoutOutput()
    output = recomputed.checkpoint(torch.tanh, values)
    view = output.view(2, 3)
    result = view * view
    recomputed.discard_output_and_register_recompute(result)
    assert not output.untyped_storage().size()
    result.sum().backward()
    torch.testing.assert_close(values.grad, 2 * torch.tanh(values) * (1 - torch.tanh(values) ** 2))
