"""Settings in Chinese: 训练本身与起始模型."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "run.stage": Translation(
        english="8c66e606",
        what="训练的类型，也就决定了读取哪种形式的数据、训练哪些 token。",
        how="stage 决定一行数据怎样变成 token 和标签；模型、优化器和并行布局在各个 stage 中都一样。损失始终是被训练 "
        "token 的损失之和除以它们的全局总数。",
        when="pt 用纯文本教语言或领域知识；sft 用对话教模型行为。pt 的行默认会打包，除非 packing 另有规定。",
        values={
            "pt": "训练纯文本的每个 token",
            "sft": "训练对话中助手的各轮回答",
            "dpo": "成对的回答，其中一个更受偏好：数据可以查看，训练尚未实现",
        },
    ),
    "run.do_train": Translation(
        english="da66a622",
        what="始终为 true：这个命令做的就是训练。",
        how="接受这个键是为了让 LLaMA-Factory 的文件原样可用；false 会被拒绝。",
        when="不需要改，省略即可。",
    ),
    "run.output_dir": Translation(
        english="ce3275db",
        what="存放检查点、日志和最终模型的文件夹。",
        how="在同一文件夹上再次启动，会从其中最新的完整检查点继续。每个保留的检查点占用模型本身的大小，带训练状态时"
        "每个参数再多约 12 字节（fp32 为 8 字节）。",
        when="每次新训练都用新的文件夹，放在所有机器都能访问的磁盘上；要接着训练就写原来的文件夹。",
    ),
    "run.overwrite_output_dir": Translation(
        english="243cbdd6",
        what="即使 output_dir 中有可恢复的检查点，也从第一步开始；这些检查点会被删除。",
        how="如果 resume_from_checkpoint 指定了某个检查点，则只在训练开始时删除步数更大的检查点。",
        when="想在同一文件夹里重跑时打开。由调度器自动重启的任务不要打开，否则每次重启都从第 0 步开始。",
    ),
    "run.resume_from_checkpoint": Translation(
        english="7b37fab5",
        what="从哪里继续训练：null 取 output_dir 中最新的完整检查点（如果有），true 要求必须有，false 从不恢复，路径"
        "则指定某个检查点。",
        how="先校验摘要，再恢复优化器、学习率进度、随机数和数据位置。并行布局可以和保存时不同；布局相同则逐位一致地"
        "继续。",
        when="绝大多数情况用 null。不允许从第 0 步开始时用 true，想回到较早的一步时写路径。",
    ),
    "run.seed": Translation(
        english="4228e976",
        what="决定数据行的顺序、留出的验证集、打包以及训练随机数的种子。",
        how="行的顺序只取决于种子和 epoch，与布局无关。同样的种子和布局得到逐位相同的训练。",
        when="想知道结果有多少是偶然时改变它。改变种子也会改变 val_size 留出的行。",
    ),
    "run.num_processes": Translation(
        english="0be4ec97",
        what="整个训练的进程数，一个进程驱动一块 GPU。null 表示每块 GPU 一个；在 CPU 上取布局允许的最少进程数。",
        how="张量、流水线和上下文并行没有用掉的进程都用于数据并行。由 torchrun 启动时，以 torchrun 的进程为准。",
        when="在 CPU 上试大机器的布局，或只用机器上的一部分 GPU 时设置。CPU 上的数据并行进程不要多于核数。",
    ),
    "run.ddp_timeout": Translation(
        english="25b798e6",
        what="一次集合通信最多等待其他进程多久，超过就结束训练。",
        how="启动、加载、保存和每次通信都受它限制。某个进程在这段时间（最多半小时）内没有进展，就会被指出，训练随之结束。",
        when="存储慢或模型很大、加载保存较久时调大。调大也意味着更晚才发现卡死。",
    ),
    "run.check_agreement_interval": Translation(
        english="6ba18a48",
        what="每隔这么多步，检查本应持有相同权重和梯度的进程是否真的相同；null 为关闭。",
        how="在这些步上，更新前比较梯度，更新后比较权重。一旦发现不同就结束训练并指出是哪些 rank。",
        when="用于新机器和排查故障：设为 100 就能以很小的代价发现坏卡。机器可信之后关掉。",
    ),
    "run.memory_check": Translation(
        english="2b02735d",
        what="开始之前是否规划每个流水线 stage 的显存，以及放不下时怎么办。",
        how="权重、梯度和优化器状态是精确计算的，激活和缓冲区是估算的："
        "公开的训练中三分之二的实际占用在规划值的 1/1.25 到 1.25 倍之间，"
        "MoE 模型在 1/1.4 到 1.4 倍之间。用最满的 stage 与设备显存比较。按下限仍放不下的才算放不下；"
        "介于下限和规划值之间的会启动并给出警告，附上数字和可行的改法。",
        when="保持 error。若你确知放得下而估算拒绝，用 warn；off 则不做规划直接启动。",
        values={
            "error": "拒绝按不确定度下限仍放不下的训练",
            "warn": "只给出警告",
            "off": "不做规划",
        },
    ),
    "run.run_name": Translation(
        english="02993795",
        what="训练在日志和 TensorBoard 中的名字。null 取 output_dir 的名字。",
        how="TensorBoard 的事件文件写在 output_dir/runs 下的同名目录中。",
        when="多个输出文件夹末级目录同名时设置。",
    ),
    "model.model_name_or_path": Translation(
        english="b6937002",
        what="要训练的 Hugging Face 检查点文件夹：config.json、safetensors 和分词器。",
        how="每个进程只读取自己持有的 safetensors 切片，不需要转换。最终模型的形式和键名与之相同。",
        when="必填。教模型行为时从指令模型开始，继续预训练时从基座模型开始。",
    ),
    "model.trust_remote_code": Translation(
        english="43d7b551",
        what="始终为 false：支持的模型系列不需要检查点仓库里的代码，因此从不运行。",
        how="模型按本项目自己对该系列的描述构建，config.json 只提供数字。",
        when="不需要改：true 会被拒绝。",
        values={
            "false": "不运行检查点里的任何代码",
        },
    ),
    "model.finetuning_type": Translation(
        english="32141a64",
        what="训练哪些参数。",
        how="full 为每个参数保存权重、梯度和优化器状态：bf16 下每个参数 18 字节，fp32 下 16 字节，由并行布局和分布式"
        "优化器分摊。",
        when="目前只有 full；LoRA 和冻结会被明确拒绝。",
        values={
            "full": "训练全部参数",
        },
    ),
}
