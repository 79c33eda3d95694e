// What an operator manages: collections, users, backups, settings, and the log.

import { html, useEffect, useState } from "./vendor-htm-preact.js";
import { ask, askForm } from "./api.js";
import { Choice, Field, Notice, Segments, Tile, bytes, clock, duration, fieldsOf, plural, scopesOf, useAct, useConfirm, whole } from "./parts.js";

// Loads something now and when `again` is called: [what was found, again, a notice if it failed].
function useLoaded(load, ...keys) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const again = () => load().then((value) => { setFound(value); setError(null); }, (failure) => setError(failure));
  useEffect(() => { again(); }, keys);
  return [found, again, error && html`<${Notice} error=${error} />`];
}

const Loading = () => html`<p class="loading" role="status">Asking…</p>`;

// -- collections ------------------------------------------------------------------------------------

export function CollectionsPage({ may }) {
  const [found, again, failed] = useLoaded(scopesOf);
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  if (failed || !found) return failed || html`<${Loading} />`;
  const { path, scopes } = found;
  const of = (scope, collection) => `${path}/${encodeURIComponent(scope)}/collections/${encodeURIComponent(collection)}`;
  function add(event) {
    event.preventDefault();
    const form = event.target;
    const { name, ttl } = fieldsOf(form);
    const [scope, collection] = name.includes(".") ? name.split(".") : ["_default", name];
    run(async () => {
      if (!scopes.some((one) => one.name === scope)) await askForm("POST", path, { name: scope });
      await askForm("POST", `${path}/${encodeURIComponent(scope)}/collections`, { name: collection, ...(ttl && { maxTTL: ttl }) });
      form.reset();
      await again();
      return `Collection ${scope}.${collection} is there.`;
    });
  }
  async function drop(scope, collection) {
    if (!(await confirm(`Drop ${scope}.${collection}?`, "All of its documents are gone with it.", "Drop it"))) return;
    run(async () => {
      await ask("DELETE", of(scope, collection));
      await again();
      return `Collection ${scope}.${collection} is dropped.`;
    });
  }
  const rows = scopes.flatMap((scope) => scope.collections.map((collection) => ({ scope: scope.name, ...collection })));
  return html`
    ${may.operate && html`<form onSubmit=${add} class="toolbar">
      <${Field} label="New collection" name="name" required placeholder="scope.collection" pattern="[^.]+([.][^.]+)?" />
      <${Field} label="Documents live at most (s)" name="ttl" type="number" min="1" placeholder="no limit" />
      <button disabled=${isRunning}>Create</button></form>`}
    ${notice}${dialog}
    <div tabindex="0" class="scroll card flush"><table><caption class="hidden">Collections</caption>
      <thead><tr><th scope="col">Scope</th><th scope="col">Collection</th><th scope="col">Id</th>
        <th scope="col">Documents live at most</th><th scope="col"><span class="hidden">Actions</span></th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${row.scope + "." + row.name}><td>${row.scope}</td>
        <th scope="row">${may.read_documents ? html`<a href="#/documents/${encodeURIComponent(`${row.scope}.${row.name}`)}">${row.name}</a>` : row.name}</th>
        <td><code>${row.uid}</code></td><td>${row.maxTTL > 0 ? duration(row.maxTTL) : "no limit"}</td>
        <td class="acts">${may.operate && !row.name.startsWith("_") && html`<button disabled=${isRunning}
          onClick=${() => drop(row.scope, row.name)} aria-label="Drop ${row.scope}.${row.name}">Drop</button>`}</td></tr>`)}</tbody></table></div>`;
}

// -- users ------------------------------------------------------------------------------------------

const ROLES = ["read", "write", "stream", "admin", "replicate"];
const scopeText = (scope) => [scope.collection, scope.prefix && `${scope.prefix}…`].filter(Boolean).join(" ") || "everything";

export function UsersPage() {
  const [found, again, failed] = useLoaded(() => ask("GET", "/api/v1/users"));
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  const [role, setRole] = useState("read");
  if (failed || !found) return failed || html`<${Loading} />`;
  const one = (name) => `/api/v1/users/${encodeURIComponent(name)}`;
  const change = (act, text) => run(async () => { await act(); await again(); return text; });
  function add(event) {
    event.preventDefault();
    const form = event.target;
    const { name, password } = fieldsOf(form);
    change(async () => {
      await ask("POST", "/api/v1/users", { name, password, roles: { [role]: [{}] } });
      form.reset();
    }, `User ${name} can log in, with the role ${role}.`);
  }
  async function remove(name) {
    if (await confirm(`Remove ${name}?`, "Open connections of this user lose their rights at once.", "Remove")) {
      change(() => ask("DELETE", one(name)), `User ${name} is removed.`);
    }
  }
  return html`
    <form onSubmit=${add} class="toolbar">
      <${Field} label="New user" name="name" required autocomplete="off" />
      <${Field} label="Password" name="password" type="password" required autocomplete="new-password" />
      <${Choice} label="Role" options=${ROLES.map((name) => [name, name])} value=${role} onChange=${setRole} />
      <button disabled=${isRunning}>Add</button></form>
    ${notice}${dialog}
    ${found.users.length === 0 ? html`<div class="card empty"><h2>No users yet</h2>
        <p>Only guest can log in, from the server's own machine. Add a user with the role admin first.</p></div>`
      : html`<div tabindex="0" class="scroll card flush"><table><caption class="hidden">Users</caption>
        <thead><tr><th scope="col">User</th>${ROLES.map((name) => html`<th scope="col">${name}</th>`)}
          <th scope="col"><span class="hidden">Actions</span></th></tr></thead>
        <tbody>${found.users.map((name) => html`<tr key=${name}><th scope="row">${name}</th>
          ${ROLES.map((each) => {
            const scopes = found.roles[name][each];
            const isWhole = scopes?.some((scope) => scopeText(scope) === "everything");
            return html`<td>${scopes && !isWhole ? html`<small>${scopes.map(scopeText).join(", ")}</small>`
              : html`<input type="checkbox" checked=${Boolean(scopes)} disabled=${isRunning} aria-label="${name}: ${each}"
                onChange=${() => change(() => ask("POST", `${one(name)}/${scopes ? "revoke" : "grant"}`, { role: each }),
                  `${name} ${scopes ? "lost" : "has"} the role ${each}.`)} />`}</td>`;
          })}
          <td class="acts"><button onClick=${() => remove(name)} disabled=${isRunning} aria-label="Remove ${name}">Remove</button></td></tr>`)}</tbody>
      </table></div>
      <p class="hint">Roles for some keys or collections only: <code>dcpctl user grant</code>. Changes count at once, also
        for open connections.</p>`}`;
}

// -- backups ----------------------------------------------------------------------------------------

const OUTCOMES = { running: ["warn", "no end yet"], done: ["live", "done"], failed: ["bad", "failed"], damaged: ["bad", "damaged"] };

const outcomeOf = ({ kind, result }) => (kind === "verify" && result === "done" ? ["live", "sound"] : OUTCOMES[result]);

function BackupRow({ user, peer, report }) {
  const [kind, text] = outcomeOf(report);
  const isRun = report.kind === "run";
  return html`<tr class=${kind === "bad" ? "row-bad" : ""}>
    <td class="nowrap">${clock(report.started_s)}${report.ended_s != null
      && html`<small>${duration(report.ended_s - report.started_s)}</small>`}</td>
    <td>${isRun ? (report.run ? `run ${report.run}` : "run") : "check"}</td>
    <td><span class="state ${kind}">${text}</span>${report.why && html`<small>${report.why}</small>`}
      ${report.rollbacks > 0 && html`<small>history had branched in ${plural(report.rollbacks, "partition")}</small>`}</td>
    <td class="value-cell"><code>${report.archive}</code><small>${report.host}, ${user} from ${peer}</small></td>
    <td class="number hide-narrow">${isRun ? whole(report.partitions) : "–"}</td>
    <td class="number hide-narrow">${whole(report.changes)}</td>
    <td class="number hide-narrow">${bytes(report.stored_bytes)}${isRun && html`<small>of ${bytes(report.raw_bytes)}</small>`}</td></tr>`;
}

// An archive is well if its newest run is done, and the newest check found no damage.
function ArchiveTile({ archive, reports, now }) {
  const newest = (kind) => reports.find((one) => one.kind === kind && one.result !== "running");
  const run = newest("run"), check = newest("verify");
  const ago = (report) => `${outcomeOf(report)[1]}, ${duration(Math.max(0, now - report.ended_s))} ago`;
  return html`<${Tile} name=${archive} value=${run ? (run.result === "done" ? `run ${run.run}` : "failed") : "no run yet"}
    note=${`${run ? ago(run) : ""}; ${check ? `check: ${ago(check)}` : "never checked"}`} />`;
}

export function BackupsPage({ head }) {
  const [found, , failed] = useLoaded(() => ask("GET", "/api/v1/backups"), head.sample);
  if (failed || !found) return failed || html`<${Loading} />`;
  if (found.backups.length === 0) {
    return html`<section class="card empty"><h2>No backup yet</h2>
      <p>A backup is a consumer that writes what it reads to a folder or an object store: everything once, then what
        has changed. Its runs and checks are shown here.</p>
      <pre tabindex="0">dcpctl backup run --archive DIR      # everything, then only what changed
