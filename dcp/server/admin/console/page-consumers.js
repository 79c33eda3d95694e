// Consumers: DCP connections by name, how far behind they are, and what to do about it.

import { html, useState } from "./vendor-htm-preact.js";
import { ask, query } from "./api.js";
import { Chart } from "./chart.js";
import { Field, bytes, clock, duration, fieldsOf, plural, short, useAct, useConfirm, useId, whole } from "./parts.js";

const ROWS_MAX = 50; // streams of one consumer

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

// Which versions of the history its streams stand in: asked for when somebody wants to see them.
function Versions({ name }) {
  const [rows, setRows] = useState(null);
  const [notice, run] = useAct();
  const load = (event) => event.target.open && run(async () => {
    setRows((await ask("GET", "/api/v1/streams" + query({ name }))).streams);
  });
  const isBehind = (row) => row.asked_vb_uuid !== "0" && row.asked_vb_uuid !== row.vb_uuid;
  const moved = rows?.filter(isBehind).length ?? 0;
  const shown = rows && [...rows].sort((a, b) => isBehind(b) - isBehind(a) || b.lag_items - a.lag_items || a.vb - b.vb).slice(0, ROWS_MAX);
  return html`<details onToggle=${load}><summary>Versions of its streams</summary>${notice}
    ${rows?.length === 0 && html`<p class="hint">It has no streams.</p>`}
    ${rows?.length > 0 && html`<p class="hint">${plural(rows.length, "stream")}. ${moved === 0
        ? "Each one stands in the version that it asked with, or began at 0."
        : `${plural(moved, "stream has", "streams have")} gone on into a newer version than the one asked with.`}
        ${rows.length > ROWS_MAX ? ` The first ${ROWS_MAX}:` : ""}</p>
      <div tabindex="0" class="scroll"><table><caption class="hidden">Streams of ${name} with their versions</caption>
        <thead><tr><th scope="col" class="number">Partition</th><th scope="col">Asked with</th><th scope="col">Stands in</th>
          <th scope="col" class="number">Sent up to</th><th scope="col" class="number">Lag</th></tr></thead>
        <tbody>${shown.map((row) => html`<tr key=${row.vb}><td class="number">${row.vb}</td>
          <td>${row.asked_vb_uuid === "0" ? "none" : html`<code>${row.asked_vb_uuid}</code>`}<small>seqno ${whole(row.asked_seqno)}</small></td>
          <td><code>${row.vb_uuid}</code></td>
          <td class="number">${whole(row.seqno)}</td><td class="number">${whole(row.lag_items)}</td></tr>`)}</tbody></table></div>`}
  </details>`;
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
      <div><dt>Oldest not acknowledged</dt><dd>${consumer.lag_s >= 1 ? `${duration(consumer.lag_s)} old` : "none that is old"}</dd></div>
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
    ${!isGone && consumer.streams > 0 && html`<${Versions} name=${consumer.name} />`}
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
      <th scope="col" class="number">Oldest not acknowledged</th><th scope="col" class="number">Changes/s</th>
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
