// The controls of the page. All names, texts, figures and pictures come from the module; the setup is the page's fragment.

const at = (id) => document.getElementById(id);
const patience = 20000;

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

// --- The module, in a worker of its own.

const bytes = Uint8Array.from(atob(at("module").textContent.trim()), (letter) => letter.charCodeAt(0));
const script = URL.createObjectURL(new Blob([at("worker").textContent], { type: "text/javascript" }));
let worker;

function start() {
  worker = new Worker(script);
  worker.postMessage(bytes);
}

// Returns the answer to a request. A worker that takes too long is ended, and another one starts.
function ask(request) {
  return new Promise((answered) => {
    const late = setTimeout(() => {
      worker.terminate();
      start();
      answered({ error: `The computation takes longer than ${patience / 1000} seconds; use a smaller size.` });
    }, patience);
    const end = (answer) => {
      clearTimeout(late);
      answered(answer);
    };
    worker.onmessage = ({ data }) => end(JSON.parse(data));
    worker.onerror = ({ message }) => end({ error: `This browser does not run the page's worker (${message ?? "it gives no reason"}); try another one.` });
    worker.postMessage(JSON.stringify(request));
  });
}

// --- The setup: texts by key, in the controls and in the fragment.

let catalogue, compared = [];
const usualSchedule = "1f1b";
const scheduleOf = (name) => catalogue.schedules.find((schedule) => schedule.name === name);
const controlOf = ({ key }) => at(`field-${key}`);

// Returns the text of a control. A browser hides a text that is not a number; the sentence about it is the module's.
function textOf(field) {
  const { checked, value, validity } = controlOf(field);
  if (field.kind === "flag") return checked ? "1" : "";
  return validity.badInput ? "?" : value.trim();
}

function makeControls() {
  const options = () => catalogue.schedules.map(({ name, summary }) => element("option", { value: name, textContent: name, title: summary }));
  at("schedule").append(...options());
  at("added").append(...options());
  for (const { key, label, help, usual, hint, kind, is_cost } of catalogue.fields) {
    const input = element("input", { id: `field-${key}`, type: { number: "number", flag: "checkbox", text: "text" }[kind] });
    if (kind === "number") Object.assign(input, { min: 1, step: 1 });
    if (kind === "text") input.inputMode = "decimal";
    if (kind !== "flag") Object.assign(input, { value: usual, placeholder: hint });
    at(is_cost ? "costs" : "sizes").append(element("label", { title: help, className: kind }, element("span", { textContent: label }), input));
  }
}

function readSetup() {
  const setup = { schedule: at("schedule").value }, { fields } = scheduleOf(setup.schedule);
  for (const field of catalogue.fields) {
    const text = textOf(field);
    if (fields.includes(field.key) && text !== "" && text !== field.usual) setup[field.key] = text;
  }
  return setup;
}

// Shows the fragment in the controls, and returns its setup. The module judges it, also what the controls cannot show.
function showFragment() {
  const given = new URLSearchParams(location.hash.slice(1)), name = given.get("schedule") ?? usualSchedule;
  const known = catalogue.schedules.find((schedule) => schedule.name === name || schedule.aliases.includes(name));
  const setup = { schedule: known?.name ?? name };
  at("schedule").value = known?.name ?? usualSchedule;
  for (const field of catalogue.fields) {
    const text = given.get(field.key);
    if (text !== null) setup[field.key] = text;
    if (field.kind === "flag") controlOf(field).checked = text !== null;
    else controlOf(field).value = text ?? field.usual;
  }
  compared = (given.get("compare") ?? "").split(",").filter((name) => scheduleOf(name));
  return setup;
}

function writeFragment(setup) {
  const given = new URLSearchParams(setup);
  if (compared.length) given.set("compare", compared.join(","));
  history.replaceState(null, "", `#${given}`);
  at("link").value = location.href;
}

// --- The results.

const percent = (share) => `${(share * 100).toFixed(1)} %`;
const most = (list) => list.reduce((one, other) => Math.max(one, other), 0);

function figure(name, value, help) {
  return element("li", { title: help }, element("b", { textContent: value }), element("span", { textContent: name }));
}

