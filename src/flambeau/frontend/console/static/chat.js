// Chat: a conversation with a language model that streams, with the sampling, and tokens colored by their probability.
import { duration, events, failure, h, hasKey, headers, number, put, replace } from "/console/elements.js";
import { authorization, client, python, quoted, snippets } from "/console/snippets.js";

export class Chat {
  constructor(model, origin) {
    this.model = model;
    this.origin = origin;
    this.messages = [];
    this.files = []; // parts of the next message
    this.welcome = h("p", { class: "empty" }, `Say something to ${model.name}.`);
    this.log = h("div", { class: "chat", role: "log", "aria-label": "Conversation", tabindex: "0" }, this.welcome);
    this.field = h("textarea", { id: "prompt", rows: 2, placeholder: "Enter sends, Shift+Enter begins a new line", onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); this.send(); } } });
    this.attached = h("p", { class: "attached", "aria-live": "polite" });
    const kinds = [["vision", "images", "image/png,image/jpeg,image/webp,image/gif"], ["audio", "sounds", "audio/*"]].filter(([ability]) => model.abilities.includes(ability));
    this.attach = h("input", { type: "file", id: "attach", accept: kinds.map(([, , types]) => types).join(), multiple: true, onchange: () => this.take(this.attach.files) });
    const names = kinds.map(([, name]) => name).join(" and ");
    const files = kinds.length ? [h("label", { for: "attach" }, names[0].toUpperCase() + names.slice(1)), this.attach, this.attached] : [];
    this.button = h("button", { class: "primary" }, "Send");
    this.problem = h("p", { class: "problem", role: "alert" });
    this.code = h("div");
    const [temperature, topP, length] = [
      slider("temperature", "Temperature", 0.8, { max: 2, step: 0.05 }),
      slider("top-p", "Top-p", 1, { min: 0.01, max: 1, step: 0.01 }),
      slider("length", "Maximum tokens", Math.min(128, (model.maxLength || 512) / 2), { min: 1, max: Math.min(4096, model.maxLength || 512), step: 1 }),
    ];
    this.sliders = { temperature: temperature.field, top_p: topP.field, max_tokens: length.field };
    this.numbers = { top_k: h("input", { type: "number", id: "top-k", min: 1, placeholder: "all" }), seed: h("input", { type: "number", id: "seed", placeholder: "random" }) };
    this.stop = h("input", { id: "stop", placeholder: "none" });
    this.system = h("textarea", { id: "system", rows: 2 });
    this.probabilities = h("input", { type: "checkbox", id: "probabilities" });
    this.scale = h("p", { class: "scale", hidden: true }, [["p0", "below 10 %"], ["p1", "40 %"], ["p2", "80 %"], ["p3", "above"]].map(([shade, text]) => h("span", { class: `token ${shade}` }, text)));
    this.probabilities.addEventListener("change", () => { this.scale.hidden = !this.probabilities.checked; });
    this.node = h("div", {}, h("div", { class: "split" },
      h("section", { class: "card talk" }, this.log, h("form", { onsubmit: (event) => { event.preventDefault(); this.abort ? this.abort.abort() : this.send(); } }, h("label", { for: "prompt" }, "Message"), h("div", { class: "inline end" }, this.field, this.button), files), this.problem),
      h("section", { class: "card" }, h("h2", {}, "Sampling"), temperature.nodes, topP.nodes, length.nodes,
        h("div", { class: "inline" }, h("div", {}, h("label", { for: "top-k" }, "Top-k"), this.numbers.top_k), h("div", {}, h("label", { for: "seed" }, "Seed"), this.numbers.seed)),
        h("label", { for: "stop" }, "Stop at"), this.stop,
        h("label", { for: "system" }, "System message"), this.system,
        h("div", { class: "check" }, this.probabilities, h("label", { for: "probabilities" }, "Color tokens by probability")), this.scale,
        h("div", { class: "actions start" }, h("button", { type: "button", onclick: () => this.clear() }, "Clear the conversation")))), this.code);
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    this.detach();
    replace(this.log, this.welcome);
    replace(this.code);
    put(this.problem, "");
  }

  // Images and sounds go with the next message, as data URLs.
  async take(files) {
    this.files = await Promise.all([...files].map((file) => new Promise((done) => {
      const reader = new FileReader();
      reader.onload = () => done(file.type.startsWith("audio/") ? { type: "audio_url", audio_url: { url: reader.result } } : { type: "image_url", image_url: { url: reader.result } });
      reader.readAsDataURL(file);
    })));
    replace(this.attached, [...files].map((file) => (file.type.startsWith("audio/") ? h("span", { class: "sound" }, file.name) : h("img", { src: URL.createObjectURL(file), alt: file.name }))));
  }

  detach() {
    this.files = [];
    this.attach.value = "";
    replace(this.attached);
  }

  request() {
    const system = this.system.value.trim();
    const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, field]) => field.value !== "").map(([name, field]) => [name, Number(field.value)]));
    return {
      model: this.model.name,
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
      ...given(this.sliders), ...given(this.numbers),
      ...(this.stop.value ? { stop: this.stop.value } : {}),
    };
  }

  turn(role, text) {
    this.welcome.remove();
    const node = h("div", { class: `turn ${role}` }, text);
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
    return node;
  }

  async send() {
    const text = this.field.value.trim();
    if ((!text && !this.files.length) || this.abort) return;
    put(this.problem, "");
    this.field.value = "";
    const parts = [...this.files, ...(text ? [{ type: "text", text }] : [])];
    this.messages.push({ role: "user", content: this.files.length ? parts : text });
    this.turn("user", [...this.attached.childNodes, text]);
    this.detach();
    const request = this.request();
    const node = this.turn("assistant", "");
    this.abort = new AbortController();
    put(this.button, "Stop");
    node.classList.add("writes");
    const said = await this.stream(request, node);
    node.classList.remove("writes");
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
    let thoughts = null;
    let ended = "";
    try {
      const body = { ...request, stream: true, stream_options: { include_usage: true }, ...(this.probabilities.checked ? { logprobs: true, top_logprobs: 3 } : {}) };
      const response = await fetch("/console/v1/chat/completions", { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal: this.abort.signal });
      if (!response.ok) throw failure(response.status, await response.text());
      for await (const event of events(response)) {
        if (event.data === "[DONE]") break;
        const document = JSON.parse(event.data);
        if (document.error) throw new Error(document.error.message);
        count = document.usage?.completion_tokens || count;
        const choice = document.choices?.[0];
        if (!choice) continue;
        ended = choice.finish_reason || ended;
        const piece = choice.delta?.content || "";
        const thought = choice.delta?.reasoning_content || "";
        if ((piece || thought) && !first) first = performance.now();
        if (thought) {
          if (!thoughts) node.append((thoughts = h("small", { class: "thoughts" })));
          thoughts.append(thought);
        }
        said += piece;
        node.append(...spans(piece, choice.logprobs?.content || []));
        this.log.scrollTop = this.log.scrollHeight;
      }
    } catch (error) {
      if (error.name !== "AbortError") put(this.problem, error.message);
    }
    if (!said && !thoughts) {
      node.remove();
      if (ended) put(this.problem, `The model's reply has no text (it ended with ${ended}).`);
    } else {
      const seconds = (performance.now() - (first || began)) / 1000;
      node.append(h("small", {}, [`first token ${duration((first || began) - began)}`, count ? `${number(count)} tokens` : null, count > 1 ? `${number((count - 1) / seconds)} tokens/s` : null].filter(Boolean).join(", ")));
      this.log.scrollTop = this.log.scrollHeight;
    }
    return said;
  }

  examples(request) {
    request = { ...request, messages: shortened(request.messages) };
    const { model, messages, top_k: topK, ...options } = request;
    const extra = topK === undefined ? {} : { extra_body: { top_k: topK } };
    const named = (fields) => Object.entries(fields).map(([name, value]) => `    ${name}=${python(value, "    ")},\n`).join("");
    return {
      curl: `curl ${this.origin()}/v1/chat/completions \\\n  -H 'content-type: application/json'${authorization()} \\\n  -d ${quoted(JSON.stringify(request, null, 2))}`,
      Python: `${client(this.origin())}print(client.chat(\n${named({ model })}    messages=${python(messages, "    ")},\n${named({ ...options, ...(topK === undefined ? {} : { top_k: topK }) })}))`,
      OpenAI: `from openai import OpenAI\n\nclient = OpenAI(base_url="${this.origin()}/v1", api_key="${hasKey() ? "…" : "none"}")\nreply = client.chat.completions.create(\n${named({ model, messages, ...options, ...extra })})\nprint(reply.choices[0].message.content)`,
    };
  }
}

