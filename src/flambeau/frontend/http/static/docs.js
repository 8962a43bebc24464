"use strict";
// Shows /openapi.json and sends requests to this server. Text from the document is only ever set as text.

const METHODS = ["get", "post", "put", "delete", "options"];
const TITLES = { openai: "OpenAI", kserve: "KServe" }; // others begin with a capital by docs.css

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function typeOf(schema) {
  if (!schema) return "";
  const limits = [["minimum", "from"], ["maximum", "to"], ["maxLength", "at most"]]
    .filter(([key]) => schema[key] !== undefined)
    .map(([key, word]) => `${word} ${schema[key]}`);
  const kind = schema.enum ? schema.enum.join(", ") : schema.type || "any value";
  return [kind, ...limits].join(", ");
}

function example(schema, depth = 0) {
  if (!schema || depth > 4) return null;
  if (schema.example !== undefined) return schema.example;
  if (schema.default !== undefined) return schema.default;
  if (schema.enum) return schema.enum[0];
  const choice = schema.oneOf || schema.anyOf;
  if (choice) return example(choice[0], depth + 1);
  if (schema.type === "object") {
    const names = schema.required || [];
    return Object.fromEntries(names.map((name) => [name, example((schema.properties || {})[name], depth + 1)]));
  }
  if (schema.type === "array") return schema.minItems ? [example(schema.items, depth + 1)] : [];
  return { string: "", integer: schema.minimum || 0, number: schema.minimum || 0, boolean: false }[schema.type] ?? null;
}

function table(rows) {
  const body = element("tbody");
  for (const row of rows) {
    const line = element("tr");
    row.forEach((cell, i) => line.append(element("td", "", cell instanceof Node ? cell : element(i ? "span" : "code", cell))));
    body.append(line);
  }
  return element("table", "", body);
}

function shellWord(text) {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

class Form {
  constructor(path, method, operation) {
    this.path = path;
    this.method = method.toUpperCase();
    this.inputs = (operation.parameters || []).map((parameter) => {
      const input = element("input");
      input.setAttribute("aria-label", parameter.name);
      return { parameter, input };
    });
    this.content = (operation.requestBody || {}).content;
    this.output = element("pre");
    this.output.hidden = true;
    this.node = this.build();
  }

  build() {
    const node = element("div");
    if (this.inputs.length) {
      node.append(table(this.inputs.map(({ parameter, input }) => [
        parameter.name + (parameter.required ? " *" : ""), input, typeOf(parameter.schema), parameter.description || "",
      ])));
    }
    if (this.content) {
      this.kind = element("select");
      this.kind.setAttribute("aria-label", "content type");
      this.kind.append(...Object.keys(this.content).map((kind) => element("option", kind)));
      this.body = element("textarea");
      this.body.setAttribute("aria-label", "body");
      const show = () => {
        const made = example(this.content[this.kind.value].schema);
        this.body.value = this.kind.value === "application/json" && made !== null ? JSON.stringify(made, null, 2) : "";
      };
      this.kind.addEventListener("change", show);
      show();
      node.append(element("p", "Body, as "), this.kind, this.body);
    }
    const send = element("button", "Send");
    send.type = "button";
    send.addEventListener("click", () => this.send());
    node.append(element("p", "", send), this.output);
    return node;
  }

  target() {
    let path = this.path;
    const query = new URLSearchParams();
    for (const { parameter, input } of this.inputs) {
      if (parameter.in === "path") path = path.replace(`{${parameter.name}}`, encodeURIComponent(input.value));
      else if (input.value) query.append(parameter.name, input.value);
    }
    return query.size ? `${path}?${query}` : path;
  }

  async send() {
    const target = this.target();
    const headers = {};
    const key = document.getElementById("key").value;
    if (key) headers.authorization = `Bearer ${key}`;
    const options = { method: this.method, headers };
    const words = ["curl", "-X", this.method, shellWord(location.origin + target)];
    if (key) words.push("-H", '"authorization: Bearer $FLAMBEAU_KEY"');
    if (this.content && this.body.value) {
      headers["content-type"] = this.kind.value;
      options.body = this.body.value;
      words.push("-H", shellWord(`content-type: ${this.kind.value}`), "-d", shellWord(this.body.value));
    }
    this.output.hidden = false;
    this.output.textContent = `${words.join(" ")}\n\n…`;
    try {
      const reply = await fetch(target, options);
      const lines = [`HTTP ${reply.status} ${reply.statusText}`];
      reply.headers.forEach((value, name) => lines.push(`${name}: ${value}`));
      this.output.textContent = `${words.join(" ")}\n\n${lines.join("\n")}\n\n${await reply.text()}`;
    } catch (error) {
      this.output.textContent = `${words.join(" ")}\n\n${error}`;
    }
  }
}

function operationNode(path, method, operation) {
  const summary = element("summary", "", element("b", method.toUpperCase()), element("code", path), ` ${operation.description || ""}`);
  const node = element("details", "", summary);
  node.addEventListener("toggle", () => {
    if (node.childElementCount > 1) return;
    node.append(new Form(path, method, operation).node);
    const replies = Object.entries(operation.responses || {}).map(([status, reply]) => [status, reply.description]);
    node.append(element("p", "Responses"), table(replies));
  });
  return node;
}

function show(description) {
  const place = document.getElementById("operations");
  place.replaceChildren();
  document.getElementById("key-row").hidden = !description.security;
  const groups = new Map((description.tags || []).map((tag) => [tag.name, []]));
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const method of METHODS.filter((name) => methods[name])) {
      const group = (methods[method].tags || ["other"])[0];
      if (!groups.has(group)) groups.set(group, []);
      groups.get(group).push(operationNode(path, method, methods[method]));
    }
  }
  for (const [group, nodes] of groups) {
    const title = element("h2", TITLES[group] || group);
    title.id = group;
    const link = element("a", TITLES[group] || group);
    link.href = `#${group}`;
    document.getElementById("apis").append(link);
    place.append(title, ...nodes);
  }
}

fetch("/openapi.json")
  .then((reply) => (reply.ok ? reply.json() : Promise.reject(new Error(`HTTP ${reply.status}`))))
  .then(show)
  .catch((error) => {
    document.getElementById("operations").textContent = `/openapi.json could not be loaded: ${error.message}`;
  });
