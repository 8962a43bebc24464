// ModelView: one model with its charts, workers, settings, output and actions.
import { age, bytes, count, duration, h, meter, number, percent, put, renew, replace } from "/console/elements.js";
import { Chart, timeline } from "/console/charts.js";
import { makeDefault, scale, shareTraffic, unregister } from "/console/actions.js";
import { Stat, column, failureRows, href, loadingWorkers, pill, showLoading, traffic } from "/console/overview.js";

const rate = (value) => number(value);

// title, how values are written, the fields of a sample with their names, options; `when` says for which models.
const CHARTS = [
  { title: "Requests per second", write: rate, series: [["requests", "answers"], ["errors", "errors"]] },
  { title: "Latency", write: duration, series: [["p50", "median"], ["p95", "p95"], ["p99", "p99"]] },
  { title: "Queue", write: rate, series: [["waiting", "queued"]], options: { least: 4 } },
  { title: "Where the time of a request goes", write: duration, series: [["queue", "queue"], ["batchWait", "batch wait"], ["transfer", "transfer"], ["preprocess", "preprocess"], ["inference", "inference"], ["postprocess", "postprocess"], ["handler", "handler"]], options: { stacked: true, wide: true }, when: (model) => !isLanguage(model) },
  { title: "Batch size", write: rate, series: [["batch", "requests"]], options: { least: 2 }, when: (model) => !isLanguage(model) },
  { title: "Tokens per second", write: rate, series: [["tokens", "generated"]], when: isLanguage },
  { title: "First token", write: duration, series: [["firstToken", "mean"]], when: isLanguage },
  { title: "Between two tokens", write: duration, series: [["gap", "median"], ["gap95", "p95"]], when: isLanguage },
  { title: "Sequences", write: rate, series: [["running", "running"], ["sequences", "waiting"]], options: { least: 4 }, when: isLanguage },
  { title: "KV cache in use", write: percent, series: [["kv", "blocks"]], options: { least: 10 }, when: isLanguage },
  { title: "Saved work", write: percent, series: [["prefix", "prompt found in the cache"], ["accepted", "drafted tokens accepted"]], options: { least: 100 }, when: isLanguage },
];

function isLanguage(model) {
  return model.abilities.includes("generate");
}

export class ModelView {
  constructor(server, name, version) {
    this.server = server;
    this.name = name;
    this.version = version;
    this.title = name;
    this.state = h("span");
    this.tags = h("span", { class: "tags" });
    this.workers = h("tbody");
    this.settings = h("tbody");
    this.facts = h("p", { class: "facts" });
    this.copies = h("p", { class: "notice section", hidden: true });
    this.output = h("div");
    this.loading = h("div", { class: "section", hidden: true });
    this.failures = h("section", { class: "section", "aria-label": "Failures" });
    this.actions = h("div", { class: "end" });
    this.charts = h("div", { class: "grid charts section" });
    this.slow = h("section", { class: "section", "aria-label": "Slowest requests" });
    this.stats = { requests: new Stat("Requests per second"), p50: new Stat("Median latency"), p99: new Stat("p99 latency"), errors: new Stat("Errors per second"), queue: new Stat("Queue", { hasMeter: true }), workers: new Stat("Workers ready") };
    const table = (label, kind, names, body) => h("div", { class: "table", tabindex: "0", role: "group", "aria-label": label }, h("table", { class: `models ${kind}` }, h("thead", {}, h("tr", {}, names.map((text) => h("th", { scope: "col" }, text)))), body));
    this.content = h("div", { hidden: true },
      h("div", { class: "grid stats six" }, Object.values(this.stats).map((stat) => stat.node)),
      this.copies, this.loading, this.failures, this.charts,
      h("section", { class: "card section flush" }, h("h2", {}, "Workers"), table("Table of workers", "workers", ["Worker", "State", "Device", "Memory", "Running", "Age", "Restarts", "Last failure"], this.workers)),
      h("div", { class: "grid two section" },
        h("section", { class: "card flush" }, h("h2", {}, "Configuration"), this.facts, table("Table of settings", "plain", ["Setting", "Value", "From"], this.settings)),
        h("section", { class: "card" }, h("h2", {}, "Output of the workers"), this.output)),
      this.slow);
    this.gone = h("div", { class: "empty" }, h("p", {}, "Waiting for the server …"));
    this.node = h("div", {},
      h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Models"), " / ", name),
      h("div", { class: "head" }, h("h1", {}, name), h("span", { class: "tag" }, version), this.tags, this.state, this.actions), this.gone, this.content);
  }

