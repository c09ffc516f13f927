// Puts the page together from its data, and keeps its parts in step.

let data = null;
const byId = (id) => document.getElementById(id);
const page = { step: null, machine: "", chart: null, plan: null };

async function readData() {
  const packed = Uint8Array.from(atob(byId("data").textContent), (letter) => letter.charCodeAt(0));
  const plain = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(plain).text());
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  page.chart?.draw();
}

function startTheme() {
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  setTheme(wish.matches ? "dark" : "light");
  wish.addEventListener("change", () => setTheme(wish.matches ? "dark" : "light"));
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
}

function figure(name, value, text) {
  return make("span", { "data-figure": name, "data-value": value }, text);
}

function card(label, value, more, parts) {
  const meter = parts ? make("div", { class: "meter", "aria-hidden": "true" }, ...parts.map(([share, color]) => make("i", { style: `width:${(share * 100).toFixed(2)}%;background:var(--${color})` }))) : null;
  return make("div", { class: "card" }, make("div", { class: "label" }, label), make("div", { class: "value" }, value), meter, make("div", { class: "more" }, ...[more].flat()));
}

function drawCards(step) {
  const f = step.figures, slowdown = f.step_s / (data.focus.infinite_s || f.step_s || 1);
  const waits = Object.entries(step.waits_s).sort((a, b) => b[1] - a[1]).map(([cause, seconds]) => `${formatSeconds(seconds)} for ${CAUSES[cause] || cause}`);
  const whole = f.step_s || 1, moved = f.moved_out_bytes + f.moved_in_bytes;
  byId("cards").replaceChildren(
    card("Step", figure("step_s", f.step_s, formatSeconds(f.step_s)), `${slowdown.toFixed(2)}x of infinite memory (${formatSeconds(data.focus.infinite_s)})`,
      [[f.compute_s / whole, "forward"], [f.recompute_s / whole, "recompute"], [f.stall_s / whole, "stall"]]),
    card("Peak memory", figure("peak_bytes", f.peak_bytes, formatBytes(f.peak_bytes)),
      ["of ", figure("budget_bytes", f.budget_bytes, formatBytes(f.budget_bytes)), `; unmanaged ${formatBytes(data.trace.peak_bytes)}`],
      [[Math.min(1, f.peak_bytes / data.trace.peak_bytes), f.peak_bytes > f.budget_bytes ? "budget" : "memory"]]),
    card("Moved", figure("moved_bytes", moved, formatBytes(moved)),
      [figure("moved_out_bytes", f.moved_out_bytes, formatBytes(f.moved_out_bytes)), " out, ", figure("moved_in_bytes", f.moved_in_bytes, formatBytes(f.moved_in_bytes)), ` in; link busy ${formatPercent(step.out_busy_s / whole)} out, ${formatPercent(step.in_busy_s / whole)} in`]),
    card("Stalled", figure("stall_s", f.stall_s, formatSeconds(f.stall_s)), waits.length ? waits.join(", ") : "nothing waited"),
    card("Recomputed", figure("recompute_s", f.recompute_s, formatSeconds(f.recompute_s)), `${formatPercent(f.recompute_s / whole)} of the step`),
  );
  const notes = [...step.notes];
  if (f.reserved_peak_bytes !== f.peak_bytes) notes.push(`The allocator model reserves ${formatBytes(f.reserved_peak_bytes)}.`);
  if (f.trials) notes.push(`${f.trials} trial steps before the plan was settled.`);
  if (step.absences > step.journeys.length) notes.push(`${step.absences - step.journeys.length} of ${step.absences} absences, those of the smallest tensors, are not listed.`);
  if (step.thinned) notes.push(`${step.thinned} operators too short to see are drawn with their neighbours.`);
  byId("notes").replaceChildren(...notes.map((note) => make("li", {}, note)));
}

