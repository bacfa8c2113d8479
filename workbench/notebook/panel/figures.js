// The figures of a panel: which are chosen, which one has the whole panel, and when each is drawn.
const CHOSEN = ["loss", "rate", "time", "layout", "timeline", "checkpoints", "events"], STORE = "workbench-figures";
// By kind: the least width in em, and the figures in order.
const KINDS = { small: [19, ["loss", "rate", "time", "layout", "memory"]], wide: [1000, ["timeline"]], table: [40, ["comms", "engines", "faults", "checkpoints", "events"]] };

function remembered() {
  try { return JSON.parse(localStorage.getItem(STORE)) || CHOSEN; } catch { return CHOSEN; }
}

export function figures(el, chooser, root, body, kit) {
  const { make, put, set, button, t } = kit, fig = {}, boxes = {}, toggles = {};
  let chosen = new Set(remembered()), one = "", redraw = () => {}, packed, sample, hadFaults = false;

  function figure(name, kind) {
    const head = make("span", { class: "wb-title" }, t[`${name}_title`]), sub = make("span", { class: "wb-sub" }), keys = make("span", { class: "wb-legend" }), tools = make("span", { class: "wb-tools" });
    const plot = make("div", { class: kind === "table" ? "wb-scroll" : "wb-plot" }), wait = make("div", { class: "wb-wait" }, kind === "table" ? "" : t.loading), enlarge = button("", "", "enlarge", "wb-tool");
    wait.hidden = kind === "table";
    if (kind === "table") for (const [key, value] of [["tabindex", 0], ["role", "region"], ["aria-label", t[`${name}_title`]]]) set(plot, key, value);
    enlarge.press = () => enlargeOne(one ? "" : name);
    tools.append(enlarge);
    const made = make("figure", { class: `wb-figure wb-of-${name}`, role: "group", "aria-label": t[`${name}_title`] }, make("figcaption", {}, make("span", {}, head, sub), keys, tools), plot, wait);
    return Object.assign(made, { head, sub, keys, tools, plot, wait, enlarge, named: name });
  }
  for (const [kind, [, names]] of Object.entries(KINDS)) {
    boxes[kind] = make("div", { class: `wb-row wb-row-${kind}` });
    for (const name of names) boxes[kind].append((fig[name] = figure(name, kind)));
    el.append(boxes[kind]);
  }
  for (const name of Object.values(KINDS).flatMap(([, names]) => names)) {
    const toggle = (toggles[name] = button("", t[`${name}_short`] || t[`${name}_title`], "", "wb-toggle"));
    toggle.press = () => {
      chosen[chosen.has(name) ? "delete" : "add"](name);
      try { localStorage.setItem(STORE, JSON.stringify([...chosen])); } catch { /* a page that may not keep anything */ }
      arrange();
    };
    chooser.append(toggle);
  }

  function enlargeOne(name) {
    const before = one;
    one = name;
    root.classList.toggle("wb-enlarged", !!one);
    arrange();
    fig[one || before].enlarge.focus();
    if (one) root.scrollIntoView({ block: "start" });
  }
  root.addEventListener("keydown", (event) => event.key === "Escape" && one && !event.defaultPrevented && enlargeOne(""));

  function arrange() {
    const px = parseFloat(getComputedStyle(body).fontSize), width = el.clientWidth, gap = 1.4 * px;
    for (const [kind, [least, names]] of Object.entries(KINDS)) {
      const chosenOnes = names.filter((name) => (one ? one === name : chosen.has(name))), fit = Math.max(1, Math.floor((width + gap) / (Math.min(least * px, width) + gap)));
      // A table that needs more than its column has the whole width, above the others.
      const whole = chosenOnes.filter((name) => fig[name].needs_em * px > (width + gap) / fit - gap), shown = chosenOnes.filter((name) => !whole.includes(name));
      const columns = Math.ceil(shown.length / Math.ceil(shown.length / fit)) || 1;
      boxes[kind].hidden = !chosenOnes.length;
      boxes[kind].style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
      for (const name of names) {
        fig[name].hidden = !chosenOnes.includes(name);
        fig[name].style.order = whole.includes(name) ? -1 : "";
        fig[name].style.gridColumn = whole.includes(name) ? "1 / -1" : name === shown[shown.length - 1] && shown.length % columns ? `span ${columns - (shown.length % columns) + 1}` : "";
        set(toggles[name], "aria-pressed", chosen.has(name));
        set(fig[name].enlarge, "aria-label", `${one ? t.shrink : t.enlarge} ${t[`${name}_title`]}`);
        set(fig[name].enlarge, "title", one ? t.shrink : t.enlarge);
      }
    }
    if (one) {
      const view = root.closest(".jp-WindowedPanel-outer, .jp-Notebook"), tall = Math.min(view?.clientHeight || window.innerHeight, window.innerHeight);
      // What is above the figure, and its caption, stay.
      root.style.setProperty("--wb-tall", `${Math.max(16 * px, tall - (el.getBoundingClientRect().top - root.getBoundingClientRect().top) - 5.2 * px)}px`);
    }
    redraw();
  }

  function widen() {
    const px = parseFloat(getComputedStyle(body).fontSize), short = KINDS.table[1].map((name) => fig[name]).filter(({ plot, needs_em = 0 }) => plot.scrollWidth > plot.clientWidth + 1 && plot.scrollWidth / px > needs_em + 0.1);
    for (const it of short) it.needs_em = it.plot.scrollWidth / px;
    if (short.length) arrange();
  }

  // The first fault brings its figure, which may be sent away again.
  function appear(s) {
    if (hadFaults || !(s.outages?.length || s.state === "waiting")) return;
    hadFaults = true;
    chosen.add("faults");
    arrange();
  }

  const lost = faults(fig.faults, kit), lists = [checkpoints(fig.checkpoints, kit), events(fig.events, kit), lost.command];
  const drawings = { layout: layout(fig.layout, kit), timeline: timeline(fig.timeline, kit, () => one === "timeline"), comms: comms(fig.comms, kit), engines: engines(fig.engines, kit), faults: lost.draw, ...charts(fig, root, body, kit) };
  arrange();
  return {
    command: (s, may) => lists.forEach((list) => list(s, may)),
    // What needs no plotly is there at once.
    draw: (s) => {
      appear(s);
      if (packed !== s.sample) sample = unpacked((packed = s.sample));
      const now = { ...s, sample };
      Object.entries(drawings).forEach(([name, drawing]) => !fig[name].hidden && (window.Plotly || !drawing.plotly) && drawing(now));
      widen();
    },
    arrange: (again) => { redraw = () => {}; arrange(); redraw = again; },
    close: () => Object.values(fig).forEach((it) => window.Plotly?.purge(it.plot)),
    broken: (error) => put(fig.loss.wait, error),
  };
}
