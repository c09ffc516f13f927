// Memory against time: every policy at every budget, and the line of those that no other beats in both.

const PLOT = { width: 1180, height: 420, left: 52, right: 16, top: 16, bottom: 46 };

function paretoFront(results) {
  const sorted = [...results].sort((a, b) => a.peak_bytes - b.peak_bytes || a.step_s - b.step_s);
  const front = [];
  let best = Infinity;
  for (const result of sorted) {
    if (result.step_s < best) { front.push(result); best = result.step_s; }
  }
  return front;
}

function slowdownOf(result) {
  return result.infinite_s ? result.step_s / result.infinite_s : 1;
}

function drawPareto(holder, results, { chosen, budget, peak, onChoose }) {
  const ran = results.filter((result) => result.ran);
  if (!ran.length) {
    holder.replaceChildren(make("p", { class: "soft" }, "No policy could run here: see the reasons below."));
    return;
  }
  PLOT.width = Math.max(340, holder.clientWidth);
  const { width, height, left, right, top, bottom } = PLOT;
  const high = Math.max(...ran.map((result) => result.peak_bytes), budget || 0) * 1.05;
  const low = Math.min(...ran.map((result) => result.peak_bytes)) * 0.9;
  const most = Math.max(1.2, ...ran.map(slowdownOf)) * 1.08;
  const least = Math.min(1, ...ran.map(slowdownOf)) * 0.97;
  const x = (nbytes) => left + (nbytes - low) / (high - low) * (width - left - right);
  const y = (slowdown) => height - bottom - Math.log(slowdown / least) / Math.log(most / least) * (height - top - bottom);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Memory against time" });
  const grid = (x1, y1, x2, y2) => make("line", { x1, y1, x2, y2, stroke: "var(--line)" });
  const label = (at, up, text, anchor, color = "var(--soft)") => make("text", { x: at, y: up, "text-anchor": anchor, fill: color }, text);
  const steps = most > 12 ? [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024] : most > 3.2 ? [1, 1.5, 2, 3, 4, 6, 8, 10] : most > 1.5 ? [1, 1.2, 1.5, 2, 2.5, 3] : [1, 1.05, 1.1, 1.2, 1.3, 1.4];
  for (const mark of steps.filter((each) => each >= least && each <= most)) {
    svg.append(grid(left, y(mark), width - right, y(mark)), label(left - 8, y(mark) + 4, `${mark}x`, "end"));
  }
  for (const mark of byteTicks(high, Math.min(8, width / 100)).filter((each) => each >= low)) {
    svg.append(grid(x(mark), top, x(mark), height - bottom), label(x(mark), height - bottom + 18, formatBytes(mark), "middle"));
  }
  svg.append(label((left + width - right) / 2, height - 6, "peak memory", "middle"), label(left + 6, top + 12, "step time, relative to infinite memory", "start"));
  if (budget) {
    svg.append(make("line", { x1: x(budget), x2: x(budget), y1: top + 17, y2: height - bottom, stroke: "var(--budget)", "stroke-dasharray": "7 5", "stroke-width": 1.5 }));
    const inside = x(budget) < (left + width) / 2 ? [6, "start"] : [-6, "end"];
    svg.append(label(x(budget) + inside[0], top + 28, `budget ${formatBytes(budget)}`, inside[1], "var(--budget)"));
  }
  if (peak <= high) svg.append(make("line", { x1: x(peak), x2: x(peak), y1: top, y2: height - bottom, stroke: "var(--ghost)", "stroke-dasharray": "2 4" }), label(x(peak) - 6, height - bottom - 8, "unmanaged", "end"));
  const front = paretoFront(ran.filter((result) => !result.over_budget));
  svg.append(make("path", { d: front.map((result, index) => `${index ? `H${x(result.peak_bytes)} V` : `M${x(result.peak_bytes)} `}${y(slowdownOf(result))}`).join(" "), fill: "none", stroke: "var(--accent)", "stroke-width": 2, opacity: 0.55 }));
  const mine = ran.filter((result) => result.policy === chosen).sort((a, b) => a.peak_bytes - b.peak_bytes);
  if (mine.length > 1) svg.append(make("path", { d: mine.map((result, index) => `${index ? "L" : "M"}${x(result.peak_bytes)} ${y(slowdownOf(result))}`).join(" "), fill: "none", stroke: "var(--ink)", "stroke-width": 1, "stroke-dasharray": "3 3", opacity: 0.5 }));
  const rank = (result) => (result.policy === chosen ? 2 : front.includes(result) ? 1 : 0);
  for (const result of [...ran].sort((a, b) => rank(a) - rank(b))) svg.append(point(result, x, y, rank(result), onChoose));
  placeLabels(svg, ran.filter((result) => rank(result) > 0).sort((a, b) => rank(b) - rank(a)), x, y, chosen);
  holder.replaceChildren(svg);
}

function point(result, x, y, rank, onChoose) {
  const rows = [
    ["budget", formatBytes(result.budget_bytes)], ["peak", formatBytes(result.peak_bytes)],
    ["step", `${formatSeconds(result.step_s)}, ${slowdownOf(result).toFixed(2)}x`], ["stall", formatSeconds(result.stall_s)],
    ["recompute", formatSeconds(result.recompute_s)], ["moved", formatBytes(result.moved_out_bytes + result.moved_in_bytes)],
  ];
  const node = make("circle", {
    class: "point", cx: x(result.peak_bytes), cy: y(slowdownOf(result)), r: rank === 2 ? 7 : rank ? 6 : 4.5, tabindex: 0, role: "button",
    "aria-label": `${result.policy}: ${rows.map((row) => row.join(" ")).join(", ")}`,
    fill: rank === 2 ? "var(--ink)" : rank ? "var(--accent)" : "var(--ghost)", stroke: "var(--card)", "stroke-width": 1.5, opacity: rank ? 1 : 0.75,
  });
  const show = () => {
    const box = node.getBoundingClientRect();
    tip.show(box.left + box.width / 2, box.top + box.height / 2, result.policy, rows);
  };
  node.addEventListener("pointerenter", show);
  node.addEventListener("pointerleave", () => tip.hide());
  node.addEventListener("focus", show);
  node.addEventListener("blur", () => tip.hide());
  node.addEventListener("click", () => onChoose(result));
  node.addEventListener("keydown", (e) => {
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); onChoose(result); }
  });
  return node;
}

function placeLabels(svg, results, x, y, chosen) {
  // A label may cover neither another label nor a dot that has one.
  const taken = results.map((result) => [x(result.peak_bytes) - 7, y(slowdownOf(result)) - 7, x(result.peak_bytes) + 7, y(slowdownOf(result)) + 7]);
  for (const result of results) {
    const wide = result.policy.length * 6.8 + 4;
    for (const [dx, dy, anchor] of [[10, 4, "start"], [-10, 4, "end"], [0, -11, "middle"], [0, 20, "middle"]]) {
      const at = x(result.peak_bytes) + dx, up = y(slowdownOf(result)) + dy;
      const from = anchor === "start" ? at : anchor === "end" ? at - wide : at - wide / 2;
      const box = [from, up - 11, from + wide, up + 3];
      const inside = box[0] > PLOT.left && box[2] < PLOT.width - PLOT.right && box[1] > PLOT.top && box[3] < PLOT.height - PLOT.bottom;
      if (!inside || taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      svg.append(make("text", { class: "halo", x: at, y: up, "text-anchor": anchor, fill: "var(--ink)", "font-weight": result.policy === chosen ? 700 : 500, "pointer-events": "none" }, result.policy));
      break;
    }
  }
}
