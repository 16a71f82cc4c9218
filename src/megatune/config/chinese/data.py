"""Settings in Chinese: 数据."""

from __future__ import annotations

from megatune.config.chinese.translation import Translation

TEXTS = {
    "data.dataset": Translation(
        english="8d0c0515",
        what="训练用的数据集：dataset_info.json 中的名字、路径，或 hf::OWNER/NAME:SUBSET 这样的 hub ID，逐个列出或"
        "用逗号分隔。",
        how="每个数据集只分词一次并存入缓存，之后的训练可以立即开始。NAME#500 随机取 500 行。",
        when="必填。多个数据集按 mix_strategy 和 dataset_weights 混合。",
    ),
    "data.dataset_dir": Translation(
        english="320db0c3",
        what="存放 dataset_info.json 及其所列文件的文件夹。",
        how="ONLINE 把所有名字当作 hub ID；REMOTE:OWNER/NAME 从 hub 上的数据集读取 dataset_info.json。",
        when="数据不在 ./data 时设置。`dataset` 里写路径则不需要它。",
    ),
    "data.eval_dataset": Translation(
        english="6e4d5455",
        what="训练集之外用来评估的数据集，写法与 `dataset` 相同。",
        how="与训练数据一样准备，按 eval_strategy 的时机依次完整评估。",
        when="有固定测试集时使用；想从训练集中切出一部分则用 val_size。二者只用其一。",
    ),
    "data.template": Translation(
        english="ef480c1c",
        what="对话怎样写成 token：default 和 null 使用模型分词器自带的对话模板；写名字用我们的模板，写 .yaml 路径用"
        "你自己的。",
        how="它决定每轮前后的文字、停止符，以及哪些 token 属于助手。基座模型会从数据中学会它。",
        when="训练时用将来提问时用的模板。`megatune data preview` 可以看到它把你的数据变成什么样。",
    ),
    "data.cutoff_len": Translation(
        english="bf7a2b83",
        what="最长的样本，也是打包后的行长；更长的样本由 truncation_strategy 处理。",
        how="不打包时微批次与其中最长的行一样长，它只是上限；打包时以及 stage pt 中，行会填满到这个长度。激活显存与"
        "它成正比，注意力时间与文档长度的平方成正比。",
        when="设为值得保留的最长样本：`megatune data stats` 会显示长度分布。行太长放不下时，增大 "
        "context_parallel_size 或打开重计算。",
    ),
    "data.truncation_strategy": Translation(
        english="8c17822b",
        what="长于 cutoff_len 的样本怎么办。",
        how="第一步之前的报告会统计截断和丢弃的数量。stage pt 的文本总是无损地切成多段，与此无关。",
        when="半截回答会教错东西时用 drop；不允许悄悄丢失任何内容时用 error。",
        values={
            "budget": "逐轮截断，提问和回答按比例让出长度",
            "drop": "丢弃该样本",
            "left": "保留样本的末尾",
            "right": "保留样本的开头",
            "error": "结束训练并指出这些行",
        },
    ),
    "data.packing": Translation(
        english="d5c1c43a",
        what="把多个样本放进一行（最多 cutoff_len 个 token），减少填充。null 只打包 stage pt 的文本。",
        how="在整个数据集上用最佳适应法分配样本。每个样本只看到自己，位置从 0 开始，因此损失和梯度与不打包时相同。",
        when="样本远短于 cutoff_len 时都应打开。一行里会有许多样本，要保持步数不变请减小批次。",
    ),
    "data.group_by_length": Translation(
        english="91462492",
        what="把长度相近的行放进同一批，减少填充。",
        how="先打乱，再在最多 50 个批次的组内按长度排序；最长的一行排在最前，显存不足会立刻暴露。",
        when="用于不能打包的训练。打包的填充更少，打包后它没有用处。",
    ),
    "data.disable_shuffling": Translation(
        english="333c109c",
        what="按数据原有顺序训练，每个 epoch 都一样。",
        how="批次直接从排好的行中切出，数据集一个接一个。",
        when="用于手工编排的课程学习；其他情况打乱训练更好。",
    ),
    "data.mix_strategy": Translation(
        english="ffb0efae",
        what="多个数据集怎样合成一个。",
        how="在打包和打乱之前一次性混合。interleave 轮流从各数据集抽取，或按 interleave_probs 的概率抽取。",
        when="concat 加 dataset_weights 是最简单的配比方式；比例比“每行都见到一次”更重要时用 interleave。",
        values={
            "concat": "每个数据集完整使用",
            "interleave_under": "抽到第一个数据集用完为止",
            "interleave_over": "抽到最后一个数据集用完为止，小的会重复",
            "interleave_once": "抽到全部用完为止，不重复",
        },
    ),
    "data.interleave_probs": Translation(
        english="1bfb916d",
        what="mix_strategy 从每个数据集抽取的概率，顺序与 `dataset` 相同，总和为 1。",
        how="每次按这些概率选一个数据集，由 `seed` 决定。null 表示轮流抽取。",
        when="与 interleave 策略一起使用，让小数据集占比高于其大小。",
    ),
    "data.dataset_weights": Translation(
        english="8eb17ce8",
        what="每个 epoch 中各数据集训练几遍，顺序与 `dataset` 相同：2 是两遍，0.5 是随机的一半。",
        how="整数部分重复数据集；小数部分随机取一部分，每个 epoch 相同。",
        when="与 mix_strategy: concat 一起用，重复小而好的数据，或缩减大的数据。",
    ),
    "data.streaming": Translation(
        english="21067b89",
        what="边读取分词边训练，而不是先准备好所有行。",
        how="一个独立进程按 buffer_size 个样本一块地读取、打乱、打包，并交给所有 rank。恢复时从文件中的位置继续。",
        when="用于大到无法预先准备的数据。需要 max_steps，因为一个 epoch 有多长是未知的；只在块内混合。",
    ),
    "data.buffer_size": Translation(
        english="05003978",
        what="流式读取时，一起打乱和打包的样本数。",
        how="第一块读完并分词后训练才开始；训练当前块时准备下一块。",
        when="调大混合更好、行更满；调小能更早开始第一步。",
    ),
    "data.on_bad_row": Translation(
        english="add3b8ed",
        what="无法训练的行怎么办。",
        how="读不出来、形式不对、或没有可训练内容的行是坏行。每种都有代码，报告按代码统计。",
        when="数据应当干净时用 error；想修数据时用 quarantine。",
        values={
            "skip": "统计并报告",
            "quarantine": "另外连同原因写入 output_dir 的 bad_rows.jsonl",
            "error": "结束训练并指出这些行",
        },
    ),
    "data.tokenized_path": Translation(
        english="4baadd4f",
        what="存放准备好的行的文件夹：没有就创建，有就打开。null 存在缓存里（$MEGATUNE_CACHE 或 ~/.cache/megatune）。",
        how="文件夹中有 token，以及决定它们的一切的键；数据或设置不同的训练会被拒绝，而不是用错数据。",
        when="在一台机器上准备、在另一台上训练，或想长期保留时设置；否则缓存会自动处理。",
    ),
    "data.overwrite_cache": Translation(
        english="dc662720",
        what="即使缓存中已有，也重新准备数据行。",
        how="缓存的键包含文件内容、分词器、模板和设置，任何一项改变都会自动重新准备。",
        when="很少需要：只在键之外的东西变了时使用。",
    ),
    "data.max_samples": Translation(
        english="ed4a85d8",
        what="每个数据集最多使用前这么多行。",
        how="其余的不读取。",
        when="试跑时设小。想缩减数据用 dataset_weights，它是随机抽取。",
    ),
    "data.val_size": Translation(
        english="f44b6435",
        what="从训练数据中留出多少用于评估：小于 1 是比例，否则是行数。",
        how="一行是否留出由它自己的文本和种子决定，因此增加数据或改其他设置不会改变划分。与留出行相同的副本也不训练。",
        when="留出 0.01 到 0.1 就能看出是否过拟合。需要 eval_strategy。",
    ),
    "data.train_on_prompt": Translation(
        english="1979199b",
        what="除助手的回答外，也训练用户的各轮。",
        how="损失计入对话的每个 token；否则提问只作为上下文。",
        when="除了非常小的数据集很少有用：模型也会学着写问题。",
    ),
    "data.mask_history": Translation(
        english="4d10095c",
        what="每个对话只训练助手的最后一轮，之前的轮次只作上下文。",
        how="与 truncation_strategy: budget 一起时，过长的对话保留最后几轮，而不是最前几轮。",
        when="前几轮回答不值得学习时使用。同样的时间里训练的 token 更少。",
    ),
    "data.enable_thinking": Translation(
        english="d64c7c50",
        what="对先思考再回答的模型：没有推理过程的回答怎样书写。",
        how="true 训练模型以空的思考开头；false 去掉所有推理，并把空思考放进提问；null 保留已有的推理，没有推理时把"
        "空思考放进提问。",
        when="数据没有推理、将来也关闭思考时设为 false；数据混合时设为 null。",
    ),
    "data.preserve_thinking": Translation(
        english="cee00207",
        what="与 mask_history 一起：保留较早回答中的推理，否则会去掉。",
        how="思考模型的模板在提问时会去掉之前轮次的推理；这里把它们保留为上下文。",
        when="只有将来提问时也带着之前的推理才需要。",
    ),
    "data.default_system": Translation(
        english="a0adfce9",
        what="没有系统消息的对话使用的系统消息。null 用模板自带的。",
        how="按模板写系统消息的方式书写。已有系统消息的对话不变。",
        when="设为将来提问时使用的系统消息。",
    ),
    "data.model_name": Translation(
        english="69e8c9fd",
        what="替换数据中的 {{name}}，用来教模型它是谁。",
        how="分词之前替换。数据里有 {{name}} 而这里没写，会被拒绝。",
        when="使用身份数据集时设置。",
    ),
    "data.model_author": Translation(
        english="e11b2c1a",
        what="替换数据中的 {{author}}，用来教模型它是谁开发的。",
        how="分词之前替换。数据里有 {{author}} 而这里没写，会被拒绝。",
        when="使用身份数据集时设置。",
    ),
    "data.preprocessing_num_workers": Translation(
        english="0e1fbfd4",
        what="分词的进程数。null 为一个。",
        how="每 256 行一块分给各进程，结果按原顺序返回：进程数不影响结果。每个进程启动需要数秒。",
        when="准备数据需要几分钟以上时，往机器的核数调大。",
    ),
    "data.dataloader_num_workers": Translation(
        english="aa063db7",
        what="每个 rank 提前准备批次的进程数。0 表示在 rank 自己的进程里准备。",
        how="批次只是从准备好的行里复制：分词早已完成。进程数不影响结果。",
        when="几乎总是 0。每步很短时可设为 1 或 2。",
    ),
    "data.dataloader_pin_memory": Translation(
        english="4769e4f4",
        what="把批次放在锁页内存中，使到 GPU 的复制与计算重叠。",
        how="占用几个批次大小的主机内存；没有 GPU 时不起作用。",
        when="只有主机不允许锁页内存时才关闭。",
    ),
    "data.remove_unused_columns": Translation(
        english="eaa20e93",
        what="两个取值效果相同：从来只读取 dataset_info.json 指定的列。",
        how="接受这个键是为了让其他工具的文件原样可用。",
        when="不需要改，省略即可。",
    ),
}
