// The page: the list of runs, and tabs for the selected runs. The selection is in the URL fragment.
import { h, render } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";
import { act, ask, given, isReport, useAnswer, usePoll } from "page/api";
import { COLORS, Curves } from "page/curves";
import { NewRun, Start, Started } from "page/new";
import { Checkpoints, Logs, Machine, Plan, Rows, Samples, Settings, Wrong } from "page/tabs";
import { currentLanguage, duration, moment, number, remember, remembered, setLanguage, t } from "page/words";

const html = htm.bind(h);
const LIVE = ["running", "starting", "stopping"];
const TABS = { curves: Curves, settings: Settings, rows: Rows, plan: Plan, checkpoints: Checkpoints, logs: Logs, samples: Samples };

const readAddress = () => {
  const asked = new URLSearchParams(location.hash.slice(1));
  return { chosen: asked.getAll("run"), tab: asked.get("tab") || "curves" };
};
const writeAddress = (chosen, tab) => { location.hash = new URLSearchParams([...chosen.map((run) => ["run", run]), ["tab", tab]]).toString(); };

function useRuns() {
  const [state, setState] = useState({ runs: null, root: "", isLost: false });
  const version = useRef(0), known = useRef(new Map());
  usePoll(async function read(isOver) {
    try {
      const answer = await ask("runs", isReport ? {} : { since: version.current });
      if (answer.version < version.current) { version.current = 0; known.current.clear(); return; }  // another server
      const isSame = answer.version === version.current && version.current > 0;
      version.current = answer.version;
      answer.gone.forEach((id) => known.current.delete(id));
      answer.runs.forEach((run) => known.current.set(run.id, run));
      setState((last) => (isSame && last.runs && !last.isLost ? last : { runs: [...known.current.values()], root: answer.root, isLost: false }));
      if (answer.more && !isOver()) await read(isOver);
    } catch {
      setState((last) => ({ ...last, isLost: true }));
    }
  }, 2, []);
  return state;
}

