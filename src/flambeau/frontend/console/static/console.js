// The console: follows the server's events and shows the view that the address names.
import { events, failure, hasKey, headers, setKey, toast, h, put, replace } from "/console/elements.js";
import { ModelView } from "/console/model.js";
import { Overview } from "/console/overview.js";
import { Playground } from "/console/playground.js";

const STALE_MS = 3000; // without an event for so long, the page says that it is not current

const main = document.getElementById("main");
const connection = document.getElementById("connection");

export const server = { state: null, fields: [], kept: 300, samples: new Map(), cpu: [] };
let view = null;
let following = null;
let lastEvent = 0;

// ---- the address ----

function parts() {
  return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent);
}

function open() {
  for (const dialog of document.querySelectorAll("dialog:not([data-key])")) dialog.close();
  const [name, model, version] = parts();
  const watched = name === "model" ? `${model}/${version}` : "";
  view = name === "model" ? new ModelView(server, model, version) : name === "play" ? new Playground(server, model, version) : new Overview(server);
  for (const link of document.querySelectorAll("[data-nav]")) {
    const isHere = link.dataset.nav === (name === "play" ? "play" : "overview");
    isHere ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  }
  document.title = `${view.title} · Flambeau`;
  replace(main, view.node);
  window.scrollTo(0, 0);
  if (server.state) view.update();
  if (following && following.watched !== watched) follow(watched);
}

// ---- events ----

async function follow(watched) {
  following?.abort.abort();
  const mine = { watched, abort: new AbortController() };
  following = mine;
  while (following === mine) {
    try {
      const response = await fetch(`/console/events?model=${encodeURIComponent(watched)}`, { headers: headers(), signal: mine.abort.signal });
      if (!response.ok) throw failure(response.status, await response.text());
      let reason = "the server is stopping";
      for await (const event of events(response)) {
        if (following !== mine) return;
        if (event.name === "end") reason = JSON.parse(event.data).reason;
        take(event);
      }
      show("warn", reason);
      main.classList.add("stale");
    } catch (error) {
      if (following !== mine) return;
      if ([400, 401, 403].includes(error.status)) {
        await askKey(error.message);
        continue;
      }
      show("bad", "not connected");
      main.classList.add("stale"); // what the page shows is not current
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

function take(event) {
  const document = JSON.parse(event.data);
  lastEvent = Date.now();
  main.classList.remove("stale");
  if (event.name === "history") {
    server.fields = document.fields;
    server.kept = document.kept;
    server.samples = new Map(Object.entries(document.models));
    server.sample = document.sample;
  } else if (event.name === "state") {
    const isFresh = server.state === null;
    document.models.sort((one, other) => one.name.localeCompare(other.name) || one.version.localeCompare(other.version));
    server.state = document;
    const present = new Set();
    for (const model of document.models) {
      const name = `${model.name}/${model.version}`;
      present.add(name);
      const samples = server.samples.get(name) || [];
      if (document.sample !== server.sample) samples.push(model.sample);
      if (samples.length > server.kept) samples.shift();
      server.samples.set(name, samples);
    }
    server.sample = document.sample;
    server.cpu = [...server.cpu, document.host.CPUUtilization ?? null].slice(-60);
    for (const name of server.samples.keys()) if (!present.has(name)) server.samples.delete(name);
    const failed = document.models.filter((model) => model.state === "failed").length + document.missing.length;
    if (document.ready) show("good", "ready");
    else show(failed ? "bad" : "warn", failed ? `${failed} of ${document.models.length + document.missing.length} failed` : "not ready");
    view.update(isFresh);
  }
}

function show(kind, text) {
  connection.className = `pill ${kind}`;
  put(connection, text);
}

setInterval(() => {
  const isStale = lastEvent && Date.now() - lastEvent > STALE_MS;
  if (isStale) main.classList.add("stale");
  if (isStale) show("bad", `no news for ${Math.round((Date.now() - lastEvent) / 1000)} s`);
}, 1000);

// ---- the key ----

function askKey(reason) {
  return new Promise((resolve) => {
    const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
    const dialog = h("dialog", { "aria-labelledby": "key-title", "data-key": true, onclose: () => { dialog.remove(); resolve(); } },
      h("form", { method: "dialog", onsubmit: () => setKey(field.value.trim()) },
        h("h2", { id: "key-title" }, "This server asks for its management key"),
        h("label", { for: "key" }, "Key (it stays in this tab until it is closed)"), field,
        hasKey() ? h("p", { class: "problem" }, reason) : null,
        h("div", { class: "actions" }, h("button", { class: "primary" }, "Continue"))));
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    document.body.append(dialog);
    dialog.showModal();
  });
}

// ---- light and dark ----

const chosen = localStorage.getItem("flambeau-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("flambeau-theme", root.dataset.theme);
});

// A page that is kept for "back" would keep its stream too, and a browser opens few connections to one server.
window.addEventListener("pagehide", () => {
  following?.abort.abort();
  following = null;
});
window.addEventListener("pageshow", (event) => {
  if (event.persisted) start();
});
window.addEventListener("hashchange", () => {
  open();
  main.focus({ preventScroll: true }); // a screen reader goes on with the new view
});
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part of an address behind # names the view
  main.focus();
});
window.addEventListener("unhandledrejection", (event) => toast(String(event.reason?.message || event.reason)));

function start() {
  open();
  follow(parts()[0] === "model" ? parts().slice(1, 3).join("/") : "");
}

start();
