// The options of the strategy that is on: a few short values side by side, many or long ones in a menu.
const ROW_CHARS = 30;
const sorted = (args) => JSON.stringify(Object.entries(args || {}).sort());

export function options(el, { make, set, put, explain, icon, button, send, changed, t }) {
  let all = [];
  const label = (option, value) => t[`${option.name}_${value.value}`] || value.label;
  const pick = (option, at, ...more) => {
    const one = button("switch", label(option, option.values[at]));
    one.dataset.key = `${option.name} ${option.values[at].value}`;
    one.press = () => !one.choice.now && send("switch", { strategy: one.strategy, ...one.choice.args });
    one.append(...more);
    all.push({ one, find: (options) => options.find((it) => it.name === option.name).values[at] });
    return one;
  };
  const segments = (option, name) => make("div", { class: "wb-segments", role: "group", "aria-label": name }, ...option.values.map((_, at) => pick(option, at)));

  function menu(option, name) {
    const open = button("", "", "", "wb-open"), list = make("div", { class: "wb-menu", role: "menu", "aria-label": name });
    const items = option.values.map((_, at) => {
      const why = make("small"), item = pick(option, at, why), press = item.press;
      set(item, "role", "menuitemradio");
      set(item, "tabindex", -1);
      item.why = why;
      item.press = () => { close(true); press(); };
      return item;
    });
    const box = make("div", { class: "wb-drop" }, open, list);
    const outside = (event) => box.contains(event.target) || close(false);
    function show(is) {
      list.hidden = !is;
      set(open, "aria-expanded", is);
      document[is ? "addEventListener" : "removeEventListener"]("pointerdown", outside, true);
    }
    function close(focus) { show(false); if (focus) open.focus(); }
    const focus = (at) => items[(at + items.length) % items.length].focus();
    open.press = () => {
      show(list.hidden);
      if (!list.hidden) focus(Math.max(0, items.findIndex((one) => one.choice.now)));
    };
    open.dataset.key = option.name;
    open.append(icon("down"));
    set(open, "aria-haspopup", "menu");
    set(open, "aria-label", name);
    box.addEventListener("keydown", (event) => {
      const at = items.indexOf(document.activeElement);
      const act = { ArrowDown: () => (at < 0 ? list.hidden && open.press() : focus(at + 1)), ArrowUp: () => at < 0 || focus(at - 1),
        Home: () => focus(0), End: () => focus(-1), Escape: () => close(true), Tab: () => close(true) }[event.key];
      if (!act || (list.hidden && event.key !== "ArrowDown")) return;
      if (event.key !== "Tab") event.preventDefault();
      act();
    });
    box.addEventListener("focusout", (event) => event.relatedTarget && !box.contains(event.relatedTarget) && close(false));
    list.append(...items);
    show(false);
    all.push({ open, find: (options) => options.find((it) => it.name === option.name), name });
    return box;
  }

  function build(found, note) {
    const focus = el.contains(document.activeElement) && document.activeElement.dataset.key;
    all = [];
    el.replaceChildren(...found.map((option) => {
      const name = t[`option_${option.name}`] || option.label, chars = option.values.map((value) => label(option, value)).join("").length;
      return make("div", { class: "wb-option" }, make("span", { class: "wb-label" }, name), (chars > ROW_CHARS ? menu : segments)(option, name));
    }));
    if (!found.length) el.append(make("span", { class: "wb-label" }, note));
    if (focus) el.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
  }

  return (s, may, note) => {
    const choice = (s.choices || []).find((it) => it.now) || { options: [] };
    const shape = choice.options.map((option) => [option.name, option.values.map((value) => value.label)]);
    if (changed("options", [choice.strategy, shape])) build(choice.options, choice.strategy === "none" ? t.one_rank : "");
    const going = note.kind === "busy" && sorted(note.args);
    for (const { one, open, find, name } of all) {
      const found = find(choice.options);
      if (open) {
        const now = found.values.find((value) => value.now), text = now ? label(found, now) : "\u2013";
        put(open.querySelector("span"), text);
        set(open, "aria-label", `${name}: ${text}`);
        set(open, "aria-disabled", !may("switch"));
        continue;
      }
      Object.assign(one, { choice: found, strategy: choice.strategy });
      set(one, one.why ? "aria-checked" : "aria-pressed", found.now);
      set(one, "aria-disabled", !may("switch") || !!found.why_not);
      one.classList.toggle("wb-going", !found.now && going === sorted({ strategy: choice.strategy, ...found.args }));
      explain(one, found);
      if (one.why) put(one.why, found.why_not);
    }
  };
}
