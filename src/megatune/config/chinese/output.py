"""Settings in Chinese: 日志、检查点与评估."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "logging.logging_steps": Translation(
        english="066cd0f2",
        what="每隔这么多步一行日志，其中的损失是这些步的平均。",
        how="控制台、metrics.jsonl、trainer_log.jsonl 和 TensorBoard 都按这个间隔。eval_steps: null 也取它。",
        when="短训练用 1，长训练用 10 到 100。",
    ),
    "logging.report_to": Translation(
        english="d438e174",
        what="除日志文件外，指标还记录到哪里。",
        how="日志文件总会写：output_dir 中的 trainer_log.jsonl 和 metrics.jsonl。",
        when="没人看 TensorBoard 时用 none。",
        values={
            "tensorboard": "output_dir/runs 中的事件文件",
            "none": "只有日志文件",
        },
    ),
    "logging.plot_loss": Translation(
        english="0a2a5cd5",
        what="训练中和结束时把损失曲线画到 output_dir/training_loss.png。",
        how="最多每 30 秒画一次，占用时间不超过百分之一。",
        when="matplotlib 启动慢或不需要时关闭。",
    ),
    "logging.profile": Translation(
        english="c2f6566f",
        what="用 torch.profiler 分析几步。",
        how="output_dir/profile 中每个被分析的 rank 有一份时间线（rank-K.json.gz，"
        "用 Perfetto 或 chrome://tracing 打开）和一张最慢算子的表（rank-K.txt）。"
        "GPU 的内存分配也会记录：内存耗尽的 rank 留下 memory-rank-K.pickle，"
        "在 pytorch.org/memory_viz 查看。",
        when="想知道慢的一步由什么组成时打开。被分析的步会变慢。",
    ),
    "logging.profile_step_start": Translation(
        english="c5d9924e",
        what="从这一步之后的一步开始分析。",
        how="进程最初的几步比其他步慢：设为 2 或更大即可避开。",
        when="训练很短时调低。",
    ),
    "logging.profile_step_end": Translation(
        english="d995a8ae",
        what="分析的最后一步。",
        how="时间线随步数增长：大模型每步几百 MB。",
        when="比 profile_step_start 大一到三步。",
    ),
    "logging.profile_ranks": Translation(
        english="be87271f",
        what="参与分析的 rank。",
        how="各自写自己的文件；其他 rank 不会变慢，但会等待它们。",
        when="加上最后一个流水线阶段的 rank，或较慢的 rank。",
    ),
    "checkpoint.save_strategy": Translation(
        english="dbe0e63b",
        what="何时保存检查点。训练结束时总会保存。",
        how="先写在旁边，计算摘要后改名：检查点要么完整，要么不存在。所有进程同时写，训练等待。",
        when="可能中断的训练用 steps。",
        values={
            "steps": "每 save_steps 步",
            "epoch": "每个 epoch 之后",
            "no": "只在结束时",
        },
    ),
    "checkpoint.save_steps": Translation(
        english="27cb3f42",
        what="每隔这么多步一个检查点。",
        how="机器故障时最多丢失这么多步。每次保存要写出模型和训练状态，bf16 下每个参数约 14 字节。",
        when="使保存间隔在 15 到 60 分钟之间。",
    ),
    "checkpoint.save_total_limit": Translation(
        english="d14ff852",
        what="只保留最新的这么多个检查点。null 全部保留。",
        how="新的完整之后才删除旧的。使用 load_best_model_at_end 时最好的一个总会保留。",
        when="磁盘小时设为 2 或 3：8B 模型的一个检查点约 115 GB。",
    ),
    "checkpoint.save_only_model": Translation(
        english="aad6ad0d",
        what="不保存训练状态：检查点只有七分之一大小（fp32 为三分之一），但不能恢复训练。",
        how="只写出 Hugging Face 模型。",
        when="每个检查点都只用来评估、不会恢复时使用。",
    ),
    "checkpoint.save_hf_model": Translation(
        english="4b986f18",
        what="始终为 true：每个检查点本身就是 Hugging Face 模型。",
        how="权重按检查点原有的键写成 safetensors。",
        when="不需要改，省略即可。",
    ),
    "evaluation.eval_strategy": Translation(
        english="ed4ecf69",
        what="何时评估。需要 val_size 或 eval_dataset。",
        how="不更新权重，计算所有留出行上的损失，并记录困惑度。",
        when="观察训练过程用 steps，小数据训练几遍用 epoch。",
        values={
            "no": "从不",
            "steps": "每 eval_steps 步，以及结束时",
            "epoch": "每个 epoch 之后",
        },
    ),
    "evaluation.eval_steps": Translation(
        english="692d8209",
        what="每隔这么多步评估一次。null 取 logging_steps，与 Transformers 相同。",
        how="最后一步总会评估。",
        when="建议设置：logging_steps 往往太频繁。使用 load_best_model_at_end 时 save_steps 必须是它的倍数。",
    ),
    "evaluation.load_best_model_at_end": Translation(
        english="12e9013f",
        what="最终模型取评估损失最低的检查点，而不是最后一个。",
        how="output_dir 中的最终模型从该检查点复制，它永远不会被删除。",
        when="epoch 偏多、评估损失会回升时使用。save_strategy 必须与 eval_strategy 相同。",
    ),
}
