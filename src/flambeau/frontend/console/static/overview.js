// Overview: all models with their traffic, what loads, what failed, and the host.
import { age, bytes, count, duration, h, meter, number, percent, put, renew } from "/console/elements.js";
import { Spark } from "/console/charts.js";
import { register } from "/console/actions.js";

const STATES = { ready: "good", sleeping: "", loading: "warn", failed: "bad", "without workers": "", "waiting to restart": "warn" };

export function href(kind, model) {
  return `#/${kind}/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
}

export function pill(node, state) {
  node.className = `pill ${STATES[state] ?? ""}`;
  put(node, state);
}

// The share of the requests that name no version, and of those that it gets copies of, if versions share them.
export function traffic(model) {
  const texts = [];
  if (model.trafficPercent !== null) texts.push(`${model.trafficPercent} % of requests`);
  if (model.mirror?.percent) texts.push(`copies of ${model.mirror.percent} %`);
  return texts.map((text) => [" ", h("span", { class: "tag" }, text)]);
}

export function column(server, model, name) {
  const index = server.fields.indexOf(name);
  return (server.samples.get(`${model.name}/${model.version}`) || []).map((sample) => sample[index] ?? null);
}

export class Stat {
  constructor(title, { spark = false, hasMeter = false } = {}) {
    this.value = h("b", {}, "–");
    this.note = h("small");
    this.spark = spark ? new Spark(`${title} in the last minute`) : null;
    this.meter = hasMeter ? meter(title) : null;
    this.node = h("div", { class: "card stat" }, h("h3", {}, title), h("div", { class: "trend" }, this.value, this.spark?.node), this.note, this.meter?.node);
  }

  set(value, note, kind = "") {
    put(this.value, value);
    put(this.note, note);
    this.value.className = kind;
  }
}

class Row {
  constructor(model) {
    this.state = h("span");
    this.sparks = { requests: new Spark(`Requests per second of ${model.name}`), p50: new Spark(`Median latency of ${model.name}`, "c2"), errors: new Spark(`Errors of ${model.name}`, "bad") };
    this.texts = Object.fromEntries(["workers", "waiting", "requests", "p50", "p99", "errors"].map((name) => [name, h("span")]));
    const { texts, sparks } = this;
    const cell = (label, ...more) => h("td", { class: "num", "data-label": label }, more);
    const trend = (label, name, ...more) => h("td", { class: "wide", "data-label": label }, h("div", { class: "trend" }, h("span", { class: "figure" }, texts[name], more), sparks[name].node));
    this.detail = h("small");
    this.node = h("tr", {},
      h("th", { scope: "row" }, h("a", { href: href("model", model) }, model.name), " ", h("span", { class: "tag" }, model.version), model.isDefault ? null : [" ", h("span", { class: "tag" }, "not default")], traffic(model), this.detail),
      h("td", { class: "state" }, this.state),
      cell("Workers", texts.workers), cell("Queued", texts.waiting),
      trend("Requests/s", "requests"), trend("Latency", "p50", h("small", {}, "p99 ", texts.p99)), trend("Errors/s", "errors"),
      h("td", { class: "act" }, h("a", { class: "button small", href: href("play", model), "aria-label": `Try ${model.name}` }, "Try it")));
  }

  update(server, model) {
    const { texts, sparks } = this;
    pill(this.state, model.state);
    put(this.detail, model.workers.find((worker) => worker.health)?.health || model.handler);
    put(texts.workers, `${model.ready} of ${model.wanted}`);
    put(texts.waiting, number(model.waiting));
    put(texts.requests, number(model.recent.requests ?? 0));
    put(texts.p50, duration(model.recent.p50));
    put(texts.p99, duration(model.recent.p99));
    put(texts.errors, number(model.recent.errors ?? 0));
    texts.errors.className = model.recent.errors ? "bad" : "";
    texts.waiting.className = model.waiting > model.capacity / 2 ? "bad" : "";
    for (const [name, spark] of Object.entries(sparks)) spark.draw(column(server, model, name));
  }
}

export class Overview {
  title = "Models";

  constructor(server) {
    this.server = server;
    this.rows = new Map();
    this.stats = { models: new Stat("Models ready"), requests: new Stat("Requests per second", { spark: true }), cpu: new Stat("CPU", { spark: true }), memory: new Stat("Memory", { hasMeter: true }) };
    this.body = h("tbody");
    this.empty = h("div", { class: "empty" }, h("p", {}, "Waiting for the server …"));
    this.table = h("table", { class: "models", hidden: true },
      h("thead", {}, h("tr", {}, ["Model", "State", "Workers", "Queued", "Requests/s", "Latency, median", "Errors/s", ""].map((text, i) => (text ? h("th", { scope: "col", class: i === 2 || i === 3 ? "num" : null }, text) : h("td"))))),
      this.body);
    this.gpus = h("div", { class: "grid stats", hidden: true });
    this.loading = h("section", { class: "section", "aria-label": "Loading" });
    this.failures = h("section", { class: "section", "aria-label": "Failures" });
    this.about = h("p", { class: "about" });
    this.register = h("button", { class: "primary", type: "button", onclick: () => register(server) }, "Register a model");
    this.node = h("div", {},
      h("div", { class: "head" }, h("h1", {}, "Models"), h("div", { class: "end" }, this.register)),
      h("div", { class: "grid stats" }, Object.values(this.stats).map((stat) => stat.node)), this.gpus,
      this.loading,
      h("section", { class: "card section flush", "aria-label": "Models" }, this.empty, h("div", { class: "table", tabindex: "0", role: "group", "aria-label": "Table of models" }, this.table)),
      this.failures, this.about);
  }

  update() {
    const { state } = this.server;
    this.updateRows(state.models);
    this.register.hidden = !state.canRegister;
    const isEmpty = !state.models.length;
    this.empty.hidden = !isEmpty;
    this.table.hidden = isEmpty;
    if (isEmpty) renew(this.empty, "none", () => [h("p", {}, h("b", {}, "No model is registered.")), h("p", {}, "Register one, or start the server with a path: ", h("code", {}, "flambeau serve model.mar"))]);
    this.updateStats(state);
    this.updateGpus(state);
    this.updateLoading(state);
    this.updateFailures(state);
    put(this.about, `Flambeau ${state.version} on ${state.hostname}, up for ${age(state.time - state.startedAt)}, ${bytes(state.serverBytes)} of memory`);
  }

  updateRows(models) {
    const names = new Set();
    for (const model of models) {
      const name = `${model.name}/${model.version}/${model.isDefault}/${model.trafficPercent}/${model.mirror?.percent}`;
      names.add(name);
      if (!this.rows.has(name)) this.rows.set(name, new Row(model));
      this.rows.get(name).update(this.server, model);
    }
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.node.remove();
        this.rows.delete(name);
      }
    }
    [...names].forEach((name, i) => { // a row that is in its place keeps the focus
      const { node } = this.rows.get(name);
      if (this.body.children[i] !== node) this.body.insertBefore(node, this.body.children[i] || null);
    });
  }

  updateStats(state) {
    const { models, host } = state;
    const sum = (pick) => models.reduce((total, model) => total + pick(model), 0);
    const ready = models.filter((model) => model.state === "ready" || model.state === "sleeping").length;
    const all = models.length + state.missing.length;
    this.stats.models.set(`${ready} of ${all}`, `${count(sum((model) => model.ready), "worker")}, ${count(sum((model) => model.restarts), "restart")}`, ready < all ? "bad" : "");
    this.stats.requests.set(number(sum((model) => model.recent.requests || 0)), `${sum((model) => model.inFlight)} in flight, ${sum((model) => model.waiting)} queued`);
    const columns = models.map((model) => column(this.server, model, "requests"));
    const longest = Math.max(0, ...columns.map((values) => values.length));
    this.stats.requests.spark.draw(Array.from({ length: longest }, (_, i) => columns.reduce((total, values) => total + (values[values.length - longest + i] || 0), 0)));
    this.stats.cpu.set(percent(host.CPUUtilization), `${count(state.cores, "core")} for this server`);
    this.stats.cpu.spark.draw(this.server.cpu);
    const used = (host.MemoryUsed || 0) * 1048576;
    const workers = sum((model) => model.workers.reduce((total, worker) => total + worker.bytes, 0));
    this.stats.memory.set(bytes(used), `of ${bytes(used + (host.MemoryAvailable || 0) * 1048576)}; workers ${bytes(workers)}`);
    this.stats.memory.meter.set((host.MemoryUtilization || 0) / 100);
  }

  updateGpus(state) {
    const { host } = state;
    const devices = Object.keys(host).filter((name) => name.startsWith("GPUMemoryUsed:")).map((name) => name.split(":")[1]);
    this.gpus.hidden = !devices.length;
    renew(this.gpus, devices.map((device) => [host[`GPUUtilization:${device}`], host[`GPUMemoryUsed:${device}`]]), () => devices.map((device) => {
      const stat = new Stat(state.gpus?.[device] || `GPU ${device}`, { hasMeter: true });
      stat.set(percent(host[`GPUUtilization:${device}`]), `cuda:${device}, ${bytes(host[`GPUMemoryUsed:${device}`] * 1048576)} in use, ${percent(host[`GPUMemoryUtilization:${device}`])}`);
      stat.meter.set((host[`GPUMemoryUtilization:${device}`] || 0) / 100);
      return stat.node;
    }));
  }

  updateLoading(state) {
    const loading = loadingWorkers(state);
    const names = [...loading.map((one) => one.key), ...state.downloads.map((one) => one.url)];
    renew(this.loading, names, () => {
      this.progress = [...loading, ...state.downloads].map(() => ({ text: h("span"), line: h("code", { class: "line-of" }), meter: meter("Progress") }));
      return names.length ? [h("h2", {}, "Loading"), h("div", { class: "card rows" }, loading.map((one, i) => this.loadingRow(h("a", { href: href("model", one.model) }, one.model.name), i)), state.downloads.map((one, i) => this.loadingRow(one.url, loading.length + i)))] : [];
    });
    loading.forEach((one, i) => showLoading(this.progress[i], one));
    state.downloads.forEach((one, i) => {
      const { text, meter: bar } = this.progress[loading.length + i];
      put(text, one.of ? `${bytes(one.bytes)} of ${bytes(one.of)}` : bytes(one.bytes));
      bar.set(one.of ? one.bytes / one.of : null);
    });
  }

  loadingRow(name, i) {
    const { text, line, meter: bar } = this.progress[i];
    return h("div", { class: "row" }, h("div", { class: "row-head" }, h("b", {}, name), text), bar.node, line);
  }

  updateFailures(state) {
    renew(this.failures, [state.missing, state.failures], () => (state.missing.length + state.failures.length ? [h("h2", {}, "Failures"),
      h("div", { class: "card rows" }, state.missing.map((one) => h("div", { class: "row failure" }, h("p", {}, h("b", {}, one.name), " could not be registered"), h("p", {}, one.reason))), failureRows(state.failures))] : []));
  }
}

// The workers that load now, with what is known about how far they are.
export function loadingWorkers(state) {
  return state.models.flatMap((model) => model.workers.filter((worker) => worker.state === "loading").map((worker) => ({ key: `${model.name}/${model.version}/${worker.id}`, model, worker, seconds: state.time - worker.startedAt })));
}

export function showLoading({ text, line, meter: bar }, { model, worker, seconds }) {
  put(text, model.loadS ? `for ${age(seconds)}; the last worker took ${number(model.loadS)} s` : `for ${age(seconds)}`);
  put(line, worker.line || "");
  line.hidden = !worker.line;
  const told = /(\d+(?:\.\d+)?) ?%/.exec(worker.line || ""); // by the handler itself
  bar.set(told && told[1] <= 100 ? told[1] / 100 : model.loadS ? Math.min(0.97, seconds / model.loadS) : null);
}

// Failures of one worker with the same cause, one after the other, are one row.
export function failureRows(failures) {
  const groups = [];
  for (const one of failures) {
    const last = groups.at(-1);
    if (last && last.one.worker === one.worker && last.one.reason === one.reason) last.times += 1;
    else groups.push({ one, times: 1 });
  }
  return groups.map(({ one, times }) => {
    const when = new Date(one.time * 1000);
    return h("div", { class: "row failure" },
      h("p", { class: "who" }, h("time", { datetime: when.toISOString() }, when.toLocaleTimeString()), " ", h("a", { href: href("model", { name: one.model, version: one.version }) }, one.model), ` worker ${one.worker}`, times > 1 ? h("span", { class: "tag" }, `${times} times`) : null),
      h("p", {}, one.reason),
      one.bundle ? h("p", { class: "hint" }, "Try it again: ", h("code", {}, `flambeau replay ${one.bundle}`)) : null,
      one.lastLines?.length ? h("details", {}, h("summary", {}, "Its last lines"), h("pre", { tabindex: "0" }, one.lastLines.join("\n"))) : null);
  });
}
