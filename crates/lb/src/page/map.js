// The map: the balancer, its nodes and their pods, and the share on each edge.

const APART = 14, MOST_BOXES = 40, MOST_PODS = 6, NONE = 1e-9;
const NODE = 66, POD = 36, GAP = 14, WIDE = 880;

/// Nodes with their pods, as they are drawn: each by itself where there are few, else those that are alike in one box.
function places(port) {
  const byNode = grouped(port.pods, (pod) => pod.node);
  const podsOf = (names) => names.flatMap((name) => byNode.get(name) ?? []);
  const few = port.nodes <= APART;
  let found = port.rows.flatMap((row) => {
    const apart = few && row.names.length === row.nodes;
    return (apart ? row.names.map((name) => [name]) : [row.names]).map((names) => ({
      row, names, count: apart ? 1 : row.nodes, share: apart ? row.share / row.nodes : row.share,
      pods: row.nodes === 1 || apart ? podsOf(names) : [],
    }));
  });
  if (few) return found.sort((a, b) => natural(a.names[0], b.names[0]));
  const alike = grouped(found, ({ row, pods }) => {
    const shares = [...new Set(pods.map((pod) => pod.share.toFixed(9)))];
    return JSON.stringify([row.pods, told(row), row.membership, row.traffic, row.fate, row.here, row.endpoints, (row.share / row.nodes).toFixed(9), shares]);
  });
  found = [...alike.values()].map((group) => ({
    row: group[0].row, names: group.flatMap(({ names }) => names).sort(natural), count: sum(group, ({ count }) => count),
    share: sum(group, ({ share }) => share), pods: group.flatMap(({ pods }) => pods),
  }));
  return found.sort((a, b) => b.share - a.share || natural(a.names[0], b.names[0]));
}

/// The pods of a place as boxes, with what comes to each from its own node and what is forwarded.
function boxes(place) {
  const { row, pods, share } = place;
  const served = pods.filter((pod) => pod.share > NONE);
  const local = isLost(row) || row.endpoints === 0 ? 0 : (share * row.here) / row.endpoints;
  place.forwarded = isLost(row) ? 0 : share - local;
  const own = (pod) => (pod.share > NONE ? local / served.length : 0);
  const sets = pods.length <= MOST_PODS && place.count === 1 ? pods.map((pod) => [pod])
    : [...grouped(pods, (pod) => `${pod.ready} ${pod.share.toFixed(9)}`).values()];
  const shown = sets.length <= MOST_PODS ? sets : [pods];
  return shown.map((set) => {
    const direct = sum(set, own), total = sum(set, (pod) => pod.share);
    const each = set.map((pod) => pod.share);
    const [least, most] = [Math.min(...each), Math.max(...each)].map(percent);
    const name = (pod) => pod.pod ?? pod.addresses[0];
    return {
      name: set.length === 1 ? name(set[0]) : many(set.length, "pod"),
      full: set.slice(0, 20).map(name).join(", "),
      detail: [set.some((pod) => !pod.ready) && "terminating", set.length > 1 && (least === most ? `${least} each` : `${least} to ${most} each`)].filter(Boolean).join(", "),
      share: total, direct, indirect: Math.max(0, total - direct),
    };
  });
}

const width = (share) => 1.5 + 14 * Math.min(1, share);
const curve = (x1, y1, x2, y2) => `M${x1} ${y1}C${(x1 + x2) / 2} ${y1} ${(x1 + x2) / 2} ${y2} ${x2} ${y2}`;
const edge = (kind, d, share) => s("path", { class: `edge ${kind}`, d, "stroke-width": width(share).toFixed(1), "data-share": share });
const words = (x, y, text, kind, anchor = "start") => s("text", { x, y, class: kind, "text-anchor": anchor }, text);

/// A shape for each state, so that colour is not all that tells them apart.
function sign(kind, x, y) {
  if (kind === "healthy") return [s("circle", { class: "sign healthy", cx: x, cy: y, r: 8 }), s("path", { class: "stroke", d: `M${x - 3.6} ${y + 0.3}l2.6 2.8 4.8 -5.6` })];
  if (kind === "lost") return [s("path", { class: "sign lost", d: `M${x - 4} ${y - 8.5}h8l4.5 4.5v8l-4.5 4.5h-8l-4.5 -4.5v-8z` }), s("path", { class: "stroke", d: `M${x - 3} ${y - 3}l6 6m0 -6l-6 6` })];
  return [s("rect", { class: "sign unhealthy", x: x - 8, y: y - 8, width: 16, height: 16, rx: 2 }), s("path", { class: "stroke", d: `M${x - 4} ${y}h8` })];
}

