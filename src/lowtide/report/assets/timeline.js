// The step over time on one canvas: memory with the budget, lanes, and where every moved tensor was.

const GUTTER = 92, RIGHT = 14, MEMORY_TOP = 18, MEMORY_HEIGHT = 210, LANE = 20, LANE_GAP = 5, AXIS = 26;
const LANE_NAMES = { compute: "compute", recompute: "recompute", stall: "stall", out: "link out", in: "link in" };
const CAUSES = {
  plan: "the plan", pressure: "memory ran out", prefetch: "prefetch", demand: "on demand",
  room: "memory", landing: "a copy to leave", arrival: "a copy to come back",
};

class Drawing {
  constructor(canvas, focus, trace) {
    Object.assign(this, { canvas, focus, trace, step: null, chosen: -1, event: -1, hoverX: null, drag: null });
    this.from = 0;
    this.to = 1;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
  }

  show(step) {
    this.step = step;
    this.end = Math.max(1, this.stepEnd);
    this.chosen = this.event = -1;
    const { lane, start, end } = step.spans;
    this.lanes = this.focus.lanes.map(() => []);
    lane.forEach((which, index) => this.lanes[which].push(index));
    // A transfer may still be under way when the last operator ends.
    for (const moment of end) if (moment > this.end) this.end = moment;
    this.events = start.map((_, index) => index).filter((index) => this.focus.lanes[lane[index]] !== "compute");
    this.rows = step.journeys.map((_, index) => index).filter((index) => step.journeys[index].back !== null || step.journeys[index].out !== null);
    this.rowHeight = this.rows.length ? Math.min(9, 360 / this.rows.length) : 0;
    const held = step.tiers.map((tier) => tier.held.reduce((most, nbytes) => Math.max(most, nbytes), 0));
    this.top = Math.max(this.trace.peak_bytes, step.figures.budget_bytes, step.figures.peak_bytes, ...held) * 1.06;
    this.whole();
  }

  whole() {
    this.from = 0;
    this.to = this.end;
    this.draw();
  }

  zoom(factor, around = (this.from + this.to) / 2) {
    const width = Math.min(this.end, Math.max(this.end / 20000, (this.to - this.from) * factor));
    const share = (around - this.from) / (this.to - this.from);
    this.move(around - share * width, width);
  }

  move(from, width = this.to - this.from) {
    this.from = Math.min(Math.max(0, from), this.end - width);
    this.to = this.from + width;
    this.draw();
  }

  // ---- geometry ----

  get lanesTop() { return MEMORY_TOP + MEMORY_HEIGHT + 16; }
  get rowsTop() { return this.lanesTop + this.lanes.length * (LANE + LANE_GAP) + (this.rows.length ? 18 : 4); }
  get rowsHeight() { return this.rows.length * this.rowHeight; }
  get height() { return this.rowsTop + this.rowsHeight + AXIS; }
  get plotWidth() { return this.width - GUTTER - RIGHT; }

  x(at) { return GUTTER + (at - this.from) / (this.to - this.from) * this.plotWidth; }
  at(x) { return this.from + (x - GUTTER) / this.plotWidth * (this.to - this.from); }
  y(nbytes) { return MEMORY_TOP + MEMORY_HEIGHT * (1 - nbytes / this.top); }
  laneTop(lane) { return this.lanesTop + lane * (LANE + LANE_GAP); }

  // ---- drawing ----

