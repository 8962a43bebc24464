// Playground: asks a model with the form that fits it, and shows the answer and how to ask for it in code.
import { call, duration, failure, h, hasKey, headers, bytes as size, problem, replace, tabs } from "/console/elements.js";
import { authorization, client, python, quoted, snippets } from "/console/snippets.js";
import { answerTo, heatMap } from "/console/answers.js";
import { timeline } from "/console/charts.js";
import { Chat } from "/console/chat.js";
import { onDrop } from "/console/actions.js";

// The forms of a model, the fitting one first: by what its worker reports, then by its example, then by its handler.
export function formsOf(model) {
  const { abilities, inputs, example, handler } = model;
  const names = inputs.map(([name]) => name).join(" ");
  if (abilities.includes("generate")) return ["Chat", "JSON"];
  if (abilities.includes("embed")) return ["Similarity", "Text", "JSON"];
  if (abilities.includes("image") || /image|pixel|picture/i.test(names)) return ["Image", "JSON", "File"];
  if (/audio|speech|wave/i.test(names)) return ["File", "JSON"];
  if (example) return /^\s*"/.test(example) ? ["Text", "JSON", "File"] : ["JSON", "Text", "Image", "File"];
  if (abilities.includes("text") || /^(text|input|question|sequence)/i.test(names)) return ["Text", "JSON", "File"];
  if (/image|object|segment|vision|photo|mnist/i.test(handler)) return ["Image", "JSON", "File"];
  return ["JSON", "Text", "Image", "File"];
}

export class Playground {
  title = "Playground";

  constructor(server, name, version) {
    this.server = server;
    this.name = name;
    this.version = version;
    this.choice = h("select", { id: "model", onchange: () => { location.hash = `#/play/${this.choice.value}`; } });
    this.body = h("div", {}, h("div", { class: "empty" }, h("p", {}, "Waiting for the server …")));
    this.node = h("div", {}, h("div", { class: "head" }, h("h1", {}, "Playground"), h("div", { class: "end pick" }, h("label", { for: "model" }, "Model"), this.choice)), this.body);
  }

  get model() {
    const { models } = this.server.state;
    return models.find((one) => one.name === this.name && (!this.version || one.version === this.version)) || (this.name ? null : models[0]);
  }

  update() {
    const { model } = this;
    const { models } = this.server.state;
    const value = (one) => `${encodeURIComponent(one.name)}/${encodeURIComponent(one.version)}`;
    const names = JSON.stringify(models.map(value));
    if (names !== this.names) {
      this.names = names;
      const versions = (one) => models.filter((other) => other.name === one.name).length;
      replace(this.choice, model ? null : h("option", { value: "" }, this.name || "none"), models.map((one) => h("option", { value: value(one) }, versions(one) > 1 ? `${one.name} ${one.version}` : one.name)));
      this.choice.value = model ? value(model) : "";
    }
    const shape = model ? JSON.stringify([model.name, model.version, model.abilities, model.inputs, model.example, this.waits(model)]) : "none";
    if (shape === this.shape) return;
    this.shape = shape;
    if (!model) replace(this.body, h("div", { class: "empty" }, h("p", {}, h("b", {}, this.name ? `${this.name} is not registered.` : "No model is registered.")), h("p", {}, h("a", { href: "#/" }, "All models"))));
    else if (this.waits(model)) replace(this.body, h("div", { class: "empty" }, h("p", {}, h("b", {}, `${model.name} is loading.`)), h("p", {}, "Its form appears when it is ready.")));
    else this.make(model);
  }

  // Nobody knows the form of a model before its first load; a form that is shown stays, with what was typed.
  waits({ name, version, state, abilities, example }) {
    return state === "loading" && !abilities.length && !example && this.made !== `${name}/${version}`;
  }

  make(model) {
    this.made = `${model.name}/${model.version}`;
    const origin = () => this.server.state.inference || location.origin;
    const make = (form) => () => (form === "Chat" ? new Chat(model, origin) : form === "Similarity" ? new Similarity(model, origin) : new Ask(model, form, origin)).node;
    replace(this.body, tabs("Kind of request", Object.fromEntries(formsOf(model).map((form) => [form, make(form)]))).node);
  }
}

// ---- one request, one answer ----

const TYPES = { Text: "text/plain; charset=utf-8", JSON: "application/json" };

