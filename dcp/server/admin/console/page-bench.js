// Test bench: what tests of consumers do to a server. Only with --test-mode.

import { html, useEffect, useState } from "./vendor-htm-preact.js";
import { Refused, ask } from "./api.js";
import { Choice, Field, Notice, consoleOf, fieldsOf, ids, plural, useAct, useConfirm, whole } from "./parts.js";

const PARTITION_ACTS = {
  branch: {
    title: "Branch", field: ["at", "At seqno", true],
    hint: "Undoes the changes above a seqno and starts a new version. Streams end with reason 6 (rollback).",
    done: (found) => `Partition ${found.vb} has a new version from seqno ${whole(found.seqno)}. ${
      plural(found.undone_seqnos, "change")} undone.`,
  },
  failover: {
    title: "Fail over", field: ["lose", "Changes that are lost", false],
    hint: "Acts as if a replica was promoted that was that far behind. Streams end with reason 2 (state changed).",
    done: (found) => `Partition ${found.vb} has a new version from seqno ${whole(found.seqno)}. ${
      plural(found.undone_seqnos, "change")} lost.`,
  },
  purge: {
    title: "Purge deletions", field: ["upto", "Up to seqno", false],
    hint: "Consumers that are below start again at 0. Without a seqno: as far as possible.",
    done: (found) => `Purged up to seqno ${whole(found.purge_seqno)}.`,
  },
};
// In a cluster a partition is changed at its master. Return those whose master this node is, and say
// where the others are changed.
async function mastersHere(isMember, vbs) {
  if (!isMember) return { here: vbs, elsewhere: "" };
  const { status, map } = await ask("GET", "/api/v1/cluster/page");
  const nameOf = (vb) => map.nodes[map.masters[vb]];
  const others = status.nodes.filter((node) => node.name !== status.node && vbs.some((vb) => nameOf(vb) === node.name));
  return {
    here: vbs.filter((vb) => nameOf(vb) === status.node),
    elsewhere: others.map((node) => `${node.name} (${consoleOf(node)})`).join(", "),
  };
}

async function change(isMember, kind, vb, body) {
  const { here, elsewhere } = await mastersHere(isMember, [vb]);
  if (!here.length) throw new Refused(409, {
    what: `Partition ${vb} was not changed`,
    why: elsewhere ? `its master is ${elsewhere}` : "it has no master now", try: "Open the console of that node." });
  if (!isMember || kind !== "failover") return PARTITION_ACTS[kind].done(await ask("POST", `/api/v1/vbuckets/${vb}/${kind}`, body));
  const found = await ask("POST", "/api/v1/cluster/failover", { vb, ...body });
  return `${found.what}. ${found.notes.join(". ")}`;
}

const OPCODES = ["", "GET", "SET", "DELETE", "DCP_OPEN", "DCP_STREAM_REQ", "DCP_BUFFER_ACK"];
const STATUSES = ["", "ETMPFAIL", "EBUSY", "ENOMEM", "NOT_MY_VBUCKET", "KEY_ENOENT", "EACCESS", "ROLLBACK"];

function BranchMany({ isMember, last }) {
  const title = "Branch many";
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  async function submit(event) {
    event.preventDefault();
    const given = fieldsOf(event.target);
    const hint = `The newest ${given.percent} % of the changes of each partition are undone.`;
    if (!(await confirm(`${title}: partitions ${given.vbs}?`, hint, title))) return;
    run(async () => {
      const { here, elsewhere } = await mastersHere(isMember, ids(given.vbs));
      const body = { vbs: here, fraction: Number(given.percent) / 100 };
      const { branched, refused } = here.length ? await ask("POST", "/api/v1/vbuckets/branch", body) : { branched: [], refused: [] };
      const undone = branched.reduce((sum, one) => sum + one.undone_seqnos, 0);
      return [`${plural(branched.length, "partition")} branched, ${plural(undone, "change")} undone.`,
        refused.length ? `${plural(refused.length, "partition")} refused: ${refused[0].why}.` : "",
        elsewhere ? `Others have their masters at ${elsewhere}: branch them there.` : ""].join(" ");
    });
  }
  return html`<section class="card" aria-labelledby="act-many">
    <h2 id="act-many">${title}</h2><p class="hint">Undoes the newest changes of many partitions together.</p>
    <form onSubmit=${submit} class="fields">
      <${Field} label="${title}: partitions" name="vbs" pattern="[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*" hint="such as 0-${last}" required />
      <${Field} label="Per cent of the changes" name="percent" type="number" min="1" max="100" required />
      <button class="danger" disabled=${isRunning}>${title}</button></form>
    ${notice}${dialog}
  </section>`;
}

