"use strict";
(() => {
  const root = document.documentElement;
  root.classList.add("js");
  const all = (where, what) => Array.from(where.querySelectorAll(what));

  // Light or dark: what the system says, until one of them is chosen.

  const theme = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const told = () => {
    theme.textContent = dark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", `Change to ${dark() ? "light" : "dark"} colours`);
  };
  try {
    const kept = localStorage.getItem("fedminimax-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* a page that may keep nothing still works */ }
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try { localStorage.setItem("fedminimax-theme", root.dataset.theme); } catch { /* as above */ }
    told();
  });
  system.addEventListener("change", told);
  told();

  // What the curves are drawn against.

  for (const tabs of all(document, ".tabs")) {
    const buttons = all(tabs, "button");
    const panels = all(tabs.parentElement, "[data-panel]");
    const choose = (name) => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.tab === name));
      for (const panel of panels) panel.hidden = panel.dataset.panel !== name;
    };
    for (const button of buttons) button.addEventListener("click", () => choose(button.dataset.tab));
    choose(buttons[0].dataset.tab);
  }

  // Legends show and hide lines in the charts they stand above.

  for (const button of all(document, ".legend button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      const which = `.series[data-series="${button.dataset.series}"]`;
      for (const line of all(button.closest(".linked"), which)) line.classList.toggle("off", !shown);
    });
  }

  // The values under the pointer, or, with the arrow keys, at the next place.

  const text = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return value.toExponential(2);
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const digits = size < 1 ? 4 : size < 100 ? 3 : 1;
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const made = (kind, content, name) => {
    const element = document.createElement(kind);
    if (content !== undefined) element.textContent = content;
    if (name) element.className = name;
    return element;
  };
  const share = (value, [low, high], log) =>
    log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);

  for (const figure of all(document, ".chart")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const [cursor, tip] = [plot.querySelector(".cursor"), plot.querySelector(".tip")];
    const square = data.kind !== "lines";
    const steps = square && data.kind !== "calibration";
    let at = null; // of the places of all lines, in order

    const lines = () =>
      data.series.filter((line) => {
        const drawn = figure.querySelector(`.series[data-series="${line.number}"]`);
        return drawn && !drawn.classList.contains("off");
      });
    const places = () =>
      [...new Set(lines().flatMap((line) => line.marks.map((mark) => mark[0])))].sort((a, b) => a - b);
    // Of a ROC curve: the most that can be had at this false positive rate; of the other, at this recall.
    const reached = (marks, x) => marks.filter((mark) => mark[0] <= x).at(-1) ?? marks[0];
    const nearest = (marks, x) =>
      marks.reduce((best, mark) => (Math.abs(mark[0] - x) < Math.abs(best[0] - x) ? mark : best));

    const hide = () => {
      at = null;
      cursor.hidden = tip.hidden = true;
      for (const point of all(plot, ".point")) point.remove();
    };

    const row = (line, mark) => {
      const entry = made("div");
      entry.className = `c${line.number % 8}`;
      const value = made("span", text(mark[1]));
      if (mark[2] !== mark[3]) value.append(made("small", ` ${text(mark[2])} to ${text(mark[3])}`));
      if (!square && mark[4] < line.runs) value.append(made("small", ` (${mark[4]} of ${line.runs} runs)`));
      entry.append(made("i"), made("em", line.label), value);
      return entry;
    };

    const show = (x) => {
      hide();
      at = x;
      // A line that has no value near this place is not asked.
      const width = (data.x_range[1] - data.x_range[0]) / 40;
      const found = lines()
        .map((line) => [line, (steps ? reached : nearest)(line.marks, x)])
        .filter(([, mark]) => steps || Math.abs(mark[0] - x) <= width);
      if (!found.length) return;
      const left = 100 * share(x, data.x_range, false);
      cursor.style.left = `${left}%`;
      tip.replaceChildren(made("b", `${data.x}: ${text(x)}`), ...found.map(([line, mark]) => row(line, mark)));
      if (data.kind === "roc") tip.append(made("small", `specificity ${text(1 - x)}`));
      let height = 0;
      for (const [line, mark] of found) {
        const up = share(mark[1], data.y_range, data.log);
        height += up / found.length;
        if (up < -0.01 || up > 1.01) continue; // outside of a chart that is cut
        const point = made("span", undefined, `point c${line.number % 8}`);
        point.style.left = `${100 * share(mark[0], data.x_range, false)}%`;
        point.style.top = `${100 * (1 - up)}%`;
        plot.append(point);
      }
      cursor.hidden = tip.hidden = false;
      // Beside the cursor, on the side with more room, and inside the window.
      const box = plot.getBoundingClientRect();
      const middle = (left / 100) * box.width;
      const wanted = left > 50 ? middle - tip.offsetWidth - 12 : middle + 12;
      const least = 8 - box.left, most = window.innerWidth - box.left - tip.offsetWidth - 24;
      tip.style.left = `${Math.max(least, Math.min(wanted, most))}px`;
      // And where the lines are not.
      tip.style.top = height > 0.5 ? `${Math.max(0, box.height - tip.offsetHeight - 8)}px` : "0";
    };

    const pointed = (event) => {
      const box = plot.getBoundingClientRect();
      const [low, high] = data.x_range;
      const x = low + ((event.clientX - box.left) / box.width) * (high - low);
      const known = places();
      if (known.length) show(nearest(known.map((place) => [place]), x)[0]);
    };
    plot.addEventListener("pointermove", pointed);
    plot.addEventListener("pointerdown", pointed);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("keydown", (event) => {
      const known = places();
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!known.length || (step === undefined && event.key !== "Home" && event.key !== "End")) return;
      event.preventDefault();
      const now = known.indexOf(at);
      const next = { Home: 0, End: known.length - 1 }[event.key] ?? (now < 0 ? 0 : now + step);
      show(known[Math.max(0, Math.min(known.length - 1, next))]);
    });
  }

  // Paper has no clicks: what is folded is opened for it, but for the files of each run.

  let folded = [];
  window.addEventListener("beforeprint", () => {
    folded = all(document, "section:not(#runs-in-full) details:not([open])");
    for (const part of folded) part.open = true;
  });
  window.addEventListener("afterprint", () => {
    for (const part of folded) part.open = false;
  });
})();
