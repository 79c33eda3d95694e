// Charts over time. uPlot draws them on a canvas, so the caption says the same in words.

import { html, useEffect, useRef } from "./vendor-htm-preact.js";

const HEIGHT = 150;
const COLOURS = ["--line-1", "--line-2", "--line-3"];

const times = (_, splits) => splits.map((at) => {
  const text = new Date(at * 1000).toLocaleTimeString("en-GB");
  return splits.at(-1) - splits[0] < 600 ? text : text.slice(0, 5);
});
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// Ticks of bytes are round in MiB, not in millions.
const SECOND_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200];
const BYTE_STEPS = Array.from({ length: 44 }, (_, power) => 2 ** power);

function options(width, series, format, isBytes) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--rule"), width: 1 },
                 ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width, height: HEIGHT, legend: { show: false }, cursor: { y: false, drag: { x: false, y: false } },
    // It begins where the data begins; until there is a minute of it, the line grows into one.
    scales: { x: { range: (_, first, last) => (last > first ? [first, last] : [last - 60, last]) }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [{ ...axis, size: 24, values: times, space: 70, incrs: SECOND_STEPS },
           { ...axis, size: 62, ...(isBytes && { incrs: BYTE_STEPS }), values: (_, splits) => splits.map(format) }],
    series: [{}, ...series.map((name, index) => ({
      label: name, stroke: colour(COLOURS[index]), width: 1.5, points: { show: false },
      // The lines differ in more than their colour.
      dash: [[], [6, 3], [2, 2]][index],
    }))],
  };
}

const lastOf = (values) => {
  for (let at = values.length - 1; at >= 0; at -= 1) if (values[at] != null) return values[at];
  return null;
};
const highestOf = (values) => values.reduce((most, value) => (value > most ? value : most), 0);

// `series`: [[name, values], ...] over `times` (Unix seconds).
export function Chart({ title, times, series, format, isBytes = false }) {
  const place = useRef();
  const plot = useRef();
  const names = series.map(([name]) => name);
  const data = [times, ...series.map(([, values]) => values)];
  const latest = useRef();
  latest.current = data;
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      const width = Math.max(200, Math.floor(place.current.clientWidth));
      plot.current = new window.uPlot(options(width, names, format, isBytes), latest.current, place.current);
    };
    draw();
    const sizes = new ResizeObserver(() => {
      const width = Math.max(200, Math.floor(place.current.clientWidth));
      if (plot.current.width !== width) plot.current.setSize({ width, height: HEIGHT });
    });
    sizes.observe(place.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    return () => {
      sizes.disconnect();
      dark.removeEventListener("change", draw);
      plot.current.destroy();
    };
  }, [names.join()]);
  useEffect(() => plot.current.setData(latest.current), [times.length, times.at(-1)]);
  return html`<figure class="chart">
    <figcaption><strong>${title}</strong>
      ${series.map(([name, values], index) => html`<span class="key line-${index + 1}">
        ${name} <b>${format(lastOf(values))}</b> <small>highest ${format(highestOf(values))}</small>
      </span>`)}
    </figcaption>
    <div ref=${place} aria-hidden="true"></div>
  </figure>`;
}
