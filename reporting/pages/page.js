"use strict";
// What appears on a page when one points at something, picks something, or uses the arrow keys.
document.documentElement.classList.add("scripted");

const number = (x) => (x === null ? "not finite" : Math.abs(x) >= 1e5 ? x.toLocaleString("en") : String(+x.toPrecision(5)));

// A line chart: a vertical line follows the pointer, and the values there are written below.
for (const figure of document.querySelectorAll("[data-chart]")) {
  const { x, box: [low, high, start, end], log, series, unit } = JSON.parse(figure.dataset.chart);
  const scaled = log ? Math.log : (value) => value;
  const place = (step) => start + ((scaled(step) - scaled(low)) / (scaled(high) - scaled(low))) * (end - start);
  const svg = figure.querySelector("svg"), hair = figure.querySelector(".hair"), output = figure.querySelector("output");
  const steps = [...new Set(series.flatMap((line) => line.points.map((p) => p[0])))].sort((a, b) => a - b);
  const shown = new Set(series.keys());
  let here = -1;
  const show = (index) => {
    here = Math.max(0, Math.min(steps.length - 1, index));
    const step = steps[here];
    hair.setAttribute("transform", `translate(${place(step)} 0)`);
    hair.setAttribute("visibility", "visible");
    const values = series.flatMap((line, i) => {
      const point = line.points.find((p) => p[0] === step);
      return shown.has(i) && point ? [`${line.name} ${number(point[1])}`] : [];
    });
    output.textContent = `${x} ${number(step)}: ${values.join(", ") || "nothing"} ${unit}`.trim();
  };
  const nearest = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const far = (step) => Math.abs(place(step) - at);
    show(steps.reduce((best, step, i) => (far(step) < far(steps[best]) ? i : best), 0));
  };
  svg.addEventListener("pointermove", nearest);
  svg.addEventListener("pointerdown", nearest);
  onArrows(svg, (move) => show(move === "Home" ? 0 : move === "End" ? steps.length - 1 : here + move));
  for (const box of figure.querySelectorAll("[data-shows]"))
    box.addEventListener("change", () => {
      const i = +box.dataset.shows;
      if (box.checked) shown.add(i);
      else shown.delete(i);
      figure.querySelector(`[data-series="${i}"]`).style.display = box.checked ? "" : "none";
    });
}

// Marks, bars, points and units: the text of the one that is pointed at is written below. Without a text of its own, it
// is the row of the table that has its number.
for (const svg of document.querySelectorAll("svg.marks")) {
  const marks = [...svg.querySelectorAll("[data-label]")], figure = svg.closest("figure");
  const output = figure.querySelector("output");
  let here = -1;
  const show = (index) => {
    marks[here]?.classList.remove("here");
    here = Math.max(0, Math.min(marks.length - 1, index));
    marks[here].classList.add("here");
    const cells = figure.querySelectorAll("tbody tr")[here]?.cells ?? [];
    output.textContent = marks[here].dataset.label || Array.from(cells, (cell) => cell.textContent).join(": ");
  };
  marks.forEach((mark, i) => mark.addEventListener("pointerenter", () => show(i)));
  for (const button of figure.querySelectorAll("[data-move]"))
    button.addEventListener("click", () => {
      show(here + +button.dataset.move);
      marks[here].scrollIntoView({ block: "nearest", inline: "nearest" });
    });
  onArrows(svg, (move) => show(move === "Home" ? 0 : move === "End" ? marks.length - 1 : here + move));
}

function onArrows(element, act) {
  const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: "Home", End: "End" };
  element.addEventListener("keydown", (event) => {
    if (!(event.key in moves)) return;
    event.preventDefault();
    act(moves[event.key]);
  });
}

// The piece of an array that a device holds: [start, stop] in each dimension, as JAX's NamedSharding divides it.
function pieceOf(array, mesh, device) {
  const coordinates = {};
  for (const [axis, size] of [...mesh].reverse()) {
    coordinates[axis] = device % size;
    device = Math.floor(device / size);
  }
  const sizes = Object.fromEntries(mesh);
  return array.shape.map((length, d) => {
    let index = 0, pieces = 1;
    for (const axis of array.spec[d] ?? []) {
      index = index * sizes[axis] + coordinates[axis];
      pieces *= sizes[axis];
    }
    return { start: (length / pieces) * index, stop: (length / pieces) * (index + 1), index, pieces };
  });
}

