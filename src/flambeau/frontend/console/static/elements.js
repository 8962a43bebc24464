// Elements, numbers and calls of the server: what every view uses.

const SVG = new Set(["svg", "path", "line", "text", "rect", "g", "circle", "image"]);

export function h(tag, attributes = {}, ...children) {
  const node = SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

function present(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

// Change the text of a node only if it differs, so that selections and screen readers are left alone.
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function replace(node, ...children) {
  node.replaceChildren(...present(children));
}

// Make the children of a node anew only if what they show has changed.
export function renew(node, document, make) {
  const text = JSON.stringify(document);
  if (node.shown === text) return;
  node.shown = text;
  replace(node, make());
}

export function meter(label) {
  const bar = h("i");
  const node = h("div", { class: "meter", role: "progressbar", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": 100 }, bar);
  // A share from 0 to 1; null: under way, nobody knows how far.
  const set = (share) => {
    node.classList.toggle("unknown", share === null);
    if (share === null) node.removeAttribute("aria-valuenow");
    else node.setAttribute("aria-valuenow", Math.round(100 * share));
    bar.style.width = share === null ? "" : `${100 * Math.min(1, Math.max(0, share))}%`;
  };
  set(0);
  return { node, set };
}

// Tabs with panels that are made when they are first shown; the arrow keys move between them.
export function tabs(label, panels, onselect = () => {}) {
  const bar = h("div", { class: "tabs", role: "tablist", "aria-label": label });
  const id = `tabs-${Math.random().toString(36).slice(2)}`;
  const panel = h("div", { role: "tabpanel", id });
  const made = new Map();
  const names = Object.keys(panels);
  const select = (name) => {
    for (const tab of bar.children) {
      const isHere = tab.textContent === name;
      tab.setAttribute("aria-selected", String(isHere));
      tab.tabIndex = isHere ? 0 : -1;
    }
    panel.setAttribute("aria-label", name);
    if (!made.has(name)) made.set(name, panels[name]());
    replace(panel, made.get(name));
    onselect(name);
  };
  const move = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = bar.children[(([...bar.children].indexOf(event.target) + step) + names.length) % names.length];
    select(next.textContent);
    next.focus();
  };
  bar.append(...names.map((name) => h("button", { type: "button", role: "tab", "aria-controls": id, onclick: () => select(name), onkeydown: move }, name)));
  select(names[0]);
  return { node: h("div", {}, names.length > 1 ? bar : null, panel), select };
}

// ---- numbers ----

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds >= 1000) return `${number(milliseconds / 1000)} s`;
  return `${number(milliseconds)} ms`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${number(value)} %`;
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log(value) / Math.log(1024)));
  return `${number(value / 1024 ** power)} ${units[power]}`;
}

export function age(seconds) {
  if (seconds < 60) return `${Math.max(0, Math.floor(seconds))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return count(Math.floor(seconds / 86400), "day");
}

export function count(value, noun) {
  return `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
}

export function toast(text) {
  const node = h("div", { class: "toast" }, text);
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), 6000);
}

// ---- calls ----

let key = sessionStorage.getItem("flambeau-key") || "";

export function setKey(value) {
  key = value;
  sessionStorage.setItem("flambeau-key", value);
}

export function hasKey() {
  return key !== "";
}

export function headers(more = {}) {
  return key ? { ...more, authorization: `Bearer ${key}` } : more;
}

// The JSON of a call, or an Error with the server's own sentence.
export async function call(method, path, body) {
  const response = await fetch(path, { method, headers: headers(body ? { "content-type": "application/json" } : {}), body: body && JSON.stringify(body) });
  const text = await response.text();
  if (!response.ok) throw failure(response.status, text);
  return text ? JSON.parse(text) : null;
}

export function failure(status, text) {
  let document = {};
  try {
    document = JSON.parse(text);
  } catch { /* not JSON: the text itself is shown */ }
  const error = document.error || document;
  const cause = Array.isArray(error.cause) ? error.cause.join("\n") : error.cause;
  const found = new Error([error.message || text || `status ${status}`, cause].filter(Boolean).join("\n"));
  found.status = status;
  found.parts = cause ? [error.message, cause] : null;
  return found;
}

// The text of an error; a traceback keeps its columns.
export function problem(error) {
  const text = error.parts ? error.parts[0] : error.message;
  const line = h("p", { class: "problem" }, error.status ? `${error.status}: ${text}` : text);
  return error.parts ? h("div", {}, line, h("pre", { tabindex: "0" }, error.parts[1])) : line;
}

// Server-sent events over fetch, which can send a key.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const lines = rest.slice(0, end).split("\n");
      rest = rest.slice(end + 2);
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      const name = lines.find((line) => line.startsWith("event:"));
      yield { name: name ? name.slice(6).trim() : "message", data };
    }
  }
}
