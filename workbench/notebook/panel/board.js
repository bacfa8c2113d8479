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
  enlarge: "M2 2h5v2H5.4l3 3L7 8.4l-3-3V7H2zM14 14H9v-2h1.6l-3-3L9 7.6l3 3V9h2z",
  compare: "M2 2h12v5H2zM4 4v1h8V4zM2 9h12v5H2zM4 11v1h5v-1z",
  warn: "M8 1l7 13H1zM7 6v4h2V6zM7 11v2h2v-2z",
};
ICONS.down = "M3 5h10l-5 6z";
ICONS.gone = ICONS.stopped;
ICONS.waiting = ICONS.warn;
const SILENT_MS = 3000, CHARTS_MS = 350, NONE = "\u2013", STRATEGIES = ["data", "model", "pipeline", "hybrid", "none"];

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
// Why a button is off, or what it leads to.
const explain = (el, it) => ["title", "aria-description"].forEach((name) => set(el, name, it ? it.why_not || it.layout : ""));
const set = (el, name, value) => { if (el.getAttribute(name) !== `${value}`) el.setAttribute(name, value); };

const whole = (x) => Math.round(x).toLocaleString("en-US");
const digits = (x, n = 4) => (x == null ? NONE : x.toPrecision(n));
const speed = (x) => (x == null ? NONE : x >= 100 ? whole(x) : x.toPrecision(3));
const share = (x) => (x == null ? NONE : `${x > 0 && x < 0.01 ? (100 * x).toFixed(1) : Math.round(100 * x)} %`);
// The other scripts come on request, and plotly.js with them unless this page has it already.
const page = (window.workbenchPanels ||= {});
const module = (code) => import(URL.createObjectURL(new Blob([code], { type: "text/javascript" })));
function load(model) {
  const ours = !window.Plotly && !(Date.now() - page.asked_ms < 15000);
  if (ours) {
    page.asked_ms = Date.now();
    page.ready = new Promise((resolve) => (page.arrived = resolve));
  }
  return new Promise((resolve, reject) => {
    const unpack = async ([code, library]) => {
      const parts = await module(code);
      return { parts, drawing: draw(library) };
    };
    const draw = async (library) => {
      if (ours) {
        const code = new Response(new Blob([library]).stream().pipeThrough(new DecompressionStream("gzip")));
        // An own `module`: a page with an AMD loader would swallow the library otherwise.
        new Function("module", await code.text())({ exports: {} });
        page.arrived();
      } else if (!window.Plotly) await page.ready;
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
  const nums = Object.fromEntries(["step", "loss", "throughput", "communication", "idle", "ranks"].map((k) => [k, number(t[k], k)]));
  const metrics = make("div", { class: "wb-metrics" });
  const numbers = make("div", { class: "wb-numbers" }, nums.step, nums.loss, metrics, nums.throughput, nums.communication, nums.idle, nums.ranks);
  const bar = make("div", { class: "wb-bar", role: "progressbar", "aria-label": t.step, "aria-valuemin": 0 }, make("i"));
  const b = {
    resume: button("resume", t.resume, "running", "go"), pause: button("pause", t.pause, "paused"),
    step: button("step", t.one_step, "step"), stop: button("stop", t.stop, "stopped", "halt"),
    save: button("save", t.save, "save"),
  };
  const picks = STRATEGIES.map((name) => {
    const one = button("switch", t[`strategy_${name}`]);
    one.press = () => one.choice.layout !== s.layout && send("switch", { strategy: name, ...one.choice.args });
    return Object.assign(one, { strategy: name });
  });
  const about = make("div", { class: "wb-about" });
  const controls = make("div", { class: "wb-controls", role: "group", "aria-label": t.controls },
    make("div", { class: "wb-group" }, b.resume, b.pause, b.step, b.stop),
    make("div", { class: "wb-segments", role: "group", "aria-label": t.strategy }, ...picks), b.save);
  const options = make("div", { class: "wb-options", role: "group", "aria-label": t.options });
  const message = make("div", { class: "wb-message", role: "status" });
  const chooser = make("div", { class: "wb-chooser", role: "group", "aria-label": t.figures }), stage = make("div", { class: "wb-figures" }, make("div", { class: "wb-soon" }, t.loading));
  const veil = make("div", { class: "wb-veil", role: "alert" });
  const body = make("div", { class: "wb-body" }, make("div", { class: "wb-status" }, pill, numbers), bar, controls, make("div", { class: "wb-line" }, options, message, about), chooser, stage);
  const root = make("div", { class: `wb-panel${big ? " wb-big" : ""}`, role: "region", "aria-label": t.panel }, body, veil);
  el.append(root);

  let s = null, drawn_ms = 0, heard_ms = Date.now(), queued = false, timer = 0, shown = true, parts = [], board = null, ready = false, stale = true;
  const raw = {}, got = {};
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
    put(nums.throughput.u, ` ${t[s.unit] || s.unit}`);
    put(nums.communication.v, share(s.comm));
    put(nums.idle.v, share(s.idle));
    const over = s.state === "gone", lost = s.alive < s.ranks && !over, all = whole(s.ranks), first = s.used < s.ranks - 1 ? t.many_ranks : `${t.rank} {first}`;
    // An ended run shows its last numbers, and says so.
    for (const name of ["throughput", "communication", "idle"]) {
      put(nums[name].k, over ? t.last_of.replace("{name}", t[name]) : t[name]);
      nums[name].classList.toggle("wb-over", over);
    }
    put(nums.ranks.v, lost ? `${whole(s.alive)} / ${all}` : s.used < s.ranks ? t.some_of.replace("{some}", whole(s.used)).replace("{all}", all) : `${all} / ${all}`);
    set(nums.ranks, "title", lost || over || s.used === s.ranks ? "" : `${t.idle}: ${first.replace("{first}", s.used).replace("{last}", s.ranks - 1)}`);
    const spares = (!over && s.faults?.spares) || 0;
    if (changed("lost", [lost, spares])) {
      nums.ranks.classList.toggle("wb-lost", lost);
      nums.ranks.u.replaceChildren(...(lost ? [icon("warn")] : []), spares ? ` +${spares} ${t.spare}` : "");
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
    put(about, [s.name, s.layout, s.precision, s.batch && `${t.batch} ${s.batch}`, s.lossy && `${t.lossy}: ${s.lossy}`].filter(Boolean).join("  \u00b7  "));
  }
  function command() {
    const note = model.get("note"), busy = note.kind === "busy";
    const may = (verb) => s.allowed.includes(verb) && !(busy && note.verb === verb);
    for (const [verb, one] of Object.entries(b)) set(one, "aria-disabled", !may(verb));
    put(b.resume.lastChild, s.step ? t.resume : t.start);
    for (const one of picks) {
      const choice = (one.choice = (s.choices || []).find((it) => it.strategy === one.strategy));
      set(one, "aria-pressed", s.strategy === one.strategy);
      set(one, "aria-disabled", !may("switch") || !choice || !!choice.why_not);
      one.classList.toggle("wb-going", busy && s.strategy !== one.strategy && note.args?.strategy === one.strategy);
      explain(one, choice);
    }
    for (const part of parts) part(s, may, note);
    board?.command(s, may);
    const error = note.kind === "error" || (!busy && s.state === "failed");
    message.className = `wb-message${error && (note.text || s.message) ? " wb-error" : ""}`;
    put(message, note.text || (t[`busy_${s.pending}`] || s.pending).replace(/( to)? \{\w+\}/, "") || s.message);
  }
  function draw() {
    queued = false;
    if (!s || !root.isConnected) return;
    status();
    command();
    if (!board || !stale || !shown || !stage.clientWidth) return;
    const wait = drawn_ms + CHARTS_MS - Date.now();
    if (wait > 0) { timer ||= setTimeout(() => { timer = 0; soon(); }, wait); return; }
    stale = false;
    board.draw(s);
    drawn_ms = Date.now();
  }
  const soon = () => { if (!queued) { queued = true; requestAnimationFrame(draw); } };
  const redraw = () => { stale = true; drawn_ms = 0; soon(); };
  const resized = () => (board ? board.arrange(redraw) : 0, redraw());
  function heard() {
    heard_ms = Date.now();
    root.classList.remove("wb-silent");
    body.inert = false;
    veil.replaceChildren();
  }
  const framed = () => {
    heard();
    for (const name of ["lists", "frame", "sample"]) {
      const bytes = model.get(name);
      if (raw[name] !== bytes && bytes?.byteLength) got[name] = JSON.parse(new TextDecoder().decode((raw[name] = bytes)));
    }
    if (got.frame) { s = { ...got.lists, ...got.frame, sample: got.sample }; stale = true; soon(); }
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
  const sizes = new ResizeObserver(resized);
  sizes.observe(root);
  const sight = new IntersectionObserver((seen) => { shown = seen[seen.length - 1].isIntersecting; soon(); });
  sight.observe(root);
  // Otherwise `b` or `d d` on a focused button edits the notebook under it.
  root.addEventListener("keydown", (event) => event.stopPropagation());
  const events = { "change:frame": framed, "change:lists": framed, "change:sample": framed, "change:beat": beaten, "change:note": beaten };
  for (const [name, act] of Object.entries(events)) model.on(name, act);
  let tries = 0;
  const kit = { make, put, set, explain, icon, button, send, changed, digits, speed, whole, t, beat: () => model.get("beat") };
  const figures = () => load(model).then(async (it) => {
    if (!board) {
      stage.replaceChildren();
      parts = [it.parts.options(options, kit), it.parts.rescue(controls, kit), it.parts.watching(controls, root, kit)];
      board = it.parts.figures(stage, chooser, root, body, kit);
      board.arrange(redraw);
    }
    redraw();
    await it.drawing;
    ready = true;
    redraw();
  }).catch((error) => put(board ? message : stage, `${error}`));
  const again = setInterval(() => (ready || ++tries > 40 ? clearInterval(again) : figures()), 16000);
  figures();
  theme();
  framed();
  return () => {
    for (const [name, act] of Object.entries(events)) model.off(name, act);
    clearInterval(watch); clearInterval(again); clearTimeout(timer);
    looks.disconnect(); sizes.disconnect(); sight.disconnect();
    board?.close();
    root.remove();
  };
}
export default { render };
