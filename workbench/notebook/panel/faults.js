// Faults: what was lost, how it was brought back, and what is done about the next one.
const PHASES = ["free", "again", "filled", "met", "state", "step"], POLICIES = { on_loss: ["replace", "shrink", "wait"], on_stall: ["wait", "interrupt", "replace"] };
// One button a policy, and what the one that is on means.
function policies(key, { make, set, put, button, send, t }) {
  const about = make("span", { class: "wb-explained" });
  const all = POLICIES[key].map((name) => {
    const one = button("policy", t[`${key}_${name}`]);
    one.press = () => one.getAttribute("aria-pressed") !== "true" && send("policy", { [key]: name });
    return Object.assign(one, { policy: name });
  });
  const row = make("div", { class: "wb-policy" }, make("span", { class: "wb-label" }, t[key]), make("div", { class: "wb-segments", role: "group", "aria-label": t[key] }, ...all), about);
  row.show = (s, may) => {
    const now = key === "on_loss" ? s.faults?.policy : s.faults?.on_stall;
    row.hidden = !now;
    for (const one of all) {
      set(one, "aria-pressed", one.policy === now);
      set(one, "aria-disabled", !may("policy"));
    }
    put(about, now ? fill(t[`${key}_${now}_more`], { spares: s.faults.spares }) : "");
  };
  return row;
}
// One button a fault, which strikes the rank beside them in its next step.
const FAULTS = { kill: {}, stall: { for_s: 5 }, slow: {}, nan: {}, "drop-link": {}, "disk-full": {} };
function strikes({ make, set, put, button, send, t }) {
  const rank = make("input", { type: "number", min: 0, value: 1, class: "wb-button", "aria-label": t.strike_rank }), about = make("span", { class: "wb-explained" });
  const all = Object.entries(FAULTS).map(([kind, how]) => {
    const one = button("inject", t[`strike_${kind}`]);
    one.press = () => send("inject", { kind, rank: +rank.value, ...how });
    return Object.assign(one, { verb: "inject" });
  });
  const clear = Object.assign(button("clear_faults", t.strike_clear), { verb: "clear_faults" });
  const row = make("div", { class: "wb-policy" }, make("span", { class: "wb-label" }, t.strike), make("label", {}, `${t.rank} `, rank), make("div", { class: "wb-segments", role: "group", "aria-label": t.strike }, ...all), clear, about);
  row.show = (s, may) => {
    set(rank, "max", s.used - 1);
    if (document.activeElement !== rank && s.used) rank.value = Math.max(0, Math.min(Math.trunc(+rank.value), s.used - 1));
    for (const one of [...all, clear]) set(one, "aria-disabled", !may(one.verb));
    put(about, (s.faults?.under_way || []).join("; "));
    clear.hidden = !s.faults?.under_way?.length;
  };
  return row;
}
const counted = (faults, t) => fill(t.fault_counts, { faults: faults.faults, lost: faults.lost_steps, down: seconds(faults.downtime_s), goodput: percent(faults.goodput) });
const seconds = (s) => (s < 10 ? `${s.toFixed(2)} s` : s < 120 ? `${s.toFixed(1)} s` : `${Math.round(s / 60)} min`);

function faults(fig, kit) {
  const { make, put, set, t } = kit, rows = Object.keys(POLICIES).map((key) => policies(key, kit)), strike = strikes(kit);
  let longest = 1, latest;
  fig.plot.append(make("div", { class: "wb-policies" }, ...rows), strike);
  const text = (head, show, off) => ({ head, off, show: (td, o) => put(td, show(o)) });
  const of = (o, phase) => o.phases[phase];
  const said = (td, o) => {
    set(td, "class", "wb-why");
    if (!td.firstChild) td.append(make("b"), make("small"));
    put(td.firstChild, o.why);
    const after = o.is_over ? [o.filled, o.source && fill(t.state_from, { source: o.source }), fill(t.steps_lost, { lost: o.lost_steps })] : [t.not_over];
    put(td.lastChild, [new Date(1000 * o.time_s).toLocaleTimeString("en-GB"), fill(t.at_step, { step: kit.whole(o.step) }), ...after].filter(Boolean).join(" \u00b7 "));
  };
  const show = grid(fig, kit, [
    { head: t.fault, show: said },
    { head: t.until_step, wide: true, show: (td, o) => bars(td, PHASES.filter((it) => it !== "again").map((it) => [`wb-phase-${it}`, (of(o, it) || 0) / longest]), "", kit) },
    ...PHASES.map((it) => text([make("i", { class: `wb-key wb-phase-${it}` }), t[`phase_${it}`]], (o) => ms(of(o, it)), (all) => it === "again" && !all.some((o) => of(o, it)))),
    text(t.altogether, (o) => (o.is_over ? ms(o.took_ms) : "\u2026")),
  ]);
  const draw = (s) => {
    const found = [...(s.outages || [])].reverse();
    longest = Math.max(1e-9, ...found.map((o) => o.took_ms - (of(o, "again") || 0)));
    put(fig.sub, s.faults?.faults ? counted(s.faults, t) : "");
    show(found, found.length ? "" : t.no_faults);
  };
  return { draw, command: (s, may) => [...rows, strike].forEach((it) => it.show(s, may)) };
}

// What a run asks that waits, or was stopped, without ranks that are gone: shown among the controls, and only then.
export function rescue(controls, { make, set, button, send, t }) {
  const ways = ["replace", "shrink"].map((how) => {
    const one = button("recover", t[`recover_${how}`], how === "replace" ? "running" : "", how === "replace" ? "go" : "");
    one.press = () => send("recover", { how });
    return one;
  });
  const box = make("div", { class: "wb-group wb-rescue", role: "group", "aria-label": t.waiting }, ...ways);
  controls.prepend(box);
  return (s, may) => {
    const waits = s.state === "waiting";
    box.hidden = !waits && !(s.state === "stopped" && s.alive < s.ranks);
    controls.classList.toggle("wb-asks", waits);
    const smaller = s.faults?.smaller;
    ways.forEach((one, at) => set(one, "aria-disabled", !may("recover") || (at && !smaller)));
    set(ways[1], "title", smaller || t.no_smaller);
  };
}
