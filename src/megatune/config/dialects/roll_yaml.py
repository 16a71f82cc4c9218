"""Writes what was read as one file that says the same: references resolved, each key with where it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatune.config.dialects.roll import ReadRL
from megatune.config.dialects.roll_schema import TOP
from megatune.config.dialects.roll_tree import Tree
from megatune.config.values import shown

_ORIGIN_COLUMN = 64
_SECRET = re.compile(r"(_|^)(key|token|password|secret)$", re.IGNORECASE)  # api_key, HF_TOKEN; not max_new_tokens


def run_yaml(read: ReadRL) -> str:
    """Write the keys of a run, and the defaults of the top level; `megatune rl run.yaml` repeats it.

    Secrets are left out.
    """
    written = list(_lines(read.tree, ""))
    defaults = [info for info in TOP.infos.values() if info.name not in read.tree and info.default is not None]
    written += [_line(f"{info.name}: {shown(info.default, quoted=True)}", "default") for info in defaults]
    return "\n".join(written) + "\n"


def _lines(tree: Tree, indent: str) -> Iterator[str]:
    for key, node in tree.items():
        if _SECRET.search(key):
            continue
        if isinstance(node, dict):
            yield f"{indent}{shown(key, quoted=True)}:" if node else f"{indent}{shown(key, quoted=True)}: {{}}"
            yield from _lines(node, f"{indent}  ")
        else:
            yield _line(f"{indent}{shown(key, quoted=True)}: {shown(node.value.data, quoted=True)}", node.origin)


def _line(text: str, origin: str) -> str:
    return f"{text:<{_ORIGIN_COLUMN}}  # {' '.join(origin.split())}"
