"use strict";
// The fields of the calculator and its answer, drawn as pages/bars.py and pages/element.py draw it.
{
  const { data, answer, sum } = calculator;
  const form = document.getElementById("calculator-form"), shown = document.getElementById("calculator-answer");
  const field = (name) => form.elements[name];
  const WIDE = 292; // of the longest bar, beside its number: WIDTH - ROOM in pages/bars.py

  // pages/units.py
  const comma = (number, digits) =>
    number.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const amount = (number) => {
    const units = [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];
    const [unit, size] = units.find(([, size]) => number >= size) ?? ["B", 1];
    return `${comma(number / size, unit === "B" ? 0 : 2)} ${unit}`;
  };

  const mesh = (name) => data.strategies[name].mesh;
  const asked = () => {
    const strategy = field("strategy").value;
    const whole = (name) => (field(name).value.trim() === "" ? NaN : Number(field(name).value));
    return {
      params: whole("params"), seq_len: whole("seq_len"), batch_size: whole("batch_size"), strategy,
      mesh: Object.fromEntries(mesh(strategy).map((axis) => [axis, whole(`mesh.${axis}`)])),
      remat: field("remat").value, accumulation: whole("accumulation"), gather: field("gather").value,
      schedule: field("schedule").value, microbatches: whole("microbatches"), chip: field("chip").value,
    };
  };

  const bars = (label, rows, height, extra = "") =>
    `<svg viewBox="0 0 360 ${height}" role="img" aria-label="${label}">${rows.join("")}${extra}</svg>`;
  const bar = (colour, x, y, width, height) =>
    `<rect class="f${colour}" x="${x}" y="${y}" width="${width}" height="${height}"></rect>`;
  const word = (x, y, text, anchor = "start") => `<text x="${x}" y="${y}" text-anchor="${anchor}">${text}</text>`;
  const card = (title, ...content) => `<figure class="card"><h3>${title}</h3>${content.join("")}</figure>`;
  const cells = (row) => row.map((cell, i) => (i ? `<td>${cell}</td>` : `<th scope="row">${cell}</th>`)).join("");
  const table = (head, rows) =>
    `<div class="scroll" tabindex="0"><table><thead><tr>${head.map((name) => `<th scope="col">${name}</th>`).join("")}` +
    `</tr></thead><tbody>${rows.map((row) => `<tr>${cells(row)}</tr>`).join("")}</tbody></table></div>`;
  const tiles = (figures) =>
    `<dl class="tiles">${figures.map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join("")}</dl>`;
  const sample = (i) => `<svg viewBox="0 0 14 12" aria-hidden="true">${bar(i + 1, 0, 1, 14, 10)}</svg>`;
  const legend = (names) => `<ul class="legend">${names.map((name, i) => `<li>${sample(i)}${name}</li>`).join("")}</ul>`;

  function memoryBar(parts, total, chip) {
    const longest = Math.max(total, chip.memory), wide = (value) => (value / longest) * WIDE;
    let x = 0;
    const drawn = parts.map(([, value], i) => bar(i + 1, (x += wide(value)) - wide(value), 14, wide(value), 14));
    const line = `<path class="limit" d="M${wide(chip.memory)} 4V34"></path>`;
    const limit = line + word(wide(chip.memory), 45, "a device's memory", "end");
    const says = `predicted: ${amount(total)}; a device's memory: ${amount(chip.memory)}.`;
    return card(
      "Memory of a device",
      bars("Memory of a device", [word(0, 10, "predicted"), ...drawn, word(x + 4, 25, amount(total))], 50, limit),
      `<figcaption>${says}</figcaption>`,
      legend(parts.map(([name]) => name)),
      table(["", "a device"], parts.map(([name, value]) => [name, amount(value)])),
    );
  }

  function sentBars(rows) {
    const over = new Map();
    for (const { axes, bytes } of rows) over.set(axes.join("+"), (over.get(axes.join("+")) ?? 0) + bytes);
    const found = [...over].sort(([a], [b]) => (a < b ? -1 : 1)), longest = Math.max(...over.values());
    const drawn = found.map(([axes, bytes], i) => {
      const width = (bytes / longest) * WIDE, y = 36 * i;
      return word(0, y + 11, `over ${axes}`) + bar(1, 0, y + 16, width, 10) + word(width + 4, y + 25, amount(bytes));
    });
    const says = found.map(([axes, bytes]) => `over ${axes}: by theory ${amount(bytes)}`).join("; ");
    const title = "Sent by a device in a step";
    return card(title, bars(title, drawn, 36 * found.length), `<figcaption>${says}.</figcaption>`);
  }

  function draw({ refused, model, count, devices, memory, total, sent }) {
    if (refused) return `<p class="refused">${refused.replace(/</g, "&lt;")}</p>`;
    const chip = data.chips[field("chip").value], share = total / chip.memory;
    const verdict = share <= data.usable ? "fits" : share <= 1 ? "leaves too little to the runtime" : "does not fit";
    const names = ["parameters", "optimizer", "gradients", "saved", "working"];
    const titles = { saved: "saved activations", working: "working memory" };
    const parts = names.map((name) => [titles[name] ?? name, memory[name]]).filter(([, value]) => value);
    const figures = [
      ["parameters", comma(count, 0)],
      ["model", `width ${model.width}, depth ${model.depth}, heads ${model.heads}, mlp ${model.mlp_width}`],
      ["devices", comma(devices, 0)],
      ["tokens in a batch", comma(field("batch_size").value * model.seq_len, 0)],
      ["memory of a device", `${amount(total)}: ${verdict}`],
      ["sent by a device in a step", amount(sum(sent.map((row) => row.bytes)))],
    ];
    if (memory.host) figures.push(["and in the host's memory", amount(memory.host)]);
    const rows = sent.map(({ kind, what, axes, bytes }) => [kind, what, axes.join("+"), comma(bytes, 0)]);
    const all = table(["message", "what", "over", "bytes a step"], rows);
    const messages = rows.length ? `${sentBars(sent)}<div class="card wide"><h3>Messages</h3>${all}</div>` : "";
    return `${tiles(figures)}<div class="cards">${memoryBar(parts, total, chip)}${messages}</div>`;
  }

  const update = () => {
    const strategy = field("strategy").value, { places } = data.strategies[strategy];
    for (const label of form.querySelectorAll("[data-axis]")) label.hidden = !mesh(strategy).includes(label.dataset.axis);
    for (const label of form.querySelectorAll("[data-pipeline]")) label.hidden = !places.layers.length;
    shown.innerHTML = draw(answer(asked()));
  };
  field("strategy").addEventListener("change", () => {
    for (const axis of mesh(field("strategy").value)) {
      const size = data.strategies[field("strategy").value].defaults[axis];
      field(`mesh.${axis}`).value = size > 0 ? size : 8;
    }
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", update);
  form.addEventListener("change", update);
  update();
}
