"""Settings in Chinese: 批次."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "batch.per_device_train_batch_size": Translation(
        english="867a2dbb",
        what="一个微批次的行数，即一个进程一次计算的行数。",
        how="激活显存与它成正比。全局批次 = 它 × gradient_accumulation_steps × 数据并行大小。",
        when="行较短且显存有余时调大：更大的矩阵乘法更能用满 GPU。打包或长行通常为 1。",
    ),
    "batch.gradient_accumulation_steps": Translation(
        english="f628af2f",
        what="梯度累积：一步中的微批次数，逐个计算之后优化器才更新权重。",
        how="梯度累加，因此显存只取决于一个微批次。有流水线时，stage 空闲的时间约为一步计算的（stage 数 − 1）/ 微批"
        "次数。",
        when="显存不变而想要更大的全局批次时调大。有流水线时取 pipeline_model_parallel_size 的数倍；有虚拟 stage 时"
        "必须是它的倍数。",
    ),
    "batch.per_device_eval_batch_size": Translation(
        english="09309f36",
        what="评估时一个微批次的行数。",
        how="评估不为反向传播保存激活，所以可以比训练时更大。不影响结果。",
        when="评估耗时较长时调大。",
    ),
}
