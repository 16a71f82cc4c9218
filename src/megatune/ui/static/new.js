// The form for a new run, with errors next to its fields, the resulting plan and settings file, and the first rows.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import htm from "htm";
import { act, useAnswer } from "page/api";
import { RowCards, Wrong } from "page/tabs";
import { t } from "page/words";

const html = htm.bind(h);
const PAUSE = 400;  // debounce of key strokes, in milliseconds
const EMPTY = { model: "", data: "", goal: "", gpus: "", gpu: "", output: "" };

// The draft for the answers, debounced; outdated responses are dropped.
function useDraft(answers) {
  const [state, setState] = useState({});
  const latest = useRef(0);
  useEffect(() => {
    const number = ++latest.current, isLate = () => number !== latest.current;
    if (!answers.model && !answers.data) return undefined;
    setState((last) => ({ ...last, isBusy: true }));
    const timer = setTimeout(async () => {
      try {
        const draft = await act("draft", answers);
        if (isLate()) return;
        setState({ draft });
        if (!draft.run) return;
        const rows = await act("first_rows", answers).catch((wrong) => ({ wrong }));
        if (!isLate()) setState({ draft, rows });
      } catch (error) { if (!isLate()) setState({ error }); }
    }, PAUSE);
    return () => clearTimeout(timer);
  }, [JSON.stringify(answers)]);
  return state;
}

function Form({ answers, change, wrong, offers }) {
  const [isElsewhere, setElsewhere] = useState(false);
  const field = (name, label, input) => html`<label data-field=${name} class=${wrong[name] ? "invalid" : ""}>${label}${input}
    ${wrong[name] && html`<${Wrong} error=${{ findings: wrong[name] }} />`}</label>`;
  const text = (name, extra = {}) => html`<input name=${name} value=${answers[name]} onInput=${(event) => change({ [name]: event.target.value.trim() })} ...${extra} />`;
  const choice = (name, options) => html`<select name=${name} value=${answers[name]} onChange=${(event) => change({ [name]: event.target.value })}>${options.map(([value, shown]) => html`<option value=${value}>${shown}</option>`)}</select>`;
  const list = (name, values) => html`<datalist id="list-${name}">${values.map((value) => html`<option value=${value} />`)}</datalist>`;
  const here = offers.here ? `${offers.here} GPU` : "CPU";
  return html`${list("model", offers.models)}${list("data", offers.data)}
    ${field("model", t("model"), text("model", { list: "list-model", placeholder: "Qwen/Qwen3-0.6B" }))}
    ${field("data", t("data"), text("data", { list: "list-data", placeholder: "my.csv" }))}
    ${field("goal", t("goal"), choice("goal", [["", t("goal_any")], ...offers.goals.map((goal) => [goal, t(`goal_${goal}`)])]))}
    ${field("machine", t("devices"), html`<select name="machine" value=${isElsewhere ? "other" : ""} onChange=${(event) => {
      const isOther = event.target.value === "other";
      setElsewhere(isOther);
      change(isOther ? { gpus: "8", gpu: "h100-80g" } : { gpus: "", gpu: "" });
    }}><option value="">${t("this_machine")}: ${here}</option><option value="other">${t("other_machines")}</option></select>`)}
    ${isElsewhere ? html`<div class="two">${field("gpus", t("gpu_count"), text("gpus", { inputmode: "numeric" }))}${field("gpu", t("gpu_kind"), choice("gpu", offers.gpus.map((kind) => [kind, kind])))}</div>`
      : wrong.gpu && html`<${Wrong} error=${{ findings: wrong.gpu }} />`}
    ${field("output", t("file"), text("output", { placeholder: t("file_new") }))}`;
}