function nodeBox(place, x, y, wide) {
  const { row, names, count, share } = place;
  const kind = row.healthy ? "healthy" : "unhealthy";
  const lost = isLost(row) && share > NONE;
  const back = count > 1 ? [6, 3].map((by) => s("rect", { class: "box", x: x + by, y: y + by, width: wide, height: NODE, rx: 8 })) : [];
  const answer = row.told === "" ? "" : ` · ${told(row)}`;
  const pods = row.pods === 0 ? "no pod" : many(row.pods, "pod") + (count > 1 ? " each" : "");
  const open = row.traffic && !row.healthy ? " · sent to anyway" : "";
  const text = wide - 38;
  const here = row.fate === "mixed" ? `${row.here} of ${row.endpoints} here, else forwarded` : fate(row);
  return s("g", { class: `node ${kind}` }, back, s("title", null, names.slice(0, 30).join(", ") + (count > 30 ? " …" : "")),
    s("rect", { class: "box", x, y, width: wide, height: NODE, rx: 8 }), sign(kind, x + 17, y + 20),
    words(x + 32, y + 24, count > 1 ? `${number(count)} nodes` : fit(names[0], text, "600 13px"), "name"),
    words(x + 32, y + 41, fit(`${state(row)}${answer} · ${pods}${open}`, text, "11.5px"), "small"),
    words(x + 32, y + 57, fit(row.traffic ? here : `a request there: ${here}`, text, "11.5px"), lost ? "small bad" : "small"));
}

function podBox(pod, x, y, wide) {
  const share = percent(pod.share);
  return s("g", { class: "pod" }, s("title", null, pod.full), s("rect", { class: "box", x, y, width: wide, height: POD, rx: 18 }),
    words(x + 16, y + (pod.detail ? 15 : 22), fit(pod.name, wide - 80, "12px"), "inside"),
    pod.detail && words(x + 16, y + 29, fit(pod.detail, wide - 30, "11.5px"), "small"),
    words(x + wide - 14, y + (pod.detail ? 15 : 22), share, "share inside pod-share", "end"));
}

function lostBox(place, x, y, wide) {
  const what = place.row.fate === "refused" ? "refused" : wide < 240 ? "dropped" : "dropped in silence";
  return s("g", { class: "gone" }, s("rect", { class: "box", x, y, width: wide, height: POD, rx: 4 }), sign("lost", x + 18, y + 18),
    words(x + 34, y + 22, fit(what, wide - 100, "12px"), "inside bad"), words(x + wide - 14, y + 22, percent(place.share), "share inside lost", "end"));
}

const forwardsTo = (list) => list.some((place) => place.forwarded > NONE);
/// From pod to pod; two edges with their shares need more room than one.
const podPitch = (list) => POD + (forwardsTo(list) ? 22 : 8);

