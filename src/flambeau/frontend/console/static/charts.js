// Line charts as SVG: a sparkline for tables, and a chart with a scale.
import { h, replace } from "/console/elements.js";

const WIDTH = 600;
const HEIGHT = 150;
const LEFT = 46;
const BOTTOM = 18;
const TOP = 9;

function points(values, count, width, height, maximum, left = 0, top = TOP) {
  const step = (width - left) / Math.max(1, count - 1);
  const start = count - values.length;
  return values.map((value, i) => (value === null ? null : [left + (start + i) * step, top + (height - top) * (1 - value / maximum)]));
}

// Straight lines between neighbors; a gap where a value is missing, and a dot for a value alone.
function path(found) {
  let text = "";
  found.forEach((point, i) => {
    if (point === null || point === undefined) return;
    const where = `${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    text += found[i - 1] ? `L${where}` : `M${where}L${where}`;
  });
  return text;
}

// The points without a neighbor, which a line would hardly show.
function lone(found) {
  return found.map((point, i) => (point && !found[i - 1] && !found[i + 1] ? point : null));
}

export class Spark {
  constructor(label) {
    this.area = h("path", { class: "area" });
    this.line = h("path", { class: "line c1" });
    this.node = h("svg", { class: "spark", viewBox: "0 0 120 30", preserveAspectRatio: "none", role: "img", "aria-label": label }, this.area, this.line);
  }

  draw(values, count = 60) {
    const shown = values.slice(-count);
    const maximum = Math.max(1, ...shown.map((value) => value || 0));
    const found = points(shown, count, 120, 28, maximum, 0, 2);
    const line = path(found);
    this.line.setAttribute("d", line);
    const isWhole = found.length > 1 && found.every((point) => point);
    this.area.setAttribute("d", isWhole ? `${line}L120 30L${found[0][0].toFixed(1)} 30Z` : "");
  }
}

export class Chart {
  constructor(title, unit, series) {
    this.series = series;
    this.unit = unit;
    this.svg = h("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
    this.now = h("span", { class: "mono" });
    const legend = h("div", { class: "legend" }, series.map((one, i) => h("span", {}, h("i", { class: `c${i + 1}` }), one.name)));
    this.node = h("div", { class: "card" }, h("h2", {}, title, " ", this.now), this.svg, series.length > 1 ? legend : null);
  }

  draw(columns, count) {
    const all = columns.flat().filter((value) => value !== null);
    const maximum = nice(Math.max(0, ...all) || 1);
    const width = this.svg.clientWidth || WIDTH;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const height = HEIGHT - BOTTOM;
    const parts = [0, 0.5, 1].flatMap((share) => {
      const y = TOP + (height - TOP) * (1 - share);
      return [
        h("line", { class: "axis", x1: LEFT, x2: width, y1: y, y2: y }),
        h("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(maximum * share)),
      ];
    });
    const minutes = Math.round(count / 60);
    parts.push(h("text", { x: LEFT, y: HEIGHT - 3 }, `${minutes} min ago`), h("text", { x: width, y: HEIGHT - 3, "text-anchor": "end" }, "now"));
    columns.forEach((values, i) => {
      const found = points(values, count, width, height, maximum, LEFT);
      parts.push(h("path", { class: `line c${i + 1}`, d: path(found) }), h("path", { class: `dot c${i + 1}`, d: path(lone(found)) }));
    });
    replace(this.svg, parts);
    const last = columns[0].at(-1);
    this.now.textContent = last === null || last === undefined ? this.unit : `${short(last)} ${this.unit}`;
  }
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((limit) => limit >= value * 0.999) || value;
}

function short(value) {
  if (value >= 10000) return `${Number((value / 1000).toPrecision(3))}k`;
  return String(Number(value.toPrecision(3)));
}
