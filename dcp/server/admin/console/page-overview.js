// Overview: is the server well, how fast is it, and how near are its limits.

import { bytes, clock, duration, html, milliseconds, plural, short, whole } from "./parts.js";
import { Chart } from "./chart.js";

const GET_NEAR = 0.8;

function Health({ head, cluster }) {
  const isWell = head.is_ready && !head.why_not;
  const blocked = cluster?.without_writes ?? 0;
  return html`<section aria-labelledby="health">
    <h2 id="health" class="hidden">Health</h2>
    ${blocked > 0 && html`<p class="health bad" role="status"><strong>${plural(blocked, "partition")} of the cluster
      take${blocked === 1 ? "s" : ""} no writes.</strong> ${cluster.why.join("; ")}. <a href="#/cluster">What to do</a></p>`}
    ${(blocked === 0 || !isWell) && html`<p class="health ${isWell ? "good" : "bad"}" role="status">
      <strong>${isWell ? "Ready." : head.is_ready ? "Writes are refused." : "Not ready."}</strong>
      ${" "}${isWell ? "Clients can use this server." : head.why_not}
    </p>`}
    ${cluster?.down.length > 0 && html`<p class="health warn">Down: node ${cluster.down.join(", node ")}.${" "}
      <a href="#/cluster">Cluster</a></p>`}
    ${head.warnings.map((warning) => html`<p class="health warn">${warning}</p>`)}
    <dl class="facts strip">
      <div><dt>Documents</dt><dd>${whole(head.items)}</dd></div>
      <div><dt>Connections</dt><dd>${whole(head.connections)}</dd></div>
      <div><dt>Durability</dt><dd>${head.durability}</dd></div>
      <div><dt>Running for</dt><dd>${duration(head.uptime_s)}</dd></div>
      <div><dt>Version</dt><dd>${head.version}</dd></div>
    </dl>
  </section>`;
}

function Limits({ gauges }) {
  const text = (gauge, value) => (gauge.unit === "bytes" ? bytes(value) : whole(value));
  return html`<section aria-labelledby="limits">
    <h2 id="limits">Against their limits</h2>
    <div tabindex="0" class="scroll card flush"><table>
      <thead><tr><th scope="col">What</th><th scope="col" class="number">Now</th>
        <th scope="col" class="number">Limit</th><th scope="col">Used</th></tr></thead>
      <tbody>${gauges.map((gauge) => {
        const share = gauge.limit ? (gauge.value ?? 0) / gauge.limit : null;
        return html`<tr><th scope="row">${gauge.name}<small>${gauge.meaning}</small></th>
          <td class="number">${text(gauge, gauge.value)}</td>
          <td class="number">${gauge.limit ? text(gauge, gauge.limit) : "none"}</td>
          <td>${share != null && html`<meter min="0" max="1" high=${GET_NEAR} optimum="0" value=${share}
            aria-label="${gauge.name}: ${Math.round(share * 100)} percent used"></meter>
            ${" "}${Math.round(share * 100)} %`}</td></tr>`;
      })}</tbody>
    </table></div>
  </section>`;
}

function Work({ work }) {
  return html`<section aria-labelledby="work">
    <h2 id="work">Merges and compaction</h2>
    ${work.merge_trouble && html`<p class="health bad">${work.merge_trouble}</p>`}
    <dl class="facts">
      <div><dt>Merge now</dt><dd>${work.merge_under_way_s ? `for ${duration(work.merge_under_way_s)}` : "none"}</dd></div>
      <div><dt>Merges</dt><dd>${whole(work.merges)}</dd></div>
      <div><dt>Last merge took</dt><dd>${work.last_merge_s ? milliseconds(work.last_merge_s * 1000) : "–"}</dd></div>
      <div><dt>Failed merges</dt><dd>${whole(work.merge_failures)}</dd></div>
      <div><dt>Turns of compaction</dt><dd>${whole(work.compaction_turns)}</dd></div>
      <div><dt>Versions dropped</dt><dd>${whole(work.dropped_versions)}</dd></div>
      <div><dt>Deletions dropped</dt><dd>${whole(work.dropped_tombstones)}</dd></div>
    </dl>
  </section>`;
}

function Slow({ slow, count }) {
  return html`<section aria-labelledby="slow">
    <h2 id="slow">Slow operations</h2>
    <p class="hint">Commands and syncs that took 100 ms or more: ${plural(count, "operation")} since the
      start. A batch of commands counts as one, under the name of its first command.</p>
    ${slow.length > 0 && html`<div tabindex="0" class="scroll"><table>
      <thead><tr><th scope="col">When</th><th scope="col">What</th><th scope="col" class="number">Time</th>
        <th scope="col">User</th><th scope="col">Client</th></tr></thead>
      <tbody>${slow.slice(0, 20).map((row) => html`<tr><td>${clock(row.time_s)}</td><td>${row.what}</td>
        <td class="number">${milliseconds(row.seconds * 1000)}</td><td>${row.user}</td><td>${row.peer}</td></tr>`)}
      </tbody></table></div>`}
  </section>`;
}

export function OverviewPage({ head, cluster, state, hour }) {
  if (!state) return html`<p class="loading" role="status">Waiting for the first figures…</p>`;
  const figures = hour.figures;
  const charts = [
    ["Per second", short, [["sets", figures.sets_per_s], ["gets", figures.gets_per_s], ["events", figures.events_per_s]]],
    ["Time to answer", milliseconds, [["p50", figures.answer_p50_ms], ["p99", figures.answer_p99_ms]]],
    ["Time of a sync", milliseconds, [["p50", figures.sync_p50_ms], ["p99", figures.sync_p99_ms]]],
    ["Lag of all consumers, in changes", short, [["lag", figures.lag_items]]],
    ["Memory", bytes, [["process", figures.memory_bytes], ["memtable", figures.memtable_bytes]]],
  ];
  return html`
    <${Health} head=${head} cluster=${cluster} />
    <section aria-labelledby="hour">
      <h2 id="hour">The last hour</h2>
      <div class="charts">${charts.map(([title, format, series]) => html`<${Chart} key=${title}
        title=${title} format=${format} isBytes=${format === bytes} times=${hour.times} series=${series} />`)}</div>
    </section>
    <${Limits} gauges=${state.gauges} />
    <${Work} work=${state.work} />
    <${Slow} slow=${state.slow} count=${state.slow_count} />`;
}