  get model() {
    return this.server.state.models.find((one) => one.name === this.name && one.version === this.version);
  }

  update() {
    const { model } = this;
    this.content.hidden = !model;
    this.gone.hidden = Boolean(model);
    if (!model) {
      renew(this.gone, "gone", () => [h("p", {}, h("b", {}, `${this.name} ${this.version} is not registered.`)), h("p", {}, h("a", { href: "#/" }, "All models"))]);
      replace(this.actions);
      replace(this.tags);
      this.state.className = "";
      put(this.state, "");
      this.made = null;
      return;
    }
    const others = this.server.state.models.filter((one) => one.name === this.name);
    const kind = JSON.stringify([model.abilities, model.isDefault, model.trafficPercent, model.mirror?.percent, others.length]);
    if (this.made !== kind) this.make(model, others, kind);
    pill(this.state, model.state);
    this.updateStats(model);
    for (const chart of this.drawn) chart.draw(chart.fields.map((name) => column(this.server, model, name)));
    this.updateLoading(model);
    this.updateWorkers(model);
    this.updateDetails(model);
    const mine = this.server.state.failures.filter((one) => one.model === this.name && one.version === this.version);
    renew(this.failures, mine, () => (mine.length ? [h("h2", {}, "Failures"), h("div", { class: "card rows" }, failureRows(mine))] : []));
  }

  make(model, others, kind) {
    this.made = kind;
    this.drawn = CHARTS.filter((one) => !one.when || one.when(model)).map((one) => new Chart(one.title, one.write, one.series, one.options));
    replace(this.charts, this.drawn.map((chart) => chart.node));
    replace(this.tags, others.length > 1 ? [h("span", { class: "tag" }, model.isDefault ? "default version" : "not default"), traffic(model)] : null);
    replace(this.actions,
      h("a", { href: href("play", model), class: "button primary" }, "Try it"),
      h("button", { type: "button", onclick: () => scale(this.model) }, "Scale"),
      model.isDefault ? null : h("button", { type: "button", onclick: () => makeDefault(model) }, "Make default"),
      model.isDefault ? null : h("button", { type: "button", onclick: () => shareTraffic(this.model) }, "Share requests"),
      this.server.state.canRegister ? h("button", { type: "button", class: "danger", onclick: () => unregister(this.model) }, "Unregister") : null);
  }

  updateStats(model) {
    const { recent } = model;
    const answers = Object.entries(model.answers).sort().map(([status, times]) => `${number(times)} × ${status}`).join(", ");
    this.stats.requests.set(number(recent.requests ?? 0), answers || "no answer yet");
    this.stats.p50.set(duration(recent.p50), "last 10 seconds");
    this.stats.p99.set(duration(recent.p99), "last 10 seconds");
    this.stats.errors.set(number(recent.errors ?? 0), "last 10 seconds", recent.errors ? "bad" : "");
    this.stats.queue.set(number(model.waiting), `of ${number(model.capacity)} places; ${number(model.inFlight)} in flight`, model.waiting > model.capacity / 2 ? "bad" : "");
    this.stats.queue.meter.set(model.waiting / model.capacity);
    const bounds = model.minWorkers === model.maxWorkers ? `${model.minWorkers}` : `${model.minWorkers} to ${model.maxWorkers}`;
    this.copies.hidden = !model.mirror;
    if (model.mirror) put(this.copies, copiesOf(model.mirror));
    this.stats.workers.set(`${model.ready} of ${model.wanted}`, `scaled to ${bounds}; ${count(model.restarts, "restart")}`, model.ready < model.wanted ? "bad" : "");
  }

  updateLoading(model) {
    const mine = loadingWorkers(this.server.state).filter((one) => one.model === model);
    this.loading.hidden = !mine.length;
    renew(this.loading, mine.map((one) => one.key), () => {
      this.progress = mine.map(() => ({ text: h("span"), line: h("code", { class: "line-of" }), meter: meter("Progress") }));
      return mine.length ? h("div", { class: "card rows" }, mine.map((one, i) => h("div", { class: "row" }, h("div", { class: "row-head" }, h("b", {}, `Worker ${one.worker.id} loads`), this.progress[i].text), this.progress[i].meter.node, this.progress[i].line))) : [];
    });
    mine.forEach((one, i) => showLoading(this.progress[i], one));
  }