function drawVerdict(step) {
  const f = step.figures, swapped = step.swapped_tensors, remade = step.recomputed_tensors;
  const slowdown = f.step_s / (data.focus.infinite_s || f.step_s || 1);
  const did = [swapped ? `swaps ${swapped} tensor${swapped > 1 ? "s" : ""}` : "", remade ? `recomputes ${remade}` : ""].filter(Boolean).join(" and ");
  const cost = slowdown < 1.005 ? "at no cost in time" : `in ${slowdown.toFixed(2)} times the time`;
  const bold = (text) => make("b", {}, text);
  byId("verdict").replaceChildren(...(step.over_budget
    ? ["A bound, not a system: ", bold(step.policy), ` ignores the budget and takes ${formatBytes(f.peak_bytes)}.`]
    : [bold(step.policy), ` runs this step in `, bold(formatBytes(f.budget_bytes)), ` instead of ${formatBytes(data.trace.peak_bytes)}, `, bold(cost), did ? `: it ${did}.` : "."]));
}

function drawLegend() {
  const line = (color, text) => make("span", {}, make("i", { class: "line", style: `border-color:var(--${color})` }), text);
  const box = (color, text) => make("span", {}, make("i", { style: `background:var(--${color})` }), text);
  byId("legend").replaceChildren(box("memory", "live memory"), box("ghost", "without Lowtide"), line("budget", "budget"), line("out", "in a tier below"), box("forward", "forward"), box("backward", "backward"),
    box("update", "update"), box("recompute", "recompute"), box("stall", "stall"), box("out", "leaving"), box("away", "away"), box("in", "coming back"));
}

function redrawPlan() {
  page.plan = drawPlan(byId("plan-table"), page.step, { filter: byId("filter").value, onRow: (row) => {
    page.plan.choose(row.index);
    page.chart.choose(row.index, { zoom: true });
    byId("timeline").scrollIntoView({ block: "start" });
  } });
}

function showStep(policy) {
  page.step = data.focus.steps.find((step) => step.policy === policy) || data.focus.steps[0];
  byId("policy").value = page.step.policy;
  byId("policy-summary").textContent = data.policies.find((each) => each.name === page.step.policy)?.summary || "";
  drawVerdict(page.step);
  drawCards(page.step);
  page.chart.show(page.step);
  byId("chart").setAttribute("aria-label", `Memory, lanes and moved tensors of ${page.step.policy} over ${formatSeconds(page.step.figures.step_s)}`);
  redrawPlan();
  drawMachine();
}

function canShow(result) {
  return Boolean(data.focus) && result.ran && result.machine === data.focus.machine && result.budget_bytes === data.focus.budget_bytes && data.focus.steps.some((step) => step.policy === result.policy);
}

function drawMachine() {
  const results = data.results.filter((result) => result.machine === page.machine);
  const chosen = page.step?.policy || "";
  const budget = data.focus && data.focus.machine === page.machine ? data.focus.budget_bytes : 0;
  const onChoose = (result) => {
    if (canShow(result)) {
      showStep(result.policy);
      byId("overview").scrollIntoView({ block: "start" });
    }
  };
  drawPareto(byId("pareto"), results, { chosen, budget, peak: data.trace.peak_bytes, onChoose });
  const wanted = byId("budget").value;
  drawResults(byId("results-table"), wanted === "all" ? results : results.filter((result) => String(result.budget_bytes) === wanted), { canShow, onChoose, chosen });
}

