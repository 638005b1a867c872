// The page of a job: all that is known once, then what changes, as the controller says it.

import { byId, causeBar, count, el, long, name, setText } from "./elements.js";
import { Details } from "./details.js";
import { Grid } from "./grid.js";
import { Plots } from "./plots.js";
import { TimeLine } from "./timeline.js";

const QUIET = 10;
const KEY = "ft-token";

const token = {
  text: "",
  may: false,
  headers() { return this.text ? { Authorization: `Bearer ${this.text}` } : {}; },
  async use(text) {
    this.text = text;
    try {
      this.may = Boolean(text) && (await fetch("api/may", { headers: this.headers() })).ok;
    } catch {
      this.may = false;
    }
    if (this.may) sessionStorage.setItem(KEY, text);
    else sessionStorage.removeItem(KEY);
    setText(byId("access"), this.may ? "operator" : "read only");
    return this.may;
  },
  fromAddress() {
    const given = new URLSearchParams(location.hash.slice(1)).get("token");
    if (given) history.replaceState(null, "", location.pathname); // it stays in no history
    return given ?? sessionStorage.getItem(KEY) ?? "";
  },
};

let hide = 0;
function say(text) {
  byId("said").textContent = text;
  clearTimeout(hide);
  hide = setTimeout(() => { byId("said").textContent = ""; }, 8000);
}

const details = new Details(token, say);
const grid = new Grid((node) => details.open(node));
const line = new TimeLine();
const plots = new Plots();
let heard = 0;

function cards(job) {
  const percent = (part) => (part === null ? "-" : `${(100 * part).toFixed(1)} %`);
  const groups = job.groups && job.groups[0] + job.groups[1] > 1;
  const found = [
    ["steps done", count(job.step)],
    ["goodput", percent(job.goodput)],
    ["roles that take part", `${count(job.roles)} of ${count(job.world)}`, job.roles < job.world && job.step > 0],
    groups ? ["replica groups", `${job.groups[0]} of ${job.groups[0] + job.groups[1]}`, job.groups[1] > 0] : null,
    ["spares", count(job.spares), job.spares === 0],
    ["recoveries", count(job.recoveries)],
    ["steps done again", count(job.redone)],
    ["parts with too few copies", count(job.below), job.below > 0],
    ["suspected of a hang", count(job.suspected), job.suspected > 0],
    ["since a durable checkpoint", job.durable === null ? "none" : long(Math.max(0, Date.now() / 1000 - job.durable))],
  ].filter(Boolean);
  const box = byId("cards");
  if (box.children.length !== found.length) {
    box.replaceChildren(...found.map(() => el("div", {}, el("dt"), el("dd"))));
  }
  found.forEach(([label, value, bad], at) => {
    const card = box.children[at];
    setText(card.firstChild, label);
    setText(card.lastChild, value);
    card.className = bad ? "bad" : "";
  });
}

const named = {};

function showRoles(id, what, kind, roles) {
  const said = JSON.stringify(roles);
  if (said === (named[id] ?? "[]")) return;
  named[id] = said;
  byId(id).hidden = !roles.length;
  byId(id).replaceChildren(el("p", {}, what, ...roles.map(([role, node, score, part]) =>
    el("button", { type: "button", class: kind, onclick: () => { details.open(node); details.flight(role, node); } },
      `role ${role} on ${node.split("+", 1)[0]}` + (score ? `: ${score.toFixed(2)} times (${part})` : "")))));
}

function showTrouble(job) {
  const found = [job.complaint && `It does not get on: ${job.complaint}`, job.unprotected && `Not protected: ${job.unprotected}`,
    job.every > 1 && `A version is protected every ${job.every} steps, so up to ${2 * job.every - 1} are done again`];
  const said = found.filter(Boolean);
  byId("trouble").hidden = !said.length;
  setText(byId("trouble"), said.join(". "));
}

function showJob(job) {
  showTrouble(job);
  showRoles("hang", "Others wait longer than usual for: ", "danger", job.suspects);
  showRoles("slow", "Takes longer than its like for its own part of a step: ", "", job.stragglers);
  setText(byId("job"), `Job ${job.name}`);
  setText(byId("phase"), job.phase);
  byId("phase").dataset.phase = job.phase;
  document.title = `${job.name}: ${job.phase}, step ${count(job.step)}`;
  cards(job);
  const parts = causeBar(byId("spent"), job.seconds);
  byId("spent-table").replaceChildren(...parts.filter(([, seconds]) => seconds >= 0.05).map(([cause, seconds, share]) => el("tr", {},
    el("td", {}, el("span", { class: "legend" }, el("span", {}, el("i", { class: `c-${cause}` }), name(cause)))),
    el("td", { class: "n" }, long(seconds)), el("td", { class: "n" }, `${(100 * share).toFixed(2)} %`))));
}

function take(news) {
  heard = Date.now();
  showLive();
  if (news.job?.phase) showJob(news.job);
  if (news.recoveries) line.show(news.recoveries, news.phases, news.events);
  const sample = news.sample ?? news.series?.at(-1);
  if (sample) line.tick(sample[0]);
}

function listen() {
  const stream = new EventSource("api/stream");
  stream.addEventListener("state", (event) => {
    const state = JSON.parse(event.data);
    take(state);
    grid.reset(state.nodes);
    plots.reset(state.series);
  });
  stream.addEventListener("news", (event) => {
    const news = JSON.parse(event.data);
    take(news);
    if (news.nodes || news.gone) grid.change(news.nodes ?? {}, news.gone ?? []);
    plots.add(news.sample);
  });
}

function showLive() {
  const quiet = Math.round((Date.now() - heard) / 1000);
  const job = byId("live");
  if (!heard) setText(job, "not connected yet");
  else setText(job, quiet < QUIET ? "live" : `nothing heard for ${long(quiet)}: the job is over, or its controller is away`);
}
setInterval(showLive, 1000);

byId("access").addEventListener("click", () => {
  byId("token-text").value = "";
  setText(byId("token-said"), token.may ? "This page has the token." : "");
  byId("token").showModal();
});
byId("token-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await token.use(byId("token-text").value.trim())) byId("token").close();
  else setText(byId("token-said"), "That is not the token of this job.");
});
addEventListener("hashchange", () => {
  if (location.hash.startsWith("#token=")) token.use(token.fromAddress());
});

token.use(token.fromAddress());
listen();
