// Consumers: DCP connections by name, how far behind they are, and what to do about it.

import { html, useState } from "./vendor-htm-preact.js";
import { ask } from "./api.js";
import { Chart } from "./chart.js";
import { Field, bytes, clock, duration, fieldsOf, plural, short, useAct, useConfirm, useId, whole } from "./parts.js";

const MEANINGS = {
  live: "It has everything and gets changes as they come.",
  "catching up": "It is being sent the backlog.",
  waiting: "Some streams wait for their turn with the backlog.",
  blocked: "It does not acknowledge what it was sent.",
  paused: "An operator has stopped some of its streams.",
  idle: "It is connected and has no streams.",
  gone: "It has no connection.",
};

function Actions({ consumer, run, isRunning, confirm }) {
  const name = consumer.name;
  const post = (action, body, done) => run(async () => {
    const found = await ask("POST", `/api/v1/streams/${action}`, { name, ...body });
    return `${done}: ${plural(Object.values(found)[0], "stream")} of ${name}.`;
  });
  async function close() {
    if (await confirm(`Close the streams of ${name}?`,
      "Each stream gets STREAM_END with the reason closed. Most consumers ask again by themselves.",
      "Close its streams")) {
      post("close", {}, "Closed");
    }
  }
  function slow(event) {
    event.preventDefault();
    post("slow", { bytes_per_s: Number(fieldsOf(event.target).bytes_per_s) }, "Slowed down");
  }
  return html`<div class="toolbar actions">
    <form onSubmit=${slow} class="fields">
      <${Field} label="Bytes per second for each stream" name="bytes_per_s" type="number" min="1"
        required defaultValue="10000" />
      <button disabled=${isRunning}>Slow down</button></form>
    <button disabled=${isRunning} onClick=${() => post("stall", {}, "Paused")}>Pause</button>
    <button disabled=${isRunning} onClick=${() => post("resume", {}, "Resumed")}>Resume</button>
    <button class="danger" disabled=${isRunning} onClick=${close}>Close its streams</button>
  </div>`;
}

function Consumer({ consumer, lags, may, now }) {
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  const id = useId(); // a name may have spaces
  const rollback = consumer.last_rollback;
  const isGone = consumer.state === "gone";
  return html`<section class="card consumer" aria-labelledby=${id}>
    <h2 id=${id}>${consumer.name}${" "}
      <span class="state ${consumer.state.replace(" ", "-")}">${consumer.state}</span></h2>
    <p class="hint">${MEANINGS[consumer.state]}${consumer.bytes_per_s ? ` Slowed down to ${
      bytes(consumer.bytes_per_s)} a second for each stream.` : ""}</p>
    <dl class="facts">
      <div><dt>${isGone ? "Lag when it left" : "Lag"}</dt><dd>${plural(consumer.lag_items, "change")}</dd></div>
      <div><dt>Oldest change not sent</dt><dd>${consumer.lag_s >= 1 ? `${duration(consumer.lag_s)} old` : "none that is old"}</dd></div>
      <div><dt>Speed</dt><dd>${short(consumer.seqnos_per_s)} changes/s</dd></div>
      <div><dt>Not acknowledged</dt><dd>${bytes(consumer.unacked_bytes)}${
        consumer.window_bytes ? ` of ${bytes(consumer.window_bytes)}` : ", no flow control"}
        ${consumer.window_bytes > 0 && html`<br /><meter min="0" max="1" high="0.9" optimum="0"
          value=${consumer.unacked_bytes / consumer.window_bytes} aria-label="Window used"></meter>`}</dd></div>
      <div><dt>Streams</dt><dd>${whole(consumer.streams)}</dd></div>
      <div><dt>${isGone ? "Gone for" : "Seen for"}</dt><dd>${duration(Math.max(0, now - consumer.since_s))}</dd></div>
      <div><dt>From</dt><dd>${consumer.peer}${consumer.user ? ` as ${consumer.user}` : ""}</dd></div>
      <div class="wide"><dt>Last rollback</dt><dd>${rollback
        ? `${clock(rollback.time_s)}: partition ${rollback.vb} to seqno ${whole(rollback.to_seqno)}. ${
            rollback.reason.replace(/\.$/, "")}. ${plural(rollback.rollbacks, "rollback")} since the start.`
        : "none since the server started"}</dd></div>
    </dl>
    <${Chart} title="Lag over time" format=${short} times=${lags.times} series=${[["lag", lags.values]]} />
    ${may.operate && !isGone && html`<${Actions} consumer=${consumer} run=${run} isRunning=${isRunning}
      confirm=${confirm} />`}
    ${notice}${dialog}
  </section>`;
}

const STATES = ["blocked", "paused", "gone", "waiting", "catching up", "live", "idle"]; // the worst first
const worstFirst = (a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || b.lag_s - a.lag_s || b.lag_items - a.lag_items;
const isLate = (consumer) => ["blocked", "paused", "gone"].includes(consumer.state);

function Summary({ consumers }) {
  return html`<div tabindex="0" class="scroll card flush"><table class="summary"><caption class="hidden">All consumers, the worst first</caption>
    <thead><tr><th scope="col">Consumer</th><th scope="col">State</th><th scope="col" class="number">Lag</th>
      <th scope="col" class="number">Oldest not sent</th><th scope="col" class="number">Changes/s</th>
      <th scope="col" class="hide-narrow">Window used</th><th scope="col" class="hide-narrow">Last rollback</th></tr></thead>
    <tbody>${[...consumers].sort(worstFirst).map((consumer) => html`<tr key=${consumer.name} class=${isLate(consumer) ? "row-bad" : ""}>
      <th scope="row">${consumer.name}</th>
      <td><span class="state ${consumer.state.replace(" ", "-")}">${consumer.state}</span></td>
      <td class="number">${whole(consumer.lag_items)}</td>
      <td class="number">${consumer.lag_s >= 1 ? duration(consumer.lag_s) : "–"}</td>
      <td class="number">${short(consumer.seqnos_per_s)}</td>
      <td class="hide-narrow">${consumer.window_bytes > 0 ? html`<meter min="0" max="1" high="0.9" optimum="0"
        value=${consumer.unacked_bytes / consumer.window_bytes} aria-label="Window of ${consumer.name}"></meter>` : "no window"}</td>
      <td class="hide-narrow">${consumer.last_rollback ? clock(consumer.last_rollback.time_s) : "none"}</td></tr>`)}</tbody></table></div>`;
}

export function ConsumersPage({ head, state, may, lags }) {
  const [filter, setFilter] = useState("");
  if (!state) return html`<p class="loading" role="status">Waiting for the consumers…</p>`;
  const shown = state.consumers.filter((consumer) => consumer.name.includes(filter));
  return html`
    <div class="toolbar"><${Field} label="Name contains" value=${filter}
      onInput=${(event) => setFilter(event.target.value)} />
      <p class="hint">${plural(state.consumers.length, "consumer")}${state.not_listed
        ? `, and ${state.not_listed} more that are not listed` : ""}. Those that are gone stay for an hour.</p></div>
    ${state.consumers.length === 0 && html`<p>No consumer has connected. Try${" "}
      <code>dcpctl watch</code> in a terminal.</p>`}
    ${shown.length > 1 && html`<${Summary} consumers=${shown} />`}
    ${shown.map((consumer) => html`<${Consumer} key=${consumer.name} consumer=${consumer} may=${may}
      now=${head.time_s} lags=${lags.get(consumer.name)} />`)}`;
}
