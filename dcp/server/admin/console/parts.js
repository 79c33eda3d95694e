// Small parts that all pages use.

import { html, useEffect, useRef, useState } from "./vendor-htm-preact.js";
import { Refused, Unreachable, ask } from "./api.js";

export { html };

const WHOLE = new Intl.NumberFormat("en");
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const whole = (value) => (value == null ? "–" : WHOLE.format(Math.round(value)));
export const short = (value) => (value == null ? "–" : value >= 1000 ? whole(value) : SHORT.format(value));

export function bytes(value) {
  if (value == null) return "–";
  let unit = 0;
  while (value >= 1024 && unit < 4) {
    value /= 1024;
    unit += 1;
  }
  return `${SHORT.format(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][unit]}`;
}

export function milliseconds(value) {
  return value == null ? "–" : value >= 1000 ? `${SHORT.format(value / 1000)} s` : `${SHORT.format(value)} ms`;
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129_600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86_400)} days`;
}

export function clock(seconds) {
  const when = new Date(seconds * 1000);
  const isToday = when.toDateString() === new Date().toDateString();
  const time = when.toLocaleTimeString("en-GB");
  return isToday ? time : `${when.toLocaleDateString("en-CA")} ${time}`;
}

export const plural = (count, one, many = one + "s") => `${whole(count)} ${count === 1 ? one : many}`;

export function describe(error) {
  if (error instanceof Refused) {
    return [error.message, error.why && `Why: ${error.why}.`, error.hint && html`Try: <${Prose} text=${error.hint} />.`];
  }
  if (error instanceof Unreachable) return ["The server cannot be reached.", "If you were changing something, look whether it was done."];
  return [String(error)];
}

// How well the server is, or all of its cluster: {kind: good, warn or bad, text}.
export function healthOf(head, cluster) {
  if (cluster?.without_writes) {
    return { kind: "bad", text: `${plural(cluster.without_writes, "partition takes", "partitions take")} no writes` };
  }
  if (!head.is_ready) return { kind: "bad", text: "Not ready" };
  if (head.why_not) return { kind: "bad", text: "Writes are refused" };
  if (cluster?.down.length) return { kind: "warn", text: `Down: ${cluster.down.join(", ")}` };
  if (cluster?.problems) return { kind: "warn", text: plural(cluster.problems, "problem") };
  if (head.warnings.length) return { kind: "warn", text: plural(head.warnings.length, "warning") };
  return { kind: "good", text: "Healthy" };
}

// A message: an error, or the result of an act. Screen readers say it when it appears.
export function Notice({ error, text, isBad = error != null }) {
  if (!error && !text) return null;
  const [first, ...more] = error ? describe(error) : [text];
  return html`<div class="notice ${isBad ? "bad" : "good"}" role=${isBad ? "alert" : "status"}>
    <strong>${first}</strong>${more.filter(Boolean).map((line) => html`<br />${line}`)}
  </div>`;
}

// Runs an act and keeps what came of it: [message, run, isRunning].
export function useAct() {
  const [result, setResult] = useState({});
  const [isRunning, setRunning] = useState(false);
  async function run(act) {
    setRunning(true);
    setResult({});
    try {
      const text = await act();
      setResult({ text });
      return true;
    } catch (error) {
      setResult({ error });
      return false;
    } finally {
      setRunning(false);
    }
  }
  return [html`<${Notice} ...${result} />`, run, isRunning];
}

let lastId = 0;
export function useId() {
  const id = useRef();
  id.current ??= `id-${(lastId += 1)}`;
  return id.current;
}

export function Field({ label, hint, ...rest }) {
  const id = useId();
  const Kind = rest.rows ? "textarea" : "input";
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <${Kind} id=${id} aria-describedby=${hint ? id + "-hint" : undefined} autocomplete="off"
      spellcheck=${false} ...${rest} />
    ${hint && html`<small id=${id + "-hint"}>${hint}</small>`}
  </div>`;
}

