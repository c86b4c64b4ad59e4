// Elements, numbers and words of the page. Text of objects becomes text nodes and attributes only, never markup.

const data = (id) => {
  const script = document.getElementById(id);
  return script && JSON.parse(script.textContent);
};

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name === "on") Object.entries(value).forEach(([event, run]) => node.addEventListener(event, run));
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const h = (name, attributes, ...children) => filled(document.createElement(name), attributes, children);
const s = (name, attributes, ...children) => filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

/// One digit behind the point, ties to even, as the command's own tables.
function oneDigit(value) {
  const tenths = value * 10;
  const whole = Math.floor(tenths);
  const even = tenths - whole === 0.5 ? whole + (whole % 2) : Math.round(tenths);
  return (even / 10 + 0).toFixed(1);
}
const percent = (share) => `${oneDigit(share * 100)} %`;
const number = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 1 });
const skew = (value) => (value === null ? "–" : value.toFixed(2));
const many = (count, one, more = one + "s") => `${number(count)} ${count === 1 ? one : more}`;
const sum = (list, of) => list.reduce((total, item) => total + of(item), 0);
/// Items by a key of theirs, in the order in which keys first come.
function grouped(list, keyOf) {
  const groups = new Map();
  for (const item of list) {
    const key = keyOf(item);
    if (groups.has(key)) groups.get(key).push(item);
    else groups.set(key, [item]);
  }
  return groups;
}
const natural = new Intl.Collator("en", { numeric: true }).compare;

function span(seconds) {
  if (seconds < 60) return `${number(seconds)} s`;
  return seconds % 60 ? `${Math.floor(seconds / 60)} min ${number(seconds % 60)} s` : `${seconds / 60} min`;
}

const FATES = {
  delivered: () => "delivered",
  forwarded: (row) => `forwarded, ${row.direct ? "direct" : "SNAT"}`,
  mixed: (row) => `delivered ${row.here} of ${row.endpoints}, else forwarded, ${row.direct ? "direct" : "SNAT"}`,
  dropped: () => "dropped in silence",
  refused: () => "refused",
};
const fate = (row) => FATES[row.fate](row);
const isLost = (row) => row.fate === "dropped" || row.fate === "refused";
const told = (row) => (row.weight === null ? row.told : `${row.told}, weight ${row.weight}`);

function traffic(row, port) {
  if (row.membership === "excluded") return "no: excluded";
  if (row.membership === "no-node") return "no: no such Node";
  return row.traffic ? (port.failed_open ? "yes: all are unhealthy" : "yes") : "no";
}

/// `healthy` or `unhealthy`, in words that say why where the answer alone does not.
function state(row) {
  if (row.membership === "excluded") return "unhealthy: excluded";
  if (row.membership === "no-node") return "unhealthy: no such Node";
  return row.healthy ? "healthy" : "unhealthy";
}

function label(names, count) {
  return count > names.length || names.length > 1 ? `${names[0]} and ${number(count - 1)} like it` : names[0];
}

let context;
/// As much of a text as fits; of a name the middle is left out, since names differ at their ends.
function fit(text, width, font) {
  context ??= document.createElement("canvas").getContext("2d");
  context.font = `${font} system-ui, sans-serif`;
  if (context.measureText(text).width <= width) return text;
  const letters = [...text];
  let [low, high] = [0, letters.length];
  const cut = (keep) => `${letters.slice(0, Math.ceil(keep / 2)).join("")}…${letters.slice(letters.length - Math.floor(keep / 2)).join("")}`;
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (context.measureText(cut(middle)).width <= width) low = middle;
    else high = middle - 1;
  }
  return cut(low);
}

const section = (level, title, ...content) => h("section", { "aria-label": title }, h(`h${level}`, null, title), content);

/// A wide table scrolls by itself, also by keys; the page does not.
const scrolled = (name, table) => h("div", { class: "scroll", role: "group", "aria-label": `${name}, scrolls`, tabindex: 0 }, table);

const MOST_ROWS = 60;
/// `columns`: title, cell (text or elements), and whether it is a number; the first is the row's header.
function table(caption, columns, rows, classOf = () => null) {
  const cell = ([, of, kind], row, at) => {
    const attributes = at === 0 ? { scope: "row" } : kind ? { class: kind } : null;
    return h(at === 0 ? "th" : "td", attributes, of(row));
  };
  const line = (row) => h("tr", { class: classOf(row) }, columns.map((column, at) => cell(column, row, at)));
  const body = h("tbody", null, rows.slice(0, MOST_ROWS).map(line));
  const head = columns.map(([title, , kind]) => h("th", { scope: "col", class: kind ?? null }, title));
  const drawn = h("table", null, h("caption", null, caption), h("thead", null, h("tr", null, head)), body);
  if (rows.length <= MOST_ROWS) return scrolled(caption, drawn);
  const more = h("button", { type: "button", class: "more" }, `Show ${number(rows.length - MOST_ROWS)} more rows`);
  more.addEventListener("click", () => { body.append(...rows.slice(MOST_ROWS).map(line)); more.remove(); });
  return [scrolled(caption, drawn), more];
}
