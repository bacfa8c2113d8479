// The picture of a layout: across it the stages of the model, down it the shares of the batch, in
// each field its ranks, side by side where they hold slices of the same tensors.
const ROW_EM = 1.9, WIDE = 8;

// blocks.0, blocks.1, blocks.2 -> blocks.0-2
function brief(units) {
  const found = [];
  for (const unit of units) {
    const [, stem, number] = /^(.*?)(\d*)$/.exec(unit), last = found[found.length - 1];
    if (number && last && last.stem === stem && last.to + 1 === +number) last.to = +number;
    else found.push({ stem, from: number, to: +number });
  }
  return found.map(({ stem, from, to }) => stem + from + (from && to > +from ? `\u2013${to}` : "")).join(", ");
}

function layout(fig, { make, put, set, changed, whole, t }) {
  const say = (key, values) => fill(t[key], values);
  const samples = ([first, end]) => (end - first === 1 ? `${first}` : `${first}\u2013${end - 1}`);
  // A long name breaks after a dot.
  const broken = (text) => text.split(/(?<=[.,])/).flatMap((part) => [part, make("wbr")]);

  // What comes before the number goes where there is no room.
  const short = (key, values) => [make("i", {}, t[key].split("{")[0]), say(key, values).slice(t[key].indexOf("{"))];

  const rank = (p, slices, off = "") => {
    const box = make("div", { class: `wb-rank${off}` }, make("b", {}, make("i", {}, `${t.rank} `), `${p.rank}`));
    if (off) {
      box.append(make("span", {}, p.is_gone ? t.gone_rank : t.idle));
      return box;
    }
    const held = make("i", { class: "wb-held" }, make("i"));
    held.firstChild.style.width = `${100 * p.held}%`;
    if (slices > 1) box.append(make("span", { class: "wb-slice" }, ...short("slice", { part: p.tp + 1, of: slices })));
    box.append(make("span", {}, ...short("holds", { share: percent(p.held) })), held);
    return box;
  };
  const words = (p, s, slices) => [`${t.rank} ${p.rank}`, ...(p.is_gone ? [t.gone_rank] : p.idle ? [t.idle] : [units(p.stages, s), `${t.samples} ${samples(p.samples)}`,
    ...(slices > 1 ? [say("slice", { part: p.tp + 1, of: slices })] : []), say("holds", { share: percent(p.held) })])].join(", ");
  const units = (stages, s) => (s.stages.length ? stages.map((stage) => brief(s.stages[stage]?.units || [])).join("; ") : t.all_layers);

  function grid(s, busy, most) {
    const count = (name) => Math.max(...busy.map((p) => p[name])) + 1, columns = count("pp"), shares = count("dp"), slices = count("tp");
    // More shares than rows: a block beside the other, at last without a head.
    const blocks = Math.ceil(shares / most), rows = Math.ceil(shares / blocks), wide = blocks * columns * slices, head = blocks === 1 || wide <= 4 ? 1 : 0;
    const mesh = make("div", { class: `wb-mesh${wide > WIDE || !head ? " wb-small" : ""}${wide > 4 ? " wb-many" : ""}` });
    mesh.style.gridTemplateColumns = Array(blocks).fill(`${head ? "max-content " : ""}repeat(${columns}, minmax(0, 1fr))`).join(" ");
    mesh.style.gridTemplateRows = `${head ? "max-content " : ""}repeat(${rows}, minmax(0, 1fr))`;
    const place = (el, row, column) => { el.style.gridArea = `${row + 1} / ${column + 1}`; mesh.append(el); };
    const first = (name, at) => busy.find((p) => p[name] === at), left = (block) => block * (columns + head);
    for (let block = 0; head && block < blocks; block++) {
      place(make("div", { class: "wb-corner" }, t.samples), 0, left(block));
      for (let pp = 0; pp < columns; pp++) {
        const text = units(first("pp", pp).stages, s);
        place(make("div", { class: "wb-units", title: text }, ...text.split("; ").map((line) => make("div", {}, ...broken(line)))), 0, left(block) + 1 + pp);
      }
    }
    for (let dp = 0; head && dp < shares; dp++) place(make("div", { class: "wb-share" }, samples(first("dp", dp).samples)), 1 + (dp % rows), left(Math.floor(dp / rows)));
    const fields = {};
    for (const p of busy) {
      const field = (fields[`${p.pp} ${p.dp}`] ||= make("div", { class: `wb-field wb-hue${p.pp % 8}` })), box = rank(p, slices, p.is_gone ? " wb-off wb-dead" : "");
      box.title = words(p, s, slices);
      if (!field.parentNode) place(field, head + (p.dp % rows), left(Math.floor(p.dp / rows)) + head + p.pp);
      field.append(box);
    }
    set(fig.plot, "aria-label", `${t.layout} ${s.layout}. ${s.places.map((p) => words(p, s, slices)).join("; ")}`);
    return mesh;
  }

  // Too many to draw each: a field for each stage, with how many ranks share it and how.
  function summary(s) {
    const mesh = make("div", { class: "wb-mesh" }), columns = Math.min(s.by_stage.length, 4);
    mesh.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    const short = (it) => [...(it.shares > 1 ? [say("many_shares", { count: whole(it.shares) })] : []), ...(it.slices > 1 ? [say("many_slices", { count: whole(it.slices) })] : [])];
    const lines = (it) => [say("many_ranks", { first: whole(it.rank), last: whole(it.last) }), units(it.stages, s), ...short(it), say("holds", { share: percent(it.held) })];
    s.by_stage.forEach((it, at) => {
      const shown = [`${whole(it.rank)}\u2013${whole(it.last)}`, ...(s.by_stage.length < 4 ? [units(it.stages, s)] : []), ...short(it)];
      mesh.append(make("div", { class: `wb-field wb-hue${at % 8}` }, make("div", { class: "wb-rank wb-stage", title: lines(it).join(", ") }, ...shown.map((line, n) => make(n ? "div" : "b", {}, line)))));
    });
    set(fig.plot, "aria-label", `${t.layout} ${s.layout}. ${s.by_stage.map((it) => lines(it).join(", ")).join("; ")}`);
    return mesh;
  }

  const cost = make("span", { class: "wb-cost" });
  fig.keys.append(cost);
  fig.head.append(" ", make("b", { class: "wb-now" }));
  fig.plot.classList.replace("wb-plot", "wb-picture");
  set(fig.plot, "role", "img");
  return (s) => {
    put(fig.head.lastChild, s.layout || "");
    set(fig.head, "title", s.layout || "");
    const last = [...(s.marks || [])].reverse().find((mark) => mark.took_s != null);
    put(cost, last ? say("switched", { step: whole(last.step), cost: spent(last) }) : "");
    const em = parseFloat(getComputedStyle(fig).fontSize), most = Math.max(1, Math.floor((fig.plot.clientHeight / em - 2.9) / ROW_EM));
    if (!changed("places", [s.places, s.by_stage, s.stages, most])) return;
    if (s.by_stage) {
      fig.wait.hidden = true;
      return fig.plot.replaceChildren(summary({ stages: [], ...s }));
    }
    const busy = (s.places || []).filter((p) => !p.idle), idle = (s.places || []).filter((p) => p.idle);
    fig.wait.hidden = busy.length > 0;
    put(fig.wait, t.no_places);
    fig.plot.replaceChildren(...(busy.length ? [grid({ stages: [], ...s }, busy, most)] : []),
      ...(idle.length ? [make("div", { class: `wb-idle${idle.length > WIDE ? " wb-small" : ""}` }, ...idle.map((p) => rank(p, 1, ` wb-off${p.is_gone ? " wb-dead" : ""}`)))] : []));
  };
}
