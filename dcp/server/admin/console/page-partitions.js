// Partitions: a map of all, one of them in detail, and why a consumer would roll back.

import { html, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { ask } from "./api.js";
import { PartitionGrid } from "./grid.js";
import { BranchTree, branchesOf } from "./tree.js";
import { Choice, Field, Notice, fieldsOf, plural, short, useAct, whole } from "./parts.js";

const LEVELS = 6;
const STATES = { a: "active", r: "replica", p: "pending", d: "dead", f: "fenced", q: "quarantined" };
const COLOURS = [
  ["state", "State"], ["items", "Documents"], ["rates", "Changes per second"],
  ["lags", "Lag of consumers"], ["history", "Changes that can be undone"],
];
const UNITS = { items: "documents", rates: "changes per second", lags: "changes behind", history: "changes can be undone" };

// 0 stays apart: a partition without documents, changes or lag is not just a pale one.
const levelOf = (value, most) =>
  value <= 0 ? 0 : Math.min(LEVELS - 1, 1 + Math.floor((value / (most || 1)) * (LEVELS - 1.001)));

function looks(map, by) {
  const values = by === "state" ? null : map[by];
  const most = values ? Math.max(...values) : 0;
  return Array.from(map.states, (letter, vb) => {
    const state = STATES[letter];
    const value = values ? values[vb] : null;
    return {
      className: values ? `level-${levelOf(value, most)}` : `state-${letter}`,
      mark: letter === "a" ? "" : letter,
      label: `Partition ${vb}, ${state}` + (values ? `, ${short(value)} ${UNITS[by]}` : ""),
    };
  });
}

function Legend({ map, by }) {
  if (by === "state") {
    const counts = {};
    for (const letter of map.states) counts[letter] = (counts[letter] || 0) + 1;
    return html`<p class="legend">${Object.entries(counts).map(([letter, count]) =>
      html`<span><i class="state-${letter}"></i>${STATES[letter]}: ${whole(count)}</span>`)}</p>`;
  }
  const most = map[by] ? Math.max(...map[by]) : 0;
  return html`<p class="legend"><span><i class="level-0"></i>none</span>
    <span><i class="level-1"></i><i class="level-2"></i><i class="level-3"></i><i class="level-4"></i>
    <i class="level-5"></i>up to ${short(most)} ${UNITS[by]}</span></p>`;
}

function Explain({ detail, onAnswer }) {
  const [notice, run, isRunning] = useAct();
  const [answer, setAnswer] = useState(null);
  function submit(event) {
    event.preventDefault();
    const given = fieldsOf(event.target);
    const body = { uuid: given.uuid.trim(), seqno: Number(given.seqno) };
    for (const name of ["snap_start", "snap_end"]) if (given[name] !== "") body[name] = Number(given[name]);
    if (given.strict) body.strict = true;
    run(async () => {
      const found = await ask("POST", `/api/v1/vbuckets/${detail.vb}/explain-rollback`, body);
      setAnswer(found);
      onAnswer({ vb_uuid: body.uuid, seqno: body.seqno, rollback: found.rollback_seqno });
    });
  }
  return html`<section class="card" aria-labelledby="explain">
    <h3 id="explain">Explain a rollback</h3>
    <p class="hint">What would a consumer at this position be answered?</p>
    <form onSubmit=${submit} class="fields">
      <${Field} label="Version (vb_uuid)" name="uuid" required inputmode="numeric" pattern="[0-9 ]+"
        defaultValue=${detail.vb_uuid} />
      <${Field} label="Seqno" name="seqno" type="number" min="0" required defaultValue=${detail.high_seqno} />
      <${Field} label="Snapshot from" name="snap_start" type="number" min="0" hint="empty: the seqno" />
      <${Field} label="Snapshot to" name="snap_end" type="number" min="0" hint="empty: the seqno" />
      <button disabled=${isRunning}>Explain</button>
    </form>
    ${notice}
    ${answer && html`<div class="answer" role="status"><strong>${answer.answer}${
      answer.rollback_seqno == null ? "" : ` to seqno ${whole(answer.rollback_seqno)}`}</strong>
      <p>${answer.reason}</p></div>`}
  </section>`;
}

function Detail({ vb, may, sample }) {
  const [detail, setDetail] = useState(null);
  const [error, setError] = useState(null);
  const [asked, setAsked] = useState(null);
  const title = useRef();
  useEffect(() => {
    let isCurrent = true;
    ask("GET", `/api/v1/vbuckets/${vb}`).then(
      (found) => { if (isCurrent) { setDetail(found); setError(null); } },
      (failure) => { if (isCurrent && failure.status) setError(failure); },
    );
    return () => { isCurrent = false; };
  }, [vb, sample]);
  useEffect(() => setAsked(null), [vb]);
  useEffect(() => { if (detail?.vb === vb) title.current.focus(); }, [vb, detail?.vb]);
  if (error) return html`<${Notice} error=${error} />`;
  if (!detail || detail.vb !== vb) return html`<p class="loading" role="status">Asking…</p>`;
  const branches = branchesOf(detail.failover_log, detail.high_seqno).reverse();
  return html`<section aria-labelledby="detail" class="card">
    <h2 id="detail" tabindex="-1" ref=${title}>Partition ${vb}</h2>
    ${detail.quarantined && html`<p class="health bad">${detail.quarantined}</p>`}
    ${detail.holds.map((hold) => html`<p class="health warn">${hold}</p>`)}
    <dl class="facts">
      <div><dt>State</dt><dd>${detail.state}</dd></div>
      <div><dt>Documents</dt><dd>${whole(detail.items)}</dd></div>
      <div><dt>High seqno</dt><dd>${whole(detail.high_seqno)}</dd></div>
      <div><dt>On disk up to</dt><dd>${whole(detail.persisted_seqno)}</dd></div>
      <div><dt>Can be branched from</dt><dd>${whole(detail.history_floor)}</dd></div>
      <div><dt>Deletions purged up to</dt><dd>${whole(detail.purge_seqno)}</dd></div>
      <div><dt>Largest lag</dt><dd>${whole(detail.lag_items)}</dd></div>
      <div><dt>Copies</dt><dd>${detail.has_copies ? "replicas confirm each change" : "this node only; it is the master"}</dd></div>
    </dl>
    <h3>Versions</h3>
    <${BranchTree} log=${detail.failover_log} highSeqno=${detail.high_seqno} asked=${asked} />
    <div tabindex="0" class="scroll"><table><caption class="hidden">Versions of partition ${vb}, newest first</caption>
      <thead><tr><th scope="col">Version (vb_uuid)</th><th scope="col" class="number">Began after seqno</th>
        <th scope="col" class="number">Valid up to</th><th scope="col" class="number">Leader epoch</th></tr></thead>
      <tbody>${branches.map((branch) => html`<tr key=${branch.vb_uuid}><td>${branch.vb_uuid}</td>
        <td class="number">${whole(branch.seqno)}</td><td class="number">${whole(branch.upto)}</td>
        <td class="number">${branch.epoch}</td></tr>`)}</tbody></table></div>
    ${may.explain && html`<${Explain} key=${vb} detail=${detail} onAnswer=${setAsked} />`}
  </section>`;
}

export function PartitionsPage({ head, state, may }) {
  const [by, setBy] = useState("state");
  const [chosen, setChosen] = useState(null);
  if (!state) return html`<p class="loading" role="status">Waiting for the partitions…</p>`;
  const shown = by === "rates" && !state.rates ? "state" : by;
  function goTo(event) {
    event.preventDefault();
    setChosen(Number(fieldsOf(event.target).vb));
  }
  return html`
    <div class="toolbar">
      <${Choice} label="Colour by" options=${COLOURS} value=${by} onChange=${setBy} />
      ${may.history && html`<form onSubmit=${goTo} class="fields">
        <${Field} label="Partition" name="vb" type="number" min="0" max=${state.states.length - 1} required />
        <button>Show</button></form>`}
    </div>
    <${PartitionGrid} looks=${looks(state, shown)} chosen=${chosen}
      onChoose=${(vb) => may.history && setChosen(vb)} />
    <${Legend} map=${state} by=${shown} />
    <p class="hint">${plural(state.states.length, "partition")}. ${may.history
      ? "Choose one to see its versions." : "Your roles do not allow to see the details of one."}</p>
    ${chosen != null && html`<${Detail} vb=${chosen} may=${may} sample=${head.sample} />`}`;
}
