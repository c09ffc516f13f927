// The timeline under a hand: what is where, zooming, moving, and the keys.

class Chart extends Drawing {
  constructor(canvas, said, focus, trace) {
    super(canvas, focus, trace);
    this.said = said;
    canvas.addEventListener("pointermove", (e) => this.onMove(e));
    canvas.addEventListener("pointerdown", (e) => this.onDown(e));
    canvas.addEventListener("pointerup", (e) => this.onUp(e));
    canvas.addEventListener("pointerleave", () => { this.hoverX = null; tip.hide(); this.draw(); });
    canvas.addEventListener("dblclick", () => this.whole());
    canvas.addEventListener("wheel", (e) => this.onWheel(e), { passive: false });
    canvas.addEventListener("keydown", (e) => this.onKey(e));
    canvas.addEventListener("blur", () => tip.hide());
  }

  // ---- what is under the pointer ----

  describeSpan(k) {
    const { spans, causes } = this.step, ops = this.focus.ops;
    const lane = this.focus.lanes[spans.lane[k]], op = spans.op[k], cause = causes[spans.cause[k]];
    const name = shortName(ops.names[ops.name[op]]), module = ops.modules[ops.module[op]];
    const rows = [["from", formatSeconds(spans.start[k] / 1e9)], ["for", formatSeconds((spans.end[k] - spans.start[k]) / 1e9)]];
    if (lane === "compute" || lane === "recompute") {
      if (module) rows.unshift(["module", module]);
      rows.push(["operator", `${op}, ${this.focus.phases[ops.phase[op]]}`]);
      return [lane === "recompute" ? `${name}, run again` : name, rows];
    }
    const maker = spans.storage[k] === null ? "" : this.makerOf(spans.storage[k]);
    if (maker) rows.unshift(["tensor", maker]);
    if (lane === "stall") return [`${name} waits for ${CAUSES[cause] || cause}`, rows];
    rows.push(["because", CAUSES[cause] || cause]);
    return [`${formatBytes(spans.nbytes[k])} ${lane === "out" ? "out" : "back in"}`, rows];
  }

  makerOf(storage) {
    const journey = this.step.journeys.find((each) => each.storage === storage);
    return journey ? `${shortName(journey.op) || journey.kind}${journey.module ? ` in ${journey.module}` : ""}` : `storage ${storage}`;
  }

  describeJourney(index) {
    const journey = this.step.journeys[index], time = (ns) => formatSeconds(ns / 1e9);
    const rows = [["module", journey.module || "none"]];
    if (journey.out !== null) rows.push(["out", journey.landed === journey.out ? time(journey.out) : `${time(journey.out)} to ${time(journey.landed)}`]);
    if (journey.back !== null) rows.push(["back", `${time(journey.back)} to ${time(journey.ready)}`]);
    rows.push([journey.way, journey.stall_s > 0 ? `stalled ${formatSeconds(journey.stall_s)}` : journey.way === "remade" ? "recomputed" : "hidden"]);
    return [`${formatBytes(journey.nbytes)} ${journey.op ? `made by ${shortName(journey.op)}` : `(${journey.kind})`}`, rows];
  }

  find(x, y) {
    const at = this.at(x), { spans, memory, figures } = this.step;
    if (x < GUTTER || x > this.width - RIGHT) return null;
    if (y < this.lanesTop - 8) {
      const live = memory.live[Math.max(0, firstAfter(memory.at, at) - 1)] ?? 0;
      const compute = this.lanes[this.focus.lanes.indexOf("compute")];
      const running = compute[Math.max(0, firstAfter(compute.map((k) => spans.start[k]), at) - 1)];
      const rows = [["live", formatBytes(live)], ["free in the budget", formatBytes(figures.budget_bytes - live)]];
      for (const tier of this.step.tiers) rows.push([`in ${tier.tier}`, formatBytes(tier.held[firstAfter(tier.at, at) - 1] ?? 0)]);
      if (running !== undefined) {
        rows.push(["unmanaged", formatBytes(this.focus.ops.peak[spans.op[running]])]);
        rows.push([spans.end[running] >= at ? "running" : "waiting after", this.spanName(running)]);
      }
      return { text: [`at ${formatSeconds(at / 1e9)}`, rows] };
    }
    const lane = Math.floor((y - this.lanesTop) / (LANE + LANE_GAP));
    if (lane >= 0 && lane < this.lanes.length) {
      const slack = 3 / this.plotWidth * (this.to - this.from);
      let best = -1, nearest = slack;
      for (const k of this.lanes[lane]) {
        const distance = Math.max(spans.start[k] - at, at - spans.end[k], 0);
        if (distance < nearest || (distance === 0 && best < 0)) [best, nearest] = [k, distance];
      }
      return best < 0 ? null : { text: this.describeSpan(best), span: best };
    }
    const row = Math.floor((y - this.rowsTop) / this.rowHeight);
    if (row >= 0 && row < this.rows.length) {
      const index = this.rows[row], journey = this.step.journeys[index];
      if (at >= (journey.out ?? journey.back) && at <= (journey.ready ?? this.stepEnd)) return { text: this.describeJourney(index), journey: index };
    }
    return null;
  }

