// Curves of one or several runs. The server downsamples points; polls return the new ones.
import { h } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";
import { ask, isReport, usePoll } from "page/api";
import { duration, number, remember, remembered, t } from "page/words";

const html = htm.bind(h);
export const COLORS = ["#4f6ef7", "#e8743b", "#19a979", "#c24fd6", "#d9a514", "#13a4b4", "#e0465e", "#7a6ff0"];
// Charts: title, and a filter of the metrics that it shows.
const CHARTS = [
  ["rewards", (key) => /^(reward|critic\/rewards\/mean|eval_reward|rewards\/(chosen|rejected|margins))$/.test(key)],
  ["loss", (key) => key === "loss"],
  ["evaluation", (key) => key === "eval_loss"],
  ["accuracy", (key) => /^(eval_)?(accuracy|rewards\/accuracies)$/.test(key)],
  ["learning_rate", (key) => key === "learning_rate"],
  ["grad_norm", (key) => key === "grad_norm"],
  ["throughput", (key) => key === "tokens_per_second"],
  ["memory", (key) => key === "memory_gib"],
  ["experts", (key) => /^(load_balancing_loss|z_loss)$|expert/.test(key)],
  ["response", (key) => /^response_length(_max)?$/.test(key)],
  ["policy", (key) => /^actor\/(entropy|approxkl|policykl|kl_loss|ppo_ratio_clipfrac)$/.test(key)],
];
const ALWAYS = ["loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "memory_gib"];
const DASHES = [[], [6, 4], [2, 3], [10, 3, 2, 3]];

// Merges an answer into the known curves of a run: for each metric, columns of records, steps, seconds and values.
function merged(known, answer, keys) {
  const start = answer.from;
  const curves = {};
  for (const key of keys) {
    const before = start > 0 && known ? known.curves[key] : null, added = answer.curves[key];
    if (!before) { if (added) curves[key] = added; continue; }
    let kept = before[0].length;
    while (kept && before[0][kept - 1] >= start) kept--;
    curves[key] = before.map((column, place) => column.slice(0, kept).concat(added ? added[place] : []));
  }
  return { ...answer, curves, keys: keys.join() };
}

function useCurves(runs, isLive) {
  const [known, setKnown] = useState({});
  const current = useRef({}), wanted = useRef([]);
  const ids = runs.map((run) => run.id).join("\n");
  const read = async (isOver) => {
    for (const { id } of runs) {
      const before = current.current[id];
      const keys = isReport ? null : [...new Set([...ALWAYS, ...wanted.current, ...(before ? before.names.filter((key) => CHARTS.some(([, shows]) => shows(key))) : [])])].sort();
      const same = before && keys && before.keys === keys.join();
      try {
        const answer = await ask("series", isReport ? { run: id } : { run: id, keys: keys.join(), ...(same ? { first: before.count, level: before.level, generation: before.generation } : {}) });
        if (isOver()) return;
        const nothing = same && answer.from > 0 && answer.count === before.count && answer.generation === before.generation;
        if (!nothing) current.current = { ...current.current, [id]: merged(before, answer, keys || answer.names) };
      } catch { /* the list says that the server does not answer */ }
    }
    const shown = Object.fromEntries(runs.map(({ id }) => [id, current.current[id]]).filter(([, curve]) => curve));
    current.current = shown;
    if (!isOver()) setKnown((last) => (runs.every(({ id }) => last[id] === shown[id]) && Object.keys(last).length === Object.keys(shown).length ? last : shown));
  };
  const [asked, setAsked] = useState(0);
  usePoll(async (isOver) => { await read(isOver); if (Object.values(current.current).some((each) => each.names.some((key) => !each.keys.split(",").includes(key) && CHARTS.some(([, shows]) => shows(key))))) await read(isOver); }, isLive ? 2 : 0, [ids, isLive, asked]);
  return [known, (keys) => { wanted.current = keys; setAsked(asked + 1); }];
}

// A bias-corrected moving average. Its width is relative to the length of the curve, regardless of the number of points.
function smoothed(values, smoothing) {
  const weight = smoothing ** (200 / Math.max(1, values.length));
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (value === null || !smoothing) return value;
    mean = mean * weight + value * (1 - weight);
    norm = norm * weight + (1 - weight);
    return mean / norm;
  });
}

