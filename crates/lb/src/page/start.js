// The content of the page, according to the parts that it was given.

const MOST_WHOLE = 5;
const judged = data("lb"), after = data("after"), change = data("what-if"), line = data("timeline");
const main = document.getElementById("main");

if (change) {
  document.body.classList.add("compared");
  main.append(compared(change, judged, after));
} else if (judged && judged.services.length <= MOST_WHOLE) {
  if (judged.services.length > 1) main.append(overview(judged, (service) => document.querySelector(`article[aria-label="${CSS.escape(keyOf(service))}"]`)?.scrollIntoView()));
  main.append(...judged.services.map((service) => wholeService(service, judged.services.length > 1 ? 3 : 2, line)));
  if (judged.services.length === 0) main.append(h("p", null, "No Service is reached from outside."));
} else if (judged) {
  const chosen = h("div", { "aria-live": "polite" });
  const show = (service) => chosen.replaceChildren(wholeService(service, 3));
  const go = (service) => { show(service); chosen.scrollIntoView(); };
  main.append(overview(judged, go), chosen);
  const asked = decodeURIComponent(location.hash.slice(1));
  const found = judged.services.find((service) => keyOf(service) === asked);
  // Without a choice the worst.
  if (found) go(found);
  else show(ranked(judged)[0].service);
}
if (line) main.append(timeline(line));
