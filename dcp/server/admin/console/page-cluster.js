// Cluster: every node, every partition, what moves, what happened, and what an operator can do.
// Any node shows all of it: the figures are those that the nodes have told each other.

import { html, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { ask } from "./api.js";
import { PartitionGrid } from "./grid.js";
import { Notice, Prose, Segments, Tile, bytes, clock, ids, plural, short, useAct, whole } from "./parts.js";

const PATH = "/api/v1/cluster";
const NODE_COLOURS = 8; // then they repeat; the labels do not
const LAG_LEVELS = [1, 10, 100, 1000, 10_000]; // changes; 0 stays apart
const EVENTS_SHOWN = 30;

const COLOURINGS = [["master", "Master"], ["sync", "Copies in sync"], ["lag", "Lag"]];

const colourOf = (node) => (node < 0 ? "none" : `node-${node % NODE_COLOURS}`);
const lagLevel = (lag) => LAG_LEVELS.filter((least) => lag >= least).length;

function syncClass(map, vb, least) {
  if (map.masters[vb] < 0 || map.in_sync[vb] < least) return "sync-short";
  return map.in_sync[vb] < map.copies[vb] ? "sync-some" : "sync-all";
}

function looksOf(map, by, least) {
  const moving = new Set(map.moving);
  return map.masters.map((master, vb) => {
    const name = master < 0 ? "no master" : `master ${map.nodes[master]}`;
    const sync = syncClass(map, vb, least);
    return {
      className: { master: colourOf(master), sync, lag: `level-${lagLevel(map.lags[vb])}` }[by],
      mark: sync === "sync-short" ? "!" : moving.has(vb) ? "→" : "",
      label: `Partition ${vb}, ${name}, ${map.in_sync[vb]} of ${map.copies[vb]} copies in sync, lag ${
        whole(map.lags[vb])}${moving.has(vb) ? ", moving" : ""}`,
    };
  });
}

function Legend({ map, by, least }) {
  const count = (test) => map.masters.filter((_, vb) => test(vb)).length;
  const rows = {
    master: () => [
      ...map.nodes.map((name, node) => [colourOf(node), name, count((vb) => map.masters[vb] === node)]),
      ["none", "no master", count((vb) => map.masters[vb] < 0)]],
    sync: () => [["sync-all", "all copies in sync"], ["sync-some", "some copies in sync"],
                 ["sync-short", "too few: no writes"]]
      .map(([name, text]) => [name, text, count((vb) => syncClass(map, vb, least) === name)]),
    lag: () => ["none", ...LAG_LEVELS.map((from) => `${whole(from)} or more`)]
      .map((text, level) => [`level-${level}`, text, count((vb) => lagLevel(map.lags[vb]) === level)]),
  }[by]();
  return html`<ul class="legend">${rows.filter(([, , many]) => many > 0).map(([name, text, many]) =>
    html`<li><i class=${name}></i>${text} <b>${whole(many)}</b></li>`)}</ul>`;
}

// -- what an operator can do ------------------------------------------------------------------------

const ACTS = {
  rebalance: { title: "Rebalance", done: "The rebalance is under way." },
  drain: { title: "Drain", done: "The node is being drained." },
  undrain: { title: "Undrain", done: "The node gets copies again." },
  failover: { title: "Fail over", done: "Its partitions get other masters.", isDangerous: true },
  remove: { title: "Remove", done: "The node is being removed.", isDangerous: true },
  cancel: { title: "Stop the plan", done: "The plan is stopped." },
};

// A dialog with what the server says that an act would do: the same as the command with --dry-run.
function Preview({ act, body, onClose, onDone }) {
  const dialog = useRef();
  const [preview, setPreview] = useState(null);
  const [isUnclean, setUnclean] = useState(false);
  const [notice, run, isRunning] = useAct();
  const asked = isUnclean ? { ...body, unclean: true } : body;
  useEffect(() => dialog.current.showModal(), []);
  useEffect(() => {
    setPreview(null);
    run(async () => { setPreview(await ask("POST", `${PATH}/${act}`, { ...asked, dry_run: true })); });
  }, [isUnclean]);
  const write = () => run(async () => {
    const shown = act === "failover" ? { shown_vbs: ids(preview.unclean_vbs) } : {};
    await ask("POST", `${PATH}/${act}`, { ...asked, ...shown });
    onDone(ACTS[act].done);
  });
  return html`<dialog ref=${dialog} class="preview" aria-labelledby="preview"
      onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <h2 id="preview">${ACTS[act].title}${body.node ? ` ${body.node}` : ""}</h2>
    ${!preview && isRunning && html`<p class="loading" role="status">Asking what it would do…</p>`}
    ${preview && html`<p>${preview.has_changes ? preview.what : "There is nothing to do."}</p>
      ${preview.notes.map((note) => html`<p class="notice warn"><${Prose} text=${note} /></p>`)}
      ${preview.nodes.length > 0 && html`<div tabindex="0" class="scroll"><table><caption class="hidden">Before and after</caption>
        <thead><tr><th scope="col">Node</th><th scope="col" class="number">Masters</th>
          <th scope="col" class="number">Copies</th></tr></thead>
        <tbody>${preview.nodes.map((node) => html`<tr><th scope="row">${node.node}</th>
          <td class="number">${whole(node.masters_before)} → <b>${whole(node.masters_after)}</b></td>
          <td class="number">${whole(node.copies_before)} → <b>${whole(node.copies_after)}</b></td></tr>`)}</tbody>
      </table></div><p class="hint">${plural(preview.moves.length, "partition")} would change.</p>`}
      ${preview.unclean_vbs && html`<p class="notice bad">Without being in sync: partitions ${preview.unclean_vbs}.
        Changes that were answered may be lost.</p>`}`}
    ${act === "failover" && html`<label class="check"><input type="checkbox" checked=${isUnclean}
      onChange=${(event) => setUnclean(event.target.checked)} /> also elect copies that are not in sync
      (answered changes may be lost)</label>`}
    ${notice}
    <p class="buttons">
      <button class=${ACTS[act].isDangerous ? "danger" : ""} onClick=${write}
        disabled=${isRunning || !preview?.has_changes}>${ACTS[act].title}</button>
      <button type="button" onClick=${onClose}>Cancel</button></p>
  </dialog>`;
}

// -- parts of the page ------------------------------------------------------------------------------

function Health({ status, least, map }) {
  const blocked = status.unwritable.reduce((sum, entry) => sum + entry.count, 0) + status.unwritable_elsewhere;
  const [kind, text] = blocked
    ? ["bad", `${plural(blocked, "partition")} of ${whole(status.partitions)} take${blocked === 1 ? "s" : ""} no writes.`]
    : status.problems.length ? ["warn", "Every partition takes writes, but something is wrong."]
    : ["good", `All ${whole(status.partitions)} partitions take writes and have all their copies in sync.`];
  return html`<section aria-labelledby="health"><h2 id="health" class="hidden">Health</h2>
    <div class="health ${kind}" role="status"><strong>${text}</strong>
      ${status.unwritable.map((entry) => html`<p>Partitions <code>${entry.vbs}</code>: ${entry.why}.
        <span class="try"><${Prose} text=${entry.try} />.</span></p>`)}
      ${status.unwritable_elsewhere > 0 && html`<p>${plural(status.unwritable_elsewhere, "partition")} of
        masters at other nodes: fewer than ${least} copies are in sync.</p>`}
      ${status.problems.map((problem) => html`<p>${problem.what}.
        <span class="try"><${Prose} text=${problem.try} />.</span></p>`)}
    </div>
    <div class="tiles">
      <${Tile} name="Nodes up" value=${`${status.nodes.filter((node) => node.is_alive).length} of ${status.nodes.length}`} />
      <${Tile} name="All copies in sync" value=${map ? whole(map.in_sync.filter((size, vb) => size >= map.copies[vb]).length) : "–"}
        note=${`of ${whole(status.partitions)} partitions`} />
      <${Tile} name="Sets per second" value=${short(sumOf(status, "sets_per_s"))} />
      <${Tile} name="Replica lag" value=${whole(status.nodes.reduce((sum, node) => sum + node.behind_changes, 0))} note="changes" />
      <${Tile} name="Copies" value=${status.copies} note=${`${least} in sync to write`} />
      <${Tile} name="Coordinator" value=${status.coordinator ?? "none"} />
    </div></section>`;
}

const sumOf = (status, name) => status.nodes.reduce((sum, node) => sum + (node.figures?.[name] ?? 0), 0);

const ROLE_MEANINGS = {
  coordinator: "It elects masters.", metastore: "The embedded metadata store is in its folder.",
};

function stateOf(node) {
  if (!node.is_alive) return ["down", "bad"];
  if (node.is_leaving) return ["leaving", "warn"];
  return node.is_drained ? ["drained", "warn"] : ["up", "good"];
}

function Nodes({ status, map, may, onAct }) {
  return html`<section aria-labelledby="nodes"><h2 id="nodes">Nodes</h2>
    <div tabindex="0" class="scroll card flush"><table class="nodes"><caption class="hidden">Nodes of the cluster</caption>
      <thead><tr><th scope="col">Node</th><th scope="col">State</th><th scope="col" class="number">Master of</th>
        <th scope="col" class="number">Copies in sync</th><th scope="col" class="number">Sets/s</th>
        <th scope="col" class="number">Events/s</th><th scope="col" class="number">Lag</th><th scope="col">Disk</th>
        ${may.operate && html`<th scope="col"><span class="hidden">Actions</span></th>`}</tr></thead>
      <tbody>${status.nodes.map((node) => {
        const [state, kind] = stateOf(node);
        const figures = node.figures;
        const share = figures?.disk_size_bytes ? figures.disk_used_bytes / figures.disk_size_bytes : null;
        return html`<tr key=${node.member} class=${kind === "bad" ? "row-bad" : ""}>
          <th scope="row"><i class="dot ${colourOf(map ? map.nodes.indexOf(node.name) : -1)}"></i>${node.name}
            ${node.name === status.node && html` <span class="tag">this node</span>`}
            ${node.roles.map((role) => html` <span class="tag" title=${ROLE_MEANINGS[role]}>${role}</span>`)}
            <small>${node.address}${node.rack ? `, rack ${node.rack}` : ""}</small></th>
          <td data-label="State"><span class="state ${kind}">${state}</span></td>
          <td class="number" data-label="Master of">${whole(node.masters)}</td>
          <td class="number" data-label="Copies in sync">${whole(node.in_sync)}<small> of ${whole(node.copies)}${
            node.filling ? `, ${whole(node.filling)} filling` : ""}</small></td>
          <td class="number" data-label="Sets/s">${short(figures?.sets_per_s)}</td>
          <td class="number" data-label="Events/s">${short(figures?.events_per_s)}</td>
          <td class="number" data-label="Lag">${whole(node.behind_changes)}</td>
          <td data-label="Disk">${share == null ? "–" : html`<span class="nowrap"><meter min="0" max="1" high="0.8" optimum="0"
            value=${share} aria-label="Disk of ${node.name}"></meter> ${Math.round(share * 100)} %</span>
            <small>${bytes(figures.disk_size_bytes - figures.disk_used_bytes)} free</small>`}</td>
          ${may.operate && html`<td class="acts">
            ${node.is_alive && html`<button onClick=${() => onAct(node.is_drained ? "undrain" : "drain", { node: node.name })}
              aria-label="${node.is_drained ? "Undrain" : "Drain"} ${node.name}">${node.is_drained ? "Undrain" : "Drain"}</button>`}
            ${node.masters > 0 && html`<button onClick=${() => onAct("failover", { node: node.name })}
              aria-label="Fail over ${node.name}">Fail over</button>`}
            ${!node.is_alive && html`<button onClick=${() => onAct("remove", { node: node.name })}
              aria-label="Remove ${node.name}">Remove</button>`}</td>`}
        </tr>`;
      })}</tbody></table></div>
    ${may.operate && html`<p class="buttons"><button type="button" onClick=${() => onAct("rebalance", {})}>Rebalance</button>
      <span class="hint">Each act shows first what it would do.</span></p>`}
  </section>`;
}

function Plan({ plan, may, onAct }) {
  const first = useRef(null);
  if (first.current?.operation !== plan.operation) {
    first.current = { operation: plan.operation, at: Date.now(), done: plan.done };
  }
  const seconds = (Date.now() - first.current.at) / 1000;
  const rate = seconds > 3 ? (plan.done - first.current.done) / seconds : null;
  const waits = Object.entries(plan.waits_for);
  return html`<section class="card" aria-labelledby="plan"><h2 id="plan">Under way: ${plan.what}</h2>
    <p><progress max=${plan.partitions} value=${plan.done} aria-labelledby="plan"></progress>
      <b> ${whole(plan.done)} of ${plural(plan.partitions, "partition")}</b>${rate ? `, ${short(rate)} a second` : ""}</p>
    <p class="hint">${plural(plan.filling, "copy is", "copies are")} being filled; ${
      plural(plan.handovers, "partition waits", "partitions wait")} for the new master only.</p>
    ${waits.map(([node, copies]) => html`<p class="notice warn">Node ${node} is down or cannot be reached:${" "}
      ${plural(copies, "copy waits", "copies wait")} for it.</p>`)}
    ${may.operate && html`<p class="buttons"><button type="button" onClick=${() => onAct("cancel", {})}>Stop the plan</button></p>`}
  </section>`;
}

const EVENT_KINDS = { down: "bad", unclean: "bad", orphaned: "bad", left: "warn", elected: "warn", up: "good", joined: "good" };

function Timeline({ events, receipts }) {
  const lost = receipts.map((receipt) => ({ at: receipt.at, kind: "unclean", what: receipt.problem
    ? `a loss receipt cannot be read: ${receipt.problem}`
    : receipt.kind === "cut_off"
      ? `loss receipt: ${plural(receipt.count, "change")} of partition ${receipt.vb} cut off, kept in ${receipt.file}`
      : `loss receipt: partition ${receipt.vb} was elected uncleanly${receipt.known_lost == null ? ""
          : `, ${plural(receipt.known_lost, "change")} known to be lost`} (${receipt.file})` }));
  const all = [...events, ...lost].sort((a, b) => b.at - a.at).slice(0, EVENTS_SHOWN);
  return html`<section aria-labelledby="timeline"><h2 id="timeline">What happened</h2>
    ${all.length === 0
      ? html`<p class="hint">Nothing since this node started: no election, no node that went or came.</p>`
      : html`<ol tabindex="0" class="timeline">${all.map((event) => html`<li class=${EVENT_KINDS[event.kind] ?? ""}>
          <time>${clock(event.at)}</time> <span>${event.what}</span></li>`)}</ol>
        <p class="hint">As this node saw it since its start, with the loss receipts in its folder.</p>`}
  </section>`;
}

function Alone() {
  return html`<section class="card empty"><h2>This node is in no cluster</h2>
    <p>It keeps all partitions on its own disk. With three nodes, each change is on a majority of
      disks before it is answered, and another node takes over within seconds when one dies.</p>
    <pre tabindex="0">dcpctl cluster init            # on this node; it prints how others join
dcpctl cluster join --token-file FILE   # on the others</pre>
    <p class="hint">To see one: <code>dcpctl cluster demo</code> starts three nodes on this machine.</p></section>`;
}

export function ClusterPage({ head, may }) {
  const [found, setFound] = useState(null);
  const [receipts, setReceipts] = useState([]);
  const [error, setError] = useState(null);
  const [by, setBy] = useState("master");
  const [act, setAct] = useState(null);
  const [told, setTold] = useState("");
  useEffect(() => {
    let isCurrent = true;
    ask("GET", `${PATH}/page`).then(
      (page) => { if (isCurrent) { setFound(page); setError(null); } },
      (failure) => { if (isCurrent && failure.status) setError(failure); });
    return () => { isCurrent = false; };
  }, [head.sample]);
  useEffect(() => {
    ask("GET", `${PATH}/receipts`).then((answer) => setReceipts(answer.receipts), () => {});
  }, [head.boot]);
  if (error) return html`<${Notice} error=${error} />`;
  if (!found) return html`<p class="loading" role="status">Waiting for the cluster…</p>`;
  const { status, map, events } = found;
  if (!status.node) return html`<${Alone} />`;
  const least = status.min_in_sync ?? Math.floor(status.copies / 2) + 1;
  const onAct = (name, body) => { setTold(""); setAct({ act: name, body }); };
  const hasMap = map && map.masters.length > 0;
  return html`
    <${Health} status=${status} least=${least} map=${map} />
    <${Notice} text=${told} />
    <${Nodes} status=${status} map=${map} may=${may} onAct=${onAct} />
    ${status.plan && html`<${Plan} plan=${status.plan} may=${may} onAct=${onAct} />`}
    <div class="columns wide-first">
      ${hasMap && html`<section aria-labelledby="map"><div class="head"><h2 id="map">Partitions</h2>
        <${Segments} label="Colour by" options=${COLOURINGS} value=${by} onChange=${setBy} /></div>
        <${PartitionGrid} looks=${looksOf(map, by, least)} chosen=${null} onChoose=${() => {}} />
        <${Legend} map=${map} by=${by} least=${least} /></section>`}
      <${Timeline} events=${events} receipts=${receipts} />
    </div>
    ${act && html`<${Preview} ...${act} onClose=${() => setAct(null)}
      onDone=${(text) => { setAct(null); setTold(text); }} />`}`;
}
