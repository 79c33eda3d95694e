// Documents: one key with its history, keys by prefix, and a partition as of a seqno.

import { html, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { ask, lines, query } from "./api.js";
import { Field, bytes, clock, fieldsOf, plural, useAct, useConfirm, whole } from "./parts.js";

const ROWS_MAX = 200; // of a partition as of a seqno
const SCAN_ROWS = 50;
const EDIT_BYTES_MAX = 40_000; // the server takes bodies of 64 KiB
const PATH = "/api/v1/documents";

const who = (document) => ({ key: document.key, collection: document.collection, key_encoding: document.key_encoding });

function Value({ version }) {
  if (version.value == null) return html`<em>${version.kind}</em>`;
  const isBinary = version.value_encoding === "base64";
  return html`<pre tabindex="0">${version.value}</pre>
    <small>${bytes(version.value_bytes)}${isBinary ? ", shown as base64" : ""}${
      version.is_cut ? ", only the beginning is shown" : ""}</small>
    ${Object.entries(version.xattrs).map(([name, text]) => html`<br /><small>XATTR ${name}: <code>${text}</code></small>`)}`;
}

function Editor({ title, version, onSave, onCancel, isRunning }) {
  const box = useRef();
  useEffect(() => box.current.querySelector("textarea").focus(), []);
  function submit(event) {
    event.preventDefault();
    onSave(event.target.elements.value.value);
  }
  return html`<form onSubmit=${submit} class="editor" ref=${box}>
    <${Field} label=${title} name="value" rows="8" defaultValue=${version?.value ?? ""} />
    <p class="buttons"><button disabled=${isRunning}>Save</button>
      <button type="button" onClick=${onCancel}>Cancel</button></p></form>`;
}

function Document({ found, setFound, may }) {
  const [notice, run, isRunning] = useAct();
  const [dialog, confirm] = useConfirm();
  const [isEditing, setEditing] = useState(false);
  const newest = found.versions[0];
  const cannotEdit = found.is_there && (
    newest.value_bytes > EDIT_BYTES_MAX ? "is too long" :
    newest.value_encoding !== "utf-8" ? "is binary" :
    // A text area would silently drop them.
    newest.value.includes("\r") ? "has carriage returns" : "");
  const mayChange = may.write_documents && found.may_write;
  const refresh = async () => setFound(await ask("GET", PATH + query(who(found))));
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
    <h2 id="document"><code>${found.key}</code></h2>
    <p class="hint">Collection ${found.collection}, partition ${found.vb}.
      ${found.is_there ? "" : " There is no such document now."}</p>
    ${mayChange && !isEditing && html`<p class="buttons">
      ${!cannotEdit && html`<button onClick=${() => setEditing(true)}>${found.is_there ? "Edit" : "Create"}</button>`}
      ${found.is_there && html`<button class="danger" onClick=${remove} disabled=${isRunning}>Delete</button>`}
      ${cannotEdit && html`<span class="hint">It ${cannotEdit} and cannot be edited here; use dcpctl set.</span>`}
    </p>`}
    ${isEditing && html`<${Editor} title="Value" version=${found.is_there ? newest : null} onSave=${save}
      onCancel=${() => setEditing(false)} isRunning=${isRunning} />`}
    ${notice}${dialog}
    <h3>History</h3>
    ${found.versions.length > 0 && html`<div class="scroll"><table class="history">
      <caption class="hidden">Versions of ${found.key}, newest first</caption>
      <thead><tr><th scope="col" class="number">Seqno</th><th scope="col">Time</th><th scope="col">Value</th></tr></thead>
      <tbody>${found.versions.map((version) => html`<tr key=${version.seqno}>
        <td class="number">${whole(version.seqno)}</td>
        <td>${clock(version.time_s)}${version.expiry ? html`<br /><small>expires ${clock(version.expiry)}</small>` : ""}</td>
        <td><${Value} version=${version} /></td></tr>`)}</tbody></table></div>`}
    ${found.older_than != null && html`<button onClick=${more} disabled=${isRunning}>Older versions</button>`}
    ${found.end && html`<p class="hint">The history ends here: ${found.end}.</p>`}
  </section>`;
}

function LookUp({ may, found, setFound, lookUp, notice, isRunning }) {
  function submit(event) {
    event.preventDefault();
    lookUp(fieldsOf(event.target));
  }
  return html`<section aria-labelledby="lookup"><h2 id="lookup">One document</h2>
    <form onSubmit=${submit} class="fields">
      <${Field} label="Key" name="key" required maxlength="250" />
      <${Field} label="Collection" name="collection" placeholder="_default._default" />
      <button disabled=${isRunning}>Look up</button></form>
    ${notice}
    ${found && html`<${Document} key=${found.collection + "/" + found.key} found=${found} setFound=${setFound} may=${may} />`}
  </section>`;
}

function Keys({ lookUp }) {
  const [notice, run, isRunning] = useAct();
  const [list, setList] = useState(null);
  const stop = useRef(false);
  useEffect(() => () => { stop.current = true; }, []);
  const search = (given, position, rows) => run(async () => {
    stop.current = false;
    const wanted = rows.length + SCAN_ROWS;
    let next = position, unreadable = position ? list.unreadable : [];
    do {
      const found = await ask("GET", `${PATH}/keys` + query({
        ...given, position: next, limit: wanted - rows.length }));
      rows = [...rows, ...found.keys];
      next = found.next;
      unreadable = [...unreadable, ...found.unreadable];
      setList({ given, rows, next, searched: found.searched, unreadable });
    } while (next != null && rows.length < wanted && !stop.current);
  });
  function submit(event) {
    event.preventDefault();
    search(fieldsOf(event.target), "", []);
  }
  return html`<section aria-labelledby="keys"><h2 id="keys">Keys with a prefix</h2>
    <form onSubmit=${submit} class="fields">
      <${Field} label="Prefix" name="prefix" maxlength="250" hint="empty: all keys" />
      <${Field} label="In collection" name="collection" placeholder="_default._default" />
      <button disabled=${isRunning}>List keys</button>
      ${isRunning && html`<button type="button" onClick=${() => { stop.current = true; }}>Stop</button>`}</form>
    ${notice}
    ${list && html`<p class="hint" role="status">${plural(list.rows.length, "key")}${list.next == null
      ? "; this is all." : `; searched ${whole(list.searched)} of 1,024 partitions.`} They are listed by
      partition.</p>
      ${list.unreadable.length > 0 && html`<p class="health unwell">The stored data of these partitions is damaged,
        so their keys are missing: ${list.unreadable.join(", ")}.</p>`}
      <div class="scroll"><table><caption class="hidden">Keys</caption>
        <thead><tr><th scope="col">Key</th><th scope="col" class="number">Partition</th>
          <th scope="col" class="number">Seqno</th><th scope="col">Changed</th></tr></thead>
        <tbody>${list.rows.map((row) => html`<tr key=${row.vb + "/" + row.key}>
          <td><button class="link" onClick=${() => lookUp({ key: row.key, key_encoding: row.key_encoding,
            collection: list.given.collection })}>${row.key}</button></td>
          <td class="number">${row.vb}</td><td class="number">${whole(row.seqno)}</td>
          <td>${clock(row.time_s)}</td></tr>`)}</tbody></table></div>
      ${list.next != null && !isRunning && html`<button
        onClick=${() => search(list.given, list.next, list.rows)}>More keys</button>`}`}
  </section>`;
}

function AsOf() {
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
      <${Field} label="Partition" name="vb" type="number" min="0" max="1023" required />
      <${Field} label="As of seqno" name="at" type="number" min="0" hint="empty: now" />
      <button disabled=${isRunning}>Show</button></form>
    ${notice}
    ${dump && html`<p class="hint" role="status">Partition ${dump.vb} as of seqno ${whole(dump.seqno)},
      version ${dump.version}: ${dump.isCut ? `the first ${ROWS_MAX} documents` : plural(dump.rows.length, "document")}.
      ${dump.isCut ? ` For all of them: dcpctl vb dump ${dump.vb} --at ${dump.seqno}` : ""}</p>
      <div class="scroll"><table><caption class="hidden">Documents of partition ${dump.vb} as of seqno ${dump.seqno}</caption>
        <thead><tr><th scope="col">Key</th><th scope="col">Collection</th><th scope="col" class="number">Seqno</th>
          <th scope="col">Value</th></tr></thead>
        <tbody>${dump.rows.map((row) => html`<tr><td><code>${row.key}</code></td><td>${row.collection}</td>
          <td class="number">${whole(row.seqno)}</td>
          <td><pre tabindex="0">${row.value.length > 2000 ? row.value.slice(0, 2000) + "…" : row.value}</pre></td></tr>`)}</tbody>
      </table></div>`}
  </section>`;
}

export function DocumentsPage({ may }) {
  const [notice, run, isRunning] = useAct();
  const [found, setFound] = useState(null);
  const lookUp = (given) => run(async () => {
    setFound(await ask("GET", PATH + query(given)));
  });
  return html`
    <${LookUp} ...${{ may, found, setFound, lookUp, notice, isRunning }} />
    <${Keys} lookUp=${lookUp} />
    ${may.dump && html`<${AsOf} />`}`;
}
