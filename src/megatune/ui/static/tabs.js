// The tabs of a run: settings, rows, plan, checkpoints, logs, samples; and the page of the machine.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import htm from "htm";
import { act, given, useAnswer, ask, usePoll } from "page/api";
import { bytes, duration, moment, number, t } from "page/words";

const html = htm.bind(h);

export function Wrong({ error }) {
  if (!error) return null;
  const findings = error.findings || [{ what: error.message }];
  return html`<div class="wrong" role="alert">${findings.map((each) => html`<p><b>${each.where}</b> ${each.what}${each.why && html`<br /><span class="dim">${each.why}</span>`}${each.fix && html`<br /><em>${t("fix")}:</em> <code>${each.fix}</code>`}</p>`)}</div>`;
}
const Loading = ({ error }) => (error ? html`<${Wrong} error=${error} />` : html`<p class="dim loading">${t("loading")}</p>`);
const Empty = ({ text }) => html`<p class="empty">${text}</p>`;

export function Settings({ runs }) {
  const [found, setFound] = useState({}), [error, setError] = useState(null);
  const [isWritten, setWritten] = useState(runs.length < 2), [isDifferent, setDifferent] = useState(runs.length > 1), [text, setText] = useState("");
  const ids = runs.map((run) => run.id).join("\n");
  useEffect(() => { Promise.all(runs.map(async (run) => [run.id, await ask("settings", { run: run.id })])).then((all) => setFound(Object.fromEntries(all)), setError); }, [ids]);
  if (error || runs.some((run) => !found[run.id])) return html`<${Loading} error=${error} />`;
  const rows = new Map();
  runs.forEach((run, place) => found[run.id].forEach((each) => {
    if (!rows.has(each.key)) rows.set(each.key, { ...each, cells: [] });
    rows.get(each.key).cells[place] = each;
  }));
  const kept = [...rows.values()].filter(({ key, cells }) => {
    const values = runs.map((_, place) => cells[place]?.value);
    return key.includes(text) && (!isWritten || cells.some((each) => each && each.origin !== "default")) && (!isDifferent || runs.length < 2 || new Set(values).size > 1);
  });
  let group = null;
  return html`<div class="bar"><input type="search" placeholder=${t("find")} value=${text} onInput=${(event) => setText(event.target.value.trim())} />
      <label><input type="checkbox" checked=${isWritten} onChange=${() => setWritten(!isWritten)} /> ${t("only_set")}</label>
      ${runs.length > 1 && html`<label><input type="checkbox" checked=${isDifferent} onChange=${() => setDifferent(!isDifferent)} /> ${t("only_different")}</label>`}</div>
    <table class="settings"><thead><tr><th>${t("key")}</th>${runs.map((run) => html`<th>${runs.length > 1 ? run.name : t("value")}</th>`)}${runs.length < 2 && html`<th>${t("origin")}</th>`}</tr></thead>
    <tbody>${kept.map(({ key, cells, group: own }) => {
      const head = own !== group && own ? html`<tr class="group"><td colspan=${runs.length + 2}>${own}</td></tr>` : null;
      group = own;
      return html`${head}<tr><td><code>${key}</code></td>${runs.map((_, place) => html`<td class=${cells[place]?.origin === "default" ? "dim" : ""} title=${cells[place]?.origin}><code>${cells[place]?.value ?? "–"}</code></td>`)}
        ${runs.length < 2 && html`<td class="dim">${cells[0].origin === "default" ? t("default") : cells[0].origin}</td>`}</tr>`;
    })}</tbody></table>`;
}

