// Checkpoints and events. Rows are made anew only when there are others.
function age(s, t) {
  const [unit, key] = s < 60 ? [1, "ago_s"] : s < 3600 ? [60, "ago_min"] : s < 86400 ? [3600, "ago_h"] : [86400, "ago_d"];
  return t[key].replace("{}", Math.max(0, Math.floor(s / unit)));
}

function checkpoints(fig, { make, put, set, button, send, changed, whole, beat, t }) {
  const rows = make("tbody"), none = make("p"), cost = (c) => (c.stall_ms == null ? "" : fill(t.save_cost, { stall: ms(c.stall_ms), write: ms(c.write_ms) }));
  fig.plot.append(none, make("table", {}, rows));
  const row = (c) => {
    const restore = button("restore", t.restore), when = make("td", { class: "wb-when" });
    restore.press = () => send("restore", { what: c.name });
    restore.setAttribute("aria-label", fill(t.restore_to, { name: c.name }));
    when.time_s = c.time_s;
    return make("tr", {}, make("td", { class: "wb-name" }, c.name), make("td", {}, `${t.step} ${whole(c.step)}`), when,
      make("td", {}, size(c.bytes)), make("td", { class: "wb-costs" }, cost(c)), make("td", { class: "wb-layout" }, c.layout || ""), make("td", {}, restore));
  };
  return (s, may) => {
    if (changed("saved", s.checkpoints)) rows.replaceChildren(...[...s.checkpoints].reverse().map(row));
    for (const when of rows.querySelectorAll(".wb-when")) put(when, age(beat() - when.time_s, t));
    for (const one of rows.querySelectorAll("button")) set(one, "aria-disabled", !may("restore"));
    put(none, s.saving ? fill(t.saving, { name: s.saving }) : t.no_checkpoints);
    none.hidden = s.checkpoints.length > 0 && !s.saving;
  };
}

function events(fig, { make, changed, t }) {
  const list = make("ul"), none = make("p", {}, t.no_events);
  fig.plot.append(none, list);
  // What stops the run stands out; what was refused, or is over, is there to be read.
  const stops = (s, e) => e.kind === "error" && ["failed", "gone"].includes(s.state) && s.message && e.text.startsWith(s.message);
  const event = (s, e) => make("li", { class: `wb-${e.kind}${stops(s, e) ? " wb-fault" : ""}` }, make("time", {}, new Date(1000 * e.time_s).toLocaleTimeString("en-GB")), make("span", {}, e.text));
  return (s) => {
    if (changed("events", [s.events, s.state, s.message])) list.replaceChildren(...[...s.events].reverse().map((e) => event(s, e)));
    none.hidden = s.events.length > 0;
  };
}
// What a switch cost: 0.21 s, 1.2 MB
const spent = (mark) => `${mark.took_s < 0.1 ? mark.took_s.toFixed(3) : mark.took_s.toPrecision(2)} s, ${size(mark.moved_bytes)}`;
