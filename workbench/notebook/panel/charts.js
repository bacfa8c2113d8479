// The figures that plotly draws. Colours and sizes are those of the style sheet.
// The end of a step axis: rarely moves, leaves at most a third empty.
function reach(last, goal) {
  const base = 10 ** Math.floor(Math.log10(Math.max(last, 10)));
  const end = base * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * base >= last);
  return goal && last <= goal ? Math.min(end, goal) : end;
}

const plain = (text) => text.replace(/[<&]/g, (c) => (c === "<" ? "&lt;" : "&amp;"));
const MEMORY = ["parameters", "gradients", "optimizer", "activations", "copies"];
const MB = 1e6;
// Marks above a curve: how many have a name, the newest; in how many rows, of what height in em.
const NAMED = 5, ROWS = 2, ROW = 1.1;
// In letters; those of Chinese are as wide as two.
const letters = (text) => [...text].reduce((sum, char) => sum + (char > "\u2e80" ? 2 : 1), 0);

function charts(f, root, body, { digits, speed, put, set, make, changed, button, t }) {
  let look;
  // Sizes and colours as they are now.
  function pen() {
    const style = getComputedStyle(root), px = parseFloat(getComputedStyle(body).fontSize), colour = (name) => style.getPropertyValue(`--wb-${name}`).trim();
    look = { px, colour, family: style.fontFamily, ink: colour("dim"), em: (x) => Math.round(x * px) };
  }
  const axis = (more) => ({ gridcolor: look.colour("grid"), linecolor: look.colour("grid"), zeroline: false, fixedrange: true, tickangle: 0, tickfont: { size: look.em(0.9) }, ...more });
  const margins = (fig, tall, rows = 1) => ({ l: look.em(3.6), r: look.em(1.4), t: Math.max(look.em(tall ? 2.6 : 1.6), fig.keys.offsetHeight + look.em(1) + (rows - 1) * look.em(ROW)), b: look.em(tall ? 2.9 : 1.7) });
  const isTall = (fig) => fig.plot.clientHeight - fig.keys.offsetHeight > 11 * look.px;
  function draw(fig, data, x, y, { rows, ...more } = {}) {
    const { px, em, family, ink } = look, width = fig.plot.clientWidth, height = fig.plot.clientHeight, tall = isTall(fig);
    fig.wait.hidden = true;
    window.Plotly.react(fig.plot, data, { width, height, margin: margins(fig, tall, rows), showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family, size: em(0.9), color: ink }, dragmode: false, hovermode: "x",
      hoverlabel: { font: { family, size: em(0.9) } }, xaxis: axis({ title: tall ? { text: x.name, standoff: em(0.4) } : undefined, showgrid: false, ...x }),
      yaxis: axis({ nticks: Math.max(3, Math.floor(height / (2.6 * px))), ...y }), uirevision: 1, ...more }, { displayModeBar: false, responsive: false });
    set(fig.plot, "role", "img");
  }
  const blank = (text) => ({ annotations: [{ text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: look.em(1), color: look.ink } }] });

  // Where the layout was switched or a rank was lost. The newest are named where there is room, with their cost where
  // there is much; older ones are a faint line, named by the pointer.
  function marked(s, values, steps, end, fig) {
    const { em, px, ink } = look, plotted = fig.plot.clientWidth - em(5), tall = fig.plot.clientHeight > 11 * px, labels = [], dots = [];
    const marks = s.marks.filter((m) => m.step <= end).map((m) => ({ ...m, cost: m.took_s == null ? "" : spent(m) }));
    for (let i = marks.length - 1; i > 0; i--)
      if (marks[i].step === marks[i - 1].step) marks.splice(i - 1, 2, { ...marks[i - 1], ...marks[i], label: `${marks[i - 1].label}, ${marks[i].label}`, cost: marks[i].cost || marks[i - 1].cost });
    const hue = (m) => (m.kind === "fault" ? look.colour("red") : ink);
    // A name lies over its line, or begins or ends there.
    const span = (m, lines, side = 0, row = 0) => {
      const half = 0.28 * em(0.85) * Math.max(...lines.map(letters)), at = Math.min(Math.max((m.step / end) * plotted + side * half, half), plotted - half);
      return { m, lines, at, row, from: at - half, to: at + half + em(0.5) };
    };
    const free = (one) => labels.every((it) => it.m === one.m || it.row !== one.row || one.to <= it.from || it.to <= one.from);
    // Newest first, in as few rows as will do; what has no place in any stays off.
    const newest = marks.slice(-NAMED).reverse();
    for (const m of newest) {
      const tries = [0, 1, -1].flatMap((side) => Array.from({ length: ROWS }, (_, row) => span(m, [m.label], side, row))), one = tries.find(free);
      if (one) labels.push(one);
    }
    const rows = Math.max(1, ...labels.map((it) => it.row + 1)), { t: top, b: bottom } = margins(fig, isTall(fig), rows), row = em(ROW) / Math.max(1, fig.plot.clientHeight - top - bottom);
    labels.forEach((old, i) => {
      const one = span(old.m, [old.m.label, old.m.cost]);
      if (rows === 1 && tall && !fig.keys.firstChild && old.m.cost && free(one)) labels[i] = one;
    });
    const label = ({ lines, at, row }) => ({ text: lines.map(plain).join("<br>"), showarrow: false, xref: "x", x: (at / plotted) * end, xanchor: "center", yref: "paper", y: 1, yanchor: "bottom", yshift: row * em(ROW), borderpad: 0, bgcolor: look.colour("paper"), font: { size: em(0.85), color: ink } });
    for (const m of marks) {
      const near = steps.findIndex((step) => step >= m.step);
      if (near >= 0) dots.push([m.step, values[near], plain([m.label, m.layout, m.cost].filter(Boolean).join(": ")), newest.includes(m) && m.cost ? 1 : 0]);
    }
    const shape = (m) => ({ type: "line", layer: "below", x0: m.step, x1: m.step, yref: "paper", y0: 0, y1: 1 + row * (labels.find((it) => it.m === m)?.row || 0), opacity: newest.includes(m) ? 1 : 0.4,
      line: { color: hue(m), width: newest.includes(m) ? 1.5 : 1, dash: m.kind === "fault" ? "solid" : "dot" } });
    return { dots, rows, labels: labels.map(label), shapes: marks.map(shape) };
  }
  // What was left behind by going back: faint, its end marked.
  const left = (s, key, name) => (s.branches || []).map((it) => ({ x: it.step, y: it[key], mode: "lines+markers", opacity: 0.45, line: { color: look.colour(name), width: look.px / 8, dash: "dot" },
    marker: { symbol: "x", color: look.ink, size: it.step.map((_, at) => (at === it.step.length - 1 ? look.px / 1.7 : 0)) }, hovertemplate: `%{y}<extra>${fill(t.branch, { step: it.step[it.step.length - 1], layout: it.layout })}</extra>` }));
  function line(s, fig, name, key, y, unit) {
    pen();
    const { px, colour, ink } = look, steps = s.curve.step || [], furthest = Math.max(0, steps[steps.length - 1] ?? 0, ...(s.branches || []).map((it) => it.step[it.step.length - 1])), end = reach(furthest, s.goal);
    const values = s.curve[key] || [], any = values.some((v) => v != null), few = steps.length < 12;
    const { dots, labels, shapes, rows } = any ? marked(s, values, steps, end, fig) : { dots: [], labels: [], shapes: [] };
    draw(fig, [{ x: steps, y: values, mode: few ? "lines+markers" : "lines", line: { color: colour(name), width: px / 6.5 }, marker: { size: px / 2.2 }, connectgaps: false, hovertemplate: `%{y}${unit}<extra>${t.step} %{x:,}</extra>` },
      { x: dots.map((d) => d[0]), y: dots.map((d) => d[1]), text: dots.map((d) => d[2]), mode: "markers", marker: { size: px / 1.7, opacity: dots.map((d) => d[3]), color: colour("paper"), line: { color: ink, width: px / 8 } }, hovertemplate: "%{text}<extra></extra>" }, ...left(s, key, name)],
      { name: t.step, range: [0, end], tickformat: ",d", nticks: 6 }, any ? y : { range: [0, 1], showticklabels: false, showgrid: false },
      any ? { shapes, annotations: labels, rows } : blank(t.no_steps));
  }
  // Stacked bars by rank. bars: [[name, colour, values, pattern, hover text]]. A row may stand for several ranks.
  const places = (rows) => rows.map((row, at) => (row.ranks > 1 ? at * rows[0].ranks : row.rank));
  function stacked(fig, rows, bars, more, none) {
    const { em } = look, n = rows.length, ranks = places(rows), wide = rows[0]?.ranks || 1;
    draw(fig, [...bars.map(([name, hue, y, pattern, customdata, hover]) => ({ type: "bar", x: ranks, y, name, customdata, marker: { color: hue, line: { width: 0 }, pattern }, hovertemplate: `${name} ${hover}<extra></extra>` })), ...more],
      { name: t.rank, tickmode: "linear", tick0: 0, tickformat: ",d", dtick: wide * 2 ** Math.max(0, Math.ceil(Math.log2((n * em(wide > 1 ? 4 : 2.4)) / fig.plot.clientWidth))), range: [-0.6 * wide, (Math.max(n, 1) - 0.4) * wide], showticklabels: n > 0 },
      n ? { rangemode: "tozero", autorange: true } : { range: [0, 1], showticklabels: false, showgrid: false }, { barmode: "stack", bargap: 0.32, ...(n ? {} : blank(none)) });
  }
  // More ranks than bars could show: a field for each part and group of neighbours.
  function heat(s, parts, names) {
    const rows = s.by_rank, { em } = look, fig = f.time;
    if (changed("parts", "heat")) fig.keys.replaceChildren(make("span", {}, fill(t.grouped, { of: rows[0].ranks })));
    const known = { type: "heatmap", x: rows.map((r) => r.rank), y: names, z: parts.map((part) => rows.map((r) => r[`${part}_ms`])), colorscale: "Viridis", zmin: 0, xgap: 0, ygap: 1,
      text: parts.map(() => rows.map((r) => `${r.rank}\u2013${r.rank + r.ranks - 1}`)), hovertemplate: `${t.rank} %{text}<br>%{y} %{z:.3g} ms<extra></extra>`,
      colorbar: { thickness: em(0.6), outlinewidth: 0, tickfont: { size: em(0.85), color: look.ink }, xpad: em(0.4), ypad: 0 } };
    draw(fig, [known], { name: t.rank, nticks: 6, tickformat: ",d" }, { autorange: "reversed", showgrid: false, nticks: parts.length, automargin: true }, { hovermode: "closest", margin: { l: em(3), r: em(0.5), t: em(2.4), b: em(2.9) } });
    set(fig.plot, "aria-label", `${t.time_title}: ${parts.map((part, at) => `${names[at]} ${ms(rows.reduce((sum, r) => sum + r[`${part}_ms`], 0) / rows.length)}`).join(", ")}`);
  }
  const hatch = (mark, hue) => mark && { shape: mark[0], fillmode: "overlay", bgcolor: look.colour(hue), fgcolor: look.colour(mark[1]), size: look.em(mark[0] === "/" ? 0.5 : 0.36), solidity: 0.28 };

  let isLog = false, last;
  const log = button("", t.log, "", "wb-tool wb-log");
  log.press = () => { isLog = !isLog; set(log, "aria-pressed", isLog); if (last) drawings.loss(last); };
  set(log, "aria-pressed", false);
  set(log, "title", t.log_title);
  set(log, "aria-label", t.log_title);
  f.loss.tools.prepend(log);

  const drawings = {
    loss(s) {
      last = s;
      line(s, f.loss, "blue", "loss", isLog ? { type: "log", tickformat: "~g", autorange: true, dtick: "D2" } : { tickformat: "~g", autorange: true }, "");
      set(f.loss.plot, "aria-label", `${t.loss_title} ${digits(s.loss)}, ${t.step} ${s.step}`);
    },
    rate(s) {
      const unit = t[s.unit] || s.unit;
      put(f.rate.head, `${t.rate_title} (${unit})`);
      if (changed("mfu", s.derived?.mfu)) f.rate.keys.replaceChildren(...(s.derived?.mfu == null ? [] : [make("span", {}, fill(t.mfu, { share: percent(s.derived.mfu) }))]));
      line(s, f.rate, "green", "rate", { tickformat: "~s", rangemode: "tozero", autorange: true }, ` ${unit}`);
      set(f.rate.plot, "aria-label", `${t.rate_title} ${speed(s.rate)} ${unit}`);
    },
    time(s) {
      pen();
      const parts = partsOf(s.by_rank), names = parts.map((part) => t[`part_${part}`]);
      if (changed("parts", parts)) f.time.keys.replaceChildren(...legend(make, t, parts));
      if (s.by_rank[0]?.ranks > 1) return heat(s, parts, names);
      const sent = s.by_rank.map((r) => size(r.sent_bytes));
      stacked(f.time, s.by_rank, parts.map((part, at) => [names[at], look.colour(part), s.by_rank.map((r) => r[`${part}_ms`]), hatch(HATCH[part], part), sent, part === "wire" || part === "comm" ? `%{y:.3g} ms, ${t.sent} %{customdata}` : "%{y:.3g} ms"]), [], t.no_times);
      set(f.time.plot, "aria-label", `${t.time_title}: ${s.by_rank.map((r) => `${t.rank} ${r.rank}: ${parts.map((part, at) => `${names[at]} ${ms(r[`${part}_ms`])}`).join(", ")}`).join("; ")}`);
    },
    memory(s) {
      pen();
      const rows = s.memory || [], ranks = places(rows), { em, colour, px } = look, parts = MEMORY.filter((part) => part !== "copies" || rows.some((r) => r.copies)), names = parts.map((part) => t[`memory_${part}`]);
      const most = Math.max(...rows.map((r) => parts.reduce((sum, part) => sum + (r[part] || 0), 0))), kept = rows.map((r) => r.resident), fits = Math.max(...kept) < 2 * most;
      // A process that is many times its model would leave no bar to see: then it is said in words.
      const said = fits || !rows.length ? "" : `: ${[...new Set([Math.min(...kept), Math.max(...kept)].map(size))].join(" \u2013 ")}`;
      if (changed("memory", [fits, said, parts.length])) f.memory.keys.replaceChildren(...parts.map((part, at) => make("span", {}, make("i", { class: `wb-hue-${part}` }), names[at])), make("span", {}, ...(fits ? [make("b", { class: "wb-mark" })] : []), t.memory_resident + said));
      const mark = { type: "scatter", mode: "markers", x: ranks, y: kept.map((it) => it / MB), text: kept.map(size), marker: { symbol: "line-ew", size: em(1.1), line: { color: colour("ink"), width: px / 6 } }, hovertemplate: `${t.memory_resident} %{text}<extra></extra>` };
      const marks = [["/", "slash"], null, null, [".", "dot"], null];
      stacked(f.memory, rows, parts.map((part, at) => [names[at], colour(part), rows.map((r) => r[part] / MB), hatch(marks[at], part), rows.map((r) => `${size(r[part])}${r.ranks > 1 ? `, ${t.rank} ${r.rank}` : ""}`), "%{customdata}"]), fits && rows.length ? [mark] : [], t.no_times);
      set(f.memory.plot, "aria-label", `${t.memory_title}: ${rows.map((r) => `${t.rank} ${r.rank}: ${parts.map((part, at) => `${names[at]} ${size(r[part])}`).join(", ")}, ${t.memory_resident} ${size(r.resident)}`).join("; ")}`);
    },
  };
  for (const drawing of Object.values(drawings)) drawing.plotly = true;
  return drawings;
}