function Chart({ title, lines, axis, smoothing, isLog }) {
  const place = useRef(), plot = useRef();
  const data = useMemo(() => {
    const tables = [];
    for (const line of lines) {
      const x = line.curve[axis === "time" ? 2 : 1], order = [], seen = new Set();
      for (let at = x.length - 1; at >= 0; at--) if (!seen.has(x[at])) { seen.add(x[at]); order.push(at); }
      order.reverse();
      const values = order.map((at) => (isLog && !(line.curve[3][at] > 0) ? null : line.curve[3][at]));
      tables.push([order.map((at) => x[at]), values, smoothed(values, smoothing)]);
    }
    return uPlot.join(tables, tables.map(() => [0, 0, 0]));
  }, [lines, axis, smoothing, isLog]);
  const shape = lines.map((line) => line.label + line.color).join("\n") + axis + isLog + (smoothing > 0) + document.documentElement.dataset.theme;
  useEffect(() => {
    const style = getComputedStyle(document.documentElement), ink = style.getPropertyValue("--dim"), grid = { stroke: style.getPropertyValue("--grid"), width: 1 };
    const series = lines.flatMap((line) => [
      { label: `${line.label} raw`, stroke: line.color + "40", width: 1, show: smoothing > 0, spanGaps: true, points: { show: false } },
      { label: line.label, stroke: line.color, width: 1.8, dash: line.dash, spanGaps: true, value: (_, value) => number(value), points: { show: line.curve[0].length < 40, size: 5 } },
    ]);
    const value = (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick)));
    const options = {
      width: place.current.clientWidth, height: 190, series: [{ label: t(axis), value: (_, x) => (axis === "time" ? duration(x) : number(x)) }, ...series],
      scales: { x: { time: false }, y: { distr: isLog ? 3 : 1 } }, legend: { live: true }, cursor: { sync: { key: `curves-${axis}` }, points: { size: 6 } },
      axes: [{ stroke: ink, grid, ticks: grid, size: 30, values: (_, ticks) => ticks.map((tick) => (axis === "time" ? duration(tick) : number(tick))) }, { stroke: ink, grid, ticks: grid, size: 62, values: value }],
    };
    plot.current = new uPlot(options, data, place.current);
    const observer = new ResizeObserver(() => place.current && plot.current.setSize({ width: place.current.clientWidth, height: 190 }));
    observer.observe(place.current);
    return () => { observer.disconnect(); plot.current.destroy(); };
  }, [shape]);
  useEffect(() => { if (plot.current && plot.current.data !== data) plot.current.setData(data); }, [data]);
  return html`<figure class="chart" data-chart=${title}><figcaption>${t(title)}</figcaption><div ref=${place}></div></figure>`;
}

export function Curves({ runs }) {
  const [axis, setAxis] = useState(remembered("axis") || "step");
  const [smoothing, setSmoothing] = useState(+(remembered("smoothing") ?? 0.6));
  const [isLog, setLog] = useState(false);
  const [isOpen, setOpen] = useState(false);
  const [known, want] = useCurves(runs, runs.some((run) => ["running", "starting", "stopping"].includes(run.state)));
  const names = [...new Set(Object.values(known).flatMap((each) => each.names))].sort();
  const rest = names.filter((key) => !CHARTS.some(([, shows]) => shows(key)));
  const charts = [...CHARTS, ...(isOpen ? rest.map((name) => [name, (key) => key === name]) : [])];
  const drawn = charts.map(([title, shows]) => {
    const lines = runs.flatMap((run, place) => Object.entries(known[run.id]?.curves || {}).filter(([key, curve]) => shows(key) && curve[0].length).map(([key, curve], number) => ({
      key, curve, color: runs.length > 1 ? run.color : COLORS[(place + number) % COLORS.length], dash: runs.length > 1 ? DASHES[number % 4] : [],
      label: runs.length > 1 ? (names.filter(shows).length > 1 ? `${run.name} ${key}` : run.name) : key,
    })));
    return lines.length ? html`<${Chart} key=${title} title=${title} lines=${lines} axis=${axis} smoothing=${["learning_rate", "memory"].includes(title) ? 0 : smoothing} isLog=${isLog && title !== "learning_rate"} />` : null;
  });
  const notices = runs.flatMap((run) => (known[run.id]?.notices || []).map((notice) => ({ ...notice, run })));
  return html`<div class="bar">
      <label>${t("axis")} <select value=${axis} onChange=${(event) => { setAxis(event.target.value); remember("axis", event.target.value); }}>
        <option value="step">${t("step")}</option><option value="time">${t("time")}</option></select></label>
      <label>${t("smoothing")} <input type="range" min="0" max="0.99" step="0.01" value=${smoothing} onInput=${(event) => { setSmoothing(+event.target.value); remember("smoothing", event.target.value); }} />
        <output>${smoothing.toFixed(2)}</output></label>
      <label><input type="checkbox" checked=${isLog} onChange=${() => setLog(!isLog)} /> ${t("log_scale")}</label>
      ${rest.length > 0 && html`<label><input type="checkbox" checked=${isOpen} onChange=${() => { setOpen(!isOpen); if (!isReport) want(isOpen ? [] : rest); }} /> ${t("more")} (${rest.length})</label>`}
    </div>
    <div class="charts">${drawn.some(Boolean) ? drawn : html`<p class="dim">${t("loading")}</p>`}</div>
    ${notices.length > 0 && html`<h3>${t("notices")}</h3><ul class="notices">${notices.slice(-20).map((each) => html`<li><b>${each.step}</b> ${runs.length > 1 && each.run.name} ${each.text}</li>`)}</ul>`}`;
}