export function RowCards({ answer }) {
  const text = (part) => html`<pre class="row">${part.texts.map(([content, isTrained, isSpecial]) => html`<span class="${isTrained ? "trained" : ""} ${isSpecial ? "special" : ""}">${content}</span>`)}</pre>`;
  const picture = (each) => html`<figure class="picture">${each.sources.map((source) => html`<img src=${source} alt=${each.text} />`)}<figcaption class="dim">${each.text}</figcaption></figure>`;
  const part = (each) => html`<div class="part ${each.name}">${each.name && html`<h4>${t(each.name)} <span class="dim">${each.tokens} ${t("tokens")}</span></h4>`}<div class="pictures">${each.images.map(picture)}</div>${text(each)}</div>`;
  return html`<p class="dim">${answer.notes.join(" · ")}</p>
    ${answer.rows.map((row) => html`<section class="card"><h3>${row.title}</h3>${row.parts.some((each) => each.name === "chosen")
      ? html`${row.parts.filter((each) => each.name === "prompt").map((_, place) => html`${part(row.parts[3 * place])}<div class="pair">${part(row.parts[3 * place + 1])}${part(row.parts[3 * place + 2])}</div>`)}`
      : row.parts.map(part)}</section>`)}
    ${answer.bad.length > 0 && html`<h3>${t("bad")}</h3><ul>${answer.bad.map((each) => html`<li>${each}</li>`)}</ul>`}`;
}

export function Rows({ run }) {
  const [first, setFirst] = useState(1), [isEval, setEval] = useState(false);
  useEffect(() => setFirst(1), [run.id, isEval]);
  const [answer, error] = useAnswer("rows", { run: run.id, first, count: 3, ...(isEval ? { eval: 1 } : {}) });
  return html`<div class="bar">
      <label><input type="radio" checked=${!isEval} onChange=${() => setEval(false)} /> ${t("training_rows")}</label><label><input type="radio" checked=${isEval} onChange=${() => setEval(true)} /> ${t("eval_rows")}</label>
      <button disabled=${first < 2} onClick=${() => setFirst(Math.max(1, first - 3))}>‹ ${t("previous")}</button><button onClick=${() => setFirst(first + 3)}>${t("next")} ›</button>
      <span class="legend"><span class="trained">${t("trained")}</span> <span>${t("context")}</span> <span class="special">${t("special")}</span></span></div>
    ${!answer || error ? html`<${Loading} error=${error} />` : html`<${RowCards} answer=${answer} />`}`;
}

const PART_COLORS = ["#4f6ef7", "#19a979", "#d9a514", "#e8743b", "#c24fd6", "#13a4b4", "#7a6ff0", "#e0465e", "#8a93a6", "#5b6b8c"];
function Stack({ parts, values, scale, format }) {
  return html`<div class="stack">${parts.map((part, place) => values[part] > 0 && html`<i style=${{ width: `${(100 * values[part]) / scale}%`, background: PART_COLORS[place % 10] }} title="${part}: ${format(values[part])}"></i>`)}</div>`;
}
const words = (part) => part.replaceAll("_", " ");

export function Plan({ run }) {
  const [plan, error] = useAnswer("plan", { run: run.id }, run.state === "running" ? 10 : 0);
  if (!plan) return html`<${Loading} error=${error} />`;
  if (!plan.stages.length) return html`<${Empty} text=${t("no_plan")} /><pre class="log">${plan.said.join("\n")}</pre>`;
  const peaks = plan.stages.map(({ stage }) => plan.measured_stages.find((each) => each.stage === stage)?.peak);
  const scale = 1.02 * Math.max(...plan.stages.map((stage) => stage.total), ...peaks.filter(Boolean)), slowest = 1.02 * Math.max(plan.step_seconds.total, plan.measured_seconds || 0);
  const line = (name, bar, value) => html`<div class="line"><span>${name}</span>${bar}<b>${value}</b></div>`;
  const solid = (value, whole) => html`<div class="stack"><i class="measured" style=${{ width: `${(100 * value) / whole}%` }}></i></div>`;
  const legend = (parts, shows) => html`<p class="legend">${parts.map((part, place) => shows(part) && html`<span><i style=${{ background: PART_COLORS[place % 10] }}></i>${words(part)}</span>`)}</p>`;
  const counted = (stage) => stage.total - (plan.counted === "allocated" ? stage.framework : 0);
  return html`<section class="card"><h3>${t("by_stage")}</h3>
      ${plan.stages.map((stage, place) => html`<div class="compared"><h4>${t("stage")} ${stage.stage}</h4>
        ${line(t("planned"), html`<${Stack} parts=${plan.memory_parts.filter((part) => plan.counted !== "allocated" || part !== "framework")} values=${stage} scale=${scale} format=${bytes} />`, bytes(counted(stage)))}
        ${peaks[place] > 0 && line(t("measured"), solid(peaks[place], scale), bytes(peaks[place]))}</div>`)}
      ${legend(plan.memory_parts, (part) => plan.stages.some((stage) => stage[part] > 0))}</section>
    <section class="card"><h3>${t("per_step")}</h3>
      ${line(t("planned"), html`<${Stack} parts=${plan.time_parts} values=${plan.step_seconds} scale=${slowest} format=${duration} />`, `${duration(plan.step_seconds.total)} ±${Math.round(100 * plan.uncertainty)}%`)}
      ${plan.measured_seconds && line(t("measured"), solid(plan.measured_seconds, slowest), duration(plan.measured_seconds))}
      ${legend(plan.time_parts, (part) => plan.step_seconds[part] > 0)}</section>
    ${plan.ranks.length > 0 && html`<section class="card"><h3>${t("by_rank")}</h3><div class="ranks">${plan.ranks.map((each) => html`<span title="${t("stage")} ${each.stage}"><b>${each.rank}</b> ${bytes(each.peak)}</span>`)}</div></section>`}
    <section class="card"><h3>${t("said")}</h3><pre class="log">${plan.said.join("\n")}</pre></section>`;
}

