// Pictures of answers: bars of probabilities, boxes and masks over an image, vectors, similarities.
import { h, number } from "/console/elements.js";

const MOST_BARS = 10;
const MOST_TEXT = 20000; // characters of JSON that are shown
const PALETTE = [[232, 89, 12], [37, 99, 235], [22, 163, 74], [192, 38, 211], [202, 138, 4], [8, 145, 178], [220, 38, 38], [124, 58, 237]];

// The nodes that show an answer; `file` is the image that was sent, if one was.
export async function answerTo(blob, type, file, model) {
  if (type.startsWith("image/")) return h("img", { class: "picture", src: URL.createObjectURL(blob), alt: "The answer" });
  const text = await blob.text();
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    if (!/^(text\/|$)/.test(type) && text.includes("\ufffd")) return h("p", {}, h("a", { href: URL.createObjectURL(blob), download: "answer" }, `Download the answer (${type})`));
    return h("pre", { tabindex: "0" }, text);
  }
  const picture = bars(value) || (file && await overlay(value, file, model)) || vector(value);
  const written = JSON.stringify(value, null, 2);
  const raw = h("pre", { tabindex: "0" }, written.length > MOST_TEXT ? `${written.slice(0, MOST_TEXT)}\n… ${number(written.length - MOST_TEXT)} more characters` : written);
  return picture ? [picture, h("details", {}, h("summary", {}, "JSON"), raw)] : raw;
}

// ---- classes ----

function isShare(value) {
  return typeof value === "number" && value >= 0 && value <= 1;
}

// [name, share] of the classes in an answer: {"cat": 0.9, …}, [{"label": "cat", "score": 0.9}, …], or one of these.
function classesIn(value) {
  const found = Array.isArray(value) && value.length === 1 && Array.isArray(value[0]) ? value[0] : value;
  const rows = Array.isArray(found) ? found : [found];
  if (!rows.length || !rows.every((one) => one && typeof one === "object" && !Array.isArray(one))) return null;
  if (rows.length === 1 && !("score" in rows[0])) {
    const pairs = Object.entries(rows[0]);
    return pairs.length && pairs.every(([, share]) => isShare(share)) ? pairs : null;
  }
  const pairs = rows.map((one) => {
    const others = Object.entries(one).filter(([name]) => name !== "score");
    return others.length === 1 && typeof others[0][1] !== "object" && isShare(one.score) ? [String(others[0][1]), one.score] : null;
  });
  return pairs.every(Boolean) ? pairs : null;
}

function bars(value) {
  const pairs = classesIn(value);
  if (!pairs) return null;
  const shown = [...pairs].sort((one, other) => other[1] - one[1]).slice(0, MOST_BARS);
  return h("dl", { class: "bars" }, shown.flatMap(([name, share]) => {
    const bar = h("i");
    bar.style.width = `${100 * share}%`;
    return [h("dt", {}, name), h("dd", {}, h("span", { class: "track" }, bar), h("span", { class: "figure" }, `${(100 * share).toFixed(1)} %`))];
  }));
}

// ---- boxes and masks ----

function isBox(value) {
  return Array.isArray(value) && value.length === 4 && value.every((one) => typeof one === "number");
}

function boxOf(value) {
  if (isBox(value)) return value;
  if (value && typeof value === "object" && ["xmin", "ymin", "xmax", "ymax"].every((name) => typeof value[name] === "number")) return [value.xmin, value.ymin, value.xmax, value.ymax];
  return null;
}

function isGrid(value) {
  return Array.isArray(value) && value.length > 1 && Array.isArray(value[0]) && value[0].length > 1 && typeof value[0][0] === "number";
}

// The objects of an answer: {name, score, box, mask}; null if it holds none.
function objectsIn(value) {
  const rows = Array.isArray(value) ? value : value && Array.isArray(value.objects) ? value.objects : null;
  if (!rows || !rows.length || !rows.every((one) => one && typeof one === "object" && !Array.isArray(one))) return null;
  const found = rows.map((one) => {
    const [field, box] = Object.entries(one).map(([name, inner]) => [name, boxOf(inner)]).find(([, inner]) => inner) || [];
    const label = one.label ?? one.class ?? one.name;
    return { name: String(label ?? field ?? ""), score: one.score, box, mask: isGrid(one.mask) ? one.mask : null };
  });
  return found.every((one) => one.box || one.mask) ? found : null;
}

