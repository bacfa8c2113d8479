// Draws the three figures of a panel with plotly. Colours and sizes are those of the style sheet.
// The end of a step axis: rarely moves, leaves at most a third empty.
function reach(last, goal) {
  const base = 10 ** Math.floor(Math.log10(Math.max(last, 10)));
  const end = base * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * base >= last);
  return goal && last <= goal ? Math.min(end, goal) : end;
}

const plain = (text) => text.replace(/[<&]/g, (c) => (c === "<" ? "&lt;" : "&amp;"));

export function charts(root, body, f, s, { digits, speed, put, set, make, changed, t }) {
  const { Plotly } = window, parts = partsOf(s.by_rank);
  const style = getComputedStyle(root), colour = (name) => style.getPropertyValue(`--wb-${name}`).trim();
  const px = parseFloat(getComputedStyle(body).fontSize), family = style.fontFamily, ink = colour("dim"), em = (x) => Math.round(x * px);
  const axis = (more) => ({ gridcolor: colour("grid"), linecolor: colour("grid"), zeroline: false, fixedrange: true, tickfont: { size: em(0.9) }, ...more });
  const draw = (fig, data, x, y, more = {}) => {
    const width = fig.plot.clientWidth, height = fig.plot.clientHeight, tall = height > 11 * px;
    fig.wait.hidden = true;
    Plotly.react(fig.plot, data, { width, height, margin: { l: em(3.6), r: em(2), t: em(tall ? 2.6 : 1.6), b: em(tall ? 2.9 : 1.7) }, showlegend: false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { family, size: em(0.9), color: ink }, dragmode: false, hovermode: "x",
      hoverlabel: { font: { family, size: em(0.9) } }, xaxis: axis({ title: tall ? { text: x.name, standoff: em(0.4) } : undefined, showgrid: false, ...x }),
      yaxis: axis({ nticks: Math.max(3, Math.floor(height / (2.6 * px))), ...y }), uirevision: 1, ...more }, { displayModeBar: false, responsive: false });
  };
  const blank = (text) => ({ annotations: [{ text, showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { size: em(1), color: ink } }] });
  const steps = s.curve.step || [], last = steps[steps.length - 1] ?? 0, end = reach(last, s.goal);
  const line = (fig, name, key, y, unit) => {
    const values = s.curve[key] || [], any = values.some((v) => v != null), few = steps.length < 12;
    const plotted = fig.plot.clientWidth - em(5.6), tall = fig.plot.clientHeight > 11 * px, labels = [], dots = [];
    const marks = any ? s.marks.filter((m) => m.step <= end).map((m) => ({ ...m, cost: m.took_s == null ? "" : spent(m) })) : [];
    for (let i = marks.length - 1; i > 0; i--)
      if (marks[i].step === marks[i - 1].step) marks.splice(i - 1, 2, { ...marks[i - 1], ...marks[i], label: `${marks[i - 1].label}, ${marks[i].label}`, cost: marks[i].cost || marks[i - 1].cost });
    const label = ({ lines, at }) => ({ text: lines.map(plain).join("<br>"), showarrow: false, xref: "x", x: (at / plotted) * end, xanchor: "center", yref: "paper", y: 1, yanchor: "bottom", font: { size: em(0.85), color: ink } });
    // Newest first: a name that would run into a newer one stays off, and then a cost into any.
    const span = (m, lines) => {
      const half = 0.28 * em(0.85) * Math.max(...lines.map((it) => it.length)), at = Math.min(Math.max((m.step / end) * plotted, half), plotted - half);
      return { m, lines, at, from: at - half, to: at + half + em(0.5) };
    };
    for (const m of [...marks].reverse()) {
      const one = span(m, [m.label]);
      if (!labels.some((it) => one.to > it.from)) labels.push(one);
    }
    labels.forEach((old, i) => {
      const one = span(old.m, [old.m.label, old.m.cost]);
      if (tall && old.m.cost && labels.every((it) => it === old || one.to <= it.from || it.to <= one.from)) labels[i] = one;
    });
    for (const m of marks) {
      const near = steps.findIndex((step) => step >= m.step);
      if (m.cost && near >= 0) dots.push([m.step, values[near], plain([m.label, m.layout, m.cost].filter(Boolean).join(": "))]);
    }
    draw(fig, [{ x: steps, y: values, mode: few ? "lines+markers" : "lines", line: { color: colour(name), width: px / 6.5 }, marker: { size: px / 2.2 }, connectgaps: false, hovertemplate: `%{y}${unit}<extra>${t.step} %{x:,}</extra>` },
      { x: dots.map((d) => d[0]), y: dots.map((d) => d[1]), text: dots.map((d) => d[2]), mode: "markers", marker: { size: px / 1.7, color: colour("paper"), line: { color: ink, width: px / 8 } }, hovertemplate: "%{text}<extra></extra>" }],
      { name: t.step, range: [0, end], tickformat: ",d", nticks: 6 }, any ? y : { range: [0, 1], showticklabels: false, showgrid: false },
      any ? { shapes: marks.map((m) => ({ type: "line", x0: m.step, x1: m.step, yref: "paper", y0: 0, y1: 1, line: { color: ink, width: 1.5, dash: "dot" } })), annotations: labels.map(label) } : blank(t.no_steps));
  };
  line(f.loss, "blue", "loss", { tickformat: "~g", autorange: true }, "");
  line(f.rate, "green", "rate", { tickformat: "~s", rangemode: "tozero", autorange: true }, ` ${s.unit}`);
  const ranks = s.by_rank.map((r) => r.rank), n = ranks.length;
  if (changed("legend", parts)) f.time.keys.replaceChildren(...legend(make, t, parts));
  const pattern = (part) => HATCH[part] && { shape: HATCH[part][0], fillmode: "overlay", bgcolor: colour(part), fgcolor: colour(HATCH[part][1]), size: em(HATCH[part][0] === "/" ? 0.5 : 0.36), solidity: 0.28 };
  draw(f.time, parts.map((part) => ({ type: "bar", x: ranks, y: s.by_rank.map((r) => r[`${part}_ms`]), name: t[`part_${part}`],
    customdata: s.by_rank.map((r) => size(r.sent_bytes)), marker: { color: colour(part), line: { width: 0 }, pattern: pattern(part) },
    hovertemplate: `${t[`part_${part}`]} %{y:.3g} ms${part === "wire" || part === "comm" ? `, ${t.sent} %{customdata}` : ""}<extra></extra>` })),
    { name: t.rank, tickmode: "linear", tick0: 0, dtick: 2 ** Math.max(0, Math.ceil(Math.log2((n * em(2.4)) / f.time.plot.clientWidth))), range: [-0.6, Math.max(n, 1) - 0.4], showticklabels: n > 0 },
    n ? { rangemode: "tozero", autorange: true } : { range: [0, 1], showticklabels: false, showgrid: false }, { barmode: "stack", bargap: 0.32, margin: { l: em(3.6), r: em(1), t: em(3.2), b: em(f.time.plot.clientHeight > 11 * px ? 2.9 : 1.7) }, ...(n ? {} : blank(t.no_times)) });
  put(f.rate.head, `${t.rate_title} (${s.unit})`);
  set(f.loss, "aria-label", `${t.loss_title} ${digits(s.loss)}, ${t.step} ${s.step}`);
  set(f.rate, "aria-label", `${t.rate_title} ${speed(s.rate)} ${s.unit}`);
  set(f.time, "aria-label", `${t.time_title} (ms): ${s.by_rank.map((r) => `${t.rank} ${r.rank}: ${parts.map((p) => `${t[`part_${p}`]} ${digits(r[`${p}_ms`], 3)}`).join(", ")}`).join("; ")}`);
}
