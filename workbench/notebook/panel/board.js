// The page's half of a panel: draws the newest frame, says what was pressed. Holds no state of its own.
const ICONS = {
  building: "M3 2h10v3L9 8l4 3v3H3v-3l4-3-4-3z",
  running: "M4 2l10 6-10 6z",
  paused: "M3 2h4v12H3zM9 2h4v12H9z",
  finished: "M2 8l2-2 3 3 6-6 2 2-8 8z",
  stopped: "M3 3h10v10H3z",
  failed: "M3 1l5 5 5-5 2 2-5 5 5 5-2 2-5-5-5 5-2-2 5-5-5-5z",
  step: "M2 2l8 6-8 6zM11 2h3v12h-3z",
  save: "M2 2h9l3 3v9H2zM5 3v3h5V3zM4 9v4h8V9z",
  warn: "M8 1l7 13H1zM7 6v4h2V6zM7 11v2h2v-2z",
};
ICONS.gone = ICONS.stopped;
const SILENT_MS = 3000, CHARTS_MS = 350, NONE = "\u2013";

function make(tag, attrs = {}, ...kids) {
  const el = document.createElement(tag);
  for (const [key, value] of Object.entries(attrs)) el.setAttribute(key, value);
  el.append(...kids);
  return el;
}
function icon(name) {
  const ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg"), path = svg.appendChild(document.createElementNS(ns, "path"));
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", "wb-icon");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", ICONS[name]);
  path.setAttribute("fill-rule", "evenodd");
  return svg;
}
const put = (el, text) => { if (el.textContent !== text) el.textContent = text; };
const set = (el, name, value) => { if (el.getAttribute(name) !== `${value}`) el.setAttribute(name, value); };

const whole = (x) => Math.round(x).toLocaleString("en-US");
const digits = (x, n = 4) => (x == null ? NONE : x.toPrecision(n));
const speed = (x) => (x == null ? NONE : x >= 100 ? whole(x) : x.toPrecision(3));
const share = (x) => (x == null ? NONE : `${x > 0 && x < 0.01 ? (100 * x).toFixed(1) : Math.round(100 * x)} %`);
function size(n) {
  if (n == null) return NONE;
  if (n < 1000) return `${Math.round(n)} B`;
  let unit = 0;
  for (n /= 1000; n >= 1000 && unit < 3; unit++) n /= 1000;
  return `${n >= 10 ? Math.round(n) : n.toFixed(1)} ${["KB", "MB", "GB", "TB"][unit]}`;
}
function age(s, t) {
  const [unit, key] = s < 60 ? [1, "ago_s"] : s < 3600 ? [60, "ago_min"] : s < 86400 ? [3600, "ago_h"] : [86400, "ago_d"];
  return t[key].replace("{}", Math.max(0, Math.floor(s / unit)));
}
// What draws the figures comes on request, and plotly.js with it unless this page has it already.
const page = (window.workbenchPanels ||= {});
const module = (code) => import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
function load(model) {
  const ours = !window.Plotly && !(Date.now() - page.asked_ms < 15000);
  if (ours) {
    page.asked_ms = Date.now();
    page.ready = new Promise((resolve) => (page.arrived = resolve));
  }
  return new Promise((resolve, reject) => {
    const unpack = async ([drawing, library]) => {
      if (ours) {
        const code = new Response(new Blob([library]).stream().pipeThrough(new DecompressionStream("gzip")));
        // An own `module`: a page with an AMD loader would swallow the library otherwise.
        new Function("module", await code.text())({ exports: {} });
        page.arrived();
      } else if (!window.Plotly) await page.ready;
      return (await module(drawing)).default;
    };
    const heard = (message, buffers) => {
      if (message.kind !== "figures") return;
      model.off("msg:custom", heard);
      unpack(buffers).then(resolve, reject);
    };
    model.on("msg:custom", heard);
    model.send({ verb: "figures", library: ours });
  });
}

