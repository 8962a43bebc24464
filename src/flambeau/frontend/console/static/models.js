// Overview: all models. ModelView: one of them, with its workers, charts and actions.
import { age, bytes, call, count, duration, h, number, put, replace, toast } from "/console/elements.js";
import { Chart, Spark } from "/console/charts.js";

const STATES = { ready: "good", sleeping: "", loading: "warn", failed: "bad", "without workers": "", "waiting to restart": "warn" };

export function href(kind, model) {
  return `#/${kind}/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
}

function pill(node, state) {
  node.className = `pill ${STATES[state] ?? ""}`;
  put(node, state);
}

export function column(server, model, name) {
  const index = server.fields.indexOf(name);
  return (server.samples.get(`${model.name}/${model.version}`) || []).map((sample) => sample[index]);
}

// ---- overview ----

class Row {
  constructor(model) {
    this.state = h("span");
    this.requests = new Spark(`requests per second of ${model.name}`);
    this.latency = new Spark(`median latency of ${model.name}`);
    const cell = (label, ...more) => h("td", { class: "num", "data-label": label }, more);
    this.texts = Object.fromEntries(["workers", "waiting", "rate", "p50", "p99", "errors"].map((name) => [name, h("span")]));
    this.detail = h("small");
    this.node = h("tr", {},
      h("td", {}, h("a", { href: href("model", model) }, model.name), " ", h("span", { class: "tag" }, model.version), model.isDefault ? null : h("span", { class: "tag" }, "not default"), this.detail),
      h("td", {}, this.state),
      cell("workers", this.texts.workers),
      cell("queued", this.texts.waiting),
      h("td", { class: "wide" }, this.requests.node), cell("requests/s", this.texts.rate),
      h("td", { class: "wide" }, this.latency.node), cell("p50", this.texts.p50), cell("p99", this.texts.p99), cell("errors/s", this.texts.errors),
      h("td", {}, h("a", { href: href("play", model), class: "tag" }, "Try it")));
  }

  update(server, model) {
    pill(this.state, model.state);
    const loading = model.workers.find((worker) => worker.state === "loading");
    put(this.detail, loading ? `loading for ${age(server.state.time - loading.startedAt)}` : model.handler);
    put(this.texts.workers, `${model.ready} / ${model.wanted}`);
    put(this.texts.waiting, number(model.waiting));
    put(this.texts.rate, number(model.recent.requests));
    put(this.texts.p50, duration(model.recent.p50));
    put(this.texts.p99, duration(model.recent.p99));
    put(this.texts.errors, number(model.recent.errors));
    this.requests.draw(column(server, model, "requests"));
    this.latency.draw(column(server, model, "p50"));
  }
}

export class Overview {
  title = "Models";

  constructor(server) {
    this.server = server;
    this.rows = new Map();
    this.stats = Object.fromEntries(["models", "rate", "cpu", "memory"].map((name) => [name, { value: h("b", {}, "–"), note: h("small") }]));
    this.meters = { cpu: h("i"), memory: h("i") };
    const stat = (name, title, meter) => h("div", { class: "card stat" }, h("h3", {}, title), this.stats[name].value, this.stats[name].note, meter ? h("div", { class: "meter" }, meter) : null);
    this.body = h("tbody");
    this.empty = h("p", { class: "empty" }, "Waiting for the server …");
    this.table = h("table", { class: "models" },
      h("thead", {}, h("tr", {}, ["Model", "State", "Workers", "Queued", "Requests per second", "", "Median latency", "p50", "p99", "Errors/s", ""].map((text, i) => h("th", { scope: "col", class: [2, 3, 5, 7, 8, 9].includes(i) ? "num" : null }, text)))),
      this.body);
    this.gpus = h("div", { class: "grid four section" });
    this.failures = h("section", { class: "section", "aria-label": "Failures" });
    this.failed = "";
    this.node = h("div", {},
      h("div", { class: "head" }, h("h1", {}, "Models"), h("div", { class: "end" }, h("button", { class: "primary", type: "button", onclick: () => register(server) }, "Register a model"))),
      h("div", { class: "grid four" }, stat("models", "Models ready"), stat("rate", "Requests per second"), stat("cpu", "CPU", this.meters.cpu), stat("memory", "Memory", this.meters.memory)),
      this.gpus,
      h("section", { class: "card section", "aria-label": "Models" }, this.empty, h("div", { class: "table" }, this.table)),
      this.failures);
  }

  update() {
    const { state } = this.server;
    const names = new Set();
    for (const model of state.models) {
      const name = `${model.name}/${model.version}/${model.isDefault}`;
      names.add(name);
      if (!this.rows.has(name)) {
        this.rows.set(name, new Row(model));
        this.body.append(this.rows.get(name).node);
      }
      this.rows.get(name).update(this.server, model);
    }
    for (const [name, row] of this.rows) {
      if (!names.has(name)) {
        row.node.remove();
        this.rows.delete(name);
      }
    }
    this.empty.hidden = state.models.length > 0;
    this.table.hidden = !this.empty.hidden;
    put(this.empty, "No model is registered. Register one, or start the server with a path.");
    const ready = state.models.filter((model) => model.state === "ready" || model.state === "sleeping").length;
    const rate = state.models.reduce((sum, model) => sum + (model.recent.requests || 0), 0);
    const waiting = state.models.reduce((sum, model) => sum + model.waiting, 0);
    this.stat("models", `${ready} of ${state.models.length + state.missing.length}`, count(state.models.reduce((sum, model) => sum + model.ready, 0), "worker"));
    this.stat("rate", number(rate), `${waiting} queued`);
    const { host } = state;
    this.stat("cpu", `${number(host.CPUUtilization ?? 0)} %`, "of this host");
    this.stat("memory", `${number(host.MemoryUtilization ?? 0)} %`, `${bytes((host.MemoryAvailable || 0) * 1048576)} free · server ${bytes(state.serverBytes)}`);
    this.meters.cpu.style.width = `${host.CPUUtilization ?? 0}%`;
    this.meters.memory.style.width = `${host.MemoryUtilization ?? 0}%`;
    this.updateGpus(host);
    this.updateFailures(state);
  }

  stat(name, value, note) {
    put(this.stats[name].value, value);
    put(this.stats[name].note, note);
  }

  updateGpus(host) {
    const devices = Object.keys(host).filter((name) => name.startsWith("GPUMemoryUsed:")).map((name) => name.split(":")[1]);
    this.gpus.hidden = !devices.length;
    replace(this.gpus, devices.map((device) => h("div", { class: "card stat" }, h("h3", {}, `GPU ${device}`),
      h("b", {}, `${number(host[`GPUUtilization:${device}`] ?? 0)} %`), h("small", {}, `${bytes(host[`GPUMemoryUsed:${device}`] * 1048576)} used, ${number(host[`GPUMemoryUtilization:${device}`] ?? 0)} %`))));
  }

  updateFailures(state) {
    const seen = JSON.stringify([state.missing, state.failures]);
    if (seen === this.failed) return;
    this.failed = seen;
    const missing = state.missing.map((one) => h("div", { class: "failure" }, h("p", {}, h("b", {}, one.name), " could not be registered"), h("p", {}, one.reason)));
    replace(this.failures, state.missing.length + state.failures.length ? [h("h2", {}, "Failures"), missing, state.failures.map((one) => failureCard(one, state.time))] : []);
  }
}

function failureCard(one) {
  const when = new Date(one.time * 1000);
  return h("div", { class: "failure" },
    h("p", { class: "who" }, h("time", { datetime: when.toISOString() }, when.toLocaleTimeString()), ` · worker ${one.worker} of `, h("a", { href: href("model", { name: one.model, version: one.version }) }, one.model)),
    h("p", {}, one.reason),
    one.lastLines?.length ? h("details", {}, h("summary", {}, "Its last lines"), h("pre", {}, one.lastLines.join("\n"))) : null);
}

// ---- one model ----

export class ModelView {
  constructor(server, name, version) {
    this.server = server;
    this.name = name;
    this.version = version;
    this.title = name;
    this.state = h("span");
    this.facts = h("dl", { class: "facts" });
    this.workers = h("tbody");
    this.lines = h("div");
    this.failures = h("div");
    this.actions = h("div", { class: "end" });
    this.charts = h("div", { class: "grid two section" });
    this.content = h("div", { hidden: true },
      this.charts,
      h("section", { class: "card section" }, h("h2", {}, "Workers"), h("div", { class: "table" }, h("table", { class: "models" },
        h("thead", {}, h("tr", {}, ["Worker", "State", "Device", "Memory", "Running", "Age", "Restarts", "Last failure"].map((text) => h("th", { scope: "col" }, text)))), this.workers))),
      h("div", { class: "grid two section" }, h("section", { class: "card" }, h("h2", {}, "Configuration"), this.facts), h("section", { class: "card" }, h("h2", {}, "Output of the workers"), this.lines)),
      h("section", { class: "section" }, this.failures));
    this.gone = h("p", { class: "empty" }, "Waiting for the server …");
    this.node = h("div", {},
      h("p", { class: "crumbs" }, h("a", { href: "#/" }, "Models"), " / ", name),
      h("div", { class: "head" }, h("h1", {}, name), h("span", { class: "tag" }, version), this.state, this.actions), this.gone, this.content);
  }

  get model() {
    return this.server.state.models.find((one) => one.name === this.name && one.version === this.version);
  }

  update() {
    const { model } = this;
    this.content.hidden = !model;
    this.gone.hidden = !!model;
    if (!model) {
      put(this.gone, "This model is not registered any more.");
      replace(this.actions);
      this.state.className = "";
      put(this.state, "");
      this.made = null;
      return;
    }
    const kind = `${model.abilities.includes("generate")}/${model.isDefault}`;
    if (this.made !== kind) this.make(model, kind);
    pill(this.state, model.state);
    for (const [chart, names] of this.drawn) chart.draw(names.map((name) => column(this.server, model, name)), this.server.kept);
    this.updateWorkers(model);
    this.updateFacts(model);
    this.updateLines();
  }

  make(model, kind) {
    this.made = kind;
    const isLanguage = model.abilities.includes("generate");
    this.drawn = [
      [new Chart("Requests", "per second", [{ name: "answers" }, { name: "errors" }]), ["requests", "errors"]],
      [new Chart("Latency", "ms", [{ name: "p50" }, { name: "p95" }, { name: "p99" }]), ["p50", "p95", "p99"]],
      [new Chart("Where the time goes", "ms", [{ name: "queue, per request" }, { name: "handler, per batch" }]), ["queue", "handler"]],
      isLanguage
        ? [new Chart("Tokens", "per second", [{ name: "generated" }]), ["tokens"]]
        : [new Chart("Batches", "requests", [{ name: "batch size" }, { name: "queued" }]), ["batch", "waiting"]],
    ];
    replace(this.charts, this.drawn.map(([chart]) => chart.node));
    const path = `/models/${encodeURIComponent(this.name)}/${encodeURIComponent(this.version)}`;
    replace(this.actions,
      h("a", { href: href("play", model), class: "button" }, h("button", { type: "button", class: "primary", tabindex: "-1" }, "Try it")),
      h("button", { type: "button", onclick: () => scale(this.model) }, "Scale"),
      model.isDefault ? null : h("button", { type: "button", onclick: () => act("PUT", `${path}/set-default`) }, "Make default"),
      h("button", { type: "button", class: "danger", onclick: () => unregister(model, path) }, "Unregister"));
  }

  updateWorkers(model) {
    const now = this.server.state.time;
    replace(this.workers, model.workers.map((worker) => {
      const state = h("span");
      pill(state, worker.state);
      return h("tr", {}, h("td", {}, h("span", { class: "mono" }, String(worker.id)), worker.pid ? h("small", {}, `process ${worker.pid}`) : null), h("td", {}, state),
        h("td", { "data-label": "device" }, worker.device || "CPU"), h("td", { "data-label": "memory" }, bytes(worker.bytes)), h("td", { "data-label": "running" }, String(worker.running)),
        h("td", { "data-label": "age" }, age(now - worker.startedAt)), h("td", { "data-label": "restarts" }, String(worker.restarts)), h("td", { class: "wide" }, worker.lastFailure?.reason || "–"));
    }));
    if (!model.workers.length) replace(this.workers, h("tr", {}, h("td", { colspan: 8 }, model.state === "sleeping" ? "None: the model starts one when a request arrives." : "None. Scale the model to start one.")));
  }

  updateFacts(model) {
    const answers = Object.entries(model.answers).map(([status, count]) => `${number(count)} × ${status}`).join(", ") || "none yet";
    const facts = {
      Handler: model.handler, Source: model.url || "–", "Batch size": String(model.batchSize), Workers: `${model.minWorkers} to ${model.maxWorkers}`,
      Queue: `${number(model.waiting)} of ${number(model.capacity)}`, Answers: answers, Registered: new Date(model.registeredAt * 1000).toLocaleString(),
      "Context length": model.maxLength ? `${number(model.maxLength)} tokens` : null,
    };
    const text = JSON.stringify(facts);
    if (text === this.factsText) return;
    this.factsText = text;
    replace(this.facts, Object.entries(facts).filter(([, value]) => value !== null).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  }

  updateLines() {
    const { state } = this.server;
    const text = JSON.stringify(state.lines);
    if (text !== this.linesText) {
      this.linesText = text;
      const workers = Object.entries(state.lines).filter(([, lines]) => lines.length);
      replace(this.lines, workers.length ? workers.map(([id, lines]) => [h("h3", {}, `Worker ${id}`), h("pre", { tabindex: "0" }, lines.join("\n"))]) : h("p", { class: "notice" }, "They have printed nothing."));
    }
    const mine = state.failures.filter((one) => one.model === this.name && one.version === this.version);
    const failed = JSON.stringify(mine);
    if (failed === this.failed) return;
    this.failed = failed;
    replace(this.failures, mine.length ? [h("h2", {}, "Failures"), mine.map(failureCard)] : []);
  }
}

// ---- actions ----

async function act(method, path) {
  try {
    const answer = await call(method, path);
    toast(answer?.status || "Done");
    return true;
  } catch (error) {
    toast(error.message);
    return false;
  }
}

// A dialog with a form; `submit` returns when it is done, or throws what is shown below the fields.
function ask(title, fields, action, submit, kind = "primary") {
  const problem = h("p", { class: "problem", role: "alert" });
  const button = h("button", { class: kind }, action);
  const dialog = h("dialog", { "aria-label": title, onclose: () => dialog.remove() },
    h("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        button.disabled = true;
        put(problem, "");
        try {
          await submit();
          dialog.close();
        } catch (error) {
          put(problem, error.message);
        }
        button.disabled = false;
      },
    }, h("h2", {}, title), fields, problem, h("div", { class: "actions" }, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), button)));
  document.body.append(dialog);
  dialog.showModal();
}

function scale(model) {
  const least = h("input", { type: "number", id: "least", min: 0, value: model.minWorkers, required: true });
  const most = h("input", { type: "number", id: "most", min: 0, value: model.maxWorkers, required: true });
  ask(`Scale ${model.name}`, h("div", { class: "inline" }, h("div", {}, h("label", { for: "least" }, "Fewest workers"), least), h("div", {}, h("label", { for: "most" }, "Most workers"), most)), "Scale", async () => {
    const query = new URLSearchParams({ min_worker: least.value, max_worker: most.value, synchronous: "false" });
    await call("PUT", `/models/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}?${query}`);
    toast(`${model.name} is scaled to ${least.value}`);
  });
}

function unregister(model, path) {
  ask(`Unregister ${model.name} ${model.version}?`, h("p", {}, "Requests that it has accepted are answered first. Its archive stays in the store."), "Unregister", async () => {
    await call("DELETE", path);
    toast(`${model.name} is unregistered`);
    location.hash = "#/";
  }, "danger");
}

async function register() {
  const found = await call("GET", "/console/store");
  const url = h("input", { id: "url", required: true, list: "store", placeholder: found.store ? "a name from the store, or a URL" : "a URL" });
  const name = h("input", { id: "model-name", placeholder: "from the archive" });
  const workers = h("input", { id: "workers", type: "number", min: 0, value: 1, required: true });
  const batch = h("input", { id: "batch", type: "number", min: 1, placeholder: "from the model" });
  ask("Register a model", [
    h("label", { for: "url" }, found.store ? `Archive or folder (${found.models.length} in the store)` : "URL (the server has no model store)"), url,
    h("datalist", { id: "store" }, found.models.map((one) => h("option", { value: one }))),
    h("label", { for: "model-name" }, "Name"), name,
    h("div", { class: "inline" }, h("div", {}, h("label", { for: "workers" }, "Workers"), workers), h("div", {}, h("label", { for: "batch" }, "Batch size"), batch)),
  ], "Register", async () => {
    const query = new URLSearchParams({ url: url.value, initial_workers: workers.value, synchronous: "true" });
    if (name.value) query.set("model_name", name.value);
    if (batch.value) query.set("batch_size", batch.value);
    const answer = await call("POST", `/models?${query}`);
    toast(answer.status);
  });
}
