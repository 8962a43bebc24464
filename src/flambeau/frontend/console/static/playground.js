// Playground: asks a model with the form that fits it, and shows the answer and how to ask for it in code.
import { call, events, failure, h, hasKey, headers, number, put, replace } from "/console/elements.js";

const FORMS = { chat: "Chat", image: "Image", text: "Text", json: "JSON", file: "File", embed: "Similarity" };

function formsOf(model) {
  if (model.abilities.includes("generate")) return ["chat", "json"];
  if (model.abilities.includes("embed")) return ["embed", "json", "text"];
  if (/image|object|segment|vision|digit|mnist/i.test(model.handler)) return ["image", "json", "file"];
  if (/text|classif|token|question|summariz|translat|mask/i.test(model.handler)) return ["text", "json", "file"];
  return ["json", "text", "image", "file"];
}

export class Playground {
  title = "Playground";

  constructor(server, name, version) {
    this.server = server;
    this.name = name;
    this.version = version;
    this.choice = h("select", { id: "model", onchange: () => { location.hash = `#/play/${this.choice.value}`; } });
    this.body = h("div", { class: "section" });
    this.node = h("div", {}, h("div", { class: "head" }, h("h1", {}, "Playground"), h("div", { class: "end" }, h("label", { for: "model" }, "Model"), this.choice)), this.body);
  }

  get model() {
    const { models } = this.server.state;
    return models.find((one) => one.name === this.name && (!this.version || one.version === this.version)) || (this.name ? null : models[0]);
  }