  updateWorkers(model) {
    const now = this.server.state.time;
    const rows = model.workers.map((worker) => [worker.id, worker.pid, worker.state, worker.device || "CPU", bytes(worker.bytes), worker.running, worker.pid ? age(now - worker.startedAt) : "–", worker.restarts, worker.lastFailure?.reason, worker.health]);
    renew(this.workers, [rows, model.state], () => (rows.length ? rows.map(([id, pid, state, device, memory, running, since, restarts, reason, health]) => {
      const shown = h("span");
      pill(shown, state);
      const cell = (label, text) => h("td", { "data-label": label }, String(text));
      return h("tr", {}, h("th", { scope: "row" }, String(id), pid ? h("small", {}, `process ${pid}`) : null), h("td", { class: "state" }, shown, health ? h("small", {}, health) : null),
        cell("Device", device), cell("Memory", memory), cell("Running", running), cell("Age", since), cell("Restarts", restarts), h("td", { class: "wide reason", "data-label": reason ? "Last failure" : null }, reason || "–"));
    }) : h("tr", {}, h("td", { colspan: 8 }, model.state === "sleeping" ? "None: the model starts one when a request arrives." : "None. Scale the model to start one."))));
  }

  updateDetails(model) {
    const { details } = this.server.state;
    const length = model.maxLength ? `, context of ${number(model.maxLength)} tokens` : "";
    put(this.facts, `Handler ${model.handler} from ${model.url || "the server's start"}, registered ${new Date(model.registeredAt * 1000).toLocaleString()}${length}.`);
    if (!details) return;
    renew(this.settings, details.settings, () => details.settings.map(([name, value, from]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, value), h("td", {}, h("span", { class: `tag ${from === "default" ? "" : "set"}` }, from)))));
    renew(this.slow, details.slow, () => (details.slow.length ? [h("h2", {}, "Slowest requests of the last hour"), h("div", { class: "card rows" }, details.slow.map(slowRow))] : []));
    const printed = Object.entries(details.output).filter(([, lines]) => lines.length);
    const places = new Map([...this.output.querySelectorAll("pre")].map((pre) => [pre.dataset.worker, pre.scrollHeight - pre.scrollTop - pre.clientHeight < 8 ? null : pre.scrollTop]));
    renew(this.output, printed, () => (printed.length ? printed.map(([id, lines]) => [h("h3", {}, `Worker ${id}`), h("pre", { tabindex: "0", class: "tail", "data-worker": id, "aria-label": `Output of worker ${id}` }, lines.join("\n"))]) : h("p", { class: "notice" }, "They have printed nothing.")));
    for (const pre of this.output.querySelectorAll("pre")) pre.scrollTop = places.get(pre.dataset.worker) ?? pre.scrollHeight; // the tail, unless the reader has scrolled up
  }
}

// What came of the copies of other versions' requests.
function copiesOf(mirror) {
  const counts = ["equal", "different", "failed", "dropped"].filter((name) => mirror[name]).map((name) => `${number(mirror[name])} ${name}`);
  const share = mirror.percent ? `Gets copies of ${mirror.percent} % of the default version's requests; nobody gets its answers.` : "Has got copies of the default version's requests.";
  const last = mirror.lastDifference ? ` Last difference: ${mirror.lastDifference}` : "";
  return `${share} ${number(mirror.mirrored)} copied${counts.length ? `: ${counts.join(", ")}` : ""}.${last}`;
}

// Where the time of one request went, who shared its batch, and what else its worker did.
function slowRow(one) {
  const facts = [one.status === 200 ? null : `status ${one.status}`, one.batch_size > 1 ? `batch of ${one.batch_size}` : null, ...one.meanwhile.map((event) => `${event.what}${event.ms ? ` for ${duration(event.ms)}` : ""}`)].filter(Boolean);
  return h("div", { class: "row" },
    h("div", { class: "row-head" }, h("span", {}, h("b", {}, duration(one.total_ms)), " ", h("time", { datetime: one.arrived, class: "who" }, `at ${new Date(one.arrived).toLocaleTimeString()}`), facts.map((fact) => [" ", h("span", { class: "tag" }, fact)])), h("code", {}, one.request_id)),
    timeline(one.parts.map((part) => [part.name, part.ms]), duration));
}
