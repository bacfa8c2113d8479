// Watching: another notebook controls. Who that is, and one button, in place of the controls.
export function watching(controls, root, { make, set, put, button, t }) {
  const who = make("span"), take = button("take_over", t.take_over, "", "go");
  const row = make("div", { class: "wb-watching", role: "status" }, who, take);
  controls.before(row);
  return (s, may) => {
    const seen = s.watching;
    row.hidden = !seen;
    root.classList.toggle("wb-watches", !!seen);
    set(take, "aria-disabled", !may("take_over"));
    put(who, seen ? fill(t[`watching_${seen.how}`], { who: seen.who }) : "");
  };
}