  draw() {
    if (!this.step) return;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    this.width = width;
    const scale = window.devicePixelRatio || 1, height = this.height;
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.pen = this.canvas.getContext("2d");
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    const style = getComputedStyle(document.documentElement);
    const colors = new Map();
    this.color = (name) => {
      if (!colors.has(name)) colors.set(name, style.getPropertyValue(`--${name}`).trim());
      return colors.get(name);
    };
    pen.font = `12px ${this.color("sans")}`;
    pen.textBaseline = "middle";
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, 0, this.plotWidth, height);
    pen.clip();
    this.drawMemory();
    this.drawLanes();
    this.drawRows();
    this.drawHover();
    pen.restore();
    this.drawLabels();
  }

  drawAxis() {
    const pen = this.pen, bottom = this.height - AXIS + 6;
    pen.strokeStyle = this.color("line");
    pen.fillStyle = this.color("soft");
    pen.lineWidth = 1;
    pen.textAlign = "center";
    const marks = ticks(this.from, this.to, Math.max(2, this.plotWidth / 120));
    const span = marks.length > 1 ? marks[1] - marks[0] : this.to - this.from;
    for (const mark of marks) {
      const x = Math.round(this.x(mark)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, MEMORY_TOP);
      pen.lineTo(x, bottom);
      pen.stroke();
      pen.fillText(this.timeLabel(mark, span), Math.min(x, this.width - 24), bottom + 11);
    }
    pen.textAlign = "right";
    for (const mark of byteTicks(this.top, 4)) {
      const y = Math.round(this.y(mark)) + 0.5;
      pen.beginPath();
      pen.moveTo(GUTTER, y);
      pen.lineTo(this.width - RIGHT, y);
      pen.stroke();
      pen.fillText(mark === 0 ? "0" : formatBytes(mark), GUTTER - 8, y);
    }
  }

  timeLabel(ns, span) {
    if (ns === 0) return "0";
    const [unit, factor] = this.end >= 1e9 ? ["s", 1e9] : this.end >= 1e6 ? ["ms", 1e6] : ["us", 1e3];
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(span / factor) - 1e-9)));
    return `${(ns / factor).toFixed(digits)} ${unit}`;
  }

  outline(moments, heights, fill, stroke) {
    // A curve of steps: what is taken down holds until the next moment.
    const pen = this.pen;
    let first = firstAfter(moments, this.from) - 1;
    if (first < 0) first = 0;
    pen.beginPath();
    let y = this.y(heights[first] ?? 0);
    pen.moveTo(this.x(Math.max(moments[first] ?? 0, this.from)), y);
    let x = GUTTER;
    for (let index = first + 1; index < moments.length && moments[index] <= this.to; index += 1) {
      x = this.x(moments[index]);
      pen.lineTo(x, y);
      y = this.y(heights[index]);
      pen.lineTo(x, y);
    }
    x = this.x(Math.min(this.to, this.stepEnd));
    pen.lineTo(x, y);
    if (stroke) {
      pen.strokeStyle = stroke;
      pen.lineWidth = 1.4;
      pen.stroke();
    }
    if (fill) {
      pen.lineTo(x, this.y(0));
      pen.lineTo(this.x(Math.max(moments[first] ?? 0, this.from)), this.y(0));
      pen.closePath();
      pen.fillStyle = fill;
      pen.fill();
    }
  }

  get stepEnd() { return Math.round(this.step.figures.step_s * 1e9); }

  drawMemory() {
    const pen = this.pen, { spans, memory, figures } = this.step;
    const compute = this.lanes[this.focus.lanes.indexOf("compute")];
    this.outline(compute.map((k) => spans.start[k]), compute.map((k) => this.focus.ops.peak[spans.op[k]]), this.color("ghost-fill"), this.color("ghost"));
    this.labelPeak(compute);
    pen.fillStyle = this.color("stall-fill");
    for (const k of this.lanes[this.focus.lanes.indexOf("stall")]) {
      const x = this.x(spans.start[k]);
      pen.fillRect(x, MEMORY_TOP, Math.max(0.5, this.x(spans.end[k]) - x), MEMORY_HEIGHT);
    }
    this.outline(memory.at, memory.live, this.color("memory-fill"), this.color("memory"));
    pen.setLineDash([3, 3]);
    for (const tier of this.step.tiers) this.outline(tier.at, tier.held, null, this.color("out"));
    pen.setLineDash([]);
    const y = Math.round(this.y(figures.budget_bytes)) + 0.5;
    pen.strokeStyle = this.color("budget");
    pen.lineWidth = 1.6;
    pen.setLineDash([7, 5]);
    pen.beginPath();
    pen.moveTo(GUTTER, y);
    pen.lineTo(this.width - RIGHT, y);
    pen.stroke();
    pen.setLineDash([]);
    pen.fillStyle = this.color("budget");
    pen.textAlign = "right";
    pen.font = `600 12px ${this.color("sans")}`;
    pen.fillText(`budget ${formatBytes(figures.budget_bytes)}`, this.width - RIGHT - 6, y - 9);
    pen.font = `12px ${this.color("sans")}`;
  }

  labelPeak(compute) {
    const pen = this.pen, { spans } = this.step, { peak } = this.focus.ops;
    const highest = compute.reduce((best, k) => (best < 0 || peak[spans.op[k]] > peak[spans.op[best]] ? k : best), -1);
    if (highest < 0 || peak[spans.op[highest]] <= this.step.figures.budget_bytes) return;
    const text = `${formatBytes(peak[spans.op[highest]])} without Lowtide`, half = pen.measureText(text).width / 2;
    const x = this.x(spans.start[highest]);
    if (x < GUTTER || x > this.width - RIGHT) return;
    pen.fillStyle = this.color("soft");
    pen.textAlign = "center";
    pen.fillText(text, Math.min(Math.max(x, GUTTER + half), this.width - RIGHT - half), this.y(peak[spans.op[highest]]) - 10);
  }

  spanColor(k) {
    const { spans } = this.step;
    const lane = this.focus.lanes[spans.lane[k]];
    return lane === "compute" ? this.focus.phases[this.focus.ops.phase[spans.op[k]]] : lane;
  }

  drawLanes() {
    const pen = this.pen, { spans } = this.step;
    this.lanes.forEach((members, lane) => {
      const top = this.laneTop(lane);
      pen.fillStyle = this.color("faint");
      pen.fillRect(GUTTER, top, this.plotWidth, LANE);
      for (const k of members) {
        if (spans.end[k] < this.from || spans.start[k] > this.to) continue;
        const x = this.x(spans.start[k]), width = this.x(spans.end[k]) - x;
        pen.fillStyle = this.color(this.spanColor(k));
        // A hairline between neighbours where there is room for one.
        pen.fillRect(x, top, Math.max(0.6, width - (width > 4 ? 1 : 0)), LANE);
        if (width > 44) this.write(this.spanName(k), x, top + LANE / 2 + 0.5, width);
        if (k === this.events[this.event] || this.belongs(k)) {
          pen.strokeStyle = this.color("ink");
          pen.lineWidth = 2;
          pen.strokeRect(x + 1, top + 1, Math.max(1, width - 2), LANE - 2);
        }
      }
    });
  }

  belongs(k) {
    const journey = this.step.journeys[this.chosen], { spans } = this.step;
    return journey && spans.storage[k] === journey.storage && (spans.start[k] === journey.out || spans.start[k] === journey.back);
  }

  spanName(k) {
    const { spans } = this.step, lane = this.focus.lanes[spans.lane[k]];
    if (lane === "out" || lane === "in") return formatBytes(spans.nbytes[k]);
    if (lane === "stall") return CAUSES[this.step.causes[spans.cause[k]]] || "";
    return shortName(this.focus.ops.names[this.focus.ops.name[spans.op[k]]]);
  }

  write(text, x, y, width) {
    const pen = this.pen;
    const left = Math.max(x, GUTTER), room = Math.min(x + width, this.width - RIGHT) - left - 8;
    if (room < 30) return;
    let shown = text;
    if (pen.measureText(shown).width > room) {
      const keep = Math.floor(shown.length * room / pen.measureText(shown).width) - 1;
      if (keep < 4) return;
      shown = `${shown.slice(0, keep)}\u2026`;
    }
    pen.fillStyle = this.color("card");
    pen.textAlign = "left";
    pen.fillText(shown, left + 4, y);
  }

  drawRows() {
    const pen = this.pen;
    this.rows.forEach((index, row) => {
      const journey = this.step.journeys[index];
      const top = this.rowsTop + row * this.rowHeight, height = this.rowHeight - (this.rowHeight > 3 ? 1 : 0);
      const bar = (from, to, color) => {
        if (from === null || to === null || to < this.from || from > this.to) return;
        pen.fillStyle = this.color(color);
        pen.fillRect(this.x(from), top, Math.max(0.6, this.x(to) - this.x(from)), height);
      };
      const kept = journey.way === "kept", carried = journey.way === "carried over", remade = journey.way === "remade";
      if (!kept) bar(journey.landed ?? (carried ? 0 : journey.back), journey.back ?? this.stepEnd, "away");
      bar(journey.out, journey.landed, "out");
      bar(journey.back, journey.ready, remade ? "recompute" : "in");
      if (journey.stall_s > 0 && journey.ready !== null) {
        pen.fillStyle = this.color("stall");
        pen.fillRect(this.x(journey.ready), top, 2, height);
      }
      if (index === this.chosen) {
        const from = journey.out ?? journey.back, to = journey.ready ?? this.stepEnd;
        pen.strokeStyle = this.color("ink");
        pen.lineWidth = 1.5;
        pen.strokeRect(this.x(from) - 2, top - 2, this.x(to) - this.x(from) + 4, height + 4);
      }
    });
  }

  drawHover() {
    const pen = this.pen;
    if (this.drag && !this.drag.moving) {
      pen.fillStyle = this.color("select");
      pen.fillRect(Math.min(this.drag.x, this.drag.now), MEMORY_TOP, Math.abs(this.drag.now - this.drag.x), this.height - AXIS - MEMORY_TOP);
    }
    if (this.hoverX === null || this.hoverX < GUTTER) return;
    pen.strokeStyle = this.color("soft");
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(this.hoverX + 0.5, MEMORY_TOP);
    pen.lineTo(this.hoverX + 0.5, this.height - AXIS + 6);
    pen.stroke();
  }

  drawLabels() {
    const pen = this.pen;
    pen.textAlign = "right";
    pen.fillStyle = this.color("soft");
    this.focus.lanes.forEach((lane, index) => pen.fillText(LANE_NAMES[lane], GUTTER - 8, this.laneTop(index) + LANE / 2));
    if (this.rows.length) {
      pen.fillText("tensors", GUTTER - 8, this.rowsTop + Math.min(this.rowsHeight / 2, 40) - (this.rowsHeight > 24 ? 7 : 0));
      if (this.rowsHeight > 24) pen.fillText("away", GUTTER - 8, this.rowsTop + Math.min(this.rowsHeight / 2, 40) + 8);
    }
    if (this.to - this.from < this.end * 0.999) {
      const y = this.height - 3;
      pen.fillStyle = this.color("line");
      pen.fillRect(GUTTER, y, this.plotWidth, 3);
      pen.fillStyle = this.color("accent");
      pen.fillRect(GUTTER + this.from / this.end * this.plotWidth, y, Math.max(3, (this.to - this.from) / this.end * this.plotWidth), 3);
    }
  }
}

// The first position whose value is greater than `wanted` in an ascending list.
function firstAfter(values, wanted) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}
