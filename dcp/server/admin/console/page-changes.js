// Changes: what is committed while you look, with the rollbacks.

import { html, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { ask, follow, query } from "./api.js";
import { Chart } from "./chart.js";
import { CollectionChoice, Notice, Segments, ValueLine, bytes, clock, plural, short, whole } from "./parts.js";

const ROWS_MAX = 500;
const POINTS_MAX = 240; // two minutes
const PATH = "/api/v1/console/changes";
const KINDS = [["", "All"], ["set", "Sets"], ["deleted", "Deletions"], ["expired", "Expiries"]];
const SIGNS = { set: "set", deleted: "deleted", expired: "expired" };

// One line for new versions without a loss: after a failover there are hundreds.
function versionRows(step) {
  const undone = step.versions.filter((version) => version.undone > 0);
  const other = step.versions.length - undone.length + step.more_versions;
  return [
    ...undone.map((version) => ({ ...version, type: "rollback" })),
    ...(other ? [{ type: "versions", count: other, time_s: step.versions[0]?.time_s ?? Date.now() / 1000 }] : []),
  ];
}

function Row({ row }) {
  if (row.type === "rollback") {
    return html`<tr class="row-bad"><td class="nowrap">${clock(row.time_s)}</td>
      <td><span class="state bad">rollback</span></td>
      <td colspan="3"><b>Partition ${row.vb} went back to seqno ${whole(row.seqno)}:${" "}
        ${plural(row.undone, "change")} undone.</b> <small>It has version ${row.vb_uuid} now. Consumers
        that had ${row.undone === 1 ? "it" : "them"} get ROLLBACK.</small></td></tr>`;
  }
  if (row.type === "versions") {
    return html`<tr class="row-note"><td class="nowrap">${clock(row.time_s)}</td><td><span class="state">new version</span></td>
      <td colspan="3">${plural(row.count, "partition has", "partitions have")} a new version and lost
        nothing that was shown here: another node is master, or it was branched at its end.</td></tr>`;
  }
  return html`<tr><td class="nowrap">${clock(row.time_s)}</td>
    <td><span class="kind ${row.kind}">${SIGNS[row.kind]}</span></td>
    <td class="key-cell"><a href="#/documents/${encodeURIComponent(row.collection)}/${encodeURIComponent(row.key)}"
      ><code>${row.key}</code></a>${row.collection === "_default._default" ? "" : html`<small>${row.collection}</small>`}</td>
    <td class="value-cell"><${ValueLine} row=${row} /></td>
    <td class="number hide-narrow" title="partition ${row.vb}, seqno ${row.seqno}">${row.vb}:${whole(row.seqno)}</td></tr>`;
}

export function ChangesPage() {
  const [wanted, setWanted] = useState({ collection: "", prefix: "", kind: "" });
  const [rows, setRows] = useState([]);
  const [link, setLink] = useState({ isUp: false });
  const [isPaused, setPaused] = useState(false);
  const [missed, setMissed] = useState(0);
  const [leftOut, setLeftOut] = useState(0);
  const [rates, setRates] = useState({ times: [], values: [] });
  const paused = useRef(false);
  paused.current = isPaused;
  const nextId = useRef(0);
  useEffect(() => {
    setRows([]); setLeftOut(0); setMissed(0); setLink({ isUp: false });
    return follow(PATH + query(wanted), (step) => {
      const now = Date.now() / 1000;
      if (step.seconds > 0.1) {
        setRates((before) => ({
          times: [...before.times, now].slice(-POINTS_MAX),
          values: [...before.values, step.passed / step.seconds].slice(-POINTS_MAX) }));
      }
      const fresh = [...versionRows(step), ...step.changes]
        .map((row) => ({ ...row, id: (nextId.current += 1) }))
        .sort((a, b) => b.time_s - a.time_s || b.id - a.id);
      if (paused.current) { setMissed((count) => count + fresh.length); return; }
      if (step.left_out) setLeftOut((count) => count + step.left_out);
      if (fresh.length) setRows((before) => [...fresh, ...before].slice(0, ROWS_MAX));
    }, setLink);
  }, [JSON.stringify(wanted)]);
  function toggle() {
    setPaused(!isPaused);
    setMissed(0);
  }
  const set = (name) => (value) => setWanted((before) => ({ ...before, [name]: value }));
  return html`
    <div class="toolbar">
      <${CollectionChoice} all="all collections" value=${wanted.collection} onChange=${set("collection")} />
      <div class="field"><label for="tail-prefix">Key begins with</label>
        <input id="tail-prefix" value=${wanted.prefix} maxlength="250" autocomplete="off" spellcheck=${false}
          onChange=${(event) => set("prefix")(event.target.value)} /></div>
      <${Segments} label="Kind" options=${KINDS} value=${wanted.kind} onChange=${set("kind")} />
      <button type="button" class="pause" aria-pressed=${isPaused} onClick=${toggle}>${isPaused ? "▶ Go on" : "❚❚ Pause"}</button>
      <button type="button" onClick=${() => { setRows([]); setLeftOut(0); }}>Clear</button>
    </div>
    ${link.error && html`<${Notice} error=${link.error} />`}
    <p class="tail-state" role="status"><i class="dot ${isPaused ? "paused" : link.isUp ? "live" : "off"}"></i>
      ${isPaused ? html`<b>Paused.</b> ${plural(missed, "change")} passed meanwhile.`
        : link.isUp ? html`<b>Live.</b> ${short(rates.values.at(-1) ?? 0)} changes a second on this node.`
        : "Connecting…"}
      ${leftOut > 0 && html` <span class="hint">${plural(leftOut, "change")} came too fast to be shown.</span>`}</p>
    <${Chart} title="Changes per second" format=${short} times=${rates.times} series=${[["changes", rates.values]]} />
    ${rows.length === 0 ? html`<div class="card empty"><h2>Nothing yet</h2><p>Changes appear here as they are
        committed${wanted.prefix || wanted.collection || wanted.kind ? " and match the filter" : ""}.</p>
        <pre tabindex="0">dcpctl set hello '{"n": 1}'</pre></div>`
      : html`<div tabindex="0" class="scroll card flush"><table class="tail"><caption class="hidden">Changes, the newest first</caption>
        <thead><tr><th scope="col">Time</th><th scope="col">What</th><th scope="col">Key</th><th scope="col">Value</th>
          <th scope="col" class="number hide-narrow">Partition:seqno</th></tr></thead>
        <tbody>${rows.map((row) => html`<${Row} key=${row.id} row=${row} />`)}</tbody></table></div>
        ${rows.length === ROWS_MAX && html`<p class="hint">The newest ${ROWS_MAX}. For all of them:${" "}
          <code>dcpctl watch</code>.</p>`}`}`;
}
