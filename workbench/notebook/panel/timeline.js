// The timeline of a step: one row a rank, what it did when. A canvas: some thousand boxes, several
// times a second. A held step stays while the training goes on, and can lie above the live one.
const NARROW_PX = 11, GAP_PX = 14;

function timeline(fig, kit, isLarge) {
  const { make, put, set, button, whole, t } = kit;
  const canvas = make("canvas", { "aria-hidden": true }), tip = make("div", { class: "wb-tip", role: "status" }), heads = make("div"), lanes = make("div", { class: "wb-lanes", tabindex: 0, role: "application" }, canvas, heads, tip);
  const hold = button("", t.hold, "paused", "wb-tool"), compare = button("", t.compare, "compare", "wb-tool");
  let live = null, held = null, both = false, blocks = [], at = null, drawn = "", hues = {}, last = null, scale = 1, left = 0;
  hold.press = () => { held = held ? null : live; both = false; again(); };
  compare.press = () => { both = !both; held ||= live; again(); };
  fig.plot.replaceWith(lanes);
  fig.plot = lanes;
  fig.tools.prepend(hold, compare);
  fig.keys.append(...legend(make, t, PARTS), make("span", {}, make("i", { class: "wb-hue-under" }), t.under_way));
  tip.hidden = true;

  const again = () => { at = null; drawn = ""; if (last) show(last); };
  // What is read of a step beside its boxes: [[text, whether it accuses]].
  const notes = (it) => [
    it.straggler ? [fill(t.straggler, { rank: it.straggler.rank, time: ms(it.straggler.ms) }), true] : null,
    it.bubble == null || it.formula == null ? null : [fill(t.bubble, { measured: percent(it.bubble), formula: percent(it.formula) })],
    it.ranks[0]?.ranks > 1 ? [fill(t.busiest, { of: it.ranks[0].ranks })] : null,
  ].filter(Boolean).map(([text, warns]) => make("span", { class: `wb-note${warns ? " wb-warn" : ""}` }, text));
  const title = (it) => `${t.step} ${whole(it.step)} \u00b7 ${it.layout} \u00b7 ${ms(it.wall_ms)}`;

  // Colours and hatches of the theme, once for each.
  function colours(ctx, ratio) {
    const root = fig.closest(".wb-panel"), style = getComputedStyle(root), get = (name) => style.getPropertyValue(`--wb-${name}`).trim(), key = `${root.className} ${ratio}`;
    if (hues.key === key) return;
    hues = { key, font: style.fontFamily, px: parseFloat(getComputedStyle(fig).fontSize) };
    for (const name of ["ink", "dim", "grid", "paper", "blue", "red", "under", ...PARTS]) hues[name] = get(name);
    for (const [part, [mark, hue]] of Object.entries(HATCH)) hues[part] = hatched(ctx, mark, get(part), get(hue), ratio);
  }
  function hatched(ctx, mark, back, front, ratio) {
    const side = mark === "." ? 5 : 7, tile = make("canvas", { width: side * ratio, height: side * ratio }), pen = tile.getContext("2d");
    pen.scale(ratio, ratio);
    pen.fillStyle = back;
    pen.fillRect(0, 0, side, side);
    pen.strokeStyle = pen.fillStyle = front;
    pen.lineWidth = mark === "/" ? 2 : 1;
    pen.beginPath();
    if (mark === ".") pen.arc(side / 2, side / 2, 1.1, 0, 7);
    for (const shift of mark === "." ? [] : [-side, 0, side]) {
      pen.moveTo(shift - 1, side + 1); pen.lineTo(shift + side + 1, -1);
      if (mark === "x") { pen.moveTo(shift - 1, -1); pen.lineTo(shift + side + 1, side + 1); }
    }
    pen[mark === "." ? "fill" : "stroke"]();
    const pattern = ctx.createPattern(tile, "repeat");
    pattern.setTransform(new DOMMatrix().scale(1 / ratio));
    return pattern;
  }

  // Where each row lies: [{sample, head, rows: [{row, y}], height, lane}].
  function plan(shown, width) {
    const { px } = hues, rows = shown.reduce((sum, it) => sum + it.ranks.length, 0), many = shown.length > 1, axis = 1.7 * px, head = many ? 1.9 * px : 0.3 * px;
    const large = isLarge(), room = large ? parseFloat(getComputedStyle(fig).getPropertyValue("--wb-tall")) - axis - shown.length * head : (many ? 21 : 14.5) * px;
    const height = Math.min(Math.max(room / rows, 4), (large ? 5 : 1.65) * px), lane = height >= NARROW_PX && shown.some((it) => it.ranks.some((row) => row.under.length)) ? Math.min(0.22 * height, 0.6 * px) : 0;
    let y = 0;
    blocks = shown.map((sample, n) => {
      y += head;
      // With one microbatch its number says nothing.
      const numbered = sample.ranks.some((row) => row.spans.some((span) => span[4] > 0));
      const block = { numbered, sample, head: y - head, height, lane, rows: sample.ranks.map((row, i) => ({ row, y: y + i * height })), note: many ? (n ? t.now : t.held) : "" };
      y += block.rows.length * height;
      return block;
    });
    left = 4.4 * px;
    scale = (width - left - 1.5 * px) / Math.max(1e-9, ...shown.map((it) => it.wall_ms));
    return y + axis;
  }

  function paint(width, height, ratio) {
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
    const ctx = canvas.getContext("2d"), { px } = hues, bottom = height - 1.7 * px, end = (width - left - 1.5 * px) / scale, step = tick(end, Math.max(2, width / (6 * px)));
    ctx.scale(ratio, ratio);
    ctx.textBaseline = "middle";
    const text = (what, x, y, hue, align, weight = "") => { ctx.fillStyle = hue; ctx.textAlign = align; ctx.font = `${weight} ${0.87 * px}px ${hues.font}`; ctx.fillText(what, x, y); };
    for (let tock = 0; tock <= end * 1.0001; tock += step) {
      ctx.fillStyle = hues.grid;
      ctx.fillRect(left + tock * scale, 0, 1, bottom);
      text(`${+tock.toPrecision(6)} ms`, left + tock * scale, bottom + 0.9 * px, hues.dim, tock ? "center" : "left");
    }
    for (const block of blocks) {
      const every = Math.max(1, Math.ceil(GAP_PX / block.height)), late = block.sample.straggler?.rank;
      block.rows.forEach(({ row, y }, i) => {
        const slow = row.rank === late;
        if (i % every === 0 || slow) text(`${block.height >= GAP_PX ? `${t.rank} ` : ""}${row.rank}`, left - 0.6 * px, y + block.height / 2, slow ? hues.red : hues.ink, "right", slow ? "bold" : "");
        boxes(ctx, block, row, y);
      });
    }
    if (at) outline(ctx);
  }
  function boxes(ctx, { height, lane, numbered }, row, y) {
    const gap = height > 8 ? 2 : height > 5 ? 1 : 0, tall = height - gap - lane;
    for (const [kind, begin, end, , micro] of row.spans) {
      const x = left + begin * scale, wide = (end - begin) * scale;
      ctx.fillStyle = hues[kind];
      ctx.fillRect(x, y, Math.max(0.6, wide > 4 ? wide - 0.8 : wide), tall);
      if (numbered && micro != null && kind !== "wire" && kind !== "idle" && tall >= NARROW_PX && wide > 0.75 * hues.px * `${micro}`.length + 3) {
        ctx.font = `bold ${Math.max(Math.min(0.87 * hues.px, 0.8 * tall), Math.min(1.5 * hues.px, 0.45 * tall))}px ${hues.font}`;
        ctx.textAlign = "center";
        ctx.fillStyle = kind === "forward" ? "#fff" : "#10222e";
        ctx.fillText(micro, x + wide / 2, y + tall / 2 + 1);
      }
    }
    if (!lane) return;
    ctx.fillStyle = hues.under;
    for (const [, begin, end] of row.under) ctx.fillRect(left + begin * scale, y + tall + 0.5, Math.max(1, (end - begin) * scale - 0.8), lane - 0.5);
  }
  function outline(ctx) {
    const block = blocks[at.block], { row, y } = block.rows[at.row], [, begin, end] = row.spans[at.span];
    ctx.strokeStyle = hues.ink;
    ctx.lineWidth = 2.5;
    ctx.strokeRect(left + begin * scale - 1, y - 1, Math.max(3, (end - begin) * scale), block.height - 1);
  }

  const where = (block, row) => `${block.note ? `${block.note}, ` : ""}${t.rank} ${row.rank}`;
  const when = (begin, end) => `${t.begin} ${begin.toFixed(2)} ms, ${t.takes} ${(end - begin).toFixed(2)} ms`;
  const words = (block, row, [kind, begin, end, stage, micro, what]) => [
    [t[`part_${kind}`], kind === "idle" && what ? `${t.waits_for} ${what}` : what].filter(Boolean).join(": "),
    [where(block, row), stage == null ? "" : `${t.stage} ${stage}`, micro == null ? "" : `${t.microbatch} ${micro}`].filter(Boolean).join(", "), when(begin, end)];
  const underWords = (block, row, [what, begin, end, bytes]) => [`${t.under_way}: ${what}`, `${where(block, row)}, ${size(bytes)}`, when(begin, end)];
  function say(lines, x, y) {
    tip.hidden = !lines;
    if (!lines) return;
    if (tip.said !== lines.join("\n")) tip.replaceChildren(...lines.map((line, n) => make(n ? "div" : "b", {}, line)));
    tip.said = lines.join("\n");
    const wide = tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(x + 12, lanes.clientWidth - wide - 2))}px`;
    tip.style.top = `${y + 4}px`;
  }
  const near = (spans, time, first = 1) => spans.findIndex((span) => span[first] <= time && time < span[first + 1]);

  lanes.addEventListener("pointermove", (event) => {
    const box = lanes.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top, time = (x - left) / scale;
    const block = blocks.find((it) => y >= it.rows[0]?.y && y < it.rows[0].y + it.rows.length * it.height);
    const found = block && block.rows[Math.floor((y - block.rows[0].y) / block.height)];
    if (!found || time < 0) return say(null);
    const below = block.lane && y > found.y + block.height - block.lane - 2 && found.row.under.find((one) => one[1] <= time && time < one[2]), span = near(found.row.spans, time);
    say(below ? underWords(block, found.row, below) : span < 0 ? null : words(block, found.row, found.row.spans[span]), x, found.y + block.height);
  });
  lanes.addEventListener("pointerleave", () => say(null));
  lanes.addEventListener("blur", () => { at = null; say(null); refresh(); });

  // Left and right from span to span, up and down from rank to rank, held and live alike.
  lanes.addEventListener("keydown", (event) => {
    const rows = blocks.flatMap((block, b) => block.rows.map((_, r) => ({ block: b, row: r }))), of = (it) => blocks[it.block].rows[it.row].row.spans;
    if (event.key === "Escape" && at) { event.preventDefault(); at = null; say(null); return refresh(); }
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key) || !rows.length) return;
    event.preventDefault();
    if (!at) at = { ...rows[0], span: 0 };
    else if (event.key === "Home") at.span = 0;
    else if (event.key === "End") at.span = of(at).length - 1;
    else if (event.key === "ArrowLeft") at.span = Math.max(0, at.span - 1);
    else if (event.key === "ArrowRight") at.span = Math.min(of(at).length - 1, at.span + 1);
    else {
      const [, begin, end] = of(at)[at.span], now = rows.findIndex((it) => it.block === at.block && it.row === at.row), to = rows[Math.min(rows.length - 1, Math.max(0, now + (event.key === "ArrowUp" ? -1 : 1)))];
      at = { ...to, span: Math.max(0, near(of(to), (begin + end) / 2)) };
    }
    announce();
    refresh();
  });
  function announce() {
    const block = blocks[at.block], { row, y } = block.rows[at.row], span = row.spans[at.span], lines = words(block, row, span);
    set(lanes, "aria-label", lines.join(". "));
    say(lines, left + span[1] * scale, y + block.height);
  }
  // The step changes under a chosen span: what is in its place now is chosen.
  function settle() {
    const block = blocks[at.block], row = block?.rows[at.row]?.row;
    if (!row) at = null;
    else at.span = Math.min(at.span, row.spans.length - 1);
  }
  const refresh = () => { drawn = ""; if (last) show(last); };

  function words4() {
    const shown = both ? null : held || live;
    put(fig.sub, shown ? title(shown) : "");
    if (kit.changed("notes", shown && [shown.step, shown.layout, shown.bubble])) fig.note.replaceChildren(...(shown ? notes(shown) : []));
    put(hold.lastChild, held ? t.held_now : t.hold);
    for (const [one, is] of [[hold, !!held], [compare, both]]) { set(one, "aria-pressed", is); set(one, "aria-disabled", !live); }
  }
  fig.note = make("span");
  fig.head.parentNode.append(fig.note);

  function show(s) {
    last = s;
    live = s.sample || live;
    if (!s.sample && !s.step) live = null;
    // The bubble is told of the layout there is now; a step that is held keeps its own.
    if (live && !("bubble" in live)) Object.assign(live, { bubble: null }, s.layout === live.layout ? { bubble: s.derived?.bubble, formula: s.derived?.bubble_formula } : {});
    words4();
    const shown = both && held ? [held, live] : [held || live].filter(Boolean);
    fig.wait.hidden = shown.length > 0;
    put(fig.wait, t.no_times);
    canvas.hidden = !shown.length;
    const width = lanes.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!shown.length || !width) return;
    const ctx = canvas.getContext("2d"), key = [width, ratio, isLarge(), both, ...shown.map((it) => `${it.step} ${it.layout} ${it.wall_ms}`), fig.closest(".wb-panel").className, getComputedStyle(fig).fontSize, getComputedStyle(fig).getPropertyValue("--wb-tall")].join();
    if (key === drawn) return;
    drawn = key;
    colours(ctx, ratio);
    hues.px = parseFloat(getComputedStyle(fig).fontSize);
    const height = plan(shown, width);
    if (at) settle();
    paint(width, height, ratio);
    heads.replaceChildren(...blocks.filter((block) => block.note).map((block) => {
      const head = make("div", { class: "wb-block" }, make("b", {}, block.note), ` ${title(block.sample)}`, ...notes(block.sample));
      head.style.top = `${block.head}px`;
      return head;
    }));
    if (!at) set(lanes, "aria-label", `${t.timeline_title}, ${shown.map(title).join("; ")}. ${t.timeline_keys}`);
  }
  return show;
}