  update() {
    const { model } = this;
    address = this.server.state.inference;
    const names = this.server.state.models.map((one) => `${encodeURIComponent(one.name)}/${encodeURIComponent(one.version)}`);
    if (names.join() !== this.names) {
      this.names = names.join();
      replace(this.choice, this.server.state.models.map((one, i) => h("option", { value: names[i] }, `${one.name} ${one.version}`)));
      if (model) this.choice.value = `${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
    }
    const shape = model ? `${model.name}/${model.version}/${model.abilities}` : "none";
    if (shape === this.shape) return;
    this.shape = shape;
    if (!model) replace(this.body, h("p", { class: "empty" }, this.name ? `${this.name} is not registered.` : "No model is registered."));
    else this.make(model);
  }

  make(model) {
    const forms = formsOf(model);
    const tabs = h("div", { class: "tabs", role: "tablist" });
    const panel = h("div", { role: "tabpanel" });
    const select = (form) => {
      for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.form === form));
      replace(panel, form === "chat" ? new Chat(model).node : form === "embed" ? new Similarity(model).node : new Ask(model, form).node);
    };
    tabs.append(...forms.map((form) => h("button", { type: "button", role: "tab", "data-form": form, onclick: () => select(form) }, FORMS[form])));
    replace(this.body, tabs, panel);
    select(forms[0]);
  }
}

// ---- how to ask for it in code ----

let address = "";

function origin() {
  return address || location.origin;
}

function snippets(examples) {
  const pre = h("pre", { tabindex: "0" });
  const bar = h("div", { class: "tabs", role: "tablist", "aria-label": "Code" });
  const names = Object.keys(examples);
  const select = (name) => {
    for (const tab of bar.children) tab.setAttribute("aria-selected", String(tab.textContent === name));
    put(pre, examples[name]);
  };
  bar.append(...names.map((name) => h("button", { type: "button", role: "tab", onclick: () => select(name) }, name)),
    h("button", { type: "button", onclick: () => navigator.clipboard?.writeText(pre.textContent) }, "Copy"));
  select(names[0]);
  return h("section", { class: "card section" }, h("h2", {}, "The same in code"), bar, pre);
}

// The inference key is another than the one this page knows.
function authorization() {
  return hasKey() ? ` -H "authorization: Bearer $FLAMBEAU_INFERENCE_KEY"` : "";
}

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// ---- one request, one answer ----

class Ask {
  constructor(model, form) {
    this.model = model;
    this.file = null;
    this.answer = h("div", { "aria-live": "polite" }, h("p", { class: "notice" }, "The answer appears here."));
    this.code = h("div");
    this.send = h("button", { class: "primary" }, "Send");
    const input = { image: () => this.imageField(), file: () => this.fileField(), text: () => this.textField("text", "A sentence."), json: () => this.textField("json", model.example || "{}") }[form]();
    this.type = { text: "text/plain; charset=utf-8", json: "application/json" }[form];
    this.node = h("div", {}, h("div", { class: "grid two" },
      h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); this.ask(); } }, h("h2", {}, "Request"), input, h("p", {}, this.send)),
      h("section", { class: "card" }, h("h2", {}, "Answer"), this.answer)), this.code);
  }

  textField(name, example) {
    this.text = h("textarea", { id: "body", rows: 8, spellcheck: "false", class: name === "json" ? "mono" : null, value: example });
    return [h("label", { for: "body" }, name === "json" ? "JSON" : "Text"), this.text];
  }

  fileField() {
    const field = h("input", { type: "file", id: "file", onchange: () => { this.file = field.files[0]; } });
    return [h("label", { for: "file" }, "File"), field];
  }

  imageField() {
    const field = h("input", { type: "file", accept: "image/*", hidden: true, id: "image", onchange: () => take(field.files[0]) });
    const zone = h("label", { class: "drop", for: "image", tabindex: "0", onkeydown: (event) => { if (event.key === "Enter" || event.key === " ") field.click(); } }, "Drop an image here, or click to choose one");
    const take = (file) => {
      if (!file) return;
      this.file = file;
      replace(zone, h("img", { src: URL.createObjectURL(file), alt: file.name }));
      this.ask();
    };
    for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (event) => { event.preventDefault(); zone.classList.add("over"); });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => { event.preventDefault(); zone.classList.remove("over"); take(event.dataTransfer.files[0]); });
    return [zone, field];
  }

  async ask() {
    const body = this.text ? this.text.value : this.file;
    if (!body) {
      replace(this.answer, h("p", { class: "problem" }, "Choose a file first."));
      return;
    }
    this.send.disabled = true;
    const began = performance.now();
    try {
      const path = `predictions/${encodeURIComponent(this.model.name)}/${encodeURIComponent(this.model.version)}`;
      const type = this.type || this.file.type || "application/octet-stream";
      const response = await fetch(`/console/${path}`, { method: "POST", headers: headers({ "content-type": type }), body });
      const blob = await response.blob();
      const took = performance.now() - began;
      if (!response.ok) throw await failure(response.status, await blob.text());
      await this.show(blob, response.headers.get("content-type") || "", took);
      replace(this.code, snippets(this.examples(path, type)));
    } catch (error) {
      replace(this.answer, h("p", { class: "problem" }, error.message));
    }
    this.send.disabled = false;
  }

  async show(blob, type, took) {
    const note = h("p", { class: "notice" }, `${number(took)} ms, ${number(blob.size)} bytes`);
    if (type.startsWith("image/")) {
      replace(this.answer, h("img", { class: "picture", src: URL.createObjectURL(blob), alt: "The answer" }), note);
      return;
    }
    const text = await blob.text();
    let value;
    try {
      value = JSON.parse(text);
    } catch {
      replace(this.answer, h("pre", {}, text), note);
      return;
    }
    replace(this.answer, probabilities(value) || this.boxes(value), h("pre", { tabindex: "0" }, JSON.stringify(value, null, 2)), note);
  }

  boxes(value) {
    if (!this.file || !Array.isArray(value) || !value.length || !value.every((one) => one && typeof one === "object" && Object.values(one).some((box) => Array.isArray(box) && box.length === 4))) return null;
    const image = h("img", { src: URL.createObjectURL(this.file), alt: "The image with what was found" });
    const svg = h("svg", {});
    const node = h("div", { class: "picture" }, image, svg);
    image.addEventListener("load", () => {
      svg.setAttribute("viewBox", `0 0 ${image.naturalWidth} ${image.naturalHeight}`);
      for (const one of value) {
        const [name, box] = Object.entries(one).find(([, found]) => Array.isArray(found) && found.length === 4);
        svg.append(h("rect", { x: box[0], y: box[1], width: box[2] - box[0], height: box[3] - box[1], fill: "none", class: "line c1" }), h("text", { x: box[0], y: box[1] - 3 }, name));
      }
    });
    return node;
  }

  examples(path, type) {
    const url = `${origin()}/${path}`;
    const isText = Boolean(this.text);
    const body = isText ? this.text.value : this.file.name;
    return {
      curl: isText ? `curl -H ${quoted(`content-type: ${type}`)} --data-binary ${quoted(body)} ${url}${authorization()}` : `curl -H ${quoted(`content-type: ${type}`)} --data-binary @${quoted(body)} ${url}${authorization()}`,
      Python: `import flambeau\n\nclient = flambeau.Client("${origin()}")\nprint(client.predict("${this.model.name}", ${isText ? JSON.stringify(body) : `open(${JSON.stringify(body)}, "rb").read()`}))`,
    };
  }
}

// The largest probabilities as bars, if that is what the answer holds.
function probabilities(value) {
  if (!value || typeof value !== "object" || Array.isArray(value)) return null;
  const pairs = Object.entries(value);
  if (!pairs.length || !pairs.every(([, share]) => typeof share === "number" && share >= 0 && share <= 1)) return null;
  const shown = pairs.sort((one, other) => other[1] - one[1]).slice(0, 10);
  const bars = shown.flatMap(([name, share]) => {
    const bar = h("i");
    bar.style.width = `${100 * share}%`;
    return [h("span", {}, name), h("div", {}, bar), h("span", { class: "mono" }, `${(100 * share).toFixed(1)} %`)];
  });
  return h("div", { class: "bars" }, bars);
}

// ---- embeddings ----

class Similarity {
  constructor(model) {
    this.model = model;
    this.text = h("textarea", { id: "texts", rows: 6, value: "A cat sleeps on the sofa.\nA kitten rests on the couch.\nThe stock market fell today." });
    this.answer = h("div", { "aria-live": "polite" });
    this.node = h("div", { class: "grid two" },
      h("form", { class: "card", onsubmit: (event) => { event.preventDefault(); this.ask(); } }, h("label", { for: "texts" }, "One text per line"), this.text, h("p", {}, h("button", { class: "primary" }, "Compare"))),
      h("section", { class: "card" }, h("h2", {}, "Cosine similarity"), this.answer));
  }

  async ask() {
    const texts = this.text.value.split("\n").filter((line) => line.trim());
    try {
      const answer = await call("POST", "/console/v1/embeddings", { model: this.model.name, input: texts });
      const vectors = answer.data.map((one) => one.embedding);
      const size = (vector) => Math.hypot(...vector);
      const rows = vectors.map((one) => vectors.map((other) => one.reduce((sum, value, i) => sum + value * other[i], 0) / (size(one) * size(other))));
      replace(this.answer, h("div", { class: "table" }, h("table", { class: "models" }, h("tbody", {}, rows.map((row, i) => h("tr", {}, h("td", {}, texts[i]), row.map((value) => {
        const cell = h("td", { class: "num" }, value.toFixed(2));
        cell.style.background = `rgb(232 89 12 / ${Math.max(0, value) * 0.5})`;
        return cell;
      })))))));
    } catch (error) {
      replace(this.answer, h("p", { class: "problem" }, error.message));
    }
  }
}

// ---- chat ----

class Chat {
  constructor(model) {
    this.model = model;
    this.isChat = model.abilities.includes("chat");
    this.messages = [];
    this.log = h("div", { class: "chat", role: "log", "aria-label": "Conversation", tabindex: "0" });
    this.field = h("textarea", { id: "prompt", rows: 2, placeholder: "Write a message; Enter sends, Shift+Enter is a new line", onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.send(); } } });
    this.button = h("button", { class: "primary" }, "Send");
    this.problem = h("p", { class: "problem", role: "alert" });
    this.code = h("div");
    const slider = (id, label, value, max, step) => {
      const shown = h("span", { class: "mono" }, String(value));
      const field = h("input", { id, type: "range", min: 0, max, step, value, oninput: () => put(shown, field.value) });
      field.value = value;
      return [field, [h("label", { for: id }, label, " ", shown), field]];
    };
    let temperature, top, length;
    [this.temperature, temperature] = slider("temperature", "Temperature", 0.8, 2, 0.05);
    [this.top, top] = slider("top-p", "Top-p", 1, 1, 0.01);
    [this.length, length] = slider("length", "Most tokens", 128, Math.min(2048, model.maxLength || 512), 1);
    this.system = h("textarea", { id: "system", rows: 3 });
    this.probabilities = h("input", { type: "checkbox", id: "probabilities" });
    this.node = h("div", {}, h("div", { class: "split" },
      h("section", { class: "card" }, this.log, h("form", { onsubmit: (event) => { event.preventDefault(); this.abort ? this.abort.abort() : this.send(); } }, h("label", { for: "prompt" }, "Message"), h("div", { class: "inline" }, this.field, this.button)), this.problem),
      h("section", { class: "card" }, h("h2", {}, "Sampling"), temperature, top, length,
        h("label", { for: "system" }, "System message"), this.system,
        h("div", { class: "check" }, this.probabilities, h("label", { for: "probabilities" }, "Color tokens by probability")),
        h("button", { type: "button", onclick: () => { this.messages = []; replace(this.log); } }, "Clear"))), this.code);
  }

  request() {
    const system = this.system.value.trim();
    return {
      model: this.model.name,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      temperature: Number(this.temperature.value),
      top_p: Number(this.top.value) || 0.01,
      max_tokens: Number(this.length.value) || 1,
    };
  }

  turn(role, text) {
    const node = h("div", { class: `turn ${role}` }, text);
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return node;
  }

  async send() {
    const text = this.field.value.trim();
    if (!text || this.abort) return;
    put(this.problem, "");
    this.field.value = "";
    this.messages.push({ role: "user", content: text });
    this.turn("user", text);
    const request = this.request();
    const node = this.turn("assistant", "");
    this.abort = new AbortController();
    put(this.button, "Stop");
    const said = await this.stream(request, node);
    this.abort = null;
    put(this.button, "Send");
    if (said) this.messages.push({ role: "assistant", content: said });
    else this.messages.pop();
    replace(this.code, snippets(this.examples(request)));
  }

  async stream(request, node) {
    const began = performance.now();
    let first = 0;
    let count = 0;
    let said = "";
    try {
      const body = { ...request, stream: true, stream_options: { include_usage: true }, ...(this.probabilities.checked ? { logprobs: true } : {}) };
      const response = await fetch("/console/v1/chat/completions", { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal: this.abort.signal });
      if (!response.ok) throw await failure(response.status, await response.text());
      for await (const event of events(response)) {
        if (event.data === "[DONE]") break;
        const document = JSON.parse(event.data);
        if (document.error) throw new Error(document.error.message);
        count = document.usage?.completion_tokens || count;
        const choice = document.choices?.[0];
        if (!choice) continue;
        const piece = choice.delta?.content || "";
        if (piece && !first) first = performance.now();
        said += piece;
        const tokens = choice.logprobs?.content;
        if (tokens && piece) node.append(...tokens.map((one) => h("span", { class: `token p${shade(one.logprob)}`, title: `${(100 * Math.exp(one.logprob)).toFixed(1)} %` }, one.token)));
        else node.append(piece);
        this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") put(this.problem, error.message);
    }
    if (!said) node.remove();
    else {
      const seconds = (performance.now() - (first || began)) / 1000;
      node.append(h("small", {}, `first token ${number((first || began) - began)} ms${count > 1 ? `, ${number((count - 1) / seconds)} tokens/s` : ""}`));
    }
    return said;
  }

  examples(request) {
    const document = JSON.stringify(request, null, 2);
    return {
      curl: `curl ${origin()}/v1/chat/completions -H 'content-type: application/json' -d ${quoted(document)}${authorization()}`,
      OpenAI: `from openai import OpenAI\n\nclient = OpenAI(base_url="${origin()}/v1", api_key="key")\nreply = client.chat.completions.create(**${document})\nprint(reply.choices[0].message.content)`,
      Python: `import flambeau\n\nclient = flambeau.Client("${origin()}")\nprint(client.chat(${JSON.stringify(request.messages)}, model="${this.model.name}"))`,
    };
  }
}

function shade(logprob) {
  const share = Math.exp(logprob);
  return share < 0.1 ? 0 : share < 0.4 ? 1 : share < 0.8 ? 2 : 3;
}