export function NewRun() {
  const [offers, failed] = useAnswer("offers", {});
  const [answers, setAnswers] = useState(EMPTY), [edited, setEdited] = useState(null), [said, setSaid] = useState({});
  const change = (some) => { setAnswers((last) => ({ ...last, ...some })); setEdited(null); setSaid({}); };
  useEffect(() => { if (offers) change({ model: offers.models[0] || "", data: offers.data[0] || "" }); }, [offers]);
  const { draft, rows, error, isBusy } = useDraft(answers);
  if (!offers) return html`<${Wrong} error=${failed} />`;
  const run = draft && draft.run, text = edited ?? run?.text;
  const doIt = async (name) => {
    setSaid({ isBusy: true });
    try {
      const answer = await act(name, { file: run.file, text });
      if (answer.findings.length) setSaid({ error: { findings: answer.findings } });
      else if (answer.number !== null && answer.run) location.hash = new URLSearchParams({ run: answer.run, tab: "curves" }).toString();
      else setSaid({ written: run.file });
    } catch (problem) { setSaid({ error: problem }); }
  };
  const isReady = run && !isBusy && !said.isBusy;
  return html`<section class="card new"><h3>${t("new_run")} ${isBusy && html`<span class="dim">${t("planning")}</span>`}</h3><${Wrong} error=${error} />
    <div class="two"><form class="start" onSubmit=${(event) => event.preventDefault()}><${Form} answers=${answers} change=${change} wrong=${draft?.wrong || {}} offers=${offers} />
      ${run && html`<pre class="log" id="plan">${run.lines.join("\n")}</pre>`}</form>
    <div>${run && html`<h4><code>${run.file}</code></h4><textarea id="yaml" spellcheck=${false} rows=${Math.min(44, text.split("\n").length + 1)} value=${text} onInput=${(event) => { setEdited(event.target.value); setSaid({}); }}></textarea>
      <${Wrong} error=${said.error} />
      <p>${run.here && html`<button id="begin" class="primary" disabled=${!isReady} onClick=${() => doIt("begin")}>${t("start_now")}</button> `}<button id="write" disabled=${!isReady} onClick=${() => doIt("write")}>${t("write_file")}</button>
      ${said.written && html` <span class="good">✓ ${said.written}</span>`}</p>${!run.here && html`<pre class="log">${run.command}</pre>`}`}</div></div>
    ${rows && html`<h3>${t("first_rows")}</h3>${rows.wrong ? html`<${Wrong} error=${rows.wrong} />` : html`<${RowCards} answer=${rows} />`}`}</section>`;
}

export function Start() {
  const [file, setFile] = useState(""), [changes, setChanges] = useState(""), [error, setError] = useState(null), [isRight, setRight] = useState(false);
  const doIt = async (name) => {
    setError(null);
    setRight(false);
    try {
      const answer = await act(name, { file, overrides: changes.split("\n").map((line) => line.trim()).filter(Boolean) });
      if (answer.findings.length) setError(Object.assign(new Error(""), { findings: answer.findings }));
      else setRight(true);
    } catch (problem) { setError(problem); }
  };
  return html`<section class="card start"><h3>${t("from_file")}</h3>
      <label>${t("file")}<input id="file" value=${file} placeholder="examples/demo/demo.yaml" onInput=${(event) => setFile(event.target.value)} /></label>
      <label>${t("overrides")}<textarea id="changes" rows="4" placeholder="learning_rate=1e-4" onInput=${(event) => setChanges(event.target.value)}>${changes}</textarea></label>
      <p><button id="check" onClick=${() => doIt("check")}>${t("check")}</button> <button id="start" class="primary" onClick=${() => doIt("start")}>${t("start_now")}</button> ${isRight && html`<span class="good">✓ ${t("all_right")}</span>`}</p>
      <${Wrong} error=${error} /></section><${Started} />`;
}

// The processes started from this page: all, or only the last one, until its run is in the list.
export function Started({ last }) {
  const [started] = useAnswer("started", {}, 2);
  if (!started?.length) return null;
  return html`<h3>${t("started")}</h3>${(last ? started.slice(0, 1) : started).map((each) => html`<section class="card"><h4><code>${each.command}</code> <span class="dim">${each.exit_code === null ? t("running") : `${t("exit_code")} ${each.exit_code}`}</span></h4><pre class="log">${each.said}</pre></section>`)}`;
}
