"""Settings in Chinese: 重计算与内核."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "recompute.recompute_granularity": Translation(
        english="e5e0b12a",
        what="重计算：反向传播时重新计算激活，而不是保存它们。null 全部保存。",
        how="被重计算的部分只保存输入，前向多算一次。数值逐位不变。",
        when="放不下时先用 selective，选真正省显存的模块（`recompute_modules`），还不够再用 full。"
        "放得下就不要重计算，更快。",
        values={
            "full": "只保存各层的输入：显存最少，时间约多三分之一",
            "selective": "只重计算 recompute_modules；其默认值几乎不省显存",
        },
    ),
    "recompute.recompute_method": Translation(
        english="0fc7b182",
        what="full 时重计算哪些层。null 取 uniform。",
        how="uniform 每 recompute_num_layers 层一组，每组保存一个输入；block 重计算每个 stage 的前 "
        "recompute_num_layers 层，其余完整保存。",
        when="显存还有余量时用 block：减小 recompute_num_layers 直到用满。",
        values={
            "uniform": "按组重计算所有层",
            "block": "只重计算每个 stage 的前几层",
        },
    ),
    "recompute.recompute_num_layers": Translation(
        english="169c0e5a",
        what="full 时一组重计算的层数（uniform），或每个 stage 重计算的层数（block）。null 在 uniform 时取 1，block "
        "时取全部。",
        how="组越大保存的输入越少，但反向时需要同时持有整组的激活。",
        when="uniform 保持 1；block 取显存需要的层数。",
    ),
    "recompute.recompute_modules": Translation(
        english="899e0f56",
        what="selective 时重计算哪些模块。",
        how="每个模块只保存输入，前向多算一次。mla_up_proj、moe、moe_act、shared_experts 只用于有它们的模型。"
        "默认的 core_attn 花时间却几乎不省显存：没有内核保存注意力分数，例外只有 torch 在不支持 "
        "flash attention 时（V100、T4、fp32）自带的实现。",
        when="逐个加入直到放得下，代价小的在先：layernorm、moe_act 和 mla_up_proj，然后 mlp、shared_experts 和 moe。",
        values={
            "core_attn": "注意力，从其输入到输出；几乎不省显存",
            "layernorm": "每层的两个归一化",
            "mlp": "稠密前馈层",
            "moe": "稀疏前馈层，包括 token 的通信",
            "moe_act": "专家的激活函数；需要 moe_grouped_gemm",
            "mla_up_proj": "多头潜在注意力的上投影",
            "shared_experts": "共享专家",
        },
    ),
    "recompute.moe_layer_recompute": Translation(
        english="4ad2c905",
        what="反向时重计算整个 MoE 层：等于 selective 加模块 moe。",
        how="token 要第二次发往专家。",
        when="专家的激活放不下时使用，尤其是专家忙闲不均时。",
    ),
    "performance.attention_backend": Translation(
        english="a9d37efe",
        what="用哪个内核计算注意力。",
        how="启动信息会说明实际使用的内核。不保存全部分数的内核，显存与行长成正比，其他的与行长的平方成正比。",
        when="保持 auto；想比较内核，或缺少某内核时要求拒绝运行，才指定名字。",
        values={
            "auto": "设备和形状允许的最快内核",
            "flash": "flash attention；在 GPU 上需要 bf16 或 fp16",
            "fused": "cuDNN 的内核，用于一行一个文档",
            "unfused": "普通矩阵乘法，全部分数放在显存中",
            "local": "与 unfused 相同",
        },
    ),
    "performance.bias_activation_fusion": Translation(
        english="67fcaf15",
        what="前馈层的激活函数（SwiGLU）只过一遍显存。",
        how="反向只保存输入，而不是输入和 silu(gate)。",
        when="在 GPU 上打开：省显存也省时间。结果在最后几位上有差别。",
    ),
    "performance.apply_rope_fusion": Translation(
        english="103874b6",
        what="旋转位置编码在可能时只过一遍显存。",
        how="代替 query 和 key 上的多个小算子，不为反向多保存任何东西。",
        when="在 GPU 上打开。",
    ),
    "performance.cross_entropy_loss_fusion": Translation(
        english="075528a6",
        what="输出层和损失一起计算，每次一段 token。",
        how="全部 token 的 logits 从不同时在显存中；反向时逐段重新计算。false 先算出全部 logits：数倍于 token 数 × "
        "词表 × 4 字节。",
        when="保持打开：词表 15 万、微批次 token 多时省下数 GB，几乎不增加时间。",
    ),
    "performance.rms_norm_fusion": Translation(
        english="85f70171",
        what="归一化前向和反向各只过一遍显存，每个 token 为反向只保存一个数。",
        how="false 逐个算子计算，并保存输入的 fp32 副本。",
        when="保持打开。",
    ),
    "performance.gradient_accumulation_fusion": Translation(
        english="6044d989",
        what="权重梯度直接加到梯度缓冲区，中间没有副本。",
        how="计算权重梯度的矩阵乘法以缓冲区的类型直接累加，每个权重省去一遍显存读写。",
        when="在 GPU 上打开，微批次多时尤其有用。",
    ),
    "performance.manual_gc": Translation(
        english="d5446772",
        what="所有进程在相同的步上做 Python 垃圾回收，而不是各自随意。",
        how="一次回收几十毫秒，其他进程都要等它。",
        when="进程很多时打开。",
    ),
    "performance.manual_gc_interval": Translation(
        english="dc0f8878",
        what="与 manual_gc 一起：每隔这么多步回收一次。",
        how="两次回收之间，只有循环引用的对象留在主机内存里。",
        when="每步很短时调大。",
    ),
}
