// The text about a Service beside its map: verdict, figures, tables and findings.

/// The outcome of requests to a port while nothing changes.
function standing(port) {
  const taking = sum(port.rows, (row) => (row.traffic ? row.nodes : 0));
  const text = port.lost > NONE ? `${percent(port.lost)} of the requests are lost`
    : taking === 0 ? "No node gets traffic: no request reaches a pod" : "Every request reaches a pod";
  return { text, bad: port.lost > NONE || taking === 0 };
}

/// The verdict on a Service; after a simulation it is the outcome of all requests, and the judgement of the start stands beside it.
function verdict(service, port, line) {
  const worst = ["error", "warning", "note"].find((level) => service.findings.some((finding) => finding.level === level));
  const now = standing(port);
  const { text, bad } = line ? outcome(line) : now;
  const found = tally(service) || "no findings";
  return h("p", { class: `verdict ${bad || worst === "error" ? "error" : worst === "warning" ? "warning" : ""}` }, h("strong", null, text), h("span", null, line ? `At the start: ${now.text}; ${found}` : found));
}

function figures(port) {
  const taking = sum(port.rows, (row) => (row.traffic ? row.nodes : 0));
  const figure = (name, value, bad) => h("div", { class: bad ? "bad" : null }, h("dt", null, name), h("dd", null, value));
  return h("dl", { class: "figures" },
    figure("healthy nodes", `${number(port.healthy)} of ${number(port.nodes)}`, port.healthy === 0),
    figure("nodes with traffic", number(taking), taking === 0),
    figure("ready pods", number(port.pods.filter((pod) => pod.ready).length), false),
    figure("skew (max ÷ mean)", skew(port.skew), false),
    figure("requests lost", percent(port.lost), port.lost > NONE));
}

function facts(service) {
  const { balancer } = service;
  const bold = (text) => h("b", null, text);
  const sure = ({ value, sure }, text = String) => text(value) + (sure ? "" : " (assumed)");
  const { check } = balancer;
  const asked = service.ports[0]?.asked;
  const asks = check.asks.value === "nothing" ? "Nodes are not asked: a speaker on them announces the address."
    : `It checks each node by ${asked} every ${sure(check.interval_seconds, span)}, waits ${sure(check.timeout_seconds, span)} for an answer; a node is unhealthy after ${sure(check.failures, (n) => many(n, "failure"))}, healthy after ${sure(check.successes, (n) => many(n, "success", "successes"))}.`;
  return h("p", { class: "facts" }, service.type, ", externalTrafficPolicy ", bold(service.external_policy), ", balancer ", bold(balancer.name), ` (${balancer.why}). `, asks);
}

const tag = (kind, text) => h("span", { class: `tag ${kind}` }, text);

function nodeTable(caption, port) {
  const rows = places({ ...port, pods: [] }).sort((a, b) => natural(a.names[0], b.names[0]));
  return table(caption, [
    ["Node", ({ names, count }) => (count > 1 ? label(names, count) : names[0])],
    ["Pods", ({ row }) => number(row.pods), "number"],
    ["Balancer sees", ({ row }) => tag(row.healthy ? "healthy" : "unhealthy", (row.healthy ? "✓ " : "– ") + state(row))],
    ["Asked", () => port.asked],
    ["Told", ({ row }) => told(row)],
    ["Traffic", ({ row }) => traffic(row, port)],
    ["A request there", ({ row }) => (isLost(row) && row.traffic ? tag("lost", "✕ " + fate(row)) : fate(row))],
    ["Share", ({ share }) => percent(share), "number"],
  ], rows, ({ row }) => (isLost(row) && row.traffic ? "lost" : null));
}

function podTable(caption, port) {
  if (port.pods.length === 0) return h("p", null, "No pod takes connections.");
  const pods = [...port.pods].sort((a, b) => b.share - a.share || natural(a.pod ?? a.addresses[0], b.pod ?? b.addresses[0]));
  const counted = pods.filter((pod) => pod.ready || pod.share > 0);
  const most = Math.max(...pods.map((pod) => pod.share), NONE), mean = sum(counted, (pod) => pod.share) / Math.max(1, counted.length);
  const meter = (pod) => h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: `width:${(pod.share / most) * 100}%` }), h("b", { style: `left:${(mean / most) * 100}%` }));
  return table(caption, [
    ["Pod", (pod) => (pod.pod ?? pod.addresses[0]) + (pod.ready ? "" : " (terminating)")],
    ["Node", (pod) => pod.node ?? "–"],
    ["Address", (pod) => pod.addresses.join(", ")],
    ["Share", (pod) => percent(pod.share), "number"],
    ["beside the mean", meter],
  ], pods);
}