function PartitionAct({ kind, isMember, last }) {
  const { title, field: [name, label, isNeeded], hint } = PARTITION_ACTS[kind];
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  async function submit(event) {
    event.preventDefault();
    const given = fieldsOf(event.target);
    const body = given[name] === "" ? {} : { [name]: Number(given[name]) };
    if (!(await confirm(`${title}: partition ${given.vb}?`, hint, title))) return;
    run(() => change(isMember, kind, Number(given.vb), body));
  }
  return html`<section class="card" aria-labelledby="act-${kind}">
    <h2 id="act-${kind}">${title}</h2><p class="hint">${hint}</p>
    <form onSubmit=${submit} class="fields">
      <${Field} label="${title}: partition" name="vb" type="number" min="0" max=${last} required />
      <${Field} label=${label} name=${name} type="number" min="0" required=${isNeeded} />
      <button class="danger" disabled=${isRunning}>${title}</button></form>
    ${notice}${dialog}
  </section>`;
}

function Faults({ sample, last }) {
  const [rules, setRules] = useState([]);
  const [error, setError] = useState(null);
  const [opcode, setOpcode] = useState("");
  const [status, setStatus] = useState("");
  const [notice, run, isRunning] = useAct();
  const refresh = async () => {
    setRules((await ask("GET", "/api/v1/faults")).faults);
    setError(null);
  };
  useEffect(() => { refresh().catch((failure) => failure.status && setError(failure)); }, [sample]);
  function submit(event) {
    event.preventDefault();
    const form = event.target;
    const given = fieldsOf(form);
    const body = {};
    if (opcode) body.opcode = opcode;
    if (status) body.status = status;
    for (const name of ["vb", "delay_ms", "count"]) if (given[name] !== "") body[name] = Number(given[name]);
    if (given.disconnect) body.disconnect = true;
    run(async () => {
      const rule = await ask("POST", "/api/v1/faults", body);
      await refresh();
      return `Rule ${rule.id} is set.`;
    });
  }
  const clear = (id) => run(async () => {
    await ask("DELETE", "/api/v1/faults" + (id == null ? "" : `/${id}`));
    await refresh();
    return id == null ? "All rules are cleared." : `Rule ${id} is cleared.`;
  });
  const effect = (rule) => [rule.status && `answers ${rule.status}`, rule.delay_ms && `delays ${rule.delay_ms} ms`,
    rule.disconnect && "closes the connection"].filter(Boolean).join(", ");
  return html`<section class="card" aria-labelledby="faults">
    <h2 id="faults">Faults</h2>
    <p class="hint">The first rule that matches a command decides what happens to it.</p>
    <form onSubmit=${submit} class="fields">
      <${Choice} label="Command" options=${OPCODES.map((name) => [name, name || "any"])} value=${opcode} onChange=${setOpcode} />
      <${Choice} label="Answer" options=${STATUSES.map((name) => [name, name || "as usual"])} value=${status} onChange=${setStatus} />
      <${Field} label="Only partition" name="vb" type="number" min="0" max=${last} />
      <${Field} label="Delay in ms" name="delay_ms" type="number" min="0" />
      <${Field} label="How often" name="count" type="number" min="1" hint="empty: always" />
      <label class="check"><input type="checkbox" name="disconnect" /> Close the connection</label>
      <button class="danger" disabled=${isRunning}>Set the fault</button></form>
    ${notice}<${Notice} error=${error} />
    ${rules.length === 0 ? html`<p>No rule is set.</p>` : html`<div tabindex="0" class="scroll"><table>
      <caption class="hidden">Fault rules</caption>
      <thead><tr><th scope="col" class="number">Rule</th><th scope="col">Command</th><th scope="col">Partition</th>
        <th scope="col">What happens</th><th scope="col" class="number">Matched</th><th scope="col"></th></tr></thead>
      <tbody>${rules.map((rule) => html`<tr key=${rule.id}><td class="number">${rule.id}</td><td>${rule.opcode ?? "any"}</td>
        <td>${rule.vb ?? "any"}</td><td>${effect(rule)}</td><td class="number">${whole(rule.met)}</td>
        <td><button onClick=${() => clear(rule.id)} aria-label="Clear rule ${rule.id}">Clear</button></td></tr>`)}</tbody></table></div>
      <button onClick=${() => clear(null)}>Clear all</button>`}
  </section>`;
}

export function BenchPage({ head, cluster }) {
  const isMember = cluster != null;
  const last = head.partitions - 1;
  return html`
    <p class="banner" role="note"><strong>Test mode.</strong> What you do here makes the server forget
      changes or answer wrongly on purpose. It was started with --test-mode.</p>
    <div class="columns">${Object.keys(PARTITION_ACTS).map((kind) => html`<${PartitionAct} key=${kind} kind=${kind} isMember=${isMember} last=${last} />`)}
      <${BranchMany} isMember=${isMember} last=${last} /></div>
    <${Faults} sample=${head.sample} last=${last} />`;
}