dcpctl backup verify --archive DIR   # reads every file, and compares
dcpctl backup restore --archive DIR  # also as of a run, or into another server</pre></section>`;
  }
  const archives = new Map();
  for (const { report } of found.backups) {
    archives.set(report.archive_id, [...(archives.get(report.archive_id) ?? []), report]);
  }
  return html`<div class="tiles">${[...archives].map(([id, reports]) => html`<${ArchiveTile} key=${id}
      archive=${reports[0].archive} reports=${reports} now=${head.time_s} />`)}</div>
    <div tabindex="0" class="scroll card flush"><table class="backups"><caption class="hidden">Backups, the newest first</caption>
      <thead><tr><th scope="col">Began</th><th scope="col">What</th><th scope="col">Result</th><th scope="col">Archive</th>
        <th scope="col" class="number hide-narrow">Partitions</th><th scope="col" class="number hide-narrow">Changes</th>
        <th scope="col" class="number hide-narrow">Stored</th></tr></thead>
      <tbody>${found.backups.map((each) => html`<${BackupRow} key=${each.report.id} ...${each} />`)}</tbody></table></div>
    <p class="hint">What <code>dcpctl backup</code> reported to this node. One without an end is under way (then it is on the
      page <a href="#/consumers">Consumers</a>), or it was killed.</p>`;
}

