// The grid of nodes. Arrow keys move in it, Enter opens one.

import { byId, count, el, many, runs, setText } from "./elements.js";

const STATES = {
  well: ["as far as the others", ""],
  behind: ["behind the others", "~"],
  missing: ["a worker is not heard of", "!"],
  lost: ["gone", "×"],
  spare: ["spare", "s"],
  starting: ["starts", "…"],
};
const MARKS = { ".": "well", b: "behind", m: "missing", f: "finished" };
const LARGE = 48, MEDIUM = 240, SHOWN = 4096;
const FIRST = { lost: 0, missing: 1, behind: 2 };

export class Grid {
  constructor(open) {
    this.open = open;
    this.nodes = new Map();
    this.cells = new Map();
    this.grid = byId("nodes");
    this.find = byId("find");
    this.current = null;
    this.grid.addEventListener("keydown", (event) => this.key(event));
    this.grid.addEventListener("click", (event) => {
      const cell = event.target.closest(".node");
      if (cell) this.choose(cell, true);
    });
    this.find.addEventListener("input", () => this.filter());
    byId("legend").replaceChildren(...Object.entries(STATES).map(([state, [words]]) =>
      el("span", {}, el("i", { class: `s-${state}` }), words)));
  }

  reset(nodes) {
    this.nodes = new Map(Object.entries(nodes));
    this.cells.clear();
    this.lay();
  }

  change(changed, gone) {
    const before = this.nodes.size;
    let anew = false;
    for (const name of gone) this.nodes.delete(name);
    for (const [name, row] of Object.entries(changed)) {
      anew ||= !this.nodes.has(name);
      this.nodes.set(name, row);
      if (this.cells.has(name)) this.draw(name);
    }
    if (anew || gone.length || before !== this.nodes.size) this.lay();
    else this.summary();
  }

  lay() {
    const order = new Intl.Collator("en", { numeric: true }).compare;
    let names = [...this.nodes.keys()].sort((a, b) => order(a, b));
    if (names.length > SHOWN) {
      const first = (name) => FIRST[this.nodes.get(name)[1]] ?? 3;
      names = names.sort((a, b) => first(a) - first(b)).slice(0, SHOWN);
    }
    this.size = names.length <= LARGE ? "large" : names.length <= MEDIUM ? "medium" : "small";
    if (this.grid.dataset.size !== this.size) this.cells.clear();
    this.grid.dataset.size = this.size;
    for (const name of this.cells.keys()) if (!this.nodes.has(name)) this.cells.delete(name);
    const focused = document.activeElement?.dataset?.name;
    this.grid.replaceChildren(...names.map((name) => {
      if (!this.cells.has(name)) {
        this.cells.set(name, el("button", { type: "button", class: "node", tabindex: -1 }));
        this.cells.get(name).dataset.name = name;
        this.draw(name);
      }
      return this.cells.get(name);
    }));
    if (focused && this.cells.has(focused)) this.cells.get(focused).focus();
    if (!this.current || !this.cells.has(this.current)) this.current = names[0] ?? null;
    if (this.current) this.cells.get(this.current).tabIndex = 0;
    this.filter();
    this.summary();
  }

  draw(name) {
    const cell = this.cells.get(name);
    const [domain, state, roles, marks, step, idle, strikes, avoided, draining] = this.nodes.get(name);
    const short = name.split("+", 1)[0];
    const says = [`${short}: ${STATES[state][0]}`, roles && `roles ${runs(roles)}`, step >= 0 && `step ${count(step)}`,
      domain && domain !== short && `domain ${domain}`, strikes && many(strikes, "strike"), avoided && "avoided", draining && "is being taken out"];
    cell.className = `node s-${state}${avoided ? " avoided" : ""}${draining ? " draining" : ""}`;
    cell.setAttribute("aria-label", says.filter(Boolean).join(", "));
    cell.title = says.filter(Boolean).join("\n");
    if (this.size === "small") {
      setText(cell, STATES[state][1]);
      return;
    }
    const what = roles ? `${marks.length === 1 ? "role" : "roles"} ${runs(roles)}` : draining ? "is being taken out" : state === "spare" ? `spare, ${many(idle, "worker")} up` : STATES[state][0];
    cell.replaceChildren(...[el("b", {}, short), el("small", {}, what),
      roles ? el("small", { class: "step" }, step >= 0 ? `step ${count(step)}` : STATES[state][0]) : null,
      el("span", { class: "marks" }, ...[...marks].map((mark) => el("i", { class: `s-${MARKS[mark]}` })))].filter(Boolean));
  }

  summary() {
    const found = {};
    for (const [, state] of this.nodes.values()) found[state] = (found[state] ?? 0) + 1;
    const parts = Object.keys(STATES).filter((state) => found[state]).map((state) => `${count(found[state])} ${state}`);
    const hidden = this.nodes.size - this.cells.size;
    setText(byId("summary"), `${many(this.nodes.size, "node")}: ${parts.join(", ") || "none yet"}`
      + (hidden > 0 ? `; ${count(hidden)} that are well are not shown` : ""));
  }

  filter() {
    const text = this.find.value.trim().toLowerCase();
    for (const [name, cell] of this.cells) {
      const hit = !text || name.toLowerCase().includes(text) || this.nodes.get(name)[0].toLowerCase().includes(text);
      cell.hidden = !hit;
    }
  }

  shown() {
    return [...this.grid.children].filter((cell) => !cell.hidden);
  }

  choose(cell, opens) {
    if (this.current && this.cells.has(this.current)) this.cells.get(this.current).tabIndex = -1;
    this.current = cell.dataset.name;
    cell.tabIndex = 0;
    cell.focus();
    if (opens) this.open(this.current);
  }

  key(event) {
    const cells = this.shown();
    const at = cells.indexOf(document.activeElement);
    if (at < 0) return;
    const top = cells[0].offsetTop;
    const columns = cells.findIndex((cell) => cell.offsetTop > top);
    const row = columns < 0 ? cells.length : columns;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + row, ArrowUp: at - row, Home: 0, End: cells.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (to >= 0 && to < cells.length) this.choose(cells[to], false);
  }
}
