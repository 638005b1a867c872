// Plots of the numbers over time, by uPlot.

import { byId, el } from "./elements.js";

const PLOTS = [
  ["Seconds of a step", 1, (value) => value],
  ["Goodput: share of the time in steps that count, %", 2, (value) => 100 * value],
  ["Spares", 3, (value) => value],
  ["Steps done", 4, (value) => value],
];
const LOSS = ["Loss, as the script tells it", 5, (value) => value];  // where it does
const MOST = 4000;
const GAP = 0.5;
const HEIGHT = 140;
const DAY = 86400;

const known = (value) => value !== null && value !== undefined;

export class Plots {
  constructor() {
    this.samples = [];
    this.box = byId("plots");
    this.plots = [];
    this.shown = PLOTS;
    this.waits = false;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.make());
    new ResizeObserver(() => this.resize()).observe(this.box);
  }

  reset(samples) {
    this.samples = samples.slice();
    this.make();
  }

  add(sample) {
    const last = this.samples[this.samples.length - 1];
    if (last && sample[0] - last[0] < GAP) return;
    this.samples.push(sample);
    if (known(sample[LOSS[1]]) && !this.shown.includes(LOSS)) this.make();
    if (this.samples.length > MOST) this.samples = this.samples.filter((_, at) => at % 2 === 0);
    if (this.waits || document.hidden) return;
    this.waits = true;
    requestAnimationFrame(() => {
      this.waits = false;
      this.plots.forEach((plot, at) => plot.setData(this.data(at)));
    });
  }

  data(at) {
    const [, column, of] = this.shown[at];
    const number = (value) => (known(value) ? of(value) : null);
    return [this.samples.map((sample) => sample[0]), this.samples.map((sample) => number(sample[column]))];
  }

  make() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    this.plots.forEach((plot) => plot.destroy());
    this.box.replaceChildren();
    const times = (_, ticks) => ticks.map((at) => {
      const date = new Date(at * 1000);
      const long = ticks.length > 1 && ticks.at(-1) - ticks[0] > DAY;
      const part = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
      const short = ticks.length > 1 && ticks[1] - ticks[0] < 60 ? { ...part, second: "2-digit" } : part;
      return date.toLocaleString("en", long ? { month: "short", day: "numeric", ...part } : short);
    });
    const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { stroke: color("--grid"), width: 1 } };
    this.shown = this.samples.some((sample) => known(sample[LOSS[1]])) ? [...PLOTS, LOSS] : PLOTS;
    this.plots = this.shown.map(([title], at) => {
      const place = el("div", { class: "plot" }, el("h3", {}, title));
      this.box.append(place);
      const range = (_, low, high) => (low === null ? [0, 1] : [Math.min(0, low), high <= 0 ? 1 : high * 1.08]);
      return new uPlot({
        width: place.clientWidth - 20 || 300, height: HEIGHT, legend: { show: false },
        cursor: { sync: { key: "job" }, drag: { x: true, y: false } },
        scales: { y: { range } },
        axes: [{ ...axis, values: times, space: 80, size: 30 }, { ...axis, size: 52 }],
        series: [{}, { stroke: color("--curve"), width: 1.5, spanGaps: true, points: { show: false } }],
      }, this.data(at), place);
    });
    this.box.setAttribute("role", "img");
    this.box.setAttribute("aria-label", `plots over time: ${this.shown.map(([title]) => title).join("; ")}`);
  }

  resize() {
    for (const plot of this.plots) {
      const width = plot.root.parentNode.clientWidth - 20;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }
}