export function Checkpoints({ run }) {
  const [found, error] = useAnswer("checkpoints", { run: run.id }, run.state === "running" ? 5 : 0);
  const [verified, setVerified] = useState({});
  useEffect(() => setVerified({}), [run.id]);
  const verify = async (name) => {
    setVerified((all) => ({ ...all, [name]: "…" }));
    const result = await act("verify", { run: run.id, checkpoint: name }).then((answer) => answer.problems, (problem) => [problem.message]);
    setVerified((all) => ({ ...all, [name]: result }));
  };
  if (!found) return html`<${Loading} error=${error} />`;
  if (!found.length) return html`<${Empty} text=${t("no_checkpoints")} />`;
  const state = (each) => {
    const result = verified[each.name];
    if (result === "…") return html`<span class="dim">${t("verifying")}</span>`;
    const problems = result || (each.problem ? [each.problem] : []);
    if (problems.length) return html`<span class="bad">${problems.join("; ")}</span>`;
    return html`<span class="good">✓ ${t(result ? "whole" : "manifest_ok")}</span>`;
  };
  return html`<table><thead><tr><th>${t("name")}</th><th>${t("size")}</th><th>${t("files")}</th><th>${t("saved")}</th><th>${t("resumable")}</th><th></th><th></th></tr></thead>
    <tbody>${found.map((each) => html`<tr data-checkpoint=${each.name}><td><code>${each.name}</code></td><td>${each.bytes ? bytes(each.bytes) : "–"}</td><td>${each.files ?? "–"}</td><td>${moment(each.changed)}</td><td>${t(each.resumable ? "yes" : "no")}</td>
      <td>${state(each)}</td><td>${!given.read_only && html`<button class="verify" disabled=${verified[each.name] === "…"} onClick=${() => verify(each.name)}>${t("verify")}</button>`}</td></tr>`)}</tbody></table>`;
}

const MOST_LOG = 400000;  // characters of a log in memory

export function Logs({ run }) {
  const [logs, error] = useAnswer("logs", { run: run.id }, run.state === "running" ? 10 : 0);
  const [chosen, setChosen] = useState(null), [content, setContent] = useState(null), [isFollowing, setFollowing] = useState(true);
  const box = useRef(), end = useRef(null);
  const name = logs?.find((each) => each.name === chosen)?.name || logs?.find((each) => each.bytes > 0)?.name || logs?.[0]?.name;
  usePoll(async (isOver) => {
    if (!name) return;
    const start = end.current?.key === run.id + name ? end.current.end : undefined;
    const answer = await ask("log", { run: run.id, name, ...(start === undefined ? {} : { start }) }).catch(() => null);
    if (!answer || isOver() || (start === answer.end && answer.start === start)) return;
    setContent((before) => ((start !== undefined && answer.start === start && before ? before : "") + answer.text).slice(-MOST_LOG));
    end.current = { key: run.id + name, end: answer.end };
  }, ["running", "starting", "stopping"].includes(run.state) ? 2 : 0, [run.id, name, run.state]);
  useEffect(() => { if (isFollowing && box.current) box.current.scrollTop = box.current.scrollHeight; }, [content, isFollowing]);
  if (!logs) return html`<${Loading} error=${error} />`;
  if (!logs.length) return html`<${Empty} text=${t("no_logs")} />`;
  return html`<div class="bar"><select value=${name} onChange=${(event) => { setContent(null); end.current = null; setChosen(event.target.value); }}>${logs.map((each) => html`<option value=${each.name}>${each.name} (${bytes(each.bytes)})</option>`)}</select>
      <label><input type="checkbox" checked=${isFollowing} onChange=${() => setFollowing(!isFollowing)} /> ${t("follow")}</label></div>
    <pre class="log tall" ref=${box}>${content}</pre>`;
}

