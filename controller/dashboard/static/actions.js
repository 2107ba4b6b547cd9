"use strict";
// Actions on a run in progress: each behind a confirmation and the token that the command printed.

(() => {
  const WORDS = {
    checkpoint: "A checkpoint is saved after the running step.",
    stop: "The running step is finished, a checkpoint is saved, and the run ends. It can be continued with areal-like resume.",
    drain: "The rollout worker hands its running answers to the others and exits. It is not restarted.",
    add: "One more rollout worker is started.",
  };
  const state_ = { chosen: "" };
  const note = make("p", { class: "missing", id: "actions-note" });
  const buttons = Object.keys(WORDS).map((name) => make("button", { type: "button", class: "plain", "data-action": name, disabled: true, "aria-describedby": "actions-note" }, name));
  const result = make("pre", { class: "result", role: "status", hidden: true });

  const title = make("h3", { id: "confirm-title" });
  const words = make("p");
  const worker = make("select", { id: "confirm-worker" });
  const workerLine = make("p", {}, make("label", { for: "confirm-worker" }, "worker "), worker);
  const token = make("input", { id: "confirm-token", type: "text", autocomplete: "off", spellcheck: "false" });
  const tokenLine = make("p", {}, make("label", { for: "confirm-token" }, "token, as areal-like dashboard printed it "), token);
  const go = make("button", { type: "button", class: "plain danger", id: "confirm-go" });
  const back = make("button", { type: "button", class: "plain" }, "cancel");
  const dialog = make("dialog", { "aria-labelledby": "confirm-title" }, title, words, workerLine, tokenLine, make("p", {}, go, " ", back));
  parts.actions.append(make("p", { class: "row" }, ...buttons), note, result, dialog);

  function remembered(value) {
    try {
      if (value === undefined) return sessionStorage.getItem("areal-like-token") || "";
      sessionStorage.setItem("areal-like-token", value);
    } catch (error) { /* storage may be forbidden: then the token is asked for each time */ }
    return "";
  }

  // The server says which actions the run refuses, and why: actions.py.
  function update() {
    if (!state.refused) return;
    const names = new Map();
    for (const button of buttons) {
      const name = button.dataset.action, why = state.refused[name];
      button.disabled = Boolean(why);
      if (why) names.set(why, [...(names.get(why) || []), name]);
    }
    note.textContent = [...names].map(([why, refused]) => `${refused.join(", ")}: ${why}`).join("; ");
    note.hidden = !names.size;
  }

  function confirm(name) {
    state_.chosen = name;
    title.textContent = `${name}: ${page.name}`;
    words.textContent = WORDS[name];
    go.textContent = name;
    workerLine.hidden = name !== "drain";
    const workers = (state.processes || []).filter((one) => one.role === "rollout").map((one) => one.name);
    worker.replaceChildren(...workers.map((one) => make("option", { value: one }, one)));
    token.value = remembered();
    dialog.showModal();
    (token.value ? back : token).focus();
  }

  async function perform() {
    const name = state_.chosen;
    remembered(token.value.trim());
    dialog.close();
    result.hidden = false;
    result.textContent = `${name}: asked`;
    try {
      const answer = await fetch(`/run/${encodeURIComponent(page.name)}/actions/${name}`, {
        method: "POST",
        headers: { "Content-Type": "application/json", Accept: "application/json", "X-Areal-Like-Token": token.value.trim() },
        body: JSON.stringify(name === "drain" ? { worker: worker.value } : {}),
      });
      const found = await answer.json();
      result.textContent = answer.ok ? found.lines.join("\n") || (found.is_done ? "done" : "it failed") : found.error;
    } catch (error) {
      result.textContent = "The dashboard does not answer.";
    }
  }

  for (const button of buttons) button.addEventListener("click", () => confirm(button.dataset.action));
  go.addEventListener("click", perform);
  back.addEventListener("click", () => dialog.close());
  document.addEventListener("run-changed", update);
})();
