"use strict";
// Samples by prompt: groups to choose from, and all answers of the chosen one next to each other.

(() => {
  const step = make("input", { id: "sample-step", type: "text", inputmode: "numeric", size: 7, autocomplete: "off" });
  const load = make("button", { type: "button", class: "plain" }, "show groups");
  const note = make("p", { class: "missing", role: "status" });
  const groups = make("div", { class: "groups", hidden: true, role: "group", "aria-label": "groups" });
  const prompt = make("pre", { class: "prompt", tabindex: "0", hidden: true });
  const legendBox = make("p", { class: "versions", hidden: true });
  const answers = make("div", { class: "answers", tabindex: "0", hidden: true, "aria-label": "answers" });
  parts.samples.append(
    make("p", {}, make("label", { for: "sample-step" }, "step (empty: the newest) "), step, " ", load),
    note, groups, prompt, legendBox, answers);
  note.textContent = "Read from the run's ledger when you ask for it.";

  const base = `/run/${encodeURIComponent(page.name)}/groups`;

  async function ask(address) {
    note.textContent = "reading";
    try {
      const answer = await fetch(address, { headers: { Accept: "application/json" } });
      const found = await answer.json();
      note.textContent = answer.ok ? "" : found.error;
      return answer.ok ? found : null;
    } catch (error) {
      note.textContent = "The dashboard does not answer.";
      return null;
    }
  }

  function rewards(group) {
    if (group.mean === null) return "no score";
    const spread = group.lowest === group.highest ? "all equal" : `${amountText(group.lowest, 2)} to ${amountText(group.highest, 2)}`;
    return `reward ${amountText(group.mean, 2)}, ${spread}`;
  }

  async function showGroups() {
    const found = await ask(step.value.trim() ? `${base}?step=${encodeURIComponent(step.value.trim())}` : base);
    if (!found) return;
    groups.replaceChildren(...found.groups.map((group) => {
      const button = make("button", { type: "button", class: "group", "aria-pressed": "false" },
        make("b", {}, `group ${group.group_id}`), make("span", {}, rewards(group)),
        make("span", { class: "note" }, `${group.num_samples} ${group.num_samples === 1 ? "answer" : "answers"}, ${group.step === null ? group.fate : `step ${group.step}`}${group.is_stored ? "" : ", tokens purged"}`));
      button.addEventListener("click", () => showAnswers(group.group_id, button));
      return button;
    }));
    groups.hidden = !found.groups.length;
    if (!found.groups.length) note.textContent = step.value.trim() ? "No group of this step has a finished sample." : "No sample has been finished yet.";
  }

  // Versions in the order in which they appear; eight colours, then they begin again.
  function shadeOf(versions, label) {
    return label ? `v${versions.indexOf(label) % 8}` : "given";
  }

  function answerBox(answer, versions) {
    const facts = make("p", { class: "note" }, [...answer.facts, ...answer.components.map(([name, value]) => `${name} ${value}`)].join(" · "));
    const texts = answer.parts.flatMap((part) => [
      part.title ? make("p", { class: "note" }, part.title) : null,
      make("pre", {}, ...part.spans.map(([label, words]) => make("span", { class: shadeOf(versions, label), title: label ? `version ${label}` : "not sampled here, or version not recorded" }, words))),
    ]);
    return make("article", { class: "answer" }, make("h3", {}, `${answer.name}: reward ${answer.reward}`), facts,
      ...answer.remarks.map((remark) => make("p", { class: "note" }, remark)), ...texts.filter(Boolean));
  }

  async function showAnswers(group, button) {
    const found = await ask(`${base}/${group}`);
    if (!found) return;
    for (const other of groups.children) other.setAttribute("aria-pressed", String(other === button));
    const versions = [...new Set(found.answers.flatMap((one) => one.parts.flatMap((part) => part.spans.map(([label]) => label))))].filter(Boolean);
    prompt.textContent = found.prompt || "the prompt is not stored any more";
    legendBox.replaceChildren("sampled by version ", ...versions.map((label) => make("span", { class: shadeOf(versions, label) }, label)));
    answers.replaceChildren(...found.answers.map((one) => answerBox(one, versions)));
    note.textContent = found.problems.join("; ");
    prompt.hidden = answers.hidden = false;
    legendBox.hidden = !versions.length;
  }

  load.addEventListener("click", showGroups);
  step.addEventListener("keydown", (event) => { if (event.key === "Enter") showGroups(); });
})();