/// Three columns: the balancer, nodes, pods; what is forwarded goes through a line between nodes and pods.
function columns(total, list, balancer) {
  const nodeX = 215, nodeW = Math.min(285, total * 0.27), podW = Math.min(300, total * 0.28), podX = total - podW;
  const forwards = forwardsTo(list);
  const right = nodeX + nodeW, bus = Math.round(right + (podX - right) * 0.47);
  const pitch = podPitch(list);
  const under = [], over = [];
  let y = 4, first = null, last = 0;
  const meet = (at) => { first = Math.min(first ?? at, at); last = Math.max(last, at); };
  const middle = sum(list, (place) => place.height + GAP) / 2 - GAP / 2 + 4;
  for (const place of list) {
    const nodeY = y + Math.max(0, (place.height - NODE) / 2 - 2), centre = nodeY + NODE / 2;
    under.push(edge(place.row.traffic ? "" : "idle", curve(112, middle, nodeX, centre), place.share));
    const text = place.row.traffic ? percent(place.share) : "nothing";
    // Where the edge does not come from.
    const beside = centre < middle ? -width(place.share) / 2 - 5 : width(place.share) / 2 + 14;
    over.push(words(nodeX - 9, centre + beside, text, place.row.traffic ? "share to-node" : "small", "end"), nodeBox(place, nodeX, nodeY, nodeW));
    const many = place.count > 1 ? 6 : 0;
    let podY = y + Math.max(0, (place.height - place.boxes.length * pitch + pitch - POD) / 2);
    for (const pod of place.boxes) {
      const into = podY + POD / 2;
      if (pod.direct > NONE) {
        under.push(edge("", curve(right + many, centre - 8, podX, into - 5), pod.direct));
        over.push(words(podX - 12, into - 11 - width(pod.direct) / 2, percent(pod.direct), "share", "end"));
      }
      if (pod.indirect > NONE) {
        meet(into + 7);
        under.push(edge("forwarded", `M${bus} ${into + 7}H${podX - 8}`, pod.indirect), s("path", { class: "head", d: `M${podX - 1} ${into + 7}l-9 -5v10z` }));
        over.push(words(podX - 14, into + 22 + width(pod.indirect) / 2, percent(pod.indirect), "share forwarded", "end"));
      }
      over.push(podBox(pod, podX, podY, podW));
      podY += pitch;
    }
    if (place.forwarded > NONE) {
      meet(centre + 14);
      under.push(edge("forwarded", `M${right + many} ${centre + 14}H${bus}`, place.forwarded));
      over.push(words(right + many + 10, centre + 30 + width(place.forwarded) / 2, percent(place.forwarded), "share forwarded"));
    }
    if (isLost(place.row) && place.share > NONE) {
      const at = centre - POD / 2;
      under.push(edge("lost", `M${right + many} ${centre}H${podX}`, place.share));
      over.push(words(podX - 12, centre - 6 - width(place.share) / 2, percent(place.share), "share lost", "end"), lostBox(place, podX, at, podW));
    }
    y += place.height + GAP;
  }
  if (forwards) under.push(s("path", { class: "edge forwarded", d: `M${bus} ${first}V${last}`, "stroke-width": 3 }));
  const box = s("g", { class: "balancer" }, s("rect", { class: "box", x: 1, y: middle - 32, width: 111, height: 64, rx: 12 }),
    words(56, middle - 4, fit(balancer, 96, "600 13px"), "name", "middle"), words(56, middle + 14, "balancer", "small", "middle"));
  return { height: Math.max(y, middle + 40), parts: [under, box, over] };
}

/// One column, for phones and beside each other: nodes below the balancer, pods below their node.
function tree(total, list, balancer) {
  const forwards = forwardsTo(list);
  const slim = total < 420;
  const nodeX = slim ? 61 : 74, podX = nodeX + 24, end = total - (forwards ? (slim ? 57 : 66) : 8), bus = total - 8;
  const under = [], over = [], meets = [];
  let y = 46, trunk = 0, idle = 0;
  for (const place of list) {
    const centre = y + NODE / 2, text = place.row.traffic ? percent(place.share) : "0 %";
    if (place.row.traffic) trunk = centre;
    else idle = centre;
    under.push(edge(place.row.traffic ? "" : "idle", `M10 ${centre - 10}q0 10 10 10H${nodeX}`, place.share));
    over.push(words(nodeX - 3, centre - 4 - width(place.share) / 2, text, place.row.traffic ? "share to-node" : "small", "end"), nodeBox(place, nodeX, y, end - nodeX - 6));
    if (place.forwarded > NONE) {
      meets.push(centre);
      under.push(edge("forwarded", `M${end - 6} ${centre}H${bus}`, place.forwarded));
      over.push(words(bus - 6, centre - 4 - width(place.forwarded) / 2, percent(place.forwarded), "share forwarded", "end"));
    }
    let podY = y + NODE + 10;
    const from = y + NODE;
    const lost = isLost(place.row) && place.share > NONE;
    for (const pod of place.boxes) {
      const into = podY + POD / 2;
      if (pod.direct > NONE) under.push(edge("", `M${podX - 12} ${from}V${into - 8}q0 8 8 8h4`, pod.direct));
      if (pod.indirect > NONE) {
        meets.push(into);
        under.push(edge("forwarded", `M${bus} ${into}H${end + 4}`, pod.indirect), s("path", { class: "head", d: `M${end - 5} ${into}l9 -5v10z` }));
        over.push(words(bus - 6, into - 4 - width(pod.indirect) / 2, percent(pod.indirect), "share forwarded", "end"));
      }
      // There is no room for it on the edge.
      const detail = pod.direct > NONE && pod.indirect > NONE ? [pod.detail, `${percent(pod.direct)} from here`].filter(Boolean).join(", ") : pod.detail;
      over.push(podBox({ ...pod, detail }, podX, podY, end - podX - 6));
      podY += POD + 8;
    }
    if (lost) {
      under.push(edge("lost", `M${podX - 12} ${from}V${podY + 10}q0 8 8 8h4`, place.share));
      over.push(lostBox(place, podX, podY, end - podX - 6));
      podY += POD + 8;
    }
    y = Math.max(podY, y + NODE + 10) + (place.count > 1 ? 8 : 6);
  }
  if (forwards) under.push(s("path", { class: "edge forwarded", d: `M${bus} ${Math.min(...meets)}V${Math.max(...meets)}`, "stroke-width": 3 }));
  if (trunk) under.push(s("path", { class: "edge", d: `M10 38V${trunk - 10}`, "stroke-width": 3 }));
  if (idle > trunk) under.push(s("path", { class: "edge idle", d: `M10 ${Math.max(38, trunk - 10)}V${idle - 10}` }));
  const box = s("g", { class: "balancer" }, s("rect", { class: "box", x: 1, y: 1, width: Math.min(220, total - 2), height: 36, rx: 12 }),
    words(14, 24, fit(`balancer ${balancer}`, 190, "600 13px"), "name"));
  return { height: y, parts: [under, box, over] };
}