// -- settings ---------------------------------------------------------------------------------------

function SettingValue({ setting, again }) {
  const [notice, run, isRunning] = useAct();
  const change = (event) => run(async () => {
    await ask("PUT", `/api/v1/settings/${setting.key}`, { value: event.target.value });
    await again();
    return "Changed, until the server ends.";
  });
  if (setting.is_live) {
    return html`<input aria-label=${setting.key} value=${setting.value} size="10" disabled=${isRunning} onChange=${change} />${notice}`;
  }
  return setting.value === setting.default ? setting.value : html`<b>${setting.value}</b>`;
}

export function SettingsPage({ head }) {
  const [found, again, failed] = useLoaded(() => ask("GET", "/api/v1/settings"), head.boot);
  const [text, setText] = useState("");
  const [which, setWhich] = useState("all");
  if (failed || !found) return failed || html`<${Loading} />`;
  const shown = found.settings.filter((setting) =>
    (which === "all" || setting.value !== setting.default) && (setting.key + setting.meaning).toLowerCase().includes(text.toLowerCase()));
  return html`
    <div class="toolbar"><${Field} label="Contains" value=${text} onInput=${(event) => setText(event.target.value)} />
      <${Segments} label="Which" options=${[["all", "All"], ["changed", "Not the default"]]} value=${which} onChange=${setWhich} /></div>
    <p class="hint" role="status">${plural(shown.length, "setting")}. They are read at the start: dcpd.toml, then DCPD_ variables, then flags. Those with a field can change now.</p>
    <div tabindex="0" class="scroll card flush"><table class="settings"><caption class="hidden">Settings</caption>
      <thead><tr><th scope="col">Setting</th><th scope="col">Value</th><th scope="col" class="hide-narrow">Default</th></tr></thead>
      <tbody>${shown.map((setting) => html`<tr key=${setting.key}><th scope="row"><code>${setting.key}</code><small>${setting.meaning}</small></th>
        <td><${SettingValue} setting=${setting} again=${again} /></td>
        <td class="hide-narrow hint">${setting.default}</td></tr>`)}</tbody></table></div>`;
}

// -- log --------------------------------------------------------------------------------------------

const LEVELS = [["", "All"], ["warning", "Warnings"], ["error", "Errors"]];
const RANK = { debug: 0, info: 1, warning: 2, error: 3 };

export function LogPage({ head }) {
  const [found, , failed] = useLoaded(() => ask("GET", "/api/v1/log"), head.sample);
  const [level, setLevel] = useState("");
  const [text, setText] = useState("");
  if (failed || !found) return failed || html`<${Loading} />`;
  const fields = (line) => Object.entries(line.fields).map(([name, value]) => `${name}=${value}`).join("  ");
  const shown = found.lines.filter((line) => (RANK[line.level] ?? 3) >= (RANK[level] ?? 0)
    && (line.event + fields(line)).toLowerCase().includes(text.toLowerCase()));
  return html`
    <div class="toolbar"><${Segments} label="Level" options=${LEVELS} value=${level} onChange=${setLevel} />
      <${Field} label="Contains" value=${text} onInput=${(event) => setText(event.target.value)} /></div>
    <p class="hint" role="status">${plural(shown.length, "line")} of the last ${whole(found.lines.length)}, the newest first.</p>
    <div tabindex="0" class="scroll card flush"><table class="log"><caption class="hidden">The server's log</caption>
      <thead><tr><th scope="col">Time</th><th scope="col">Level</th><th scope="col">Event</th></tr></thead>
      <tbody>${shown.map((line, index) => html`<tr key=${index} class=${{ error: "row-bad", warning: "row-note" }[line.level] ?? ""}>
        <td class="nowrap">${clock(line.time_s)}</td>
        <td><span class="state ${{ error: "bad", warning: "warn" }[line.level] ?? ""}">${line.level}</span></td>
        <td>${line.event} <code class="hint">${fields(line)}</code></td></tr>`)}</tbody></table></div>`;
}
