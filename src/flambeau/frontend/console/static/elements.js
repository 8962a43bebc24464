// Elements, numbers and calls of the server: what every view uses.

export function h(tag, attributes = {}, ...children) {
  const node = tag === "svg" || SVG.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = new Set(["path", "line", "text", "rect", "g", "polyline"]);

// Change the text of a node only if it differs, so that selections and screen readers are left alone.
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function replace(node, ...children) {
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
}

export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export function duration(milliseconds) {
  if (milliseconds === null || milliseconds === undefined) return "–";
  if (milliseconds >= 10000) return `${number(milliseconds / 1000)} s`;
  return `${number(milliseconds)} ms`;
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
  return `${Math.floor(seconds / 86400)} days`;
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
  if (!response.ok) throw await failure(response.status, text);
  return text ? JSON.parse(text) : null;
}

export async function failure(status, text) {
  let document = {};
  try {
    document = JSON.parse(text);
  } catch { /* not JSON: the text itself is shown */ }
  const error = document.error || document;
  const cause = Array.isArray(error.cause) ? error.cause.join("\n") : error.cause;
  const found = new Error([error.message || text || `status ${status}`, cause].filter(Boolean).join("\n"));
  found.status = status;
  return found;
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