// The class of each pixel: rows of numbers, or rows of [class, probability] as image_segmenter answers.
function segmentsIn(value) {
  if (!Array.isArray(value) || value.length < 2 || !Array.isArray(value[0]) || value[0].length < 2) return null;
  if (typeof value[0][0] === "number") return value[0].length > 4 ? value : null;
  return Array.isArray(value[0][0]) && value[0][0].length === 2 && typeof value[0][0][0] === "number" ? value.map((row) => row.map((pixel) => pixel[0])) : null;
}

function masked(grid, colorOf) {
  const canvas = h("canvas", { class: "mask", width: grid[0].length, height: grid.length });
  const context = canvas.getContext("2d");
  const image = context.createImageData(grid[0].length, grid.length);
  grid.forEach((row, y) => row.forEach((one, x) => {
    const color = colorOf(one);
    if (color) image.data.set([...color, 120], 4 * (y * row.length + x));
  }));
  context.putImageData(image, 0, 0);
  return canvas;
}

async function overlay(value, file, model) {
  const objects = objectsIn(value);
  const segments = objects ? null : segmentsIn(value);
  if (!objects && !segments) return null;
  const image = h("img", { src: URL.createObjectURL(file), alt: objects ? `The image with ${objects.map((one) => one.name).join(", ")}` : "The image, colored by class" });
  await image.decode();
  const node = h("div", { class: "picture" }, image);
  const color = (i) => PALETTE[i % PALETTE.length];
  if (segments) {
    if (model.handler === "image_segmenter") node.classList.add("square"); // it sees the middle of the image
    node.append(masked(segments, (one) => (one ? color(one - 1) : null)));
    const kinds = [...new Set(segments.flat())].sort((one, other) => one - other);
    return [node, h("ul", { class: "legend" }, kinds.filter(Boolean).map((one) => legend(color(one - 1), `class ${one}`)))];
  }
  const { naturalWidth: width, naturalHeight: height } = image;
  const svg = h("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  objects.forEach((one, i) => {
    if (one.mask) node.append(masked(one.mask, (pixel) => (pixel > 0.5 ? color(i) : null)));
    if (one.box) {
      const box = h("rect", { x: one.box[0], y: one.box[1], width: one.box[2] - one.box[0], height: one.box[3] - one.box[1], rx: width / 200, class: "box" });
      box.style.stroke = `rgb(${color(i)})`;
      svg.append(box);
    }
  });
  node.append(svg);
  return [node, h("ul", { class: "legend" }, objects.map((one, i) => legend(color(i), one.name, one.score)))];
}

function legend(color, name, score) {
  const swatch = h("i");
  swatch.style.background = `rgb(${color})`;
  return h("li", {}, swatch, name, typeof score === "number" ? [" ", h("b", {}, `${(100 * score).toFixed(1)} %`)] : null);
}

// ---- vectors ----

function vector(value) {
  const numbers = Array.isArray(value) && value.length === 1 && Array.isArray(value[0]) ? value[0] : value;
  if (!Array.isArray(numbers) || numbers.length < 16 || !numbers.every((one) => typeof one === "number")) return null;
  const most = Math.max(...numbers.map(Math.abs)) || 1;
  const svg = h("svg", { class: "vector", viewBox: `0 0 ${numbers.length} 2`, preserveAspectRatio: "none", role: "img", "aria-label": `${numbers.length} numbers` },
    numbers.map((one, i) => h("rect", { x: i, y: one > 0 ? 1 - one / most : 1, width: 0.8, height: Math.abs(one) / most, class: one > 0 ? "up" : "down" })));
  return [svg, h("p", { class: "took" }, `${numbers.length} numbers, length ${number(Math.hypot(...numbers))}`)];
}

export function heatMap(texts, vectors) {
  const length = (one) => Math.hypot(...one) || 1;
  const rows = vectors.map((one) => vectors.map((other) => one.reduce((sum, value, i) => sum + value * other[i], 0) / (length(one) * length(other))));
  return h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Similarities" }, h("table", { class: "heat" },
    h("thead", {}, h("tr", {}, h("td"), texts.map((text, i) => h("th", { scope: "col", title: text }, String(i + 1))))),
    h("tbody", {}, rows.map((row, i) => h("tr", {}, h("th", { scope: "row", title: texts[i] }, h("span", {}, `${i + 1}`), texts[i]), row.map((value) => {
      const cell = h("td", { class: value > 0.74 ? "deep" : null }, value.toFixed(2));
      cell.style.setProperty("--share", `${Math.round(100 * Math.max(0, value) ** 1.5)}%`);
      return cell;
    }))))));
}
