// A failover log as a tree: each version of a partition is a branch that leaves the one before it.

import { html } from "./vendor-htm-preact.js";
import { whole } from "./parts.js";

const SHOWN = 12; // newest versions; the table below has all
const WIDTH = 640, LANE = 34, LEFT = 10, RIGHT = 190, TOP = 18;

// The versions, oldest first, each with the seqno up to which it is part of today's history.
export function branchesOf(log, highSeqno) {
  const oldestFirst = [...log].reverse();
  return oldestFirst.map((version, index) => ({
    ...version, upto: index + 1 < oldestFirst.length ? oldestFirst[index + 1].seqno : highSeqno,
  }));
}

export function BranchTree({ log, highSeqno, asked }) {
  const branches = branchesOf(log, highSeqno).slice(-SHOWN);
  const points = [...new Set([branches[0].seqno, ...branches.map((branch) => branch.upto),
                              ...(asked ? [Number(asked.seqno), asked.rollback ?? 0] : [])])]
    .sort((a, b) => a - b);
  // Evenly spaced: versions may begin one seqno or a million apart.
  const step = (WIDTH - LEFT - RIGHT) / Math.max(1, points.length - 1);
  const x = (seqno) => LEFT + points.indexOf(seqno) * step;
  const y = (lane) => TOP + lane * LANE;
  const height = TOP + branches.length * LANE + 16;
  const asksLane = asked ? branches.findIndex((branch) => branch.vb_uuid === asked.vb_uuid) : -1;
  return html`<div tabindex="0" class="scroll"><svg class="tree" viewBox="0 0 ${WIDTH} ${height}" role="img"
      aria-label="The versions of this partition as branches. The table below has the same data.">
    ${points.map((seqno) => html`<g class="tick">
      <line x1=${x(seqno)} x2=${x(seqno)} y1="8" y2=${height - 14} />
      <text x=${x(seqno)} y=${height - 2} text-anchor="middle">${whole(seqno)}</text></g>`)}
    ${branches.map((branch, lane) => html`<g class=${lane === branches.length - 1 ? "branch now" : "branch"}>
      ${lane > 0 && html`<path d="M${x(branch.seqno)} ${y(lane - 1)} V${y(lane)}" />`}
      <line x1=${x(branch.seqno)} x2=${x(branch.upto)} y1=${y(lane)} y2=${y(lane)} />
      ${lane < branches.length - 1 && html`<line class="undone" x1=${x(branch.upto)}
        x2=${x(branch.upto) + 26} y1=${y(lane)} y2=${y(lane)} />`}
      <circle cx=${x(branch.seqno)} cy=${y(lane)} r="4" />
      <text x=${Math.max(x(branch.upto) + 32, x(branch.seqno) + 10)} y=${y(lane) + 4}>
        ${branch.vb_uuid}${lane === branches.length - 1 ? " now" : ""}</text></g>`)}
    ${asksLane >= 0 && html`<g class="asked">
      <circle cx=${x(Number(asked.seqno))} cy=${y(asksLane)} r="7" />
      ${asked.rollback != null && html`<path d="M${x(Number(asked.seqno))} ${y(asksLane) - 9}
        H${x(asked.rollback)} v5" />`}</g>`}
  </svg></div>
  <p class="hint">A solid line is part of today's history. A dotted end stands for changes that were
    undone, if there were any.${log.length > SHOWN ? ` The newest ${SHOWN} of ${log.length} versions.` : ""}
    ${asksLane >= 0 ? " The ring is the consumer's position; the arrow leads to where it rolls back." : ""}</p>`;
}