class Ask {
  constructor(model, form, origin) {
    this.model = model;
    this.origin = origin;
    this.file = null;
    this.answer = h("div", { "aria-live": "polite" }, h("p", { class: "notice" }, "The answer appears here."));
    this.code = h("div");
    this.send = h("button", { class: "primary" }, "Send");
    this.type = TYPES[form];
    const input = { Image: () => this.imageField(), File: () => this.fileField(), Text: () => this.textField(form, textOf(model.example)), JSON: () => this.textField(form, pretty(model.example)) }[form]();
    this.node = h("div", {}, h("div", { class: "grid two" },
      h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); this.ask(); } }, h("h2", {}, "Request"), input, h("div", { class: "actions start" }, this.send)),
      h("section", { class: "card" }, h("h2", {}, "Answer"), this.answer)), this.code);
  }

  textField(form, example) {
    this.text = h("textarea", { id: `body-${form}`, rows: 9, spellcheck: "false", class: form === "JSON" ? "mono" : null, value: example });
    this.text.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.ask(); });
    return [h("label", { for: this.text.id }, form === "JSON" ? "JSON (Ctrl+Enter sends)" : "Text (Ctrl+Enter sends)"), this.text];
  }

  fileField() {
    const field = h("input", { type: "file", id: "file", onchange: () => { [this.file] = field.files; } });
    return [h("label", { for: "file" }, "File, sent as it is"), field];
  }

  imageField() {
    const field = h("input", { type: "file", accept: "image/*", class: "beneath", id: "image", onchange: () => take(field.files[0]) });
    const shown = h("span", {}, h("b", {}, "Drop an image here"), h("br"), "or choose one");
    const zone = h("label", { class: "drop", for: "image" }, shown, field);
    const take = (file) => {
      if (!file) return;
      this.file = file;
      replace(shown, h("img", { src: URL.createObjectURL(file), alt: file.name }), h("small", {}, `${file.name}, ${size(file.size)}`));
      this.ask();
    };
    onDrop(zone, take);
    return zone;
  }

  async ask() {
    const body = this.text ? this.text.value : this.file;
    if (!body) {
      replace(this.answer, h("p", { class: "problem" }, this.text ? "Write a request first." : "Choose a file first."));
      return;
    }
    this.send.disabled = true;
    this.answer.classList.add("waits");
    const began = performance.now();
    try {
      const path = `predictions/${encodeURIComponent(this.model.name)}/${encodeURIComponent(this.model.version)}`;
      const type = this.type || this.file.type || "application/octet-stream";
      const response = await fetch(`/console/${path}`, { method: "POST", headers: headers({ "content-type": type }), body });
      const blob = await response.blob();
      const took = performance.now() - began;
      replace(this.code, snippets(this.examples(path, type)));
      if (!response.ok) throw failure(response.status, await blob.text());
      const shown = await answerTo(blob, response.headers.get("content-type") || "", this.file, this.model);
      const parts = timesIn(response.headers.get("server-timing") || "");
      replace(this.answer, shown, h("p", { class: "took" }, `${response.status}, ${duration(took)}, ${size(blob.size)}`), parts.length ? timeline(parts, duration) : null);
    } catch (error) {
      replace(this.answer, problem(error));
    }
    this.answer.classList.remove("waits");
    this.send.disabled = false;
  }

  examples(path, type) {
    const body = this.text ? quoted(this.text.value) : `@${quoted(this.file.name)}`;
    let data = this.text ? JSON.stringify(this.text.value) : `open(${JSON.stringify(this.file.name)}, "rb").read()`;
    if (this.type === TYPES.JSON) {
      try {
        data = python(JSON.parse(this.text.value));
      } catch { /* it is sent as text */ }
    }
    return {
      curl: `curl ${this.origin()}/${path} \\\n  -H ${quoted(`content-type: ${type}`)}${authorization()} \\\n  --data-binary ${body}`,
      Python: `${client(this.origin())}print(client.predict(${JSON.stringify(this.model.name)}, ${data}, version=${JSON.stringify(this.model.version)}${this.text ? "" : `, content_type=${JSON.stringify(type)}`}))`,
    };
  }
}

// [name, milliseconds] of the parts in a Server-Timing header.
function timesIn(header) {
  return [...header.matchAll(/([\w-]+);dur=([\d.]+)/g)].map(([, name, ms]) => [name, Number(ms)]).filter(([name, ms]) => name !== "total" && ms > 0);
}

function textOf(example) {
  try {
    const value = JSON.parse(example);
    return typeof value === "string" ? value : "A sentence.";
  } catch {
    return example || "A sentence.";
  }
}

function pretty(example) {
  try {
    const value = JSON.parse(example);
    return value && typeof value === "object" && !Array.isArray(value) ? JSON.stringify(value, null, 2) : example;
  } catch {
    return example || "{}";
  }
}

// ---- embeddings ----

class Similarity {
  constructor(model, origin) {
    this.model = model;
    this.origin = origin;
    this.text = h("textarea", { id: "texts", rows: 7, value: "A cat sleeps on the sofa.\nA kitten rests on the sofa.\nThe stock market fell today.\nMarkets fell on bad news today." });
    this.answer = h("div", { "aria-live": "polite" }, h("p", { class: "notice" }, "The picture appears here: the darker, the more alike."));
    this.code = h("div");
    this.node = h("div", {}, h("div", { class: "grid two" },
      h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); this.ask(); } }, h("h2", {}, "Texts"), h("label", { for: "texts" }, "One text per line"), this.text, h("div", { class: "actions start" }, h("button", { class: "primary" }, "Compare"))),
      h("section", { class: "card" }, h("h2", {}, "Cosine similarity"), this.answer)), this.code);
  }

  async ask() {
    const texts = this.text.value.split("\n").filter((line) => line.trim());
    const request = { model: this.model.name, input: texts };
    const began = performance.now();
    try {
      if (!texts.length) throw new Error("Write a text first.");
      const answer = await call("POST", "/console/v1/embeddings", request);
      const vectors = answer.data.map((one) => one.embedding);
      const took = performance.now() - began;
      replace(this.answer, heatMap(texts, vectors), h("p", { class: "took" }, `${vectors[0].length} dimensions, ${answer.usage.total_tokens} tokens, ${duration(took)}`));
      replace(this.code, snippets(this.examples(request)));
    } catch (error) {
      replace(this.answer, h("p", { class: "problem" }, error.message));
    }
  }

  examples(request) {
    return {
      curl: `curl ${this.origin()}/v1/embeddings \\\n  -H 'content-type: application/json'${authorization()} \\\n  -d ${quoted(JSON.stringify(request, null, 2))}`,
      OpenAI: `from openai import OpenAI\n\nclient = OpenAI(base_url="${this.origin()}/v1", api_key="${hasKey() ? "…" : "none"}")\nanswer = client.embeddings.create(model=${python(request.model)}, input=${python(request.input)})\nprint([len(one.embedding) for one in answer.data])`,
      Python: `${client(this.origin())}print(client.predict(${JSON.stringify(request.model)}, ${python(request.input)}))`,
    };
  }
}
