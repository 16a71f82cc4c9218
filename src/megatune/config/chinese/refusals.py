"""Reasons of keys that are known and refused, in Chinese, by the English reason: a changed one is not found here."""

from __future__ import annotations

REFUSALS = {
    "training is what this command does": "这个命令做的就是训练",
    "only full fine-tuning is built; LoRA and freezing are not yet": "只实现了全参数微调；LoRA 和冻结尚未实现",
    "the supported model families need no code from a checkpoint's repository, so none is ever run": (
        "支持的模型系列不需要检查点仓库里的代码，因此从不运行"
    ),
    "only TensorBoard is built; metrics.jsonl holds the same numbers for other tools": (
        "只实现了 TensorBoard；metrics.jsonl 中有同样的数字，可供其他工具使用"
    ),
    "a checkpoint is always a Hugging Face model as it is; there is no other form to save": (
        "检查点本身就是 Hugging Face 模型，没有其他保存形式"
    ),
    "how many rows are tokenised together changes no result here, and is chosen by the program": (
        "一起分词多少行不影响结果，由程序自己选择"
    ),
    "vision-language models are not built yet; only text is read": "视觉语言模型尚未实现，只读取文本",
    "the loss is always divided by the global number of trained tokens, once; any other mean weighs tokens unequally": (
        "损失总是除以被训练 token 的全局总数，只除一次；其他平均方式会使各 token 的权重不等"
    ),
    "the engine's own layers are used, on every machine; Transformer Engine is not needed": (
        "在任何机器上都使用引擎自己的层，不需要 Transformer Engine"
    ),
    "Megatron-Core is the only engine here": "这里只有 Megatron-Core 一个引擎",
    "Megatron-Core's data parallelism expects a gradient for every parameter, and every parameter gets one": (
        "Megatron-Core 的数据并行要求每个参数都有梯度，而每个参数确实都有"
    ),
    "LoRA is not built yet": "LoRA 尚未实现",
    "Megatron-Core shards the optimizer itself: see use_distributed_optimizer": (
        "Megatron-Core 自己切分优化器状态：见 use_distributed_optimizer"
    ),
    "the key `attention_backend` chooses the kernel": "由 `attention_backend` 选择内核",
    "Megatron-Core's keys say what is recomputed": "重计算由 Megatron-Core 的键决定",
    "the key `optimizer` chooses the optimizer: adam (AdamW) or sgd": "由 `optimizer` 选择优化器：adam（AdamW）或 sgd",
}
FIXES = {
    "write finetuning_type: full": "写 finetuning_type: full",
    "write report_to: tensorboard, or report_to: none": "写 report_to: tensorboard 或 report_to: none",
    "write attention_backend: auto": "写 attention_backend: auto",
    "write recompute_granularity: full": "写 recompute_granularity: full",
    "write optimizer: adam or optimizer: sgd": "写 optimizer: adam 或 optimizer: sgd",
}
