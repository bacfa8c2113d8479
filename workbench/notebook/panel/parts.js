// The parts of a step, in the order in which every picture has them.
const PARTS = ["forward", "backward", "optimizer", "data", "wire", "idle", "other"];
// While nobody can tell the wire from waiting for a partner, both are one part.
const PLAIN = PARTS.flatMap((part) => (part === "wire" ? ["comm"] : part === "idle" ? [] : [part]));
const partsOf = (rows) => (rows.some((row) => row.wire_ms == null) ? PLAIN : PARTS);
// Told apart without colour, too.
const HATCH = { wire: ["/", "hatch"], comm: ["/", "hatch"], data: [".", "dot"], other: ["x", "cross"] };
const legend = (make, t, parts) => parts.map((part) => make("span", {}, make("i", { class: `wb-hue-${part}` }), t[`part_${part}`]));
