// Checkpoints and events. Rows are made anew only when there are others.
function size(n) {
  if (n == null) return "\u2013";
  if (n < 1000) return `${Math.round(n)} B`;
  let unit = 0;
  for (n /= 1000; n >= 1000 && unit < 3; unit++) n /= 1000;
  return `${n >= 10 ? Math.round(n) : n.toFixed(1)} ${["KB", "MB", "GB", "TB"][unit]}`;
}
function age(s, t) {
  const [unit, key] = s < 60 ? [1, "ago_s"] : s < 3600 ? [60, "ago_min"] : s < 86400 ? [3600, "ago_h"] : [86400, "ago_d"];
  return t[key].replace("{}", Math.max(0, Math.floor(s / unit)));
}

export function lists(el, { make, put, set, button, send, changed, whole, beat, t }) {
  const rows = make("tbody"), list = make("ul"), noRows = make("p", {}, t.no_checkpoints), noList = make("p", {}, t.no_events);
  const section = (title, ...kids) => make("section", { "aria-label": title }, make("div", { class: "wb-title" }, title), make("div", { class: "wb-scroll", tabindex: 0 }, ...kids));
  el.append(section(t.checkpoints, noRows, make("table", {}, rows)), section(t.events, noList, list));
  const row = (c) => {
    const restore = button("restore", t.restore), when = make("td", { class: "wb-when" });
    restore.press = () => send("restore", { what: c.name });
    restore.setAttribute("aria-label", `${t.restore} ${c.name}`);
    when.time_s = c.time_s;
    return make("tr", {}, make("td", { class: "wb-name" }, c.name), make("td", {}, `${t.step} ${whole(c.step)}`), when,
      make("td", {}, size(c.bytes)), make("td", { class: "wb-layout" }, c.layout || ""), make("td", {}, restore));
  };
  const event = (e) => make("li", { class: `wb-${e.kind}` }, make("time", {}, new Date(1000 * e.time_s).toLocaleTimeString("en-GB")), make("span", {}, e.text));
  return (s, may) => {
    if (changed("saved", s.checkpoints)) rows.replaceChildren(...[...s.checkpoints].reverse().map(row));
    for (const when of rows.querySelectorAll(".wb-when")) put(when, age(beat() - when.time_s, t));
    for (const one of rows.querySelectorAll("button")) set(one, "aria-disabled", !may("restore"));
    noRows.hidden = s.checkpoints.length > 0;
    if (changed("events", s.events)) list.replaceChildren(...[...s.events].reverse().map(event));
    noList.hidden = s.events.length > 0;
  };
}
// What a switch cost: 0.21 s, 1.2 MB
export const spent = (mark) => `${mark.took_s < 0.1 ? mark.took_s.toFixed(3) : mark.took_s.toPrecision(2)} s, ${size(mark.moved_bytes)}`;
