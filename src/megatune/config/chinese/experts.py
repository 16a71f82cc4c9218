"""Settings in Chinese: 混合专家."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "experts.moe_token_dispatcher_type": Translation(
        english="f625c6a9",
        what="token 怎样到达专家。",
        how="数值结果相同，区别在于发送什么：每个 token 的专家多时，大多数进程本来就需要大多数 token。",
        when="用 alltoall，除非分担专家的进程很少。",
        values={
            "alltoall": "只把 token 发给其专家所在的进程",
            "allgather": "到处收集全部 token；进程少或每个 token 专家多时更快",
            "alltoall_seq": "alltoall 的旧名",
        },
    ),
    "experts.moe_grouped_gemm": Translation(
        english="21ee555d",
        what="用一次分组矩阵乘法计算所有本地专家，而不是逐个计算。",
        how="token 按专家排序，一次调用与所有专家的权重相乘。",
        when="保持打开：在 GPU 上快数倍。",
    ),
    "experts.moe_router_load_balancing_type": Translation(
        english="6547893a",
        what="怎样让各专家同样忙。",
        how="辅助损失（系数为 moe_aux_loss_coeff）把路由器推向分到较少的专家；sinkhorn 在训练时直接均衡选择。",
        when="通常用 aux_loss，系数大于 0；要求每个文档内均衡时用 seq_aux_loss。",
        values={
            "aux_loss": "按微批次计算的辅助损失",
            "seq_aux_loss": "按文档计算的辅助损失",
            "sinkhorn": "直接均衡选择，不用损失",
            "none": "不做均衡",
        },
    ),
    "experts.moe_aux_loss_coeff": Translation(
        english="3261b391",
        what="负载均衡损失的系数。0 只训练语言模型损失，与 Transformers 的默认相同。",
        how="日志显示不带系数的损失：专家同样忙时为 1。",
        when="长训练用 1e-3 保持均衡；短的微调不需要。",
    ),
    "experts.moe_z_loss_coeff": Translation(
        english="5b070e28",
        what="路由器 z-loss 的系数，使路由器的 logits 保持较小；null 为关闭。",
        how="它是路由器 logits 的 log-sum-exp 的均方。",
        when="16 位训练中路由器 logits 不断变大时，通常用 1e-3。",
    ),
    "experts.moe_router_dtype": Translation(
        english="9cd31254",
        what="路由器计算的数据类型。null 与 Transformers 对该系列的做法相同。",
        how="只涉及产生路由器 logits 的小矩阵乘法。",
        when="专家多且用 16 位时，fp32 更稳：否则接近的分数会由舍入决定。",
        values={
            "fp32": "用 float32 计算路由器的 logits",
            "fp64": "用 float64 计算路由器的 logits",
        },
    ),
    "experts.moe_router_topk": Translation(
        english="36c0142a",
        what="每个 token 的专家数。null 即可：config.json 里有。",
        how="与模型不同的数会被拒绝：产出的检查点会按 config.json 运行。",
        when="不需要改；要改就改 config.json。",
    ),
    "experts.moe_router_pre_softmax": Translation(
        english="8db3ce2d",
        what="选出最好的专家之前先对所有专家做 softmax。null 即可：config.json 里有。",
        how="与模型不同的取值会被拒绝：产出的检查点会按 config.json 运行。",
        when="不需要改；要改就改 config.json。",
    ),
    "experts.moe_router_bias_update_rate": Translation(
        english="482eb0b6",
        what="用于靠每个专家的偏置来均衡的模型（DeepSeek-V3）：偏置每步移动多少。",
        how="分到较少的专家偏置增加这么多，其他专家减少。偏置只参与选择专家，不参与加权。",
        when="0 保持预训练的偏置，与 Transformers 相同；预训练时用的是 1e-3。",
    ),
    "experts.moe_expert_capacity_factor": Translation(
        english="d1d5da41",
        what="每个专家最多接收平均份额的这么多倍的 token，其余丢弃。null 不丢弃。",
        how="每个进程为每个专家保留权重最大的选择。它限制了最忙的专家的显存和时间，并且会改变数值。",
        when="不均衡导致显存不足时使用：1.5 丢弃很少。Transformers 从不丢弃，所以优先做均衡。",
    ),
    "experts.moe_pad_expert_input_to_capacity": Translation(
        english="c0f22c5b",
        what="与 moe_expert_capacity_factor 一起：把每个专家的 token 填充到其容量，使形状固定。",
        how="每个专家计算的行数相同，其中一部分是 0。",
        when="很少需要：形状逐步变化使显存碎片化时使用。",
    ),
    "experts.moe_shared_expert_overlap": Translation(
        english="d44559d9",
        what="token 发往其他专家的同时计算共享专家。",
        how="共享专家处理所有 token，不需要通信，可以与通信同时进行。需要共享专家和 alltoall。",
        when="在 GPU 上使用专家并行时打开。",
    ),
}