function Spark({ values, color }) {
  if (!values || values.length < 2) return html`<svg class="spark"></svg>`;
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const points = values.map((value, place) => `${(64 * place) / (values.length - 1)},${18 - (16 * (value - low)) / span}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 64 20"><polyline points=${points} stroke=${color} /></svg>`;
}

const State = ({ state }) => html`<span class="state ${state}"><i></i>${t(state)}</span>`;
const Progress = ({ run }) => run.total_steps > 0 && html`<div class="progress ${run.state}"><i style=${{ width: `${Math.min(100, (100 * run.step) / run.total_steps)}%` }}></i></div>`;

function List({ runs, root, chosen, choose }) {
  const [text, setText] = useState("");
  const shown = useMemo(() => {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = runs.filter((run) => words.every((word) => [run.id, run.name, run.model, run.stage, run.state, t(run.state)].join(" ").toLowerCase().includes(word)));
    return kept.sort((one, other) => LIVE.includes(other.state) - LIVE.includes(one.state) || other.changed - one.changed);
  }, [runs, text]);
  const toggle = (run) => choose(chosen.includes(run.id) ? chosen.filter((id) => id !== run.id) : [...chosen, run.id].slice(-COLORS.length));
  return html`<nav class="list"><input type="search" placeholder=${t("filter")} value=${text} onInput=${(event) => setText(event.target.value)} />
    <div class="scroll">${shown.length ? shown.map((run) => {
      const place = chosen.indexOf(run.id);
      return html`<div key=${run.id} class="run ${place >= 0 ? "chosen" : ""}" style=${{ "--mark": place >= 0 ? COLORS[place] : "transparent" }} data-run=${run.id} onClick=${() => choose([run.id])}>
        <input type="checkbox" title=${t("compare_hint")} checked=${place >= 0} onClick=${(event) => { event.stopPropagation(); toggle(run); }} />
        <div class="name"><b title=${run.id}>${run.id === "." ? run.name : run.id}</b><small>${[run.stage, run.model.split("/").pop()].filter(Boolean).join(" · ")}</small></div>
        <${Spark} values=${run.spark} color=${place >= 0 ? COLORS[place] : "var(--dim)"} />
        <div class="numbers"><${State} state=${run.state} /><small>${run.reward != null ? `${t("reward")} ${number(run.reward)}` : run.loss != null ? `${t("loss")} ${number(run.loss)}` : ""}</small></div>
        <${Progress} run=${run} /></div>`;
    }) : html`<p class="empty">${t("none")}<br /><small>${t("no_runs")} ${root}</small></p>`}</div></nav>`;
}

function Head({ run, tell }) {
  const [isBusy, setBusy] = useState(false);
  const isLive = LIVE.includes(run.state);
  const doIt = async (name) => {
    if (name === "stop" && !confirm(t("stop_sure"))) return;
    setBusy(true);
    await act(name, { run: run.id }).then(() => tell(null), tell);
    setBusy(false);
  };
  const facts = [
    [t("step"), run.step == null ? null : `${number(run.step)} / ${number(run.total_steps)}`], [t("epoch"), run.epoch == null ? null : number(run.epoch)], [t("loss"), run.loss == null ? null : number(run.loss)],
    [t("eval_loss"), run.eval_loss == null ? null : number(run.eval_loss)], [t("reward"), run.reward == null ? null : number(run.reward)],
    [t("tokens_s"), run.tokens_per_second == null ? null : number(run.tokens_per_second)], [t("eta"), isLive && run.eta_seconds != null ? duration(run.eta_seconds) : null], [t("changed"), isLive ? null : moment(run.changed)],
  ];
  return html`<header class="head"><div class="title"><h2>${run.name}</h2><${State} state=${run.state} /><span class="dim">${[run.stage, run.model].filter(Boolean).join(" · ")}</span>
      <span class="gap"></span>${!given.read_only && (isLive ? html`<button id="stop" class="danger" disabled=${isBusy || run.state === "stopping"} onClick=${() => doIt("stop")}>${t("stop")}</button>`
        : run.state !== "finished" && html`<button id="resume" class="primary" disabled=${isBusy} onClick=${() => doIt("resume")}>${t("resume")}</button>`)}</div>
    <div class="facts">${facts.filter(([, value]) => value).map(([name, value]) => html`<div><small>${name}</small><b>${value}</b></div>`)}</div><${Progress} run=${run} />
    ${run.problem && html`<div class="wrong"><p>${run.problem}${run.fix && html`<br /><em>${t("fix")}:</em> <code>${run.fix}</code>`}</p></div>`}</header>`;
}

function Compared({ runs }) {
  const columns = [["eval_loss", "eval_loss"], ["reward", "reward"], ["tokens_s", "tokens_per_second"]].filter(([, key]) => runs.some((run) => run[key] != null));
  return html`<table class="compare"><thead><tr><th>${t("name")}</th><th></th><th>${t("step")}</th><th>${t("loss")}</th>${columns.map(([name]) => html`<th>${t(name)}</th>`)}<th>${t("changed")}</th></tr></thead>
    <tbody>${runs.map((run) => html`<tr><td><i style=${{ background: run.color }}></i><b>${run.name}</b> <span class="dim">${[run.stage, run.model.split("/").pop()].filter(Boolean).join(" · ")}</span></td><td><${State} state=${run.state} /></td>
      <td>${number(run.step)} / ${number(run.total_steps)}</td><td>${number(run.loss)}</td>${columns.map(([, key]) => html`<td>${number(run[key])}</td>`)}<td>${moment(run.changed)}</td></tr>`)}</tbody></table>`;
}

function Page() {
  const { runs, root, isLost } = useRuns();
  const [{ chosen, tab }, setAddress] = useState(readAddress());
  const [theme, setTheme] = useState(remembered("theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
  const [, setTongue] = useState(currentLanguage());
  const [error, setError] = useState(null);
  document.documentElement.dataset.theme = theme;
  useEffect(() => {
    const listen = () => { setAddress(readAddress()); setError(null); };
    addEventListener("hashchange", listen);
    return () => removeEventListener("hashchange", listen);
  }, []);
  const list = runs || [];
  const first = isReport && !chosen.length ? list.map((run) => run.id) : chosen.length ? chosen : list.filter((run) => LIVE.includes(run.state)).concat(list).slice(0, 1).map((run) => run.id);
  const picked = first.map((id) => list.find((run) => run.id === id)).filter(Boolean).map((run, place) => ({ ...run, color: COLORS[place % COLORS.length] }));
  const special = ["machine", "start"].includes(tab);
  const names = Object.keys(TABS).filter((name) => !isReport || name !== "rows");
  const Shown = TABS[tab] || Curves;
  const many = picked.length > 1 && !["curves", "settings"].includes(tab);
  const go = (name) => writeAddress(chosen, name);
  const top = (name) => html`<button class=${tab === name ? "on" : ""} id="tab-${name}" onClick=${() => go(tab === name ? "curves" : name)}>${t(name)}</button>`;
  return html`<div class="top"><h1><span class="logo"></span>megatune</h1><span class="dim root" title=${root}>${isReport ? t("report") : root.split("/").pop()}</span><span class="gap"></span>
      ${isLost && html`<span class="bad" role="status">${t("offline")}</span>`}${!isReport && html`${top("machine")}${!given.read_only && top("start")}`}
      <button title=${t("theme")} id="theme" onClick=${() => { const next = theme === "dark" ? "light" : "dark"; setTheme(next); remember("theme", next); }}>${theme === "dark" ? "☀" : "☾"}</button>
      <button id="language" onClick=${() => { const next = currentLanguage() === "zh" ? "en" : "zh"; setLanguage(next); setTongue(next); }}>${currentLanguage() === "zh" ? "English" : "中文"}</button></div>
    <div class="body">${runs && html`<${List} runs=${list} root=${root} chosen=${picked.map((run) => run.id)} choose=${(ids) => writeAddress(ids, special ? "curves" : tab)} />`}
      <main>${special ? (tab === "machine" ? html`<${Machine} />` : html`<${NewRun} /><${Start} />`) : picked.length ? html`
        ${picked.length > 1 ? html`<${Compared} runs=${picked} />` : html`<${Head} key=${picked[0].id} run=${picked[0]} tell=${setError} />`}
        <${Wrong} error=${error} />
        <div class="tabs" role="tablist">${names.map((name) => html`<button role="tab" id="tab-${name}" class=${tab === name ? "on" : ""} onClick=${() => go(name)}>${t(name)}</button>`)}</div>
        ${many && html`<p class="dim">${t("one_run")}: <b>${picked[0].name}</b></p>`}
        <${Shown} key=${tab + picked.map((run) => run.id).join()} runs=${picked} run=${picked[0]} />` : runs ? html`<p class="empty">${chosen.length ? html`${t("not_yet")} <code>${chosen[0]}</code>` : list.length ? t("pick") : ""}</p>${chosen.length > 0 && html`<${Started} last />`}` : html`<p class="dim">${t("loading")}</p>`}</main></div>`;
}

if (given.title) document.title = `${given.title} · megatune`;
render(html`<${Page} />`, document.getElementById("page"));