function row(cells, tag = "td") {
  return element("tr", {}, ...cells.map((cell, index) => {
    const made = element(index && tag === "td" ? "td" : "th", { scope: tag === "td" ? "row" : "col" });
    made.append(cell);
    return made;
  }));
}

// A number with a bar that shows its share of the largest one.
function barred(text, share) {
  const bar = element("i", { className: "bar" });
  bar.style.width = `${100 * share}%`;
  return element("div", { className: "barred" }, element("span", { textContent: text }), bar);
}

// Shows a page in a frame of `least` pixels, which grows to the height of its content. Resolves when the page is loaded.
function showIn(frame, page, least) {
  const grow = () => {
    const missing = frame.contentDocument.documentElement.scrollHeight - frame.clientHeight;
    // The texts for screen readers are outside of the content, by less than this.
    if (missing > 2) frame.style.height = `${frame.offsetHeight + missing}px`;
  };
  const start = () => { frame.style.height = `${least}px`; };
  // A window of another height changes nothing in the frame, so that its observer is silent.
  frame.fit = () => { start(); grow(); };
  start();
  return new Promise((resolve) => {
    frame.onload = () => {
      grow();
      new frame.contentWindow.ResizeObserver(grow).observe(frame.contentDocument.body);
      resolve();
    };
    frame.srcdoc = page;
  });
}

// Returns a text whose parts between backquotes are code.
function withCode(text) {
  return text.split("`").map((part, index) => index % 2 ? element("code", { textContent: part }) : part);
}

// Resolves when the picture is loaded.
function showResult(answer, schedule) {
  const { summary } = answer, { peak_activations: peaks, peak_bytes: bytes } = summary;
  at("figures").replaceChildren(
    figure("time of a step", answer.time, "From the start of the first action to the end of the last, in the unit of the costs"),
    figure("bubble", percent(summary.bubble_fraction), "The mean share of the step in which a rank does not compute"),
    figure("least time", answer.busiest, "The time that the busiest rank computes; no order of the same actions takes less"),
    figure("exposed messages", percent(summary.exposed_comm_fraction), "The mean share of the step in which ranks wait for messages in flight"),
    figure("memory", bytes ? answer.memory[bytes.indexOf(most(bytes))] : `${most(peaks)} act.`, "The most that a rank holds: activations of a stage for one microbatch or slice, or their memory"),
  );
  at("note").textContent = answer.note ?? "";
  at("note").hidden = !answer.note;
  document.title = `${answer.title} - Pipewright`;
  const isLoaded = showIn(at("picture"), answer.picture, Math.min(Math.max(260 + 60 * peaks.length, 520), 900));
  const heads = ["rank", "bubble", "activations", ...bytes ? ["memory"] : []];
  at("ranks").replaceChildren(element("thead", {}, row(heads, "th")), element("tbody", {}, ...peaks.map((peak, rank) => row([
    `${rank}`, barred(percent(summary.bubble_per_rank[rank]), summary.bubble_per_rank[rank]), barred(`${peak}`, peak / (most(peaks) || 1)),
    ...bytes ? [barred(answer.memory[rank], bytes[rank] / (most(bytes) || 1))] : [],
  ]))));
  at("command").value = answer.command;
  at("python").value = answer.python;
  at("guide-title").textContent = `About ${schedule.name}`;
  at("order").replaceChildren(...withCode(schedule.order));
  at("choice").replaceChildren(...withCode(schedule.choice));
  at("source").textContent = `Source: ${schedule.source}.`;
  at("formulas").replaceChildren(...["bubble", "peak"].flatMap((name) => schedule[name].length
    ? [element("dt", { textContent: name }), ...schedule[name].map((text) => element("dd", {}, element("code", { textContent: text })))] : []));
  return isLoaded;
}

