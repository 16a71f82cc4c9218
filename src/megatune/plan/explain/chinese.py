"""Headings, connecting words and phrases of cost, in Chinese. Imported only where Chinese is asked for."""

from __future__ import annotations

from megatune.plan.explain.words import Words

CHINESE = Words(
    colon="：",
    comma="，",
    stop="。",
    parentheses="（{}）",
    takes="取值",
    default="默认",
    group="分组",
    also="键名",
    what="说明",
    how="原理",
    when="何时修改",
    values="各取值",
    cost="代价",
    parts={
        "weights": "权重",
        "gradients": "梯度",
        "master_weights": "主权重（fp32）",
        "optimizer_state": "优化器状态",
        "activations": "激活",
        "logits_and_loss": "logits 和损失",
        "communication": "通信缓冲区",
        "expert_imbalance": "专家不均衡",
        "framework": "框架",
    },
    ground="{model}，{gpus} × {gpu}，{layout}",
    assumed={
        "case": "假定的场景；可用文件或 --model、--gpus、--gpu 指定",
        "machines": "机器是假定的；可用 --gpus、--gpu 指定",
    },
    semicolon="；",
    tokens="每步 {rows} 行，每行 {tokens} 个 token",
    now="{value}：{memory}，每步 {seconds}",
    fullest="最满的 stage 占用 {size} / {device}",
    memory="最满的 stage {change}",
    no_memory="显存不变",
    step_time="每步时间 {change}",
    token_time="每个 token 的时间 {change}",
    no_time="时间不变",
    does_not_fit="放不下",
    uncertainty="时间的不确定度为 ±{percent}；权重、梯度和优化器状态是精确的",
    beside="并设 {changes}",
    none="无：规划的显存和时间都不变",
    not_compared="无法比较：此处没有其他有效取值",
    not_here="此处无效：{why}",
    not_planned="未规划：{why}",
    against="与 {value} 相比：{effect}",
    refused="已知，但会被拒绝",
    refused_values="拒绝",
    passes="允许",
    instead="改为",
    settings="{file} 设置了什么",
    none_set="什么都没有设置：全部取默认值。",
    is_default="即默认值",
    off="关闭：{what}",
    remarks="备注",
    no_remarks="无：没有错误，每一项都起作用。",
    without_effect="需要 {needs}，否则 {key} 不起作用",
    experts="MoE 模型",
    line="第 {number} 行",
    whole="整体，{ground}：{memory}，每步 {seconds}，每块 GPU 每秒 {rate} 个 token",
    title="设置",
    head="""\
一次训练的全部设置：写在 YAML 文件里，或在其后写 `key=value`，或写成 `--key value`。没有写的取默认值。
未列出的键会被拒绝，超出范围的值也会被拒绝。

`megatune explain KEY` 说明单个设置，以及它对某个模型和机器的代价；`megatune explain FILE.yaml` 逐项说明一个文件。
本页即 `megatune explain --all --language zh` 的输出，由 `python docs/generate_settings.py` 写出；
英文见 [settings.md](settings.md)。
""",
    refused_head="""\
## 已知但会被拒绝

LLaMA-Factory 文件中已知、但这里不支持的键。不要求任何事情的取值可以通过，其他取值会以下述理由被拒绝。

| 键 | 拒绝 | 允许 | 理由 |
|---|---|---|---|
""",
    every_other="其他任何取值",
    the_rest="其余",
)