export function Samples({ run }) {
  const [step, setStep] = useState(null), [isSorted, setSorted] = useState(false);
  useEffect(() => setStep(null), [run.id]);
  const [found, error] = useAnswer("samples", { run: run.id, ...(step === null ? {} : { step }) }, run.state === "running" && step === null ? 5 : 0);
  if (!found) return html`<${Loading} error=${error} />`;
  if (found.step === null) return html`<${Empty} text=${t("no_samples")} />`;
  const samples = isSorted ? [...found.samples].sort((one, other) => other.score - one.score) : found.samples;
  return html`<div class="bar"><label>${t("step")} <select value=${found.step} onChange=${(event) => setStep(+event.target.value)}>${found.steps.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>
      <label><input type="checkbox" checked=${isSorted} onChange=${() => setSorted(!isSorted)} /> ${t("sort_score")}</label></div>
    ${samples.map((each) => html`<section class="card sample"><h3>${each.score === null ? "" : html`<span class="score ${each.score > 0 ? "good" : ""}">${t("score")} ${number(each.score)}</span>`}
        <span class="dim">${each.domain || each.where} · ${each.id} · ${each.tokens} ${t("tokens")} · ${each.finish}${Object.entries(each).filter(([key]) => key.startsWith("reward/")).map(([key, value]) => ` · ${key} ${typeof value === "number" ? number(value) : value}`)}</span></h3>
      <div class="pair"><div><h4>${t("prompt_of")}</h4><pre class="row">${each.prompt}</pre></div><div><h4>${t("response_of")}</h4><pre class="row trained">${each.response}</pre>${each.label ? html`<h4>${t("wanted")}</h4><pre class="row">${each.label}</pre>` : ""}</div></div></section>`)}`;
}

const Gauge = ({ name, part, text }) => html`<div class="line"><span>${name}</span><div class="stack"><i class=${part > 0.9 ? "hot" : ""} style=${{ width: `${100 * part}%` }}></i></div><b>${text}</b></div>`;

export function Machine() {
  const [machine, error] = useAnswer("machine", {}, 2);
  if (!machine) return html`<${Loading} error=${error} />`;
  return html`<section class="card"><h3>${machine.host}</h3>
      ${machine.cpus.map((use, place) => html`<${Gauge} name="${t("cpu")} ${place}" part=${use / 100} text="${Math.round(use)}%" />`)}
      <${Gauge} name=${t("ram")} part=${machine.memory.used / machine.memory.total} text="${bytes(machine.memory.used)} / ${bytes(machine.memory.total)}" />
      <${Gauge} name=${t("disk")} part=${machine.disk.used / machine.disk.total} text="${bytes(machine.disk.used)} / ${bytes(machine.disk.total)}" /></section>
    <section class="card"><h3>${t("gpu")}</h3>${machine.gpus.length ? machine.gpus.map((gpu) => html`<h4>${gpu.index} · ${gpu.name} <span class="dim">${number(gpu.heat)} °C · ${number(gpu.power)} W</span></h4>
      <${Gauge} name="%" part=${gpu.use / 100} text="${number(gpu.use)}%" /><${Gauge} name=${t("ram")} part=${gpu.used / gpu.total} text="${bytes(gpu.used * 2 ** 20)} / ${bytes(gpu.total * 2 ** 20)}" />`) : html`<p class="dim">${t("no_gpu")}</p>`}</section>`;
}