function drawSources() {
  const fact = (name, value) => [make("dt", {}, name), make("dd", {}, value)];
  const known = (value, text) => (typeof value === "number" ? text(value) : "not known");
  byId("machines").replaceChildren(...data.machines.flatMap((machine) => [
    make("h3", {}, `Machine: ${machine.name}`),
    make("dl", { class: "facts" },
      ...(machine.title ? fact("what", machine.title) : []),
      ...fact("compute", known(machine.flops_per_s, (value) => `${(value / 1e12).toPrecision(3)} TFLOP/s`) + (machine.sources.flops_per_s ? `; ${machine.sources.flops_per_s}` : "")),
      ...fact("memory", [known(machine.capacity_bytes, formatBytes), known(machine.memory_bytes_per_s, formatRate)].filter((text) => text !== "not known").join(", ") || "not known"),
      ...machine.links.flatMap((link) => fact(`tier ${link.tier}`, `${formatRate(link.write_bytes_per_s)} out, ${formatRate(link.read_bytes_per_s)} in${link.duplex ? ", both at once" : ""}${link.idle_speedup > 1 ? `, ${link.idle_speedup.toPrecision(3)} times as fast while nothing computes` : ""}; latency ${formatSeconds(link.write_latency_s)} out, ${formatSeconds(link.read_latency_s)} in${machine.sources[link.tier] ? `; ${machine.sources[link.tier]}` : ""}`)),
      ...fact("figures", machine.source)),
  ]), make("h3", {}, "Trace"), make("dl", { class: "facts" },
    ...fact("model", data.model || "not named"), ...fact("operators", String(data.trace.operators)),
    ...fact("peak, unmanaged", `${formatBytes(data.trace.peak_bytes)}, of which ${formatBytes(data.trace.static_bytes)} static`),
    ...fact("floor", `${formatBytes(data.trace.floor_bytes)}${data.trace.floor_op ? `, set by ${shortName(data.trace.floor_op)}` : ""}`)));
  drawAbout(byId("about-table"), data.policies);
}

function start() {
  const model = data.model || "Training step";
  const where = data.focus && data.focus.machine !== "assumed" ? data.focus.machine : "an assumed machine";
  byId("title").textContent = `Simulated: ${data.focus ? `${model} in ${formatBytes(data.focus.budget_bytes)} on ${where}` : `${model}, compared`}`;
  if (data.more_policies) byId("more-policies").textContent = `${data.more_policies} more policies can be compared: lowtide report --policies all.`;
  if (data.note) { byId("note").textContent = data.note; byId("note").hidden = false; }
  for (const node of document.querySelectorAll('[data-needs="focus"]')) node.hidden = !data.focus;
  byId("machine").replaceChildren(...data.machines.map((machine) => make("option", { value: machine.name }, machine.name)));
  page.machine = data.focus ? data.focus.machine : data.machines[0]?.name || "";
  byId("machine").value = page.machine;
  byId("machine").parentElement.hidden = data.machines.length < 2;
  const budgets = [...new Set(data.results.map((result) => result.budget_bytes))].sort((a, b) => a - b);
  byId("budget").replaceChildren(make("option", { value: "all" }, "all"), ...budgets.map((nbytes) => make("option", { value: nbytes }, formatBytes(nbytes))));
  byId("budget").value = data.focus && budgets.includes(data.focus.budget_bytes) ? String(data.focus.budget_bytes) : "all";
  byId("budget").addEventListener("change", drawMachine);
  byId("machine").addEventListener("change", () => { page.machine = byId("machine").value; drawMachine(); });
  if (data.focus) {
    page.chart = new Chart(byId("chart"), byId("chart-said"), data.focus, data.trace);
    page.chart.onChoose = (index) => {
      page.chart.choose(index);
      if (byId("filter").value) { byId("filter").value = ""; redrawPlan(); }
      page.plan?.choose(index);
    };
    byId("policy").replaceChildren(...data.focus.steps.map((step) => make("option", { value: step.policy }, step.policy)));
    byId("policy").addEventListener("change", () => showStep(byId("policy").value));
    byId("filter").addEventListener("input", redrawPlan);
    byId("zoom-in").addEventListener("click", () => page.chart.zoom(0.5));
    byId("zoom-out").addEventListener("click", () => page.chart.zoom(2));
    byId("zoom-all").addEventListener("click", () => page.chart.whole());
    drawLegend();
    showStep(data.focus.steps[0].policy);
  } else {
    drawMachine();
  }
  drawSources();
}

startTheme();
readData().then((found) => {
  data = found;
  start();
  let widthDrawn = byId("pareto").clientWidth;
  new ResizeObserver(() => {
    if (byId("pareto").clientWidth !== widthDrawn) { widthDrawn = byId("pareto").clientWidth; drawMachine(); }
  }).observe(byId("pareto"));
}).catch((error) => {
  byId("note").textContent = `This page cannot be drawn: ${error.message || error}. A browser from 2023 or later reads it.`;
  byId("note").hidden = false;
  console.error(error);
}).finally(() => {
  document.documentElement.dataset.drawn = "yes";
});
