// Bytes and seconds as lowtide.core.units writes them, and small helpers for the document.

function threeDigits(value) {
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

function formatBytes(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = Math.abs(nbytes), index = 0;
  while (value >= 1023.5 && index < units.length - 1) { value /= 1024; index += 1; }
  const text = index === 0 ? value.toFixed(0) : threeDigits(value);
  return `${nbytes < 0 ? "-" : ""}${text} ${units[index]}`;
}

function formatSeconds(seconds) {
  if (seconds < 0) return `-${formatSeconds(-seconds)}`;
  if (seconds < 999.5e-6) return `${(seconds * 1e6).toFixed(0)} us`;
  if (seconds < 999.95e-3) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 59.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 3597) return `${(seconds / 60).toFixed(1)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function formatRate(perSecond) {
  if (typeof perSecond !== "number") return "unlimited";
  for (const [factor, unit] of [[1e9, "GB/s"], [1e6, "MB/s"]]) {
    if (perSecond >= factor) return `${threeDigits(perSecond / factor)} ${unit}`;
  }
  return `${threeDigits(perSecond / 1e3)} KB/s`;
}

function formatPercent(share) {
  return share > 0 && share < 0.005 ? "<1%" : `${Math.round(share * 100)}%`;
}

function shortName(op) {
  return op.replace(/^aten::/, "").replace(/^_+/, "");
}

// A long name as text that may break after its dots and underscores.
function breakable(name) {
  return name.split(/(?<=[._])/).flatMap((part) => [part, make("wbr")]);
}

// Make an element. Everything that comes from a trace goes in as text, never as markup.
function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "path", "circle", "line", "text", "rect", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const tip = {
  node: null,
  show(x, y, title, rows) {
    this.node ||= document.getElementById("tip");
    this.node.replaceChildren(make("b", {}, title), ...rows.map(([name, value]) => make("div", {}, make("span", {}, name), make("span", {}, value))));
    this.node.hidden = false;
    const box = this.node.getBoundingClientRect();
    const left = x + 16 + box.width > window.innerWidth ? x - 16 - box.width : x + 16;
    const top = y + 16 + box.height > window.innerHeight ? y - 16 - box.height : y + 16;
    this.node.style.left = `${Math.max(4, left)}px`;
    this.node.style.top = `${Math.max(4, top)}px`;
  },
  hide() {
    if (this.node) this.node.hidden = true;
  },
};

// Round numbers between low and high, about `count` of them.
function ticks(low, high, count, bases = [1, 2, 5]) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([...bases, 10].find((base) => base * power >= rough) || 10);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  return found;
}

function byteTicks(high, count) {
  let unit = 1;
  while (unit * 1024 <= high) unit *= 1024;
  if (high / unit < 2 && unit > 1) return ticks(0, high / (unit / 1024), count, [1, 2, 4, 5]).map((value) => value * unit / 1024);
  return ticks(0, high / unit, count).map((value) => value * unit);
}
