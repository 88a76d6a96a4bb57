"use strict";
// The slider of a view over several steps of training: it shows the completions of one step, and their mean reward.
window.spanwiseSteps = ({ view, data, show, plain, moved }) => {
  const NAMED = 4; // objectives whose mean reward is written; more have one mean
  const slider = view.querySelector("[name=step]"), output = view.querySelector(".token-slider output");
  const everyone = [...data.steps.keys()], steps = data.by_step ? [...new Set(data.steps)].sort((a, b) => a - b) : [];
  const members = () => steps.length ? everyone.filter((n) => data.steps[n] === steps[slider.value]) : everyone;
  const mean = (numbers) => numbers.reduce((sum, x) => sum + x, 0) / numbers.length;
  const draw = () => {
    const means = data.objectives.map((objective, m) => [objective, mean(members().map((n) => data.rewards[n][m]).filter((x) => x !== null).map(Number))])
      .filter(([, x]) => !Number.isNaN(x)); // an objective that no completion has a reward of
    const written = means.length > NAMED ? [[`of ${means.length} objectives`, mean(means.map(([, x]) => x))]] : means;
    output.replaceChildren();
    show(output, `${steps[slider.value]} · mean reward ${written.map(([name, x]) => `${name} ${plain(+x.toPrecision(3))}`).join(", ") || "not known"}`);
    slider.ariaValueText = output.textContent;
  };
  const go = (to, ...place) => {
    slider.value = to;
    draw();
    moved(...place);
  };
  const open = (n) => { // the step of a completion
    if (steps.length && data.steps[n] !== steps[slider.value]) go(steps.indexOf(data.steps[n]), 0);
  };
  slider.max = steps.length - 1;
  slider.closest("label").hidden = !steps.length;
  slider.addEventListener("input", () => go(slider.value));
  if (steps.length) draw();
  return { any: steps.length > 0, members, open };
};
