// Communication by axis and kind, and the engines: tables whose cells change and whose rows stay.
// column: {head, wide, show(td, row)}; a cell is drawn into, never made anew.
function grid(fig, { make, set }, columns) {
  const head = make("thead", {}, make("tr", {}, ...columns.map((it) => make("th", { scope: "col" }, ...[it.head].flat())))), rows = make("tbody"), note = make("p");
  fig.plot.append(note, make("table", {}, head, rows));
  return (data, text = "") => {
    while (rows.children.length > data.length) rows.lastChild.remove();
    while (rows.children.length < data.length) rows.append(make("tr", {}, ...columns.map((it) => make("td", { class: it.wide ? "wb-widest" : "" }))));
    data.forEach((row, at) => columns.forEach((it, column) => it.show(rows.children[at].children[column], row)));
    columns.forEach((it, column) => {
      const off = !!it.off?.(data);
      for (const tr of [head.firstChild, ...rows.children]) tr.children[column].hidden = off;
    });
    head.hidden = !data.length;
    note.hidden = !text;
    if (note.textContent !== text) note.textContent = text;
    set(fig, "data-rows", data.length);
  };
}
// A bar of one or more parts, [[class, share of the whole bar]], with a text behind it.
function bars(td, parts, text, { make, put }) {
  if (!td.firstChild) td.append(make("span", { class: "wb-bars" }, ...parts.map(([kind]) => make("i", { class: kind }))), make("span", { class: "wb-said" }, ""));
  parts.forEach(([, share], at) => (td.firstChild.children[at].style.width = `${100 * Math.min(1, share || 0)}%`));
  put(td.lastChild, text);
}

function comms(fig, kit) {
  const { make, put, whole, t } = kit, WAYS = ["exposed", "waiting", "overlapped"];
  let longest = 1;
  const text = (head, show) => ({ head, show: (td, row) => put(td, show(row)) });
  const show = grid(fig, kit, [
    text(t.axis, (c) => c.axis), text(t.operation, (c) => c.op), text(t.count, (c) => `${whole(c.count)}\u00d7`), text(t.bytes, (c) => size(c.bytes)),
    { head: t.time_a_step, wide: true, show: (td, c) => bars(td, WAYS.map((way) => [`wb-way-${way}`, c[`${way}_ms`] / longest]), "", kit) },
    ...WAYS.map((way) => text([make("i", { class: `wb-key wb-way-${way}` }), t[`way_${way}`]], (c) => ms(c[`${way}_ms`]))),
    text(t.bandwidth, (c) => (c.bus_gbps == null ? "\u2013" : `${size(1e9 * c.bus_gbps)}/s`)),
  ]);
  return (s) => {
    const found = s.sample?.comms || [];
    longest = Math.max(1e-9, ...found.map((c) => WAYS.reduce((sum, way) => sum + (c[`${way}_ms`] || 0), 0)));
    show(found, found.length ? "" : s.sample ? t.no_comms : t.no_times);
  };
}

function engines(fig, kit) {
  const { put, set, t } = kit, none = "\u2013";
  let most = 1;
  const text = (head, show, off) => ({ head, off, show: (td, row) => put(td, show(row)) });
  const noGpu = (rows) => !rows.some((row) => row.gpu);
  const show = grid(fig, kit, [
    text(t.rank, (e) => `${e.rank}`), text(t.device, (e) => e.gpu?.name || e.device),
    { head: t.state, show: (td, e) => { put(td, t[`engine_${e.state}`] || e.state); set(td, "class", e.state === "alive" ? "wb-alive" : "wb-dead"); } },
    text(t.pid, (e) => `${e.pid ?? none}`),
    { head: t.cpu, wide: true, show: (td, e) => bars(td, [["wb-gauge", e.cpu == null ? 0 : e.cpu / Math.max(1, e.threads || 1)]], e.cpu == null ? none : `${e.cpu.toFixed(2)} ${t.cores}`, kit) },
    { head: t.memory, wide: true, show: (td, e) => bars(td, [["wb-gauge", (e.resident || 0) / most]], size(e.resident), kit) },
    { head: t.gpu, wide: true, off: noGpu, show: (td, e) => bars(td, [["wb-gauge", e.gpu?.utilisation || 0]], e.gpu ? percent(e.gpu.utilisation) : none, kit) },
    text(t.gpu_memory, (e) => (e.gpu ? size(e.gpu.memory) : none), noGpu),
    text(t.temperature, (e) => (e.gpu?.temperature_c == null ? none : `${Math.round(e.gpu.temperature_c)} \u00b0C`), noGpu),
    text(t.power, (e) => (e.gpu?.power_w == null ? none : `${Math.round(e.gpu.power_w)} W`), noGpu),
  ]);
  return (s) => {
    const found = s.engines || [], left = s.ranks - found.length;
    most = Math.max(1, ...found.map((e) => e.resident || 0));
    show(found, left > 0 && found.length ? fill(t.engines_cut, { shown: found.length, all: s.ranks }) : found.length ? "" : t.no_times);
  };
}