function render({ model, el }) {
  const { texts: t, big } = model.get("page");
  const send = (verb, args = {}) => model.send({ verb, args });
  const button = (verb, label, sign, kind = "") => {
    const b = make("button", { type: "button", class: `wb-button ${kind}` }, ...(sign ? [icon(sign)] : []), make("span", {}, label));
    b.press = () => send(verb);
    // aria-disabled keeps the focus where the keyboard left it.
    b.onclick = () => b.getAttribute("aria-disabled") !== "true" && b.press();
    return b;
  };
  const number = (label, cls = "") => {
    const v = make("b"), u = make("span", { class: "wb-unit" }), k = make("div", { class: "wb-label" }, label);
    return Object.assign(make("div", { class: `wb-number ${cls}` }, k, make("div", {}, v, u)), { v, u, k });
  };
  const pill = make("div", { class: "wb-pill", role: "status" });
  const nums = Object.fromEntries(["step", "loss", "throughput", "communication", "ranks"].map((k) => [k, number(t[k], k)]));
  const metrics = make("div", { class: "wb-metrics" });
  const numbers = make("div", { class: "wb-numbers" }, nums.step, nums.loss, metrics, nums.throughput, nums.communication, nums.ranks);
  const bar = make("div", { class: "wb-bar", role: "progressbar", "aria-label": t.step, "aria-valuemin": 0 }, make("i"));
  const b = {
    resume: button("resume", t.resume, "running", "go"), pause: button("pause", t.pause, "paused"),
    step: button("step", t.one_step, "step"), stop: button("stop", t.stop, "stopped", "halt"),
    save: button("save", t.save, "save"),
  };
  const copies = [false, true].map((shard) => {
    const one = button("switch", shard ? t.sharded : t.replicated);
    one.press = () => one.getAttribute("aria-pressed") !== "true" && send("switch", { shard });
    return one;
  });
  const about = make("div", { class: "wb-about" });
  const controls = make("div", { class: "wb-controls", role: "group", "aria-label": t.controls },
    make("div", { class: "wb-group" }, b.resume, b.pause, b.step, b.stop),
    make("div", { class: "wb-segments", role: "group", "aria-label": t.layout }, ...copies), b.save);
  const message = make("div", { class: "wb-message", role: "status" });
  const figure = (title, legend = []) => {
    const head = make("span", { class: "wb-title" }, title), plot = make("div", { class: "wb-plot" }), wait = make("div", { class: "wb-wait" }, t.loading);
    const keys = make("span", { class: "wb-legend" }, ...legend.map((k) => make("span", {}, make("i", { class: `wb-${k}` }), t[k])));
    return Object.assign(make("figure", { role: "img" }, make("figcaption", {}, head, keys), plot, wait), { head, plot, wait });
  };
    const f = { loss: figure(t.loss_title), rate: figure(t.rate_title), time: figure(`${t.time_title} (ms)`, ["compute", "comm", "data", "other"]) };
  const rows = make("tbody"), list = make("ul"), noRows = make("p", {}, t.no_checkpoints), noList = make("p", {}, t.no_events);
  const section = (title, ...kids) => make("section", { "aria-label": title }, make("div", { class: "wb-title" }, title), make("div", { class: "wb-scroll", tabindex: 0 }, ...kids));
  const veil = make("div", { class: "wb-veil", role: "alert" });
  const body = make("div", { class: "wb-body" }, make("div", { class: "wb-status" }, pill, numbers), bar, controls, make("div", { class: "wb-line" }, message, about),
    make("div", { class: "wb-figures" }, f.loss, f.rate, f.time),
    make("div", { class: "wb-lists" }, section(t.checkpoints, noRows, make("table", {}, rows)), section(t.events, noList, list)));
  const root = make("div", { class: `wb-panel${big ? " wb-big" : ""}`, role: "region", "aria-label": t.panel }, body, veil);
  el.append(root);

  let s = null, drawn_ms = 0, heard_ms = Date.now(), queued = false, timer = 0, shown = true, charts = null, stale = true;
  const keep = {};
  const changed = (key, value) => { const now = JSON.stringify(value); return keep[key] !== now && (keep[key] = now, true); };

  function status() {
    if (changed("state", s.state)) {
      pill.className = `wb-pill wb-${s.state}`;
      pill.replaceChildren(icon(s.state in ICONS ? s.state : "building"), t[s.state] || s.state);
    }
    put(nums.step.v, whole(s.step));
    put(nums.step.u, s.goal ? ` / ${whole(s.goal)}` : "");
    put(nums.loss.v, digits(s.loss));
    put(nums.throughput.v, speed(s.rate));
    put(nums.throughput.u, ` ${s.unit}`);
    put(nums.communication.v, share(s.comm));
    put(nums.ranks.v, `${s.alive} / ${s.ranks}`);
    const lost = s.alive < s.ranks && s.state !== "gone";
    if (changed("lost", lost)) {
      nums.ranks.classList.toggle("wb-lost", lost);
      nums.ranks.u.replaceChildren(...(lost ? [icon("warn")] : []));
    }
    if (changed("metrics", [s.metrics, s.metrics_step]))
      metrics.replaceChildren(...Object.entries(s.metrics || {}).slice(0, 2).map(([name, value]) => {
        const n = number(name);
        put(n.v, digits(value));
        n.title = `${t.measured_at} ${whole(s.metrics_step ?? s.step)}`;
        return n;
      }));
    const part = s.goal ? Math.min(1, s.step / s.goal) : 0;
    bar.firstChild.style.width = `${100 * part}%`;
    set(bar, "aria-valuemax", s.goal || 0);
    set(bar, "aria-valuenow", s.step);
    put(about, [s.name, s.layout, s.precision, s.batch && `batch ${s.batch}`, s.lossy && `${t.lossy}: ${s.lossy}`].filter(Boolean).join("  \u00b7  "));
  }
  function command() {
    const note = model.get("note"), busy = note.kind === "busy";
    const may = (verb) => s.allowed.includes(verb) && !(busy && note.verb === verb);
    for (const [verb, one] of Object.entries(b)) set(one, "aria-disabled", !may(verb));
    put(b.resume.lastChild, s.step ? t.resume : t.start);
    copies.forEach((one, i) => {
      set(one, "aria-pressed", s.shard === !!i);
      set(one, "aria-disabled", !may("switch"));
    });
    for (const one of rows.querySelectorAll("button")) set(one, "aria-disabled", !may("restore"));
    const error = note.kind === "error" || (!busy && s.state === "failed");
    message.className = `wb-message${error && (note.text || s.message) ? " wb-error" : ""}`;
    put(message, note.text || (t[`busy_${s.pending}`] || s.pending).replace(" {what}", "") || s.message);
  }
  function lists() {
    if (changed("saved", s.checkpoints))
      rows.replaceChildren(...[...s.checkpoints].reverse().map((c) => {
        const restore = button("restore", t.restore), when = make("td", { class: "wb-when" });
        restore.press = () => send("restore", { what: c.name });
        restore.setAttribute("aria-label", `${t.restore} ${c.name}`);
        when.time_s = c.time_s;
        return make("tr", {}, make("td", { class: "wb-name" }, c.name), make("td", {}, `${t.step} ${whole(c.step)}`), when,
          make("td", {}, size(c.bytes)), make("td", { class: "wb-layout" }, c.layout || ""), make("td", {}, restore));
      }));
    for (const when of rows.querySelectorAll(".wb-when")) put(when, age(model.get("beat") - when.time_s, t));
    noRows.hidden = s.checkpoints.length > 0;
    if (changed("events", s.events))
      list.replaceChildren(...[...s.events].reverse().map((e) => make("li", { class: `wb-${e.kind}` },
        make("time", {}, new Date(1000 * e.time_s).toLocaleTimeString("en-GB")), make("span", {}, e.text))));
    noList.hidden = s.events.length > 0;
  }

  function draw() {
    queued = false;
    if (!s || !root.isConnected) return;
    status();
    lists();
    command();
    if (!charts || !stale || !shown || !f.loss.plot.clientWidth) return;
    const wait = drawn_ms + CHARTS_MS - Date.now();
    if (wait > 0) { timer ||= setTimeout(() => { timer = 0; soon(); }, wait); return; }
    stale = false;
    charts(root, body, f, s, t, { digits, speed, size, put, set });
    drawn_ms = Date.now();
  }
  const soon = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  const redraw = () => { stale = true; drawn_ms = 0; soon(); };
  function heard() {
    heard_ms = Date.now();
    root.classList.remove("wb-silent");
    body.inert = false;
    veil.replaceChildren();
  }
  const framed = () => {
    heard();
    const bytes = model.get("frame");
    if (bytes && bytes.byteLength) { s = JSON.parse(new TextDecoder().decode(bytes)); stale = true; soon(); }
  };
  const beaten = () => { heard(); soon(); };
  const watch = setInterval(() => {
    if (Date.now() - heard_ms < SILENT_MS || veil.firstChild) return;
    root.classList.add("wb-silent");
    body.inert = true;
    veil.append(make("div", {}, make("b", {}, t.silent), make("p", {}, t.silent_more)));
  }, 500);
  const theme = () => { root.classList.toggle("wb-dark", document.body.dataset.jpThemeLight === "false" || document.body.classList.contains("vscode-dark")); redraw(); };
  const looks = new MutationObserver(theme);
  looks.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
  const sizes = new ResizeObserver(redraw);
  sizes.observe(root);
  const sight = new IntersectionObserver((seen) => { shown = seen[seen.length - 1].isIntersecting; soon(); });
  sight.observe(root);
  // Otherwise `b` or `d d` on a focused button edits the notebook under it.
  root.addEventListener("keydown", (event) => event.stopPropagation());
  const events = { "change:frame": framed, "change:beat": beaten, "change:note": beaten };
  for (const [name, act] of Object.entries(events)) model.on(name, act);
  let tries = 0;
  const figures = () => load(model).then((it) => { charts = it; redraw(); }, (error) => put(f.loss.wait, `${error}`));
  const again = setInterval(() => (charts || ++tries > 40 ? clearInterval(again) : figures()), 16000);
  figures();
  theme();
  framed();
  return () => {
    for (const [name, act] of Object.entries(events)) model.off(name, act);
    clearInterval(watch); clearInterval(again); clearTimeout(timer);
    looks.disconnect(); sizes.disconnect(); sight.disconnect();
    for (const one of Object.values(f)) window.Plotly?.purge(one.plot);
    root.remove();
  };
}
export default { render };
