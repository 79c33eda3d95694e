// A JSON document as a tree that can be edited, and the differences between two of them.

import { html, useState } from "./vendor-htm-preact.js";

const OPEN_DEPTH = 2; // deeper levels begin closed
const isTree = (value) => value !== null && typeof value === "object";
const kindOf = (value) => (value === null ? "null" : Array.isArray(value) ? "array" : typeof value);

// Numbers that JavaScript would round: such a document is edited as text, so that nothing changes
// that was not touched.
export function treeOf(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return undefined;
  }
  const isSame = JSON.stringify(value).replace(/\s/g, "") === text.replace(/\s/g, "");
  return isSame && isTree(value) ? value : undefined;
}

const copyWith = (tree, key, value) => {
  const copy = Array.isArray(tree) ? [...tree] : { ...tree };
  copy[key] = value;
  return copy;
};
const copyWithout = (tree, key) => {
  if (Array.isArray(tree)) return tree.filter((_, index) => index !== key);
  const { [key]: _, ...rest } = tree;
  return rest;
};

// What somebody typed: JSON if it is, else a text.
function typed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

function Leaf({ name, value, onChange }) {
  const shown = JSON.stringify(value);
  if (!onChange) return html`<code class="json-${kindOf(value)}">${shown}</code>`;
  return html`<input class="json-${kindOf(value)}" aria-label="Value of ${name}" value=${shown} spellcheck=${false}
    autocomplete="off" size=${Math.min(60, Math.max(6, shown.length + 1))}
    onChange=${(event) => onChange(typed(event.target.value))} />`;
}

function Adder({ tree, onChange }) {
  function add(event) {
    event.preventDefault();
    event.stopPropagation();
    const form = event.currentTarget.parentElement;
    const name = form.querySelector("[data-name]")?.value ?? tree.length;
    if (name === "" || (!Array.isArray(tree) && name in tree)) return;
    onChange(Array.isArray(tree) ? [...tree, null] : { ...tree, [name]: null });
  }
  return html`<span class="adder">${Array.isArray(tree) ? "" : html`<input data-name aria-label="New member" placeholder="member" size="10" />`}
    <button type="button" class="small" onClick=${add}>+ add</button></span>`;
}

// `onChange` gets the whole tree with the change; without it nothing can be changed.
export function JsonTree({ value, onChange, name = "the document", depth = 0 }) {
  const [isOpen, setOpen] = useState(depth < OPEN_DEPTH);
  if (!isTree(value)) return html`<${Leaf} name=${name} value=${value} onChange=${onChange} />`;
  const isArray = Array.isArray(value);
  const entries = isArray ? value.map((item, index) => [index, item]) : Object.entries(value);
  const what = isArray ? `[ ${entries.length} ]` : `{ ${entries.length} }`;
  return html`<span class="json">
    <button type="button" class="toggle" aria-expanded=${isOpen} aria-label="${isOpen ? "Close" : "Open"} ${name}"
      onClick=${() => setOpen(!isOpen)}>${isOpen ? "▾" : "▸"} <span class="hint">${what}</span></button>
    ${isOpen && html`<ul>${entries.map(([key, item]) => html`<li key=${key}>
      <span class="member">${isArray ? key : `"${key}"`}:</span>${" "}
      <${JsonTree} value=${item} name=${String(key)} depth=${depth + 1}
        onChange=${onChange && ((changed) => onChange(copyWith(value, key, changed)))} />
      ${onChange && html`<button type="button" class="small quiet" aria-label="Take ${key} out"
        onClick=${() => onChange(copyWithout(value, key))}>✕</button>`}</li>`)}
      ${onChange && html`<li><${Adder} tree=${value} onChange=${onChange} /></li>`}</ul>`}
  </span>`;
}

const lines = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2).split("\n");
  } catch {
    return text.split("\n");
  }
};
const LINES_MAX = 1000; // the table of the longest common part has the square of it

// [sign, line] of two texts: " " in both, "-" only in the old one, "+" only in the new one.
export function differences(before, after) {
  const old = lines(before).slice(0, LINES_MAX), now = lines(after).slice(0, LINES_MAX);
  const common = Array.from({ length: old.length + 1 }, () => new Uint16Array(now.length + 1));
  for (let i = old.length - 1; i >= 0; i -= 1) {
    for (let j = now.length - 1; j >= 0; j -= 1) {
      common[i][j] = old[i] === now[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < old.length || j < now.length) {
    if (i < old.length && j < now.length && old[i] === now[j]) {
      found.push([" ", old[i]]); i += 1; j += 1;
    } else if (j >= now.length || (i < old.length && common[i + 1][j] >= common[i][j + 1])) {
      found.push(["-", old[i]]); i += 1;
    } else {
      found.push(["+", now[j]]); j += 1;
    }
  }
  return found;
}

export const Difference = ({ before, after }) => html`<pre class="diff" tabindex="0">${
  differences(before, after).map(([sign, line]) => html`<span class=${{ "+": "plus", "-": "minus", " ": "" }[sign]}>${
    sign} ${line}${"\n"}</span>`)}</pre>`;
