// Charts as SVG: a sparkline for tables, and a chart with a scale, a legend with the present values, and a cursor.
import { h, put, replace } from "/console/elements.js";

const HEIGHT = 148;
const LEFT = 40;
const BOTTOM = 20;
const TOP = 8;
const SHORTEST = 60; // samples that a chart shows at least, so that a first minute does not fill it

function points(values, count, left, width, top, height, maximum) {
  const step = width / Math.max(1, count - 1);
  const start = count - values.length;
  return values.map((value, i) => (value === null || value === undefined ? null : [left + (start + i) * step, top + height * (1 - Math.min(1, value / maximum))]));
}

// Straight lines between neighbors; a gap where a value is missing.
function path(found) {
  let text = "";
  found.forEach((point, i) => {
    if (!point) return;
    const where = `${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    text += found[i - 1] ? `L${where}` : `M${where}L${where}`;
  });
  return text;
}

// The area between two lines of the same points, in as many pieces as there are gaps.
function area(upper, lower) {
  let text = "";
  let begin = -1;
  for (let i = 0; i <= upper.length; i++) {
    if (upper[i] && begin < 0) begin = i;
    if (!upper[i] && begin >= 0) {
      const back = lower.slice(begin, i).reverse();
      text += `${path(upper.slice(begin, i))}${path(back).replaceAll("M", "L")}Z`;
      begin = -1;
    }
  }
  return text;
}

export class Spark {
  constructor(label, color = "c1") {
    this.area = h("path", { class: `area ${color}` });
    this.line = h("path", { class: `line ${color}` });
    this.node = h("svg", { class: "spark", viewBox: "0 0 100 28", preserveAspectRatio: "none", role: "img", "aria-label": label }, this.area, this.line);
  }

  draw(values, count = SHORTEST) {
    const shown = values.slice(-count);
    const maximum = Math.max(0, ...shown.map((value) => value || 0)) * 1.05 || 1;
    const found = points(shown, count, 0, 100, 2, 25, maximum);
    this.node.classList.toggle("flat", !shown.some(Boolean));
    const base = found.map((point) => point && [point[0], 28]);
    this.line.setAttribute("d", path(found));
    this.area.setAttribute("d", area(found, base));
  }
}

export class Chart {
  // `series` are [field, name]; with `stacked` they are parts of a whole.
  constructor(title, write, series, { stacked = false, least = 0, wide = false } = {}) {
    this.title = title;
    this.write = write;
    this.series = series;
    this.isStacked = stacked;
    this.least = least; // of the scale's end
    this.cursor = null;
    this.values = series.map(() => h("b"));
    this.when = h("span", { class: "when" });
    this.svg = h("svg", {
      class: "chart", role: "img", tabindex: "0", "aria-label": title,
      onpointermove: (event) => this.point(event.offsetX), onpointerleave: () => this.point(null), onblur: () => this.point(null), onkeydown: (event) => this.step(event),
    });
    const legend = h("ul", { class: "legend" }, series.map(([, name], i) => h("li", {}, h("i", { class: `c${i + 1}` }), name, " ", this.values[i])));
    this.node = h("section", { class: wide ? "card span" : "card" }, h("div", { class: "card-head" }, h("h2", {}, title), this.when), this.svg, legend);
  }

  get fields() {
    return this.series.map(([field]) => field);
  }

  point(x) {
    this.cursor = x === null || !this.step_px ? null : Math.min(this.count - 1, Math.max(0, Math.round((x - LEFT) / this.step_px)));
    this.draw();
  }

  step(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.cursor = Math.min(this.count - 1, Math.max(0, (this.cursor ?? this.count) + by));
    this.draw();
  }

  draw(columns = this.columns) {
    if (!columns) return;
    this.columns = columns;
    const count = this.count = Math.max(SHORTEST, columns[0].length);
    const width = this.svg.clientWidth || 400;
    const inner = width - LEFT - 2;
    const height = HEIGHT - BOTTOM - TOP;
    this.step_px = inner / (count - 1);
    const tops = this.isStacked ? stack(columns) : columns;
    const maximum = nice(Math.max(this.least, ceiling(tops.flat())) || 1);
    const parts = [0, 0.5, 1].flatMap((share) => {
      const y = TOP + height * (1 - share);
      return [h("line", { class: "axis", x1: LEFT, x2: width, y1: y, y2: y }), h("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, short(maximum * share))];
    });
    parts.push(h("text", { x: LEFT, y: HEIGHT - 3 }, count > 90 ? `${Math.round(count / 60)} min ago` : `${count} s ago`), h("text", { x: width - 1, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
    let below = tops[0].map((value) => value === null ? null : 0);
    const placed = (values) => points(values, count, LEFT, inner, TOP, height, maximum);
    tops.forEach((values, i) => {
      const found = placed(values);
      if (this.isStacked) parts.push(h("path", { class: `part c${i + 1}`, d: area(found, placed(below)) }));
      else {
        if (i === 0) parts.push(h("path", { class: "area c1", d: area(found, placed(values.map((value) => value === null ? null : 0))) }));
        parts.push(h("path", { class: `line c${i + 1}`, d: path(found) }), h("path", { class: `dot c${i + 1}`, d: path(found.map((point, j) => (point && !found[j - 1] && !found[j + 1] ? point : null))) }));
      }
      below = values;
    });
    if (this.cursor !== null) parts.push(h("line", { class: "cursor", x1: LEFT + this.cursor * this.step_px, x2: LEFT + this.cursor * this.step_px, y1: TOP, y2: TOP + height }));
    replace(this.svg, parts);
    this.tell(columns, count);
  }

  tell(columns, count) {
    const texts = columns.map((values) => {
      const value = this.cursor === null ? values.findLast((one) => one !== null) : values[this.cursor - (count - values.length)];
      return this.write(value ?? null);
    });
    texts.forEach((text, i) => put(this.values[i], text));
    put(this.when, this.cursor === null ? "" : `${count - 1 - this.cursor} s ago`);
    this.svg.setAttribute("aria-label", `${this.title}: ${this.series.map(([, name], i) => `${name} ${texts[i]}`).join(", ")}`);
  }
}

const PARTS = { queue: "c1", lost: "c1", batch_wait: "c2", transfer: "c3", to_worker: "c3", read: "c3", reply: "c3", to_server: "c3", other: "c3", preprocess: "c4", first_token: "c4", inference: "c5", generate: "c5", postprocess: "c6", handler: "c7" };

// The parts of one request's time, [name, milliseconds], as a bar.
export function timeline(parts, write) {
  const total = parts.reduce((sum, [, ms]) => sum + ms, 0) || 1;
  const kind = (name) => PARTS[name] || "c7";
  const bar = h("div", { class: "timeline", "aria-hidden": "true" }, parts.map(([name, ms]) => {
    const part = h("i", { class: kind(name), title: `${name.replaceAll("_", " ")} ${write(ms)}` });
    part.style.flexGrow = ms / total;
    return part;
  }));
  const named = parts.filter(([, ms]) => ms >= total / 100);
  return h("div", {}, bar, h("ul", { class: "legend" }, named.map(([name, ms]) => h("li", {}, h("i", { class: kind(name) }), name.replaceAll("_", " "), " ", h("b", {}, write(ms))))));
}

// Each column on top of those before; a moment without any value stays empty.
function stack(columns) {
  const sums = columns[0].map((_, i) => (columns.some((values) => values[i] !== null && values[i] !== undefined) ? 0 : null));
  return columns.map((values) => values.map((value, i) => (sums[i] === null ? null : (sums[i] += value || 0))));
}

// The largest value; a few that tower above all others, such as those of a cold start, are cut off.
function ceiling(values) {
  const found = values.filter((value) => value !== null && value !== undefined).sort((one, other) => one - other);
  const usual = found[Math.floor(0.95 * (found.length - 1))] || 0;
  const most = found.at(-1) || 0;
  return found.length > 20 && usual > 0 && most > 5 * usual ? 1.5 * usual : most;
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((limit) => limit >= value * 0.999) || value;
}

function short(value) {
  if (value >= 10000) return `${Number((value / 1000).toPrecision(3))}k`;
  return String(Number(value.toPrecision(3)));
}
