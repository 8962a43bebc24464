// Actions on models, each in a dialog that shows what went wrong where it did: register, scale, unregister.
import { age, bytes, call, failure, h, headers, meter, put, replace, tabs, toast } from "/console/elements.js";

function path(model) {
  return `/models/${encodeURIComponent(model.name)}/${encodeURIComponent(model.version)}`;
}

export async function makeDefault(model) {
  try {
    await call("PUT", `${path(model)}/set-default`);
    toast(`${model.version} is the default version of ${model.name}`);
  } catch (error) {
    toast(error.message);
  }
}

// A dialog with a form; `submit` returns when it is done, or throws what is shown below the fields.
function ask(title, fields, action, submit, { kind = "primary", oncancel = () => {} } = {}) {
  const problem = h("p", { class: "problem", role: "alert" });
  const button = h("button", { class: kind }, action);
  const dialog = h("dialog", { "aria-label": title, onclose: () => { oncancel(); dialog.remove(); } },
    h("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        if (button.disabled) return;
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
  return dialog;
}

function field(id, label, input) {
  input.id = id;
  return h("div", {}, h("label", { for: id }, label), input);
}

export function scale(model) {
  const least = h("input", { type: "number", min: 0, value: model.minWorkers, required: true });
  const most = h("input", { type: "number", min: 0, value: model.maxWorkers, required: true });
  ask(`Scale ${model.name}`, [
    h("p", { class: "hint" }, "The server adds workers up to the larger number while requests wait, and retires them when they idle."),
    h("div", { class: "inline" }, field("least", "Fewest workers", least), field("most", "Most workers", most)),
  ], "Scale", async () => {
    const query = new URLSearchParams({ min_worker: least.value, max_worker: most.value, synchronous: "false" });
    await call("PUT", `${path(model)}?${query}`);
    toast(`${model.name} is scaled to ${least.value === most.value ? least.value : `${least.value} to ${most.value}`}`);
  });
}

export function shareTraffic(model) {
  const percent = h("input", { type: "number", min: 0, max: 100, value: model.trafficPercent ?? 0, required: true });
  const copies = h("input", { type: "number", min: 0, max: 100, value: model.mirror?.percent ?? 0, required: true });
  ask(`Share requests with ${model.name} ${model.version}`, [
    h("p", { class: "hint" }, "This version gets so many of 100 requests that name no version. The default version gets the others, and all while this one cannot answer. 0 ends it."),
    field("percent", "Percent", percent),
    h("p", { class: "hint" }, "Copies of so many of 100 requests of the default version are sent to this one too. Their answers are compared and sent to nobody."),
    field("mirror", "Copies, percent", copies),
  ], "Share", async () => {
    const query = new URLSearchParams({ percent: percent.value, mirror: copies.value });
    await call("PUT", `${path(model)}/traffic?${query}`);
    toast(`${model.version} of ${model.name} gets ${percent.value} % of the requests${Number(copies.value) ? `, and copies of ${copies.value} %` : ""}`);
  });
}

export function unregister(model) {
  const running = model.inFlight ? `${model.inFlight} accepted requests are answered first. ` : "Requests that it has accepted are answered first. ";
  ask(`Unregister ${model.name} ${model.version}?`, h("p", {}, running, "New ones are refused. Its files stay where they are."), "Unregister", async () => {
    await call("DELETE", path(model));
    toast(`${model.name} is unregistered`);
    location.hash = "#/";
  }, { kind: "danger" });
}

// ---- register ----

export async function register(server) {
  const store = await call("GET", "/console/store");
  const source = { kind: "", url: "", file: null };
  const progress = meter("Progress");
  const doing = h("p", { class: "hint", role: "status" });
  const running = h("div", { hidden: true }, doing, progress.node);
  const upload = { isCancelled: false };
  const choice = tabs("Source", {
    ...(store.store ? { Store: () => fromStore(store, source) } : {}),
    Upload: () => fromFile(store, source),
    URL: () => fromUrl(source),
  }, (name) => { source.kind = name; });
  const name = h("input", { placeholder: "from the archive" });
  const workers = h("input", { type: "number", min: 0, value: 1, required: true });
  const batch = h("input", { type: "number", min: 1, placeholder: "from the model" });
  const dialog = ask("Register a model", [
    choice.node,
    field("model-name", "Name", name),
    h("div", { class: "inline" }, field("workers", "Workers", workers), field("batch", "Batch size", batch)),
    running,
  ], "Register", async () => {
    running.hidden = false;
    try {
      const url = await locate(source, store, upload, (done, size) => {
        put(doing, `Uploading: ${bytes(done)} of ${bytes(size)}`);
        progress.set(done / size);
      });
      const query = new URLSearchParams({ url, initial_workers: workers.value, synchronous: "true" });
      if (name.value) query.set("model_name", name.value);
      if (batch.value) query.set("batch_size", batch.value);
      const answer = await during(() => call("POST", `/models?${query}`), (seconds) => {
        put(doing, `Registering, and waiting for its workers: ${age(seconds)}`);
        progress.set(null);
      });
      toast(answer.status);
    } finally {
      running.hidden = true;
    }
  }, { oncancel: () => { upload.isCancelled = true; } });
  dialog.classList.add("wide");
}

function fromStore(store, source) {
  if (!store.models.length) return h("p", { class: "notice" }, "The model store is empty. Put an archive there, or upload one.");
  return h("fieldset", { class: "choices" }, h("legend", {}, "Archive or folder in the model store"), store.models.map((one, i) => h("label", { class: "choice" },
    h("input", { type: "radio", name: "archive", value: one.name, required: true, onchange: () => { source.name = one.name; } }), h("span", {}, one.name), one.isRegistered ? h("span", { class: "tag" }, "registered") : null)));
}

function fromFile(store, source) {
  if (!store.uploads) return h("p", { class: "notice" }, "This server accepts no uploads. Whoever can upload can run code, so it must be allowed: ", h("code", {}, "flambeau serve --allow-uploads"), ".");
  const chosen = h("span", {}, "Drop an archive (.mar, .tar.gz) here, or choose one");
  const input = h("input", { type: "file", id: "archive", class: "beneath", accept: ".mar,.gz,.tgz", onchange: () => take(input.files[0]) });
  const zone = h("label", { class: "drop", for: "archive" }, chosen, input);
  const take = (file) => {
    if (!file) return;
    source.file = file;
    replace(chosen, h("b", {}, file.name), ` ${bytes(file.size)}`);
  };
  onDrop(zone, take);
  return zone;
}

function fromUrl(source) {
  const input = h("input", { id: "url", required: true, placeholder: "https://…/model.mar", oninput: () => { source.url = input.value; } });
  return [h("label", { for: "url" }, "URL that the server's allow_url permits, or a name in the store"), input];
}

export function onDrop(zone, take) {
  for (const kind of ["dragenter", "dragover"]) zone.addEventListener(kind, (event) => { event.preventDefault(); zone.classList.add("over"); });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => { event.preventDefault(); zone.classList.remove("over"); take(event.dataTransfer.files[0]); });
}

// What the server registers: a name of its store, a URL, or the name of the file that is uploaded first.
async function locate(source, store, upload, ondone) {
  if (source.kind === "URL") return source.url;
  if (source.kind === "Store") {
    if (!source.name) throw new Error("Choose an archive.");
    return source.name;
  }
  if (!source.file) throw new Error(store.uploads ? "Choose a file." : "This server accepts no uploads.");
  if (source.uploaded === source.file) return source.file.name; // a second attempt
  const { file } = source;
  const target = `/console/uploads/${encodeURIComponent(file.name)}`;
  for (let offset = 0; offset < file.size; offset += store.pieceBytes) {
    ondone(offset, file.size);
    const piece = file.slice(offset, offset + store.pieceBytes);
    const response = await fetch(`${target}?offset=${offset}&size=${file.size}`, { method: "PUT", headers: headers({ "content-type": "application/octet-stream" }), body: piece });
    if (!response.ok) throw failure(response.status, await response.text());
    if (upload.isCancelled) {
      await call("DELETE", target);
      throw new Error("The upload was cancelled.");
    }
  }
  if (!file.size) throw new Error(`${file.name} is empty.`);
  ondone(file.size, file.size);
  source.uploaded = file;
  return file.name;
}

async function during(work, tell) {
  const began = Date.now();
  const timer = setInterval(() => tell((Date.now() - began) / 1000), 250);
  tell(0);
  try {
    return await work();
  } finally {
    clearInterval(timer);
  }
}