function yaml(text) {
  const code = h("pre", null, h("code", null, text));
  const button = h("button", { type: "button", "aria-label": "Copy the YAML" }, "Copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
    }
  });
  return h("div", { class: "yaml" }, code, button);
}

function findings(service, level) {
  if (service.findings.length === 0) return null;
  const item = (finding) => h("li", { class: finding.level },
    h("p", null, h("span", { class: "level" }, finding.level), finding.what, " ", h("code", null, finding.code)),
    finding.fix && h("p", null, h("b", null, "Fix: "), finding.fix), finding.yaml && yaml(finding.yaml));
  return section(level, "Findings", h("ul", { class: "findings" }, service.findings.map(item)));
}

const portName = (port) => port.ports.map((key) => key.replaceAll("/", " ").trim()).join(", ");
const reached = (port) => [...new Set(port.frontends.map((frontend) => frontend.replace(/^NodePort .*:/, "node port ").replace(/^\w+ (?=[\d[])/, "")))].join(", ");

/// `level` is that of the headings; at level 2 the page has the name above them. `line` is the time line of a simulation, if there is one.
function wholeService(service, level, line) {
  const name = keyOf(service);
  const title = (what, port) => `${what} of ${name}, ${portName(port)}`;
  const drawn = (port) => section(level, `Port ${portName(port)}${line ? ", at the start" : ""}`, h("p", { class: "facts" }, `Reached by ${reached(port)}`), figures(port), map(title("Map", port), service, port));
  const tables = (port) => [nodeTable(title("Nodes", port), port), podTable(title("Pods", port), port)];
  return h("article", { "aria-label": name }, level > 2 && h("h2", null, name), facts(service), verdict(service, service.ports[0], line),
    service.ports.map(drawn), findings(service, level), section(level, "Tables", service.ports.map(tables)));
}

const keyOf = (service) => `${service.namespace}/${service.name}`;
const count = (service, level) => service.findings.filter((finding) => finding.level === level).length;
const tally = (service) => ["error", "warning", "note"].map((level) => [level, count(service, level)]).filter(([, found]) => found).map(([level, found]) => many(found, level)).join(", ");

/// Ports of all Services, the worst first.
function ranked(document) {
  const rows = document.services.flatMap((service) => service.ports.map((port, at) => ({ service, port, at })));
  const by = (level) => (a, b) => count(b.service, level) - count(a.service, level);
  return rows.sort((a, b) => by("error")(a, b) || b.port.lost - a.port.lost || by("warning")(a, b) || natural(keyOf(a.service), keyOf(b.service)) || a.at - b.at);
}

/// All Services in one table, with a field that filters them by name.
function overview(document, choose) {
  const rows = ranked(document);
  const link = ({ service, port, at }) => h("a", { href: `#${encodeURIComponent(keyOf(service))}`, on: { click: () => choose(service) } }, keyOf(service) + (at ? `: ${portName(port)}` : ""));
  const drawn = (found) => table("Services", [
    ["Service", link], ["Policy", ({ service }) => service.external_policy], ["Balancer", ({ service }) => service.balancer.name],
    ["Nodes", ({ port }) => number(port.nodes), "number"], ["Healthy", ({ port }) => number(port.healthy), "number"],
    ["Traffic", ({ port }) => number(sum(port.rows, (row) => (row.traffic ? row.nodes : 0))), "number"],
    ["Pods", ({ port }) => number(port.pods.filter((pod) => pod.ready).length), "number"],
    ["Skew", ({ port }) => skew(port.skew), "number"], ["Lost", ({ port }) => percent(port.lost), "number"],
    ["Findings", ({ service }) => tally(service) || "–"],
  ], found, ({ port }) => (port.lost > NONE ? "lost" : null));
  const field = h("input", { type: "search", "aria-label": "Services whose name contains" , placeholder: "Services whose name contains …" });
  const place = h("div", null, drawn(rows));
  field.addEventListener("input", () => place.replaceChildren(...[drawn(rows.filter(({ service }) => keyOf(service).includes(field.value)))].flat()));
  return section(2, `${many(document.services.length, "Service")} on ${many(document.nodes, "node")}`, document.services.length > 20 && field, place);
}
