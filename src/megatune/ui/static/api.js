// Queries to the server, or to the answers embedded in a report.
import { useEffect, useState } from "preact/hooks";

export const given = JSON.parse(document.getElementById("given").textContent);
export const isReport = Boolean(given.answers);

export async function ask(name, asked = {}) {
  const query = new URLSearchParams(asked).toString();
  if (isReport) {
    const answer = given.answers[query ? `${name}?${query}` : name];
    if (answer === undefined) throw new Error("this is not in the report");
    return answer;
  }
  return answered(await fetch(`/api/${name}?${query}`, { cache: "no-store" }));
}

export async function act(name, body) {
  return answered(await fetch(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));
}

async function answered(response) {
  const content = await response.json();
  if (!response.ok) throw Object.assign(new Error(content.error), { findings: content.findings });
  return content;
}

// Calls `poll` now and every `seconds` while the page is visible, one call at a time; only once in a report.
export function usePoll(poll, seconds, depends) {
  useEffect(() => {
    let timer, ended = false;
    const again = async () => {
      if (!document.hidden) await poll(() => ended);
      if (!ended && !isReport && seconds) timer = setTimeout(again, seconds * 1000);
    };
    again();
    return () => { ended = true; clearTimeout(timer); };
  }, depends);
}

// Returns [answer, error] of a query, which is repeated every `seconds` unless that is 0.
export function useAnswer(name, asked, seconds = 0) {
  const [state, setState] = useState([null, null]);
  const key = name + JSON.stringify(asked);
  useEffect(() => setState([null, null]), [key]);
  usePoll(async (isOver) => {
    try {
      const answer = await ask(name, asked);
      if (!isOver()) setState([answer, null]);
    } catch (error) {
      if (!isOver()) setState(([answer]) => [answer, error]);
    }
  }, seconds, [key, seconds]);
  return state;
}