let maps = 0;
/// The map of a port of a Service, drawn anew when its room changes.
function map(title, service, port) {
  const all = places(port);
  const list = all.slice(0, MOST_BOXES);
  for (const place of list) place.boxes = boxes(place);
  const pitch = podPitch(list);
  for (const place of list) place.height = Math.max(NODE + (place.count > 1 ? 6 : 0), place.boxes.length * pitch - pitch + POD);
  const number = ++maps;
  const sentence = ({ row, names, count, share }) => `${count > 1 ? label(names, count) : names[0]}: ${state(row)}, ${share > NONE ? `${percent(share)} of the requests, ${fate(row)}` : "no requests"}.`;
  const desc = [...list.slice(0, 12).map(sentence), list.length > 12 ? "The rest is in the tables." : "The tables below have the same numbers."].join(" ");
  const svg = s("svg", { class: "map", role: "img", "aria-labelledby": `map-${number}`, "aria-describedby": `map-text-${number}` });
  const draw = (room) => {
    const drawn = room >= WIDE ? columns(room, list, service.balancer.name) : tree(room, list, service.balancer.name);
    svg.setAttribute("viewBox", `0 0 ${room} ${drawn.height}`);
    svg.setAttribute("width", room);
    svg.setAttribute("height", drawn.height);
    svg.replaceChildren(s("title", { id: `map-${number}` }, title), s("desc", { id: `map-text-${number}` }, desc), ...drawn.parts.flat());
  };
  const holder = h("div", null, svg);
  let before = 0;
  new ResizeObserver(([{ contentRect }]) => {
    const room = Math.floor(contentRect.width);
    if (room > 0 && room !== before) requestAnimationFrame(() => draw((before = room)));
  }).observe(holder);
  const key = (part, text) => h("span", null, part, text);
  const icon = (...parts) => s("svg", { width: 24, height: 18, "aria-hidden": "true" }, parts);
  const legend = [
    key(icon(sign("healthy", 12, 9)), "healthy for the balancer"), key(icon(sign("unhealthy", 12, 9)), "unhealthy"),
    key(icon(edge("", "M0 9H24", 0.2)), "share of requests"),
    forwardsTo(list) && key(icon(edge("forwarded", "M0 9H24", 0.05)), list.some(({ row }) => row.direct) ? "forwarded to another node, unchanged (direct)" : "forwarded to another node, source rewritten (SNAT)"),
    port.lost > NONE && key(icon(sign("lost", 12, 9)), "lost"),
    all.length > list.length && key("", `${all.length - list.length} more groups are in the tables`),
  ];
  return h("figure", null, holder, h("figcaption", null, legend));
}
