// The map of all partitions: a grid of cells that is walked with the arrow keys.

import { html, useEffect, useRef } from "./vendor-htm-preact.js";

const COLUMNS = 32;

// `looks`: {className, mark, label} of each partition.
// Buttons that are made once. After that only what has changed is written.
export function PartitionGrid({ looks, chosen, onChoose }) {
  const place = useRef();
  const cells = useRef([]);
  const focused = useRef(chosen ?? 0);
  const choose = useRef();
  choose.current = onChoose;
  useEffect(() => {
    const rows = Array.from({ length: looks.length / COLUMNS }, (_, row) => {
      const element = document.createElement("div");
      element.setAttribute("role", "row");
      for (let column = 0; column < COLUMNS; column += 1) {
        const cell = document.createElement("button");
        cell.type = "button";
        cell.setAttribute("role", "gridcell");
        cell.tabIndex = -1;
        cell.dataset.vb = row * COLUMNS + column;
        cells.current.push(cell);
        element.append(cell);
      }
      return element;
    });
    place.current.replaceChildren(...rows);
    cells.current[focused.current].tabIndex = 0;
    return () => { cells.current = []; };
  }, []);
  useEffect(() => {
    looks.forEach((look, vb) => {
      const cell = cells.current[vb];
      const name = look.className + (vb === chosen ? " chosen" : "");
      if (cell.className !== name) cell.className = name;
      if (cell.getAttribute("aria-label") !== look.label) {
        cell.setAttribute("aria-label", look.label);
        cell.title = look.label;
      }
      if (cell.textContent !== look.mark) cell.textContent = look.mark;
      if ((cell.getAttribute("aria-selected") === "true") !== (vb === chosen)) {
        cell.setAttribute("aria-selected", vb === chosen);
      }
    });
  });
  function move(event) {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -COLUMNS, ArrowDown: COLUMNS };
    const at = focused.current;
    let to = at + (steps[event.key] ?? 0);
    if (event.key === "Home") to = at - (at % COLUMNS);
    if (event.key === "End") to = at - (at % COLUMNS) + COLUMNS - 1;
    if (to === at || to < 0 || to >= cells.current.length) return;
    event.preventDefault();
    cells.current[at].tabIndex = -1;
    focused.current = to;
    cells.current[to].tabIndex = 0;
    cells.current[to].focus();
  }
  function click(event) {
    const vb = event.target.dataset?.vb;
    if (vb !== undefined) choose.current(Number(vb));
  }
  return html`<div class="map" role="grid" aria-label="All partitions. Arrow keys move, Enter shows one."
    ref=${place} onKeyDown=${move} onClick=${click}></div>`;
}
