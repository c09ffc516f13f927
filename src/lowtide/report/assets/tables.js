// Tables that sort by any column: headers are buttons, and say how they sort.

const FIRST_ROWS = 150;

// columns: {label, value(row), show(row) -> text or nodes, number, style}; a column without `value` does not sort.
function sortable(holder, { caption, columns, rows, sort, onRow, keyOf }) {
  const state = { column: columns.findIndex((column) => column.label === sort[0]), down: sort[1], all: false, chosen: null };
  const head = make("tr");
  const body = make("tbody");
  const more = make("button", { type: "button", class: "more-rows" });
  const table = make("table", {}, make("caption", {}, caption), make("thead", {}, head), body);
  holder.replaceChildren(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": caption }, table), more);
  more.addEventListener("click", () => { state.all = true; render(); });

  function sorted() {
    const { value } = columns[state.column];
    const order = (a, b) => {
      const [one, two] = [value(a), value(b)];
      // What has no value goes last, whichever way the others go.
      if (one === null || two === null) return (one === null) - (two === null);
      const sign = typeof one === "string" ? one.localeCompare(two) : one - two;
      return state.down ? -sign : sign;
    };
    return [...rows].sort(order);
  }

  function render() {
    const ordered = sorted(), shown = state.all ? ordered : ordered.slice(0, FIRST_ROWS);
    head.replaceChildren(...columns.map((column, index) => {
      const classes = [column.number ? "number" : "", column.value ? "" : "plain"].join(" ").trim();
      if (!column.value) return make("th", { scope: "col", class: classes }, column.label);
      const way = index === state.column ? (state.down ? "descending" : "ascending") : "none";
      return make("th", { scope: "col", class: classes, "aria-sort": way }, make("button", { type: "button", onclick: () => {
        state.down = index === state.column ? !state.down : Boolean(column.number);
        state.column = index;
        render();
        head.children[index].querySelector("button").focus({ preventScroll: true });
      } }, column.label));
    }));
    body.replaceChildren(...shown.map((row) => {
      const cells = columns.map((column) => make("td", { class: [column.number ? "number" : "", column.style || ""].join(" ").trim() || null }, ...[column.show(row)].flat()));
      const line = make("tr", { class: keyOf && keyOf(row) === state.chosen ? "chosen" : null }, ...cells);
      if (onRow) line.addEventListener("click", () => onRow(row));
      return line;
    }));
    more.hidden = shown.length === ordered.length;
    more.textContent = `Show all ${ordered.length} rows`;
  }

  render();
  return {
    choose(key) {
      state.chosen = key;
      if (!state.all && sorted().findIndex((row) => keyOf(row) === key) >= FIRST_ROWS) state.all = true;
      render();
      // Within the table only: the page stays where it is.
      const line = body.querySelector(".chosen"), box = table.parentElement;
      if (line && (line.offsetTop < box.scrollTop + 40 || line.offsetTop + line.offsetHeight > box.scrollTop + box.clientHeight)) box.scrollTop = line.offsetTop - box.clientHeight / 2;
    },
  };
}

function timeBar(result, longest) {
  const share = (seconds) => `${(seconds / longest * 100).toFixed(2)}%`;
  const part = (seconds, color) => (seconds > 0 ? make("i", { style: `width:${share(seconds)};background:var(--${color})` }) : null);
  return make("div", { class: "bar", "aria-hidden": "true" }, part(result.compute_s, "forward"), part(result.recompute_s, "recompute"), part(result.stall_s, "stall"));
}

function drawResults(holder, results, { canShow, onChoose, chosen }) {
  const ran = results.filter((result) => result.ran), longest = Math.max(1e-12, ...ran.map((result) => result.step_s));
  const figure = (name, format) => ({ number: true, value: (row) => (row.ran ? row[name] : null), show: (row) => (row.ran ? format(row[name]) : "") });
  const table = sortable(holder, {
    caption: `${ran.length} of ${results.length} cases run; bars: compute, recompute, stall`,
    sort: ["time", false],
    rows: results,
    keyOf: (row) => row.policy,
    columns: [
      { label: "policy", value: (row) => row.policy, style: "tight", show: (row) => (canShow(row) ? make("button", { type: "button", class: "link", onclick: () => onChoose(row) }, row.policy) : row.policy) },
      ...(new Set(results.map((row) => row.budget_bytes)).size > 1 ? [{ label: "budget", number: true, value: (row) => row.budget_bytes, show: (row) => formatBytes(row.budget_bytes) }] : []),
      { label: "time", number: true, value: (row) => (row.ran ? slowdownOf(row) : null), show: (row) => (row.ran ? `${slowdownOf(row).toFixed(2)}x` : "") },
      { label: "step", ...figure("step_s", formatSeconds) },
      { label: "", show: (row) => (row.ran ? timeBar(row, longest) : "") },
      { label: "peak", ...figure("peak_bytes", formatBytes) },
      { label: "moved", number: true, value: (row) => (row.ran ? row.moved_out_bytes + row.moved_in_bytes : null), show: (row) => (row.ran ? formatBytes(row.moved_out_bytes + row.moved_in_bytes) : "") },
      { label: "recompute", ...figure("recompute_s", formatSeconds) },
      { label: "stall", ...figure("stall_s", formatSeconds) },
      { label: "verdict", value: verdictText, show: verdictOf },
    ],
  });
  table.choose(chosen);
}

function verdictText(row) {
  if (row.ran) return row.over_budget ? "a bound, over budget" : row.unplanned_bytes ? `fits, ${formatBytes(row.unplanned_bytes)} unplanned` : "fits";
  if (row.needed_bytes !== null) return `${shortName(row.op)} needs ${formatBytes(row.needed_bytes)}`;
  return row.crashed ? `failed: ${row.reason}` : row.reason;
}

function verdictOf(row) {
  const kind = row.ran ? (row.over_budget || row.unplanned_bytes ? "warn" : "good") : "bad";
  return make("span", { class: `tag ${kind}`, title: row.ran ? null : row.reason }, verdictText(row));
}

function drawPlan(holder, step, { filter, onRow }) {
  const words = filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
  const rows = step.journeys.map((journey, index) => ({ ...journey, index })).filter((row) => words.every((word) => `${row.op} ${row.module} ${row.way} ${row.why} ${row.storage}`.toLowerCase().includes(word)));
  if (!rows.length) {
    holder.replaceChildren(make("p", { class: "soft" }, step.journeys.length ? "No tensor matches the filter." : "Nothing left fast memory in this step."));
    return null;
  }
  const moment = (name) => ({ number: true, value: (row) => row[name], show: (row) => (row[name] === null ? "" : formatSeconds(row[name] / 1e9)) });
  const total = rows.reduce((sum, row) => sum + row.nbytes, 0);
  return sortable(holder, {
    caption: `${rows.length} absences, ${formatBytes(total)}; click a row to find it on the timeline`,
    sort: ["out at", false],
    rows, onRow,
    keyOf: (row) => row.index,
    columns: [
      { label: "made by", style: "name", value: (row) => row.op, show: (row) => [...breakable(shortName(row.op) || row.kind), " ", make("code", {}, `#${row.storage}`)] },
      { label: "module", style: "name", value: (row) => row.module, show: (row) => make("code", {}, ...breakable(row.module)) },
      { label: "bytes", number: true, value: (row) => row.nbytes, show: (row) => formatBytes(row.nbytes) },
      { label: "out at", ...moment("out") },
      { label: "back at", ...moment("ready") },
      { label: "how", style: "tight", value: (row) => row.way, show: (row) => make("span", { class: "tag" }, row.way) },
      { label: "why", style: "wide", value: (row) => row.why, show: (row) => row.why },
      { label: "effect", style: "tight", value: (row) => row.stall_s, show: effectOf },
    ],
  });
}

function effectOf(row) {
  if (row.stall_s > 0) return make("span", { class: "tag bad" }, `stalled ${formatSeconds(row.stall_s)}`);
  if (row.way === "remade") return make("span", { class: "tag warn" }, row.ready === null ? "discarded" : `recomputed ${formatSeconds((row.ready - row.back) / 1e9)}`);
  return make("span", { class: "tag good" }, "hidden");
}

function drawAbout(holder, policies) {
  sortable(holder, {
    caption: `${policies.length} policies and what each declares`,
    sort: ["policy", false],
    rows: policies,
    columns: [
      { label: "policy", style: "tight", value: (row) => row.name, show: (row) => make("b", {}, row.name) },
      { label: "what it does", style: "half", show: (row) => row.summary },
      { label: "family", style: "tight", value: (row) => row.family, show: (row) => row.family },
      { label: "how it runs", value: (row) => row.runs.join(", "), show: (row) => row.runs.join(", ") },
      { label: "paper", value: (row) => row.paper, show: (row) => row.paper },
      { label: "reconstructed or left out", style: "half", show: (row) => row.filled_in },
    ],
  });
}
