// What has happened: the strip of what time went to, failures with their recoveries, events.

import { byId, causeBar, el, firstLine, long, many, name, svg, table, when } from "./elements.js";

const EVERY = 5;

export class TimeLine {
  constructor() {
    this.items = new Map();
  }

  show(recoveries, phases, events) {
    this.told = [phases, recoveries];
    this.drawn = 0;
    this.list(recoveries);
    byId("events").replaceChildren(...events.map((event) => el("tr", {},
      el("td", {}, when(event.time)), el("td", { class: "n" }, String(event.epoch)), el("td", {}, event.event),
      el("td", { class: "text" }, [event.node, event.reason].filter(Boolean).join(": ")))));
  }

  // What goes on is drawn up to now, every few seconds.
  tick(now) {
    if (!this.told || now - this.drawn < EVERY) return;
    this.drawn = now;
    const [phases, recoveries] = this.told;
    const last = phases[phases.length - 1];
    if (!last) return;
    this.strip([...phases.slice(0, -1), [last[0], last[1], Math.max(last[2], now - last[1])]], recoveries);
  }

  strip(phases, recoveries) {
    const began = phases[0][1];
    const last = phases[phases.length - 1];
    const end = Math.max(last[1] + last[2], began + 1);
    const x = (at) => (1000 * Math.min(Math.max(at - began, 0), end - began)) / (end - began);
    const rects = phases.map(([cause, at, seconds]) => svg("rect", {
      class: `c-${cause}`, x: x(at), y: 10, width: Math.max(x(at + seconds) - x(at), cause === "productive" ? 0 : 1.5), height: 32,
    }, svg("title", {}, `${name(cause)}: ${long(seconds)}`)));
    const marks = recoveries.filter((each) => each.began >= began).map((each) => svg("line", {
      class: "mark", x1: x(each.began), x2: x(each.began), y1: 0, y2: 10,
    }, svg("title", {}, firstLine(each.reason))));
    byId("strip").replaceChildren(
      svg("svg", { viewBox: "0 0 1000 42", preserveAspectRatio: "none", role: "img",
        "aria-label": `what the time went to, with ${many(recoveries.length, "failure")}` }, ...rects, ...marks),
      el("div", { class: "line" }, el("span", {}, when(began)), el("span", {}, when(end))));
    const causes = [...new Set(phases.map(([cause]) => cause))];
    byId("causes").replaceChildren(...causes.map((cause) => el("span", {}, el("i", { class: `c-${cause}` }), name(cause))),
      el("span", {}, "a line above: a failure"));
  }

  list(recoveries) {
    const list = byId("recoveries");
    if (!recoveries.length) {
      list.replaceChildren(el("li", { class: "soft" }, "No failure so far."));
      return;
    }
    const before = this.items;
    this.items = new Map();
    list.replaceChildren(...recoveries.map((each) => {
      const key = `${each.began}`, said = JSON.stringify(each);
      const known = before.get(key);
      if (known && known.said === said) {
        this.items.set(key, known);
        return known.item;
      }
      const item = el("li", {}, this.item(each, known?.item.firstChild.open));
      this.items.set(key, { item, said });
      return item;
    }));
  }

  item(each, open) {
    const bar = el("div", { class: "bar", role: "img" });
    const parts = causeBar(bar, each.parts);
    const moved = Object.entries(each.moved).map(([role, node]) => `role ${role} to ${node}`).join(", ");
    const from = each.origin ? `${each.origin}${each.version === null ? "" : `, step ${each.version}`}` : "not decided yet";
    return el("details", { class: "recovery", open },
      el("summary", {}, el("time", {}, when(each.began)),
        el("span", { class: "took" }, each.seconds === null ? "not done" : long(each.seconds)),
        [each.fault, each.node.split("+", 1)[0], firstLine(each.reason)].filter(Boolean).join(" · ")),
      bar,
      table(["phase", "n:time"], parts.map(([cause, seconds]) => [name(cause), long(seconds)])),
      el("p", {}, `Went on in epoch ${each.epoch} from ${from}${moved ? `; ${moved}` : ""}.`),
      el("pre", {}, each.reason));
  }
}