export function Choice({ label, options, value, onChange }) {
  const id = useId();
  return html`<div class="field">
    <label for=${id}>${label}</label>
    <select id=${id} value=${value} onChange=${(event) => onChange(event.target.value)}>
      ${options.map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}
    </select>
  </div>`;
}

export const fieldsOf = (form) => Object.fromEntries(new FormData(form));

// Returns [dialog, confirm]. `confirm` asks whether to go on, and resolves to true or false.
export function useConfirm() {
  const [question, setQuestion] = useState(null);
  const dialog = useRef();
  useEffect(() => {
    if (question) dialog.current.showModal();
  }, [question]);
  function answer(value) {
    dialog.current.close();
    question.resolve(value);
    setQuestion(null);
  }
  const view = html`<dialog ref=${dialog} aria-labelledby=${question ? "confirm-title" : undefined}
      onCancel=${(event) => { event.preventDefault(); answer(false); }}>
    ${question && html`
      <h2 id="confirm-title">${question.title}</h2>
      <p>${question.text}</p>
      <p class="buttons">
        <button class="danger" onClick=${() => answer(true)}>${question.button}</button>
        <button autofocus onClick=${() => answer(false)}>Cancel</button>
      </p>`}
  </dialog>`;
  const confirm = (title, text, button) =>
    new Promise((resolve) => setQuestion({ title, text, button, resolve }));
  return [view, confirm];
}

// A text of the server, in which commands stand in backquotes.
export const Prose = ({ text }) => text.split("`").map((piece, index) =>
  index % 2 ? html`<code>${piece}</code>` : piece);

export const Tile = ({ name, value, note }) => html`<div class="tile"><span>${name}</span>
  <b>${value}</b>${note && html`<small>${note}</small>`}</div>`;

// A choice of few, all of them in sight.
export function Segments({ label, options, value, onChange }) {
  const id = useId();
  return html`<fieldset class="segments"><legend>${label}</legend><div>
    ${options.map(([key, text]) => html`<label class=${key === value ? "chosen" : ""}>
      <input type="radio" name=${id} value=${key} checked=${key === value} onChange=${() => onChange(key)} />${text}</label>`)}
  </div></fieldset>`;
}

// The numbers in "0-5,9".
// Where another node of the cluster has its console.
export function consoleOf(node) {
  const port = location.protocol === "https:" ? node.admin_tls_port : node.admin_port;
  const host = node.address.slice(0, node.address.lastIndexOf(":"));
  return `${location.protocol}//${host}:${port}/`;
}

export const ids = (text) => text.split(",").filter(Boolean).flatMap((piece) => {
  const [first, last] = piece.split("-").map(Number);
  return Array.from({ length: (last ?? first) - first + 1 }, (_, index) => first + index);
});

// The value of a document in one line.
export function ValueLine({ row }) {
  if (row.value == null) return html`<em>–</em>`;
  const isCut = row.value_bytes > row.value.length;
  return html`<code class="line">${row.value_encoding === "base64" ? `binary, ${bytes(row.value_bytes)}` : row.value}${isCut ? "…" : ""}</code>`;
}

// The scopes and collections of the bucket: [{name, collections: [{name, maxTTL}]}], and its path.
export async function scopesOf() {
  const [bucket] = await ask("GET", "/pools/default/buckets");
  const path = `/pools/default/buckets/${encodeURIComponent(bucket.name)}/scopes`;
  return { path, scopes: (await ask("GET", path)).scopes };
}

export const DEFAULT_COLLECTION = "_default._default";

export function CollectionChoice({ value, onChange, all }) {
  const [paths, setPaths] = useState([DEFAULT_COLLECTION]);
  useEffect(() => {
    scopesOf().then(({ scopes }) => setPaths(scopes.flatMap((scope) =>
      scope.collections.map((collection) => `${scope.name}.${collection.name}`)).sort()), () => {});
  }, []);
  const known = value && !paths.includes(value) ? [value, ...paths] : paths;
  const options = [...(all ? [["", all]] : []), ...known.map((path) => [path, path])];
  return html`<${Choice} label="Collection" options=${options} value=${value} onChange=${onChange} />`;
}