  // ---- hands ----

  place(e) {
    const box = this.canvas.getBoundingClientRect();
    return [e.clientX - box.left, e.clientY - box.top];
  }

  onMove(e) {
    const [x, y] = this.place(e);
    this.hoverX = x;
    if (this.drag) {
      if (this.drag.moving) this.move(this.drag.from - (x - this.drag.x) / this.plotWidth * (this.to - this.from));
      else this.drag.now = Math.max(GUTTER, x);
      tip.hide();
    } else {
      const found = this.find(x, y);
      if (found) tip.show(e.clientX, e.clientY, ...found.text);
      else tip.hide();
    }
    this.draw();
  }

  onDown(e) {
    const [x] = this.place(e);
    if (e.button !== 0 || x < GUTTER) return;
    this.canvas.setPointerCapture(e.pointerId);
    this.drag = { x, now: x, moving: e.shiftKey, from: this.from };
  }

  onUp(e) {
    const drag = this.drag;
    this.drag = null;
    if (!drag) return;
    const [x, y] = this.place(e);
    if (!drag.moving && Math.abs(drag.now - drag.x) > 6) {
      const low = this.at(Math.min(drag.now, drag.x)), high = this.at(Math.max(drag.now, drag.x));
      this.move(low, Math.max(this.end / 20000, high - low));
    } else if (!drag.moving) {
      const found = this.find(x, y);
      if (found && found.journey !== undefined) this.onChoose?.(found.journey);
      this.draw();
    }
  }

  onWheel(e) {
    if (e.ctrlKey) {
      e.preventDefault();
      this.zoom(Math.exp(e.deltaY / 300), this.at(this.place(e)[0]));
    } else if (Math.abs(e.deltaX) > Math.abs(e.deltaY)) {
      e.preventDefault();
      this.move(this.from + e.deltaX / this.plotWidth * (this.to - this.from));
    }
  }

  onKey(e) {
    if (e.ctrlKey || e.metaKey || e.altKey) return;
    const width = this.to - this.from;
    const act = {
      ArrowLeft: () => this.move(this.from - width / 8),
      ArrowRight: () => this.move(this.from + width / 8),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2),
      0: () => this.whole(), Home: () => this.move(0), End: () => this.move(this.end),
      ".": () => this.next(1), ",": () => this.next(-1),
    }[e.key];
    if (!act) return;
    e.preventDefault();
    act();
  }

  next(way) {
    if (!this.events.length) return;
    this.event = Math.min(this.events.length - 1, Math.max(0, this.event < 0 && way < 0 ? this.events.length - 1 : this.event + way));
    const k = this.events[this.event], { spans } = this.step;
    if (spans.start[k] < this.from || spans.end[k] > this.to) this.move((spans.start[k] + spans.end[k]) / 2 - (this.to - this.from) / 2);
    this.draw();
    const [title, rows] = this.describeSpan(k);
    this.said.textContent = `${title}. ${rows.map((row) => row.join(" ")).join(", ")}`;
    const box = this.canvas.getBoundingClientRect();
    tip.show(box.left + this.x(spans.start[k]), box.top + this.laneTop(spans.lane[k]) + LANE, title, rows);
  }

  choose(index, { zoom = false } = {}) {
    this.chosen = index;
    const journey = this.step.journeys[index];
    if (zoom && journey) {
      const from = journey.out ?? journey.back, to = journey.ready ?? this.stepEnd;
      const width = Math.min(this.end, Math.max((to - from) * 1.3, this.end / 500));
      this.move((from + to) / 2 - width / 2, width);
    }
    this.draw();
  }
}
