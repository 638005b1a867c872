// One node in a dialog, flight records, stacks, the ledger; and what an operator may do, which is asked twice.

import { byId, count, el, long, many, size, table, when } from "./elements.js";

const EVERY = 2000;
const POLICY = {
  wait: "the job would wait for a node",
  shrink: "its replica groups would leave, and the others go on",
  stop: "the job would end",
};
const STATES = { R: "runs", S: "waits", D: "waits (uninterruptible)", T: "stopped", Z: "ended", X: "ended" };

export function lossInWords(loss) {
  if (!loss) return "Not known yet: no state was reported.";
  const said = [];
  if (!loss.roles.length) said.push("It plays no role: training would not notice.");
  else if (loss.alone) {
    said.push(`${many(loss.alone, "part")} of the state would be lost, as there is no copy elsewhere: the job would `
      + "go back to a durable checkpoint, or start over.");
  } else if (loss.version !== null) {
    said.push(`Nothing would be lost: others hold all that it has alone, as of step ${count(loss.version)}; `
      + `${loss.redone ? `${many(loss.redone, "step")} would be done again` : "no finished step would be done again"}.`);
  } else said.push("Nothing is known yet of its roles' state.");
  if (loss.roles.length) {
    said.push(loss.ready ? `${many(loss.ready, "spare")} could take its ${loss.roles.length === 1 ? "role" : "roles"}.`
      : `No spare is ready: ${POLICY[loss.policy] ?? ""}.`);
  }
  if (loss.below) said.push(`${many(loss.below, "part")} of the state would have too few copies until they are copied anew.`);
  return said.join(" ");
}

function movesInWords({ roles, room }) {
  if (!roles) return "It plays no role: it ends once the copies that it keeps are elsewhere.";
  const theirs = `Its ${many(roles, "role")} would start on other nodes, which have workers for ${count(room)}`;
  if (room < roles) return `${theirs}: that is too few, and it will be refused.`;
  return `${theirs}, and change over between two steps: no step is done again, nothing has fewer copies meanwhile.`;
}

export class Details {
  constructor(token, say) {
    this.token = token;
    this.say = say;
    this.name = null;
    this.shown = "";
    this.pressed = false;
    for (const dialog of document.querySelectorAll("dialog")) {
      dialog.querySelectorAll("[data-close]").forEach((button) => button.addEventListener("click", () => dialog.close()));
    }
    byId("node").addEventListener("close", () => { this.name = null; clearTimeout(this.timer); });
    byId("node").addEventListener("pointerdown", () => { this.pressed = true; });
    for (const over of ["pointerup", "pointercancel"]) addEventListener(over, () => { this.pressed = false; });
    byId("stacks-box").addEventListener("toggle", () => this.stacks());
    byId("ledger-box").addEventListener("toggle", () => this.ledger());
    byId("confirm-yes").addEventListener("click", () => this.confirmed());
  }

  async get(path) {
    try {
      const answer = await fetch(path);
      const found = await answer.json();
      return answer.ok ? found : { error: found.error };
    } catch {
      return { error: "the controller does not answer" };
    }
  }

  open(name) {
    this.name = name;
    this.shown = "";
    byId("node-title").textContent = name;
    byId("node-body").replaceChildren(el("p", { class: "soft" }, "asks …"));
    byId("node").showModal();
    this.refresh();
  }

  async refresh() {
    clearTimeout(this.timer);
    const name = this.name;
    if (name === null) return;
    const found = await this.get(`api/node?name=${encodeURIComponent(name)}`);
    if (this.name !== name) return;
    const said = JSON.stringify([found, this.token.may]);
    if (said !== this.shown && !this.pressed) { // what is being pressed stays where it is
      this.shown = said;
      const key = document.activeElement?.dataset?.key;
      byId("node-body").replaceChildren(...(found.error ? [el("p", {}, found.error)] : this.node(found)), this.flightBox ?? "");
      if (key) byId("node-body").querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus();
    }
    this.timer = setTimeout(() => this.refresh(), EVERY);
  }

  button(text, key, does, danger) {
    const button = el("button", { type: "button", class: `plain${danger ? " danger" : ""}`, onclick: does }, text);
    button.dataset.key = key;
    return button;
  }

