"""Settings in Chinese: 并行布局."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "parallel.tensor_model_parallel_size": Translation(
        english="138fa6aa",
        what="张量并行：把每一层切分到这么多进程上。",
        how="切分注意力头和前馈通道；每层前向和反向各通信两次激活，无法隐藏。权重、梯度和大部分激活按它均分。",
        when="放在一台机器内（互联快），取放得下的最小值。跨机器用流水线并行。",
    ),
    "parallel.pipeline_model_parallel_size": Translation(
        english="b0f3fcc5",
        what="流水线并行：把各层切成这么多个首尾相接的 stage。",
        how="微批次从一个 stage 传到下一个，每次只发一条小消息。流水线填充和排空时 stage 空闲，占计算的（stage 数 − "
        "1）/ 微批次数。第一个 stage 同时保存与 stage 数一样多的微批次的激活。",
        when="一台机器内张量并行也放不下时使用。微批次数取 stage 数的数倍，或用虚拟 stage。",
    ),
    "parallel.virtual_pipeline_model_parallel_size": Translation(
        english="8c481210",
        what="交错流水线：每个 stage 分成这么多个更小的层组（虚拟 stage），减少空闲。",
        how="空闲时间除以它。每个微批次经过每个 stage 这么多次，消息也相应增多，第一个 stage 保存的激活略多。",
        when="每步微批次较少时使用。要求微批次数是 pipeline_model_parallel_size 的倍数，并且每组都有层。",
    ),
    "parallel.sequence_parallel": Translation(
        english="77044b1a",
        what="序列并行：把张量并行没有切分的部分（如归一化和层的输入）沿序列切分。",
        how="每层的两次通信变成总字节相同的 gather 和 scatter；其间的张量除以 tensor_model_parallel_size。",
        when="tensor_model_parallel_size 大于 1 时都应打开：节省激活显存，不增加时间。MoE 模型必须打开。",
    ),
    "parallel.use_distributed_optimizer": Translation(
        english="f8dabba4",
        what="分布式优化器（ZeRO-1）：每个数据并行进程只保存优化器状态的一份。",
        how="梯度 reduce-scatter 而不是全部求和，各进程更新自己的一份，再收集权重：总字节与不用时相同。",
        when="保持打开：有数据并行时每个参数最多省 12 字节，不增加时间。",
    ),
    "parallel.overlap_grad_reduce": Translation(
        english="189c996e",
        what="反向传播还在进行时就在数据并行进程间对梯度求和。",
        how="在一步的最后一个微批次中，梯度一完整就按桶发送。",
        when="多 GPU 时打开：通信的大部分被隐藏。单进程时不起作用。",
    ),
    "parallel.overlap_param_gather": Translation(
        english="a07d219a",
        what="下一次前向已经开始时才收集更新后的参数。",
        how="每个桶的权重在需要它的层之前收集，提前一个桶。需要 use_distributed_optimizer 和 overlap_grad_reduce。",
        when="多 GPU 时与 overlap_grad_reduce 一起打开。",
    ),
    "parallel.overlap_p2p_comm": Translation(
        english="9c1c8645",
        what="有虚拟 stage 时，一边计算一边在 stage 之间交换激活。",
        how="发送和接收提前发起。没有虚拟 stage 时没有可重叠的。",
        when="保持打开。",
    ),
    "parallel.context_parallel_size": Translation(
        english="7da2e731",
        what="上下文并行：把每一行的序列切分到这么多进程上，作用于所有层。",
        how="每个进程持有一行的两段，一前一后，使因果注意力的计算均衡；注意力交换 key 和 value。激活除以它，权重不变，"
        "优化器状态也在这些进程间分摊。",
        when="行太长、激活放不下时使用。它占用数据并行的进程：先试重计算。",
    ),
    "parallel.cp_comm_type": Translation(
        english="019b4670",
        what="上下文并行的各进程怎样对彼此的 token 计算注意力。",
        how="数值结果相同，区别在于发送什么、能否被计算隐藏，以及对头数的要求。",
        when="长行用 p2p；key/value 头少用 all_gather；头数足够且互联快用 a2a。",
        values={
            "p2p": "计算的同时沿环传递 key 和 value",
            "all_gather": "先收集所有 key 和 value",
            "a2a": "把按序列切分换成按头切分（Ulysses）：发送最少；每个进程至少要有一个头",
        },
    ),
    "parallel.expert_model_parallel_size": Translation(
        english="61fa7a04",
        what="专家并行：把每层的专家分给这么多进程，并把 token 发给它们。",
        how="专家的权重、梯度和优化器状态除以它。它占用数据并行和上下文并行的进程，不改变全局批次；每个 MoE 层都要把"
        " token 发过去再收回来。",
        when="大的 MoE 模型首选。够用时放在一台机器内：通信量很大。",
    ),
    "parallel.expert_tensor_parallel_size": Translation(
        english="64dca181",
        what="每个专家切分到这么多进程。null 取 tensor_model_parallel_size。",
        how="专家本来就小，再切分矩阵乘法就很窄。",
        when="使用专家并行且整个专家放得下时设为 1，更快。",
    ),
    "parallel.decoder_first_pipeline_num_layers": Translation(
        english="77e4eadc",
        what="第一个流水线 stage 的层数，它还持有词嵌入。null 取均分。",
        how="其他 stage 均分剩下的层。",
        when="第一个 stage 最满时取得比其他少：它保存的微批次激活也最多。",
    ),
    "parallel.decoder_last_pipeline_num_layers": Translation(
        english="8da6400d",
        what="最后一个流水线 stage 的层数，它还计算词表上的损失。null 取均分。",
        how="其他 stage 均分剩下的层。最慢的 stage 决定整体速度。",
        when="词表大时取得比其他少：输出层的时间相当于一层或更多。",
    ),
    "parallel.account_for_embedding_in_pipeline_split": Translation(
        english="33458454",
        what="给流水线 stage 分层时把词嵌入算作一层：第一个 stage 少一层。",
        how="层数加上算入的部分一起均分。",
        when="第一个 stage 最满时，或为了让层数能整除时使用。",
    ),
    "parallel.account_for_loss_in_pipeline_split": Translation(
        english="12d8ae25",
        what="给流水线 stage 分层时把输出层和损失算作一层：最后一个 stage 少一层。",
        how="层数加上算入的部分一起均分。",
        when="词表大时使用：否则其他 stage 都要等最后一个。",
    ),
    "parallel.pipeline_model_parallel_layout": Translation(
        english="6f677257",
        what="逐个写出每个 stage 持有什么，用 | 分隔：E 词嵌入，t 一层，L 损失；t*3 和 (tt|)*4 表示重复。",
        how="Et*3|t*4|t*4|t*3L 是 14 层分 4 个 stage，或 2 个 stage 各 2 个虚拟 stage。各部分依次轮流分给 stage。",
        when="更简单的键都不能使各 stage 均衡时使用。",
    ),
}
