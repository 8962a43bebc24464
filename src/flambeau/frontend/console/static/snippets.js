// Snippets: how to ask in code for what was just asked.
import { h, hasKey, tabs } from "/console/elements.js";

export function snippets(examples) {
  const made = Object.fromEntries(Object.entries(examples).map(([name, text]) => [name, () => {
    const copy = h("button", { type: "button", class: "small copy", onclick: async () => {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    } }, "Copy");
    return h("div", { class: "snippet" }, h("pre", { tabindex: "0", "aria-label": name }, text), copy);
  }]));
  return h("section", { class: "card section code" }, h("h2", {}, "The same in code"), tabs("Code", made).node);
}

// The inference key is another than the one this page knows.
export function authorization() {
  return hasKey() ? ` \\\n  -H "authorization: Bearer $FLAMBEAU_INFERENCE_KEY"` : "";
}

export function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

// A value of JSON as Python writes it.
export function python(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const entries = Array.isArray(value) ? value.map((one) => python(one, inner)) : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${python(one, inner)}`);
  const line = `${open}${entries.join(", ")}${close}`;
  return line.length < 88 ? line : `${open}\n${inner}${entries.join(`,\n${inner}`)},\n${indent}${close}`;
}

export function client(origin) {
  return `import flambeau\n\nclient = flambeau.Client(${JSON.stringify(origin)}${hasKey() ? ", key=\"…\"" : ""})\n`;
}
