// The page's texts: English, Chinese. Names of settings and metrics are the same in both.
const WORDS = {
  runs: ["Runs", "训练"], filter: ["Filter by name, model or state", "按名称、模型或状态筛选"], none: ["No runs here yet", "这里还没有训练"],
  no_runs: ["A run appears here once it has started. It is a folder with a run.yaml below", "训练启动后会出现在这里：即下面这个目录中含有 run.yaml 的文件夹"],
  pick: ["Choose a run on the left", "请在左侧选择一个训练"], compare: ["Compare", "对比"], compare_hint: ["Show this run next to others", "与其他训练一起显示"],
  curves: ["Curves", "曲线"], settings: ["Settings", "设置"], rows: ["Data", "数据"], plan: ["Plan", "规划"], checkpoints: ["Checkpoints", "检查点"],
  logs: ["Logs", "日志"], samples: ["Answers", "回答"], machine: ["Machine", "本机"], start: ["New run", "新建训练"],
  running: ["running", "运行中"], starting: ["starting", "启动中"], stopping: ["saving and stopping", "保存并停止中"], finished: ["finished", "已完成"],
  stopped: ["stopped", "已停止"], failed: ["failed", "失败"], interrupted: ["interrupted", "已中断"], ended: ["ended", "已结束"],
  stop: ["Save and stop", "保存并停止"], resume: ["Resume", "继续训练"], stop_sure: ["Save a checkpoint and stop this run?", "保存检查点并停止该训练？"],
  step: ["step", "步"], time: ["time", "时间"], epoch: ["epoch", "轮次"], smoothing: ["Smoothing", "平滑"], axis: ["Axis", "横轴"], log_scale: ["Log scale", "对数"],
  loss: ["Loss", "损失"], evaluation: ["Evaluation", "评估"], learning_rate: ["Learning rate", "学习率"], grad_norm: ["Gradient norm", "梯度范数"],
  throughput: ["Tokens per second", "每秒词元数"], memory: ["Memory, GiB", "内存 (GiB)"], rewards: ["Rewards", "奖励"], experts: ["Experts", "专家负载"],
  accuracy: ["Accuracy", "准确率"], response: ["Response length", "回复长度"], policy: ["Policy", "策略"], more: ["All other metrics", "其余指标"],
  notices: ["Notices", "提示"], eta: ["remaining", "剩余"], tokens_s: ["tokens/s", "词元/秒"], eval_loss: ["eval loss", "评估损失"], reward: ["reward", "奖励"],
  key: ["Setting", "设置项"], value: ["Value", "值"], origin: ["From", "来源"], only_set: ["Only explicitly set", "只看写出的设置"],
  only_different: ["Only differences", "只看差异"], find: ["Find a setting", "查找设置"], default: ["default", "默认"],
  trained: ["trained", "参与训练"], context: ["context", "上下文"], special: ["special token", "特殊标记"], training_rows: ["Training", "训练集"],
  eval_rows: ["Evaluation", "评估集"], previous: ["Previous", "上一页"], next: ["Next", "下一页"], prompt: ["prompt of both", "共同的提示"], chosen: ["chosen", "优选回答"],
  rejected: ["rejected", "拒绝回答"], loading: ["Loading…", "加载中…"], bad: ["Rows that cannot be trained on", "无法训练的数据"],
  planned: ["planned", "规划"], measured: ["measured", "实测"], per_step: ["Time of a step", "每步耗时"], by_stage: ["Memory by pipeline stage", "各流水线阶段的内存"],
  stage: ["Stage", "阶段"], rank: ["Rank", "进程"], peak: ["peak", "峰值"], said: ["Summary", "文字说明"], no_plan: ["There is no plan for this run", "该训练没有规划"],
  by_rank: ["Peak by rank", "各进程峰值"], name: ["Name", "名称"], size: ["Size", "大小"], files: ["Files", "文件数"], saved: ["Saved", "保存时间"],
  resumable: ["Resumable", "可继续"], verify: ["Verify", "校验"], verifying: ["Reading…", "读取中…"], whole: ["complete: every digest matches", "完整：所有摘要一致"],
  manifest_ok: ["manifest is complete", "清单完整"], yes: ["yes", "是"], no: ["no", "否"], no_checkpoints: ["No checkpoints yet", "还没有检查点"], no_logs: ["No logs", "没有日志"],
  no_samples: ["No answers: set eval_generate_steps, or rollout_dump_dir in a run of reinforcement learning", "没有回答：请设置 eval_generate_steps，强化学习训练则设置 rollout_dump_dir"], wanted: ["Reference answer", "期望的答案"],
  score: ["score", "得分"], tokens: ["tokens", "词元"], response_of: ["Response", "回复"], prompt_of: ["Prompt", "提示"], sort_score: ["Sort by score", "按得分排序"],
  cpu: ["Processors", "处理器"], ram: ["Memory", "内存"], disk: ["Disk", "磁盘"], gpu: ["GPUs", "显卡"], no_gpu: ["No GPU, or no nvidia-smi: runs compute on the CPU", "没有 GPU 或 nvidia-smi：训练在 CPU 上计算"],
  file: ["Settings file", "设置文件"], overrides: ["Overrides, one key=value per line", "修改，每行一个 key=value"], check: ["Check", "检查"], start_now: ["Start", "启动"],
  all_right: ["These settings are valid", "设置没有问题"], started: ["Started from this page", "从此页面启动"], exit_code: ["exit code", "退出码"],
  offline: ["The server does not answer", "服务器没有响应"], theme: ["Light or dark", "浅色或深色"], close: ["Close", "关闭"], follow: ["Follow", "跟随"], report: ["Report", "报告"],
  new_run: ["New run", "新建训练"], model: ["Model: a folder, or an id on a hub", "模型：文件夹或模型库中的 ID"], data: ["Data: a file of rows, or an id on a hub", "数据：数据文件或数据集 ID"],
  goal: ["Goal", "目标"], goal_any: ["chosen from data and memory", "由数据和内存决定"], goal_full: ["full fine-tuning", "全参数微调"], goal_lora: ["LoRA", "LoRA"], goal_dpo: ["DPO on pairs of answers", "DPO（成对回答）"],
  goal_rl: ["reinforcement learning", "强化学习"], devices: ["Machine", "机器"], this_machine: ["This machine", "本机"], other_machines: ["Other machines", "其他机器"], gpu_count: ["Number of GPUs", "显卡数量"], gpu_kind: ["Kind of GPU", "显卡型号"],
  file_new: ["a new name", "新文件名"], planning: ["planning…", "规划中…"], write_file: ["Only write the file", "仅写入文件"], first_rows: ["The first rows, as the model sees them", "模型看到的前几行数据"], from_file: ["From a settings file", "从设置文件启动"],
  not_yet: ["This run has not written anything yet:", "该训练尚未写入任何内容："],
  changed: ["last change", "最后更新"], one_run: ["Shown for the first selected run", "显示所选的第一个训练"], fix: ["fix", "修正"],
};
let language = localStorageGet("language") || ((navigator.language || "").startsWith("zh") ? "zh" : "en");

function localStorageGet(key) {
  try { return localStorage.getItem(key); } catch { return null; }  // a page opened from a file may have no storage
}
export const remembered = localStorageGet;
export function remember(key, value) {
  try { localStorage.setItem(key, value); } catch { /* it holds for this page */ }
}
export const currentLanguage = () => language;
export function setLanguage(value) {
  language = value;
  document.documentElement.lang = value;
  remember("language", value);
}
document.documentElement.lang = language;
export const t = (key) => (WORDS[key] ? WORDS[key][language === "zh" ? 1 : 0] : key);

// Formatting of numbers.
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}
export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  for (; value >= 1024 && place < 4; place++) value /= 1024;
  return `${value >= 100 || !place ? Math.round(value) : value.toFixed(1)} ${units[place]}`;
}
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${(minutes / 1440).toFixed(1)} d`;
}
export function moment(seconds) {
  return seconds ? new Date(seconds * 1000).toLocaleString(language === "zh" ? "zh-CN" : "en-GB", { dateStyle: "medium", timeStyle: "short" }) : "–";
}