// Devices and the pieces that they hold. Colours run through a scale that stays apart in grey, too.
for (const figure of document.querySelectorAll("[data-placement]")) {
  const { mesh, ids, arrays } = JSON.parse(figure.dataset.placement);
  const picker = figure.querySelector("select"), output = figure.querySelector("output");
  const buttons = [...figure.querySelectorAll("[data-device]")], drawing = figure.querySelector(".array");
  let array = arrays[0], here = 0;
  const numberOf = (piece) => piece.reduce((n, d) => n * d.pieces + d.index, 0);
  const fill = (share) => {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]]; // viridis
    const at = share * (stops.length - 1), i = Math.min(stops.length - 2, Math.floor(at));
    const rgb = stops[i].map((low, c) => Math.round(low + (at - i) * (stops[i + 1][c] - low)));
    return { back: `rgb(${rgb})`, text: 0.3 * rgb[0] + 0.59 * rgb[1] + 0.11 * rgb[2] > 115 ? "#000" : "#fff" };
  };
  const pick = (index) => {
    array = arrays[index];
    buttons.forEach((button, i) => {
      const piece = pieceOf(array, mesh, i), count = piece.reduce((n, d) => n * d.pieces, 1), n = numberOf(piece);
      const colours = fill(count > 1 ? n / (count - 1) : 0.25);
      button.style.background = colours.back;
      button.style.color = colours.text;
      button.querySelector("span").textContent = count > 1 ? `piece ${n}` : "whole";
    });
    show(here);
  };
  const show = (device) => {
    here = Math.max(0, Math.min(buttons.length - 1, device));
    const piece = pieceOf(array, mesh, here), n = numberOf(piece), count = piece.reduce((m, d) => m * d.pieces, 1);
    const same = ids.filter((_, i) => i !== here && numberOf(pieceOf(array, mesh, i)) === n);
    buttons.forEach((button, i) => {
      button.classList.toggle("here", i === here);
      button.classList.toggle("same", i !== here && numberOf(pieceOf(array, mesh, i)) === n);
      button.tabIndex = i === here ? 0 : -1;
    });
    let rest = here;
    const where = [...mesh].reverse().map(([axis, size]) => {
      const at = rest % size;
      rest = Math.floor(rest / size);
      return `${axis}=${at}`;
    });
    const ranges = piece.map((d, i) => `${array.dims[i] ?? "·"} ${d.start}:${d.stop}`).join(", ");
    const others = same.length === 1 ? `es device ${same[0]}` : ` ${same.length > 8 ? `${same.length} other devices` : `devices ${same.join(", ")}`}`;
    output.textContent =
      `Device ${ids[here]} (${where.reverse().join(", ")}) holds ${count > 1 ? `piece ${n} of ${count}` : "the whole"} of ` +
      `${array.name}: ${ranges}. ${same.length ? `So do${others}.` : "No other device holds it."}`;
    draw(piece, fill(count > 1 ? n / (count - 1) : 0.25).back);
  };
  // Two dimensions of the array: the first two that are split, or else the largest. A vector is drawn as a row.
  const draw = (piece, back) => {
    const split = array.shape.map((_, d) => d).filter((d) => piece[d].pieces > 1);
    const others = array.shape.map((_, d) => d).filter((d) => piece[d].pieces === 1);
    others.sort((a, b) => array.shape[b] - array.shape[a]);
    const drawn = [...split, ...others].slice(0, 2).sort((a, b) => a - b);
    const whole = { index: 0, pieces: 1 }, wide = 300, high = drawn.length > 1 ? 170 : 40;
    const [row, column] = drawn.length > 1 ? drawn.map((d) => piece[d]) : [whole, piece[drawn[0]] ?? whole];
    const name = (d) => (d === undefined ? "" : `${array.dims[d] ?? "·"} (${array.shape[d].toLocaleString("en")})`);
    const rules = ({ pieces }, size, rule) =>
      pieces > 64 ? "" : Array.from({ length: pieces - 1 }, (_, i) => rule((size * (i + 1)) / pieces)).join("");
    const at = (part, size) => (size * part.index) / part.pieces, length = (part, size) => size / part.pieces;
    drawing.innerHTML =
      `<svg viewBox="0 0 ${wide + 24} ${high + 24}" role="img" aria-label="the piece in the array"><g transform="translate(20 16)">` +
      `<rect width="${wide}" height="${high}" class="wait"/><rect x="${at(column, wide)}" y="${at(row, high)}" ` +
      `width="${length(column, wide)}" height="${length(row, high)}" fill="${back}" class="piece"/><path class="axis" ` +
      `d="${rules(column, wide, (x) => `M${x} 0V${high}`)}${rules(row, high, (y) => `M0 ${y}H${wide}`)}"/>` +
      `<text x="${wide / 2}" y="-4" text-anchor="middle"></text><text text-anchor="middle" ` +
      `transform="translate(-6 ${high / 2}) rotate(-90)"></text></g></svg>`;
    const [across, down] = drawing.querySelectorAll("text"); // names are text and never markup
    across.textContent = name(drawn.at(-1));
    down.textContent = drawn.length > 1 ? name(drawn[0]) : "";
  };
  picker.addEventListener("change", () => pick(+picker.value));
  buttons.forEach((button, i) => {
    button.addEventListener("pointerenter", () => show(i));
    button.addEventListener("focus", () => show(i));
    onArrows(button, (move) => {
      const to = move === "Home" ? 0 : move === "End" ? buttons.length - 1 : Math.max(0, Math.min(buttons.length - 1, i + move));
      buttons[to].focus();
    });
  });
  pick(0);
}
