"""Settings in Chinese: 优化器与精度."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "optimizer.optimizer": Translation(
        english="7f07a738",
        what="怎样由梯度更新权重。",
        how="adam 为每个参数保存两个滑动平均，fp32 下 8 字节；sgd 保存动量，4 字节，sgd_momentum: 0 时不保存。",
        when="语言模型用 adam。sgd 状态更少，但很少能训练得一样好。",
        values={
            "adam": "AdamW：权重衰减与梯度分开",
            "sgd": "带动量的梯度下降",
        },
    ),
    "optimizer.learning_rate": Translation(
        english="86c4c425",
        what="最高学习率，预热之后达到。",
        how="之后怎样下降由 lr_scheduler_type 决定。",
        when="全参数微调通常为 1e-6 到 5e-5，模型越大取得越低。损失跳动时调低，全局批次变大时调高。",
    ),
    "optimizer.lr_scheduler_type": Translation(
        english="71fa551a",
        what="预热之后学习率怎样变化；数值与 Transformers 中同名的调度器一致。",
        how="学习率只取决于当前步数和总步数，因此恢复训练就像从未中断。",
        when="常用 cosine 和 linear。开始时不知道训练多长，适合 warmup_stable_decay。",
        values={
            "cosine": "沿半个余弦降到 0",
            "linear": "线性降到 0",
            "constant": "保持不变，没有预热",
            "constant_with_warmup": "预热后保持不变",
            "inverse_sqrt": "按步数的平方根下降",
            "cosine_with_min_lr": "余弦下降到 min_lr，或最高学习率的 min_lr_rate 倍",
            "warmup_stable_decay": "保持不变，最后 num_decay_steps 步下降",
        },
    ),
    "optimizer.lr_scheduler_kwargs": Translation(
        english="c2e19910",
        what="调度器类型之外的参数：cosine_with_min_lr 需要 min_lr 或 min_lr_rate，warmup_stable_decay 需要 "
        "num_decay_steps。",
        how="名字与 Transformers 相同；调度器不接受的参数会被拒绝。",
        when="使用这两种调度器时设置。",
    ),
    "optimizer.warmup_ratio": Translation(
        english="d2fc85df",
        what="学习率从 0 上升的阶段占整个训练的比例。",
        how="步数为总步数乘以该比例，向上取整；第一步学习率为 0。",
        when="通常为 0.03 到 0.1：最初几步 Adam 的平均值还不可靠。与 warmup_steps 只用其一。",
    ),
    "optimizer.warmup_steps": Translation(
        english="5053babc",
        what="学习率从 0 上升的步数；小于 1 时为占训练的比例，与 Transformers 5 相同。",
        how="第一步学习率为 0，经过这么多步达到最高。",
        when="预热不应随训练长度变化时使用。与 warmup_ratio 只用其一。",
    ),
    "optimizer.weight_decay": Translation(
        english="64ca2ebe",
        what="每一步把权重往 0 拉，幅度为它乘以学习率。",
        how="归一化层和偏置除外。",
        when="0 到 0.1。训练长时重要，几个 epoch 的微调影响很小。",
    ),
    "optimizer.max_grad_norm": Translation(
        english="f713a28f",
        what="所有参数的梯度范数大于它时，按比例缩小到它。0 为关闭。",
        how="范数在梯度求和之后跨所有进程计算；日志显示缩放前的范数。",
        when="通常为 1。改之前先看日志里的范数：若一直高于它，实际学习会比学习率显示的慢。",
    ),
    "optimizer.adam_beta1": Translation(
        english="b4dcb863",
        what="Adam 的一阶矩（梯度的滑动平均）衰减得多慢。",
        how="大约是最近 1 / (1 − beta1) 步的平均。",
        when="保持 0.9。",
    ),
    "optimizer.adam_beta2": Translation(
        english="60c5e6a1",
        what="Adam 的二阶矩（梯度平方的滑动平均）衰减得多慢。",
        how="大约是最近 1 / (1 − beta2) 步的平均。",
        when="大批次和长训练常用 0.95：梯度尖峰的影响消退得更快。",
    ),
    "optimizer.adam_epsilon": Translation(
        english="c8ba04af",
        what="防止 Adam 除以接近 0 的数。",
        how="加在二阶矩的平方根上。",
        when="保持默认；16 位训练出现尖峰时有人提高到 1e-6。",
    ),
    "optimizer.sgd_momentum": Translation(
        english="e85aa4cc",
        what="optimizer: sgd 的动量；adam 不用它。",
        how="每次更新是上次更新的这个比例加上新梯度。0 不保存状态。",
        when="通常为 0.9。",
    ),
    "optimizer.num_train_epochs": Translation(
        english="4338639f",
        what="训练数据过几遍，可以是小数。设置了 max_steps 时以它为准。",
        how="每个 epoch 有自己的顺序，最后一批可能较小。学习率调度在最后一步结束。",
        when="微调通常 1 到 3。注意评估损失：过多遍会把数据背下来。",
    ),
    "optimizer.max_steps": Translation(
        english="17d96d84",
        what="训练这么多步后结束，不管 num_train_epochs。-1 表示由 num_train_epochs 决定。",
        how="学习率按这么多步的训练安排。",
        when="流式读取时以及试跑时设置。",
    ),
    "optimizer.exp_avg_dtype": Translation(
        english="2dc0f382",
        what="Adam 的一阶矩（梯度的滑动平均）的数据类型。",
        how="更新用 fp32 计算，平均值以该类型保存。",
        when="显存紧张且少量舍入无害时用 bf16；先用 use_distributed_optimizer 分摊状态。",
        values={
            "fp32": "每个参数 4 字节",
            "bf16": "每个参数 2 字节，每步舍入",
        },
    ),
    "optimizer.exp_avg_sq_dtype": Translation(
        english="05a3649b",
        what="Adam 的二阶矩（梯度平方的滑动平均）的数据类型。",
        how="更新用 fp32 计算，平均值以该类型保存。beta2 接近 1 时，每步变化小于 bf16 的精度，因此跟不上梯度的变化。",
        when="除非显存紧张，保持 fp32；用 bf16 时降低 adam_beta2。",
        values={
            "fp32": "每个参数 4 字节",
            "bf16": "每个参数 2 字节，每步舍入",
        },
    ),
    "optimizer.optimizer_cpu_offload": Translation(
        english="1039cdcf",
        what="把 Adam 的滑动平均放在主机内存中，并在主机上更新。",
        how="进程所分到的每个参数省下 8 字节显存。每步把权重和梯度复制到主机、把权重复制回来，更新由主机计算。",
        when="其他办法都放不下时使用。一步多用几个微批次，让更新只占很小的时间。",
    ),
    "optimizer.optimizer_offload_fraction": Translation(
        english="4cdead0b",
        what="与 optimizer_cpu_offload 一起：状态放在主机上的参数比例。",
        how="按参数顺序取到该比例为止，其余在 GPU 上更新。",
        when="降到刚好放得下：留在 GPU 上的部分越多，步越快。",
    ),
    "precision.bf16": Translation(
        english="037148dc",
        what="用 bfloat16 计算，主权重为 float32，梯度默认也为 float32。",
        how="每个参数：权重 2 字节，梯度 4，主权重 4，Adam 平均值 8。bfloat16 的范围与 float32 相同，不需要损失缩放。",
        when="Ampere 及之后的 GPU 的正确选择：激活显存减半，矩阵乘法快数倍。",
    ),
    "precision.fp16": Translation(
        english="6108eed5",
        what="用 float16 计算，带损失缩放。",
        how="损失乘以一个缩放系数，梯度溢出时减半，不溢出时增大；溢出的步会跳过。",
        when="用于没有 bfloat16 的 GPU（V100、T4）；其他情况用 bf16。",
    ),
    "precision.accumulate_allreduce_grads_in_fp32": Translation(
        english="76512205",
        what="bf16 或 fp16 时：梯度用 float32 累加和通信。false 则用模型的数据类型。",
        how="所有微批次的梯度累加到一个缓冲区，float32 每个参数 4 字节，否则 2 字节，再由数据并行进程求和。",
        when="显存紧张且一步微批次很少时用 false：每次相加都会舍入，通信量减半。",
    ),
}