  node(found) {
    this.flightBox = this.flightBox?.dataset.node === found.name ? this.flightBox : null;
    const may = this.token.may;
    const copies = (role) => {
      const held = {};
      for (const nodes of Object.values(role.copies)) {
        for (const [node, versions] of Object.entries(nodes)) (held[node] ??= new Set()).add(versions.join(" "));
      }
      const words = Object.entries(held).map(([node, versions]) => `${node.split("+", 1)[0]}: ${[...versions].join(" | ")}`);
      return words.join(", ") || "-";
    };
    const rows = found.roles.map((role) => {
      const beat = role.beat;
      const does = el("span", {}, this.button("flight record", `flight-${role.role}`, () => this.flight(role.role, found.name)),
        " ", may ? this.button("kill …", `kill-${role.role}`, () => this.act({ do: "kill", role: role.role }), true) : null);
      if (!beat) return [role.role, "-", "-", role.finished ? "finished" : "not heard of", "-", copies(role), "-", "-", does];
      return [role.role, beat.pid, count(beat.step), beat.held.join(" ") || "-", beat.committed < 0 ? "-" : count(beat.committed),
        copies(role), long(beat.step_s), long(beat.waited_s), does];
    });
    const parts = found.draining ? [el("p", {}, "It is being taken out.")] : [];
    parts.push(el("h3", {}, "If it died now"), el("p", { class: "loss" }, lossInWords(found.loss)));
    if (rows.length) {
      parts.push(el("h3", {}, "Roles"), el("div", { class: "wide" }, table(["n:role", "n:pid", "n:step", "versions held", "n:safe",
        "copies are on", "n:a step", "n:waited", ""], rows)));
    }
    const keeps = Object.keys(found.keeps).length;
    parts.push(el("p", { class: "soft" }, keeps ? `It keeps copies of ${many(keeps, "part")} of other nodes' state.` : "It keeps no copies for others."));
    if (may) {
      parts.push(el("p", { class: "line" },
        found.here && !found.draining ? this.button("drain this node …", "drain", () => this.act({ do: "drain", node: found.name })) : null,
        found.here ? this.button("kill this node …", "kill-node", () => this.act({ do: "kill", node: found.name }), true) : null,
        this.button("forgive its strikes …", "forgive", () => this.act({ do: "forgive", node: found.name.split("+", 1)[0] }))));
    } else parts.push(el("p", { class: "soft" }, "To act, open this page with the operator's token."));
    return parts;
  }

  async flight(role, node) {
    const found = await this.get(`api/flight?role=${role}`);
    const box = el("div", {}, el("h3", {}, `Flight record of role ${role}`));
    box.dataset.node = node;
    if (found.error) box.append(el("p", {}, found.error));
    else {
      box.append(el("p", { class: "soft" }, `epoch ${found.epoch}, version ${found.version}, main thread: `
        + `${STATES[found.state] ?? found.state}${found.at_end ? "; waits at the end of its script" : ""}. The newest first.`));
      box.append(el("div", { class: "wide" }, table(["group", "n:number", "kind", "n:size", "n:peer", "n:began", "n:took"],
        found.records.reverse().map((each) => [each.group, each.number, each.kind, size(each.bytes), each.peer < 0 ? "-" : each.peer,
          `${long(each.ago)} ago`, each.took === null ? "UNDER WAY" : long(each.took)]))));
    }
    if (this.flightBox?.isConnected) this.flightBox.replaceWith(box);
    else byId("node-body").append(box);
    this.flightBox = box;
  }

  async stacks() {
    if (!byId("stacks-box").open) return;
    const found = await this.get("api/stacks");
    const none = found.error ?? "None were written on the controller's machine; those of other machines are in hangs/ of their job directory.";
    byId("stacks").replaceChildren(...(Array.isArray(found) && found.length ? found.map((each) => el("details", {},
      el("summary", {}, `${when(each.time)}  role ${each.role}, pid ${each.pid}`), el("pre", {}, each.text))) : [el("p", { class: "soft" }, none)]));
  }

  async ledger() {
    if (!byId("ledger-box").open) return;
    const found = await this.get("api/ledger");
    const none = found.error ?? "There is none: it is kept where replica groups may leave (--ft-policy shrink).";
    const ranges = (each) => each.map(([first, end]) => `${first}-${end - 1}`).join(" ");
    byId("ledger").replaceChildren(Array.isArray(found) && found.length ? table(["n:step", "n:epoch", "t:samples, by replica group"],
      found.map((each) => [each.step, each.epoch, Object.entries(each.samples).map(([group, of]) => `${group}: ${ranges(of)}`).join("; ")]))
      : el("p", { class: "soft" }, none));
  }

  // -- acting: the first request is answered with a word, and with what it would mean

  async post(action) {
    try {
      const answer = await fetch("api/act", { method: "POST", body: JSON.stringify(action),
        headers: { "Content-Type": "application/json", ...this.token.headers() } });
      return [answer.status, await answer.json()];
    } catch {
      return [0, { error: "the controller does not answer" }];
    }
  }

  async act(action) {
    const [code, said] = await this.post(action);
    if (code !== 202) {
      this.say(said.error ?? said.done);
      return;
    }
    this.asked = { ...action, confirm: said.confirm };
    byId("confirm-says").textContent = `This will ${said.says}.`;
    byId("confirm-loss").textContent = said.loss ? lossInWords(said.loss) : said.moves ? movesInWords(said.moves) : "";
    byId("confirm").showModal();
  }

  async confirmed() {
    byId("confirm").close();
    const [, said] = await this.post(this.asked);
    this.say(said.done ?? said.error ?? "it was not done: ask again");
    this.refresh();
  }
}
