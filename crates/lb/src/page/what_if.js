// Before and after a change, beside each other.

const arrow = (old, now) => (old === now ? old : `${old} → ${now}`);

function cost(change) {
  const { cost } = change;
  const about = (sure) => (sure ? "" : "about ");
  const rate = change.lost_requests === null || change.lost_seconds === 0 ? null : change.lost_requests / change.lost_seconds;
  const lost = cost.lost.map((loss) => h("li", null, h("b", null, `${percent(loss.share)} of the requests are lost for up to ${about(loss.sure)}${span(loss.seconds)}`),
    rate === null ? "" : ` = ${many(Math.round(rate * loss.share * loss.seconds), "request")}`, `: ${loss.why}`));
  const cut = cost.cut.map(([share, what]) => h("li", null, h("b", null, `${percent(share)} of the open connections are cut`), `: ${what}`));
  return h("ul", { class: "cost" },
    lost.length ? lost : h("li", null, h("b", null, "No request is lost.")),
    cut.length ? cut : h("li", null, "No connection is cut."),
    cost.drain && h("li", null, h("b", null, "Lossless with ", h("code", null, `traffic-policy.io/drain: "${Math.ceil(cost.drain[0])}s"`)), cost.drain[1] ? "" : " (the balancer's times are assumed)"),
    cost.advice.map((advice) => h("li", null, advice)));
}

function comparedNodes(change) {
  const groups = [...grouped(change.nodes, (node) => JSON.stringify([node.before, node.after])).values()]
    .flatMap((group) => (group.length > 8 ? [{ ...group[0], names: group.map((node) => node.name) }] : group.map((node) => ({ ...node, names: [node.name] }))));
  const both = (of) => ({ before, after }) => arrow(before ? of(before) : "–", after ? of(after) : "–");
  const loses = ({ after }) => after !== null && after.traffic && /^(dropped|refused)/.test(after.request);
  return table("Nodes before and after", [
    ["Node", ({ names }) => label(names, names.length)],
    ["Pods", both((side) => number(side.pods)), "number"],
    ["Traffic", both((side) => (side.traffic ? "yes" : "no"))],
    ["A request there", both((side) => side.request)],
    ["Share of each", both((side) => percent(side.share)), "number"],
  ], groups, (row) => (loses(row) ? "lost" : null));
}

function comparedPods(change) {
  const share = (value) => (value === null ? "–" : percent(value));
  return table("Pods before and after", [
    ["Pod", ({ pod }) => pod], ["Before", ({ before }) => share(before), "number"], ["After", ({ after }) => share(after), "number"],
  ], [...change.pods].sort((a, b) => natural(a.pod, b.pod)));
}

function compared(change, before, after) {
  const name = `${change.namespace}/${change.name}`;
  const sides = [["Before", before], ["After", after]].map(([when, document]) => {
    const service = document.services[0];
    return section(3, when, facts(service), verdict(service, service.ports[0]), service.ports.map((port) => [
      service.ports.length > 1 && h("h4", null, portName(port)), figures(port), map(`Map of ${name} ${when.toLowerCase()}, ${portName(port)}`, service, port)]));
  });
  return h("article", { "aria-label": `What if: ${name}` }, h("h2", null, change.changes.join(", ")),
    section(3, "What it costs", cost(change)), h("div", { class: "sides" }, sides),
    section(3, "What changes", h("p", { class: "facts" }, `Skew ${arrow(skew(change.skew[0]), skew(change.skew[1]))} (largest share ÷ mean).`), comparedNodes(change), comparedPods(change)),
    h("div", { class: "sides" }, [["Before", before], ["After", after]].map(([when, document]) => {
      const found = findings(document.services[0], 3);
      found?.setAttribute("aria-label", `Findings ${when.toLowerCase()}`);
      found?.firstChild.append(` ${when.toLowerCase()}`);
      return found ?? section(3, `Findings ${when.toLowerCase()}`, h("p", null, "None."));
    })));
}
