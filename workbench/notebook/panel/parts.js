// The parts of a step, in the order in which every picture has them.
const PARTS = ["forward", "backward", "optimizer", "data", "wire", "idle", "other"];
// While nobody can tell the wire from waiting for a partner, both are one part.
const PLAIN = PARTS.flatMap((part) => (part === "wire" ? ["comm"] : part === "idle" ? [] : [part]));
const partsOf = (rows) => (rows.some((row) => row.wire_ms == null) ? PLAIN : PARTS);
// Told apart without colour, too.
const HATCH = { wire: ["/", "hatch"], comm: ["/", "hatch"], data: [".", "dot"], other: ["x", "cross"] };
const legend = (make, t, parts) => parts.map((part) => make("span", {}, make("i", { class: `wb-hue-${part}` }), t[`part_${part}`]));
const fill = (text, values) => Object.entries(values).reduce((done, [name, value]) => done.replace(`{${name}}`, value), text);
const ms = (x) => (x == null ? "\u2013" : x >= 1e4 ? `${(x / 1e3).toFixed(1)} s` : `${x >= 100 ? Math.round(x) : x >= 1 ? x.toPrecision(3) : x ? x.toFixed(3) : 0} ms`);
const percent = (x) => (x == null ? "\u2013" : `${x > 0 && x < 0.01 ? (100 * x).toFixed(1) : Math.round(100 * x)} %`);
function size(n) {
  if (n == null) return "\u2013";
  if (n < 1000) return `${Math.round(n)} B`;
  let unit = 0;
  for (n /= 1000; n >= 1000 && unit < 3; unit++) n /= 1000;
  return `${n >= 10 ? Math.round(n) : n.toFixed(1)} ${["KB", "MB", "GB", "TB"][unit]}`;
}
// A round distance between ticks, so that about `count` fit into `span`.
function tick(span, count) {
  const base = 10 ** Math.floor(Math.log10(span / count));
  return base * [1, 2, 5, 10].find((m) => span / (base * m) <= count);
}
// A sample as frame.py packs it, in words and milliseconds.
function unpacked(sample) {
  if (!sample) return sample;
  const { whats, bins, ...rest } = sample;
  for (const row of bins ? rest.ranks : []) {
    row.spans = [...row.bins.matchAll(/(\d)\1*/g)].map(({ 0: run, 1: part, index }) => [PARTS[part], (index / bins) * rest.wall_ms, ((index + run.length) / bins) * rest.wall_ms, null, null, ""]);
    row.under = [];
  }
  for (const row of whats ? rest.ranks : []) {
    row.spans = row.spans.map(([kind, begin, end, stage, micro, what]) => [PARTS[kind], begin / 1000, end / 1000, stage, micro, whats[what]]);
    row.under = row.under.map(([what, begin, end, bytes]) => [whats[what], begin / 1000, end / 1000, bytes]);
  }
  return rest;
}
