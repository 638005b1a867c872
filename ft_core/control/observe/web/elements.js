// Elements and words. All text comes in as text: nothing that is said of a job can become markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const byId = (id) => document.getElementById(id);

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function table(head, rows) {
  const cell = (kind, text, name) => el(kind, { class: name }, text instanceof Node ? text : String(text));
  const kinds = head.map((name) => (name.startsWith("n:") ? "n" : name.startsWith("t:") ? "text" : null));
  return el("table", {},
    el("thead", {}, el("tr", {}, ...head.map((name, i) => cell("th", name.replace(/^[nt]:/, ""), kinds[i])))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((text, i) => cell("td", text, kinds[i]))))));
}

export function long(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toPrecision(3)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function size(bytes) {
  for (const [unit, each] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= each) return `${(bytes / each).toFixed(1)} ${unit}`;
  }
  return `${bytes} B`;
}

const pad = (number) => String(number).padStart(2, "0");

export function when(seconds) {
  const at = new Date(seconds * 1000);
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  const time = `${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
  return Date.now() - at > 20 * 3600e3 ? `${day} ${time}` : time;
}

export const name = (cause) => cause.replace("_", "-");
export const count = (number) => (number === null || number === undefined ? "-" : number.toLocaleString("en"));
export const runs = (text) => text.replaceAll(/(\d+)-(\d+):1\b/g, "$1-$2");
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;
export const firstLine = (text) => text.split("\n", 1)[0];

export function causeBar(element, seconds) {
  const parts = Object.entries(seconds).filter(([, each]) => each > 0).sort((a, b) => b[1] - a[1]);
  const whole = parts.reduce((sum, [, each]) => sum + each, 0);
  element.replaceChildren(...parts.map(([cause, each]) => {
    const part = el("i", { class: `c-${cause}`, title: `${name(cause)}: ${long(each)}` });
    part.style.width = `${(100 * each) / whole}%`;
    return part;
  }));
  element.setAttribute("aria-label", parts.map(([cause, each]) => `${name(cause)} ${long(each)}`).join(", "));
  return parts.map(([cause, each]) => [cause, each, whole ? each / whole : 0]);
}