// The messages of an example: data of images and sounds are left out.
function shortened(messages) {
  const short = (part) => (part.type === "text" ? part : { type: part.type, [part.type]: { url: part[part.type].url.replace(/,.*/s, ",…") } });
  return messages.map((message) => (Array.isArray(message.content) ? { ...message, content: message.content.map(short) } : message));
}

function slider(id, label, value, { min = 0, max, step }) {
  const shown = h("output", { for: id }, String(value));
  const field = h("input", { id, type: "range", min, max, step, oninput: () => put(shown, field.value) });
  field.value = value;
  put(shown, field.value);
  return { field, nodes: [h("div", { class: "named" }, h("label", { for: id }, label), shown), field] };
}

// A piece of text as its tokens; those that end the text, such as </s>, are not part of it.
function spans(piece, tokens) {
  const shown = tokens.filter((one) => one.token && piece.includes(one.token));
  if (shown.map((one) => one.token).join("") === piece) return shown.map((one) => colored(one, one.token));
  return tokens.length && piece ? [colored(tokens[0], piece)] : [piece];
}

// A token with its probability, and those that were nearly chosen.
function colored(one, text) {
  const share = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
  const others = (one.top_logprobs || []).map((other) => `${JSON.stringify(other.token)} ${share(other.logprob)}`).join("\n");
  return h("span", { class: `token p${shade(one.logprob)}`, title: `${JSON.stringify(one.token)} ${share(one.logprob)}${others ? `\n\nmost probable:\n${others}` : ""}` }, text);
}

function shade(logprob) {
  const share = Math.exp(logprob);
  return share < 0.1 ? 0 : share < 0.4 ? 1 : share < 0.8 ? 2 : 3;
}
