"""Types, ranges and units of settings in Chinese."""

from __future__ import annotations

from megatune.config.setting import SettingInfo

UNITS = {
    "checkpoints": "个检查点",
    "epochs": "epoch",
    "experts": "个专家",
    "layers": "层",
    "micro-batches": "个微批次",
    "model chunks per stage": "每个 stage 的层组数",
    "processes": "个进程",
    "rows": "行",
    "rows, or a share below 1": "行，或小于 1 的比例",
    "samples": "个样本",
    "seconds": "秒",
    "share of all steps": "占总步数的比例",
    "stages": "个 stage",
    "steps": "步",
    "steps, or a share below 1": "步，或小于 1 的比例",
    "tokens": "个 token",
}
_KINDS: tuple[tuple[type, str], ...] = (
    (bool, "true 或 false"),
    (int, "整数"),
    (float, "数"),
    (str, "文本"),
    (list, "列表，或用逗号分隔的值"),
    (dict, "名字到值的映射"),
)
_RANGE = {"ge": "至少", "gt": "大于", "le": "至多", "lt": "小于"}


def expected(info: SettingInfo) -> str:
    """`SettingInfo.expected` in Chinese."""
    if info.choices:
        listed = "、".join(
            "true" if value is True else "false" if value is False else str(value) for value in info.choices
        )
        words = f"列表，取自：{listed}" if list in info.kinds else f"可选：{listed}"
    elif list in info.kinds and info.items is not str:
        words = "数的列表，或用逗号分隔的数"
    else:
        words = "，或".join(word for kind, word in _KINDS if kind in info.kinds)
    words += "".join(f"，{_RANGE[name]} {limit}" for name, limit in info.bounds.items())
    return f"{words}，或 null" if info.optional else words
