// The time line of a simulation: requests of each second that were answered, answered late, lost or cut.

const KINDS = [["lost", "lost"], ["cut", "cut"], ["delayed", "delayed"], ["ok", "answered"]];

const totals = (line) => Object.fromEntries(KINDS.map(([kind]) => [kind, sum(line.seconds, (second) => second[kind])]));

/// A round number of at least a fifth of `most`.
function gridStep(most) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, most / 4)));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => most / step <= 5);
}

function chart(line, room) {
  const left = 44, top = 22, low = 190, seconds = line.seconds;
  // At least two pixels a bar: seconds are added up where there are more of them.
  const together = Math.max(1, Math.ceil((seconds.length * 2) / (room - left)));
  const bars = [];
  for (let at = 0; at < seconds.length; at += together) {
    const part = seconds.slice(at, at + together);
    bars.push(Object.fromEntries(KINDS.map(([kind]) => [kind, sum(part, (second) => second[kind]) / part.length])));
  }
  const most = Math.max(1, ...bars.map((bar) => sum(KINDS, ([kind]) => bar[kind])));
  const step = gridStep(most), scale = (low - top) / most, wide = (room - left) / seconds.length, x = (second) => left + second * wide;
  const parts = [];
  for (let value = 0; value <= most; value += step) {
    parts.push(s("line", { class: "grid", x1: left, x2: room, y1: low - value * scale, y2: low - value * scale }), s("text", { class: "axis", x: left - 6, y: low - value * scale + 4, "text-anchor": "end" }, number(value)));
  }
  bars.forEach((bar, at) => {
    let y = low;
    for (const [kind] of KINDS) {
      const tall = bar[kind] * scale;
      y -= tall;
      if (tall > 0) parts.push(s("rect", { class: kind, x: x(at * together).toFixed(2), y: y.toFixed(2), width: Math.max(1, wide * together - (wide * together > 4 ? 1 : 0)).toFixed(2), height: tall.toFixed(2) }));
    }
  });
  const tick = gridStep((seconds.length * 60) / (room - left) * 5);
  for (let second = 0; second <= seconds.length; second += tick) parts.push(s("text", { class: "axis", x: x(second), y: low + 16, "text-anchor": second === 0 ? "start" : x(second) > room - 20 ? "end" : "middle" }, `${number(second)} s`));
  line.events.forEach((event, at) => parts.push(s("line", { class: "event", x1: x(event.second), x2: x(event.second), y1: top - 4, y2: low }), s("text", { x: x(event.second), y: top - 8, "text-anchor": "middle" }, at + 1)));
  return parts;
}

/// The outcome of all requests of a simulation.
function outcome(line) {
  const { ok, delayed, lost, cut } = totals(line);
  if (lost + cut === 0) return { text: delayed === 0 ? "Every request is answered" : `Every request is answered, ${number(delayed)} ${delayed === 1 ? "is" : "are"} delayed`, bad: false };
  const [[first, how], ...more] = [[lost, "lost"], [cut, "cut"]].filter(([count]) => count > 0);
  const text = `${number(first)} of ${many(ok + delayed + lost + cut, "request")} ${first === 1 ? "is" : "are"} ${how}`;
  return { text: [text, ...more.map(([count, what]) => `${number(count)} ${count === 1 ? "is" : "are"} ${what}`)].join(", "), bad: true };
}

function timeline(line) {
  const all = totals(line);
  const says = `${many(all.ok, "request")} answered, ${number(all.delayed)} delayed, ${number(all.lost)} lost, ${number(all.cut)} cut in ${number(line.seconds.length)} s`;
  const svg = s("svg", { class: "time", role: "img", "aria-labelledby": "time-title", "aria-describedby": "time-text" });
  const holder = h("div", null, svg);
  let before = 0;
  new ResizeObserver(([{ contentRect }]) => {
    const room = Math.floor(contentRect.width);
    if (room <= 0 || room === before) return;
    before = room;
    requestAnimationFrame(() => draw(room));
  }).observe(holder);
  const draw = (room) => {
    svg.setAttribute("viewBox", `0 0 ${room} 210`);
    svg.setAttribute("width", room);
    svg.setAttribute("height", 210);
    svg.replaceChildren(s("title", { id: "time-title" }, `Time line of ${line.title}`), s("desc", { id: "time-text" }, `${says}. The table below has each second.`), ...chart(line, room));
  };
  const legend = [...KINDS].reverse().map(([kind, name]) => h("span", null, h("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), `${name}: ${number(all[kind])}`));
  const rows = line.seconds.map((second, at) => ({ at, ...second }));
  const numbers = table("Requests of each second", [
    ["Second", ({ at }) => String(at)], ["Answered", ({ ok }) => number(ok), "number"], ["Delayed", ({ delayed }) => number(delayed), "number"], ["Lost", ({ lost }) => number(lost), "number"], ["Cut", ({ cut }) => number(cut), "number"],
  ], rows, ({ lost }) => (lost ? "lost" : null));
  const events = line.events.length > 0 && h("ol", { class: "cost" }, line.events.map((event) => h("li", null, h("b", null, `${number(event.second)} s`), `: ${event.what}`)));
  return section(2, "Time line", h("p", { class: "facts" }, `${line.title}: ${says}.`), h("figure", { class: "time" }, holder, h("figcaption", null, legend)), events, h("details", { "aria-label": "Each second" }, h("summary", null, "The number of each second"), numbers));
}
