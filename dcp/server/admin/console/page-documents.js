// Documents: the first hundred by key, now or as of a moment, one with its history, a partition as of a seqno.

import { html, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { ask, lines, query } from "./api.js";
import { Difference, JsonTree, treeOf } from "./json.js";
import { CollectionChoice, DEFAULT_COLLECTION, Field, Segments, ValueLine, bytes, clock, consoleOf, fieldsOf,
         plural, useAct, useConfirm, whole } from "./parts.js";

const ROWS_MAX = 200; // of a partition as of a seqno
const PAGE_ROWS = 100;
const EDIT_BYTES_MAX = 40_000; // the server takes bodies of 64 KiB
const PATH = "/api/v1/documents";

const who = (document) => ({ key: document.key, collection: document.collection, key_encoding: document.key_encoding });

function Value({ version }) {
  if (version.value == null) return html`<em>${version.kind}</em>`;
  const isBinary = version.value_encoding === "base64";
  const tree = isBinary || version.is_cut ? undefined : treeOf(version.value);
  return html`${tree === undefined ? html`<pre tabindex="0">${version.value}</pre>` : html`<${JsonTree} value=${tree} />`}
    <small>${bytes(version.value_bytes)}${isBinary ? ", shown as base64" : ""}${
      version.is_cut ? ", only the beginning is shown" : ""}</small>
    ${Object.entries(version.xattrs).map(([name, text]) => html`<br /><small>XATTR ${name}: <code>${text}</code></small>`)}`;
}

const FORMS = [["tree", "Tree"], ["text", "Text"]];

function Editor({ title, version, onSave, onCancel, isRunning }) {
  const box = useRef();
  const [text, setText] = useState(version?.value ?? "");
  const tree = treeOf(text);
  const [form, setForm] = useState(tree === undefined ? "text" : "tree");
  const shown = tree === undefined ? "text" : form;
  useEffect(() => box.current.querySelector("textarea, .toggle")?.focus(), [shown]);
  function submit(event) {
    event.preventDefault();
    onSave(text);
  }
  return html`<form onSubmit=${submit} class="editor" ref=${box}>
    ${tree !== undefined && html`<${Segments} label="Edit as" options=${FORMS} value=${shown} onChange=${setForm} />`}
    ${shown === "tree"
      ? html`<div class="card"><${JsonTree} value=${tree} onChange=${(changed) => setText(JSON.stringify(changed))} /></div>`
      : html`<${Field} label=${title} name="value" rows="8" value=${text} onInput=${(event) => setText(event.target.value)} />`}
    <p class="buttons"><button disabled=${isRunning}>Save</button>
      <button type="button" onClick=${onCancel}>Cancel</button></p></form>`;
}

// "2026-11-28T17:45" of a field, as Unix seconds; null: none.
const momentOf = (text) => (text ? new Date(text).getTime() / 1000 : null);

function Versions({ found, isRunning, onMore, asOf }) {
  const [moment, setMoment] = useState(asOf);
  const at = momentOf(moment);
  const then = at == null ? null : found.versions.find((version) => version.time_s <= at);
  return html`<div class="head"><h3>History</h3>
    <div class="field inline"><label for="moment">As of</label>
      <input id="moment" type="datetime-local" step="1" value=${moment} onInput=${(event) => setMoment(event.target.value)} /></div></div>
    ${at != null && html`<p class="notice ${then ? "good" : "warn"}" role="status">${then
      ? html`At that moment it was <b>seqno ${whole(then.seqno)}</b>, ${then.value == null ? then.kind : "the marked version"}.`
      : found.older_than != null ? "It is older than what is shown. Load older versions."
      : "No version of that time is kept."}</p>`}
    <div tabindex="0" class="scroll"><table class="history"><caption class="hidden">History of ${found.key}, newest first</caption>
      <thead><tr><th scope="col" class="number">Seqno</th><th scope="col">Time</th><th scope="col">Value</th></tr></thead>
      <tbody>${found.versions.map((version, index) => {
        const before = found.versions[index + 1];
        const hasText = (one) => one?.value != null && one.value_encoding === "utf-8" && !one.is_cut;
        return html`<tr key=${version.seqno} class=${version === then ? "row-then" : ""}>
          <td class="number">${whole(version.seqno)}</td>
          <td class="nowrap">${clock(version.time_s)}<small>revision ${version.rev}</small>${
            version.expiry ? html`<small>expires ${clock(version.expiry)}</small>` : ""}</td>
          <td>${version.value == null ? html`<span class="kind deleted">${version.kind}</span>` : html`<${Value} version=${version} />`}
            ${hasText(version) && hasText(before) && html`<details><summary>What changed</summary>
              <${Difference} before=${before.value} after=${version.value} /></details>`}</td></tr>`;
      })}</tbody></table></div>
    ${found.older_than != null && html`<button type="button" onClick=${onMore} disabled=${isRunning}>Older versions</button>`}
    ${found.end && html`<p class="hint">The history ends here: ${found.end}.</p>`}`;
}

// Only the master of a partition changes it: {name, url} of that node if it is another one.
function useMasterElsewhere(isMember, found) {
  const [master, setMaster] = useState(null);
  useEffect(() => {
    if (!isMember) return;
    ask("GET", "/api/v1/cluster/page").then(({ status, map }) => {
      const name = map.nodes[map.masters[found.vb]];
      const node = status.nodes.find((one) => one.name === name);
      if (!node || name === status.node) return;
      const place = [found.collection, found.key].map(encodeURIComponent).join("/");
      setMaster({ name, url: `${consoleOf(node)}#/documents/${place}` });
    }, () => {});
  }, [isMember, found.vb]);
  return master;
}

function Document({ found, setFound, may, onChanged, isMember, asOf }) {
  const master = useMasterElsewhere(isMember, found);
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  const [isEditing, setEditing] = useState(false);
  const title = useRef();
  useEffect(() => title.current.focus(), []);
  const newest = found.versions[0];
  const cannotEdit = found.is_there && (
    newest.value_bytes > EDIT_BYTES_MAX ? "is too long" :
    newest.value_encoding !== "utf-8" ? "is binary" :
    // A text area would silently drop them.
    newest.value.includes("\r") ? "has carriage returns" : "");
  const mayChange = may.write_documents && found.may_write && !master;
  const refresh = async () => {
    setFound(await ask("GET", PATH + query(who(found))));
    onChanged();
  };
  // The CAS makes sure that nothing is overwritten that was not on the screen.
  const save = (value) => run(async () => {
    const condition = found.is_there
      ? { cas: newest.cas, flags: newest.flags, expiry: newest.expiry } : { only_new: true };
    const changed = await ask("PUT", PATH, { ...who(found), value, ...condition });
    setEditing(false);
    await refresh();
    return `Saved as seqno ${whole(changed.seqno)}. It is on disk.`;
  });
  async function remove() {
    if (!(await confirm(`Delete ${found.key}?`,
      "Consumers see the deletion. Its versions stay in the history for a while.", "Delete it"))) return;
    run(async () => {
      const changed = await ask("DELETE", PATH, { ...who(found), cas: newest.cas });
      await refresh();
      return `Deleted as seqno ${whole(changed.seqno)}.`;
    });
  }
  const more = () => run(async () => {
    const older = await ask("GET", PATH + query({ ...who(found), older_than: found.older_than }));
    setFound({ ...older, is_there: found.is_there, versions: [...found.versions, ...older.versions] });
  });
  return html`<section class="card" aria-labelledby="document">
    <div class="head"><h2 id="document" tabindex="-1" ref=${title}><code>${found.key}</code></h2>
      <button type="button" onClick=${() => { location.hash = "#/documents"; setFound(null); }}>Close</button></div>
    <p class="hint">Collection ${found.collection}, partition ${found.vb}.
      ${found.is_there ? ` CAS ${newest.cas}, revision ${newest.rev}.` : " There is no such document now."}</p>
    ${mayChange && !isEditing && html`<p class="buttons">
      ${!cannotEdit && html`<button onClick=${() => setEditing(true)}>${found.is_there ? "Edit" : "Create"}</button>`}
      ${found.is_there && html`<button class="danger" onClick=${remove} disabled=${isRunning}>Delete</button>`}
      ${cannotEdit && html`<span class="hint">It ${cannotEdit} and cannot be edited here; use dcpctl set.</span>`}</p>`}
    ${master && html`<p class="notice warn">This node has a copy. It is changed at its master,
      node ${master.name}: open <code>${master.url}</code> (a link from here would be one of another site).</p>`}
    ${!mayChange && !master && html`<p class="hint">Your roles do not allow to change it.</p>`}
    ${isEditing && html`<${Editor} title="Value" version=${found.is_there ? newest : null} onSave=${save}
      onCancel=${() => setEditing(false)} isRunning=${isRunning} />`}
    ${notice}${dialog}
    ${found.versions.length > 0 && html`<${Versions} found=${found} isRunning=${isRunning} onMore=${more} asOf=${asOf} />`}
    ${found.versions.length === 0 && found.end && html`<p class="hint">${found.end}.</p>`}
  </section>`;
}

// The documents by key, a page at a time.
function Listing({ collection, prefix, lookUp, changes, asOf }) {
  const [notice, run, isRunning] = useAct();
  const [list, setList] = useState(null);
  const newest = useRef(); // an answer that comes after that of a later question is dropped
  const load = (before) => run(async () => {
    const mine = (newest.current = {});
    const found = await ask("GET", `${PATH}/sorted` + query({
      collection, prefix, limit: PAGE_ROWS, position: before?.next, at: momentOf(asOf) }));
    if (newest.current === mine) setList({ ...found, documents: [...(before?.documents ?? []), ...found.documents] });
  });
  useEffect(() => { load(null); }, [collection, prefix, changes, asOf]);
  return html`<section aria-labelledby="listing"><h2 id="listing" class="hidden">Documents by key</h2>
    ${notice}
    ${list?.unreadable.length > 0 && html`<p class="health bad">The stored data of these partitions is damaged,
      so their keys are missing: ${list.unreadable.join(", ")}.</p>`}
    ${list?.too_new.length > 0 && html`<p class="notice warn" role="status">The history of${" "}
      ${plural(list.too_new.length, "partition does", "partitions do")} not reach back so far, so documents are missing here.
      ${list.kept_since_s ? ` Everything is kept since ${clock(list.kept_since_s)}.` : ""} The setting${" "}
      <code>history_window</code> says how long versions are kept.</p>`}
    ${!list && isRunning && html`<p class="loading" role="status">Looking…</p>`}
    ${list && (list.documents.length === 0 ? html`<div class="card empty"><h2>No documents</h2>
        <p>${prefix ? html`No key in ${collection} begins with <code>${prefix}</code>` : `${collection} is empty`}${asOf ? " as of then" : ""}.</p>
        <pre tabindex="0">dcpctl set hello '{"n": 1}'</pre></div>`
      : html`<p class="hint" role="status">${list.next == null ? plural(list.documents.length, "document")
          : `The first ${whole(list.documents.length)} documents`}, sorted by key${asOf ? `, as of ${clock(momentOf(asOf))}` : ""}.</p>
        <div tabindex="0" class="scroll card flush"><table class="documents"><caption class="hidden">Documents by key</caption>
          <thead><tr><th scope="col">Key</th><th scope="col">Value</th><th scope="col" class="number hide-narrow">Size</th>
            <th scope="col" class="hide-narrow">Changed</th><th scope="col" class="number hide-narrow">Partition</th></tr></thead>
          <tbody>${list.documents.map((row) => html`<tr key=${row.vb + "/" + row.key}>
            <td class="key-cell"><button class="link" onClick=${() => lookUp({ key: row.key, key_encoding: row.key_encoding, collection })}
              >${row.key}</button></td>
            <td class="value-cell"><${ValueLine} row=${row} /></td>
            <td class="number hide-narrow">${bytes(row.value_bytes)}</td><td class="nowrap hide-narrow">${clock(row.time_s)}</td>
            <td class="number hide-narrow">${row.vb}</td></tr>`)}</tbody></table></div>
        ${list.next != null && html`<p class="buttons"><button type="button" disabled=${isRunning}
          onClick=${() => load(list)}>Next ${PAGE_ROWS}</button></p>`}`)}
  </section>`;
}

function AsOf({ last }) {
  const [notice, run, isRunning] = useAct();
  const [dump, setDump] = useState(null);
  function submit(event) {
    event.preventDefault();
    const { vb, at } = fieldsOf(event.target);
    run(async () => {
      const rows = [];
      let head = null, isCut = false;
      for await (const line of lines(`/api/v1/vbuckets/${Number(vb)}/documents` + query({ at }))) {
        if (!head) head = line;
        else if (line.error) throw new Error(line.error.why);
        else if (rows.length === ROWS_MAX) { isCut = true; break; }
        else rows.push(line);
      }
      setDump({ vb, ...head, rows, isCut });
    });
  }
  return html`<section aria-labelledby="asof"><h2 id="asof">A partition as of a seqno</h2>
    <form onSubmit=${submit} class="fields">
      <${Field} label="Partition" name="vb" type="number" min="0" max=${last} required />
      <${Field} label="As of seqno" name="at" type="number" min="0" placeholder="now" />
      <button disabled=${isRunning}>Show</button></form>
    ${notice}
    ${dump && html`<p class="hint" role="status">Partition ${dump.vb} as of seqno ${whole(dump.seqno)},
      version ${dump.version}: ${dump.isCut ? `the first ${ROWS_MAX} documents` : plural(dump.rows.length, "document")}.
      ${dump.isCut ? ` For all of them: dcpctl vb dump ${dump.vb} --at ${dump.seqno}` : ""}</p>
      <div tabindex="0" class="scroll"><table><caption class="hidden">Documents of partition ${dump.vb} as of seqno ${dump.seqno}</caption>
        <thead><tr><th scope="col">Key</th><th scope="col">Collection</th><th scope="col" class="number">Seqno</th>
          <th scope="col">Value</th></tr></thead>
        <tbody>${dump.rows.map((row) => html`<tr><td><code>${row.key}</code></td><td>${row.collection}</td>
          <td class="number">${whole(row.seqno)}</td>
          <td><pre tabindex="0">${row.value.length > 2000 ? row.value.slice(0, 2000) + "…" : row.value}</pre></td></tr>`)}</tbody>
      </table></div>`}
  </section>`;
}

export function DocumentsPage({ head, may, args, cluster }) {
  const [notice, run, isRunning] = useAct();
  const [found, setFound] = useState(null);
  const [collection, setCollection] = useState(args[0] || DEFAULT_COLLECTION);
  const [prefix, setPrefix] = useState("");
  const [asOf, setAsOf] = useState("");
  const [changes, setChanges] = useState(0);
  const lookUp = (given) => run(async () => {
    setFound(null);
    setFound(await ask("GET", PATH + query(given)));
  });
  useEffect(() => { if (args[1]) lookUp({ collection: args[0], key: args[1] }); }, [args.join("/")]);
  function submit(event) {
    event.preventDefault();
    lookUp({ key: fieldsOf(event.target).key, collection });
  }
  return html`
    <div class="toolbar">
      <${CollectionChoice} value=${collection} onChange=${(path) => { setCollection(path); setFound(null); }} />
      <div class="field"><label for="doc-prefix">Key begins with</label>
        <input id="doc-prefix" maxlength="250" autocomplete="off" spellcheck=${false} value=${prefix}
          onChange=${(event) => setPrefix(event.target.value)} /></div>
      <form onSubmit=${submit} class="fields"><${Field} label="Key" name="key" required maxlength="250" />
        <button disabled=${isRunning}>Look up</button></form>
      <div class="field"><label for="doc-as-of">As of (empty: now)</label>
        <input id="doc-as-of" type="datetime-local" step="1" value=${asOf} onChange=${(event) => setAsOf(event.target.value)} /></div>
    </div>
    ${notice}
    ${found && html`<${Document} key=${found.collection + "/" + found.key} found=${found} setFound=${setFound} may=${may} isMember=${cluster != null} asOf=${asOf}
      onChanged=${() => setChanges((count) => count + 1)} />`}
    <${Listing} ...${{ collection, prefix, lookUp, changes, asOf }} />
    ${may.dump && html`<${AsOf} last=${head.partitions - 1} />`}`;
}