// Resolves when the pictures are loaded.
function showComparison({ rows = [], picture, note, error }) {
  const columns = [
    ["stages per rank", (it) => it.stages_per_rank, (it) => it.stages_per_rank], ["time", (it) => it.makespan, (it) => it.time],
    ["bubble", (it) => it.bubble_fraction, (it) => percent(it.bubble_fraction)],
    ["memory", (it) => it.peak, (it) => it.memory],
    ["messages", (it) => it.messages, (it) => it.messages],
  ];
  const made = rows.filter((it) => !it.error);
  const cell = (it, [title, value, text]) => {
    const isBest = title !== "stages per rank" && value(it) === Math.min(...made.map(value));
    return element(isBest ? "b" : "span", { textContent: text(it) });
  };
  const lines = rows.map((it, index) => {
    const show = element("button", { type: "button", className: "name", textContent: it.name, title: "show this schedule above" });
    show.onclick = () => { at("schedule").value = it.name; change(); };
    const remove = element("button", { type: "button", className: "remove", textContent: "\u00d7", ariaLabel: `remove ${it.name}` });
    remove.onclick = () => { compared.splice(index, 1); change(); };
    const line = row(it.error ? [show, element("span", {}, ...withCode(it.error)), remove] : [show, ...columns.map((column) => cell(it, column)), remove]);
    if (it.error) Object.assign(line.children[1], { colSpan: columns.length, className: "reason" });
    return line;
  });
  at("compared").replaceChildren(element("thead", {}, row(["schedule", ...columns.map(([title]) => title), ""], "th")), element("tbody", {}, ...lines));
  at("compared-note").textContent = error ?? note ?? "";
  at("compared").hidden = rows.length === 0;
  at("scale").hidden = !picture;
  return picture && showIn(at("scale"), picture, 0);
}

// --- The order of requests: one at a time, always with the newest setup.

let isAsking = false, wanted = null;

async function update(setup) {
  wanted = setup;
  if (isAsking) return;
  isAsking = true;
  while (wanted) {
    const current = wanted;
    wanted = null;
    const answer = await ask({ do: "simulate", setup: current });
    if (wanted) continue;
    at("result").hidden = Boolean(answer.error);
    at("sentence").hidden = !answer.error;
    at("sentence").replaceChildren(...withCode(answer.error ?? ""));
    const isLoaded = !answer.error && showResult(answer, scheduleOf(current.schedule));
    const comparison = await ask({ do: "compare", setup: current, names: compared });
    if (wanted) continue;
    const isCompared = showComparison(comparison);
    // A reader, or a program, that looks at the page when it is no longer busy finds its pictures.
    await Promise.all([isLoaded, isCompared]);
  }
  isAsking = false;
  document.body.ariaBusy = "false";
}

function show(setup) {
  const schedule = scheduleOf(setup.schedule);
  for (const field of catalogue.fields) controlOf(field).closest("label").hidden = !schedule?.fields.includes(field.key);
  at("summary").textContent = schedule ? schedule.summary : "";
  document.body.ariaBusy = "true";
  update(setup);
}

// The reader has changed something.
function change() {
  const setup = readSetup();
  writeFragment(setup);
  show(setup);
}

function add(names) {
  compared.push(...names.filter((name) => !compared.includes(name)));
  change();
}

async function copy(button) {
  const source = at(button.dataset.copies), label = button.textContent;
  source.select();
  // Without permission, the text is selected, and the reader copies it.
  const isCopied = await navigator.clipboard?.writeText(source.value).then(() => true, () => false);
  button.textContent = isCopied ? "copied" : "press Ctrl+C";
  setTimeout(() => { button.textContent = label; }, 1500);
}

start();
catalogue = await ask({ do: "catalogue" });
if (catalogue.error) {
  at("sentence").textContent = catalogue.error;
  throw new Error(catalogue.error);
}
at("colours").textContent = catalogue.colours;
makeControls();
for (const id of ["setup", "comparison"]) at(id).hidden = false;
at("setup").addEventListener("input", change);
at("setup").addEventListener("submit", (event) => event.preventDefault());
at("add").onclick = () => add([at("added").value]);
at("add-all").onclick = () => add(catalogue.schedules.map(({ name }) => name));
at("remove-all").onclick = () => { compared = []; change(); };
for (const button of document.querySelectorAll("[data-copies]")) button.onclick = () => copy(button);
const follow = () => { show(showFragment()); at("link").value = location.href; };
addEventListener("hashchange", follow);
addEventListener("resize", () => { for (const frame of document.querySelectorAll("iframe")) frame.fit?.(); });
follow();
